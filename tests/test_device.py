"""What device.py says of neuron, as far as it can be asked without one; and that a step's shapes are watched.

pytest tests/test_device.py
"""

import json
import os
import re
import types

import pytest
import torch

from qwen3_trn import dispatch, start
from qwen3_trn.config import Qwen3Config, TrainConfig
from qwen3_trn.device import TRAINIUM2, Device
from qwen3_trn.dispatch import assign_slots
from qwen3_trn.errors import UserError
from qwen3_trn.model import PADDING_DOCUMENT, Qwen3ForCausalLM
from qwen3_trn.shapes import ShapeGuard
from tests.common import REPO, in_process, run_python, succeeded, tiny_config

CPU = Device("cpu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"masked": True}, "documents are masked"),
        ({"seq_len": 4000}, "--seq-len 4000 is not a multiple of 512"),
        ({"head_dim": 256}, "head_dim 256 is above 128"),
        ({"rows": 33}, "33 rows x 16 heads are above 512"),
    ],
)
def test_attention_is_fused_under_the_documented_conditions(changes, reason):
    arguments = {"rows": 32, "seq_len": 4096, "num_heads": 16, "head_dim": 128, "masked": False}
    said = TRAINIUM2.attention_kernel(**arguments | changes)
    assert said == "fused" if reason is None else "not fused" in said and reason in said
    if changes == {"masked": True}:
        assert f"{4 * 32 * 16 * 4096**2 / 2**30:.2f} GiB" in said
    assert "fused" not in CPU.attention_kernel(**arguments | changes)


def test_the_environment_is_set_where_the_user_has_not(monkeypatch):
    for name in ("NEURON_CC_FLAGS", "NEURON_RT_STOCHASTIC_ROUNDING_EN", "TORCH_NEURONX_NEFF_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    assert CPU.set_environment() == [] and dict(os.environ) == before
    monkeypatch.setenv("NEURON_CC_FLAGS", "--mine")
    try:
        said = TRAINIUM2.set_environment()
        assert "NEURON_CC_FLAGS=--mine" in said and os.environ["NEURON_CC_FLAGS"] == "--mine"
        assert "NEURON_RT_STOCHASTIC_ROUNDING_EN=0" in said and os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "0"
        assert len(said) == 6
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


@pytest.mark.parametrize(("name", "tflops"), [("trn2", 166.75), ("trn3", 167.75)])
def test_peak_flops_are_a_quarter_of_a_chips(name, tflops, monkeypatch):
    module = types.SimpleNamespace(
        current_device=lambda: 0, get_device_properties=lambda device: types.SimpleNamespace(name=name)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda type: module)
    assert TRAINIUM2.peak_flops(torch.bfloat16) == (tflops * 1e12, f"{name}, documented bf16 peak")


def test_without_grouped_matmul_a_capacity_must_be_stated(monkeypatch):
    dense, experts = Qwen3Config.from_dict(tiny_config()), Qwen3Config.from_dict(tiny_config(moe=True))
    assert not start.use_equal_groups(TrainConfig(), experts, CPU)  # widths that the grouped matmul does not take loop
    monkeypatch.setattr(Device, "has_grouped_matmul", lambda self: False)
    assert not start.use_equal_groups(TrainConfig(), dense, CPU)
    with pytest.raises(UserError, match="say with --moe-capacity how large"):
        start.use_equal_groups(TrainConfig(), experts, CPU)
    assert start.use_equal_groups(TrainConfig(moe_capacity=2.0), experts, CPU)


def test_widths_that_would_loop_on_the_host_are_batched_on_neuron(monkeypatch):
    monkeypatch.setattr(Device, "has_grouped_matmul", lambda self: True)
    fits, odd = (Qwen3Config.from_dict(tiny_config(moe=True, moe_intermediate_size=size)) for size in (24, 20))
    assert not start.use_equal_groups(TrainConfig(), fits, TRAINIUM2)
    assert start.use_equal_groups(TrainConfig(moe_capacity=2.0), odd, TRAINIUM2)  # 20 bf16 are 40 bytes, no whole 16s
    assert not start.use_equal_groups(TrainConfig(), odd, CPU)


@pytest.mark.parametrize("block", [1, 4])
def test_equal_groups_give_what_others_give(block):
    """With the same capacity: the same choices have a slot, and outputs and gradients are the same."""
    torch.manual_seed(0)
    num_tokens, num_experts, capacity = 12, 3, 8
    expert_ids = torch.tensor([[0, 1]] * 9 + [[2, 3], [3, 3], [1, 0]], dtype=torch.int32)  # 3: goes nowhere
    results = []
    for equal_groups in (False, True):
        torch.manual_seed(1)
        x, gate, up = (
            torch.randn(*shape, dtype=torch.float64, requires_grad=True)
            for shape in ((num_tokens, 5), (num_experts, 4, 5), (num_experts, 4, 5))
        )
        down = torch.randn(num_experts, 5, 4, dtype=torch.float64, requires_grad=True)
        slots = assign_slots(expert_ids, num_experts, block, capacity, equal_groups)
        if equal_groups:
            assert slots.group_ends.tolist() == [8, 16, 24] and slots.choice_of_slot.shape == (24,)
        y, _, _ = dispatch.moe_experts(x, *slots, gate, up, down, equal_groups)
        out = dispatch.combine(y, torch.rand(num_tokens, 2, dtype=torch.float64), *slots[:2])
        out.square().sum().backward()
        results.append([out, x.grad, gate.grad, up.grad, down.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_run_without_grouped_matmul(tmp_path, cache, monkeypatch):
    """With room for all, batched matmuls give the losses of grouped ones."""
    flags = ["--steps", 3, "--seq-len", 64, "--no-export", "--moe-capacity", 4]
    expected = in_process(monkeypatch, tmp_path / "grouped", *flags)
    monkeypatch.setattr(Device, "has_grouped_matmul", lambda self: False)
    found = in_process(monkeypatch, tmp_path / "batched", *flags)
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-6)
    assert all(row["dropped_choices"] == 0 for row in found)


def make_model(moe: bool) -> tuple[Qwen3ForCausalLM, dict[str, torch.Tensor]]:
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(moe=moe)))
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(131, (2, 16)), "labels": torch.randint(131, (2, 16))}
    documents = torch.tensor([[0] * 5 + [1] * 8 + [PADDING_DOCUMENT] * 3] * 2)
    positions = torch.tensor([[*range(5), *range(8), *range(3)]] * 2)
    batch["labels"][documents == PADDING_DOCUMENT] = -100
    return model, batch | {"positions": positions, "document_ids": documents}


@pytest.mark.parametrize("moe", [False, True])
def test_without_a_mask_a_row_is_one_text(moe):
    """--doc-mask none: the loss of the row without documents, but padding still goes to no expert."""
    model, batch = make_model(moe)
    masked = model.loss_terms(**batch)
    model.model.mask_documents = False
    found = model.loss_terms(**batch)
    plain = model.loss_terms(batch["input_ids"], batch["labels"])
    torch.testing.assert_close(found.cross_entropy, plain.cross_entropy)
    assert (found.cross_entropy - masked.cross_entropy).abs() > 1e-3
    if moe:
        assert found.router.tokens_per_expert.sum() == masked.router.tokens_per_expert.sum() == 2 * 13 * 2 * 2


def test_a_row_of_one_document_needs_no_mask():
    """What --no-pack relies on."""
    model, batch = make_model(moe=True)
    batch["document_ids"] = torch.where(batch["document_ids"] == PADDING_DOCUMENT, PADDING_DOCUMENT, 0)
    batch["positions"] = torch.arange(16).expand(2, 16)
    masked = model.loss_terms(**batch)
    model.model.mask_documents = False
    found = model.loss_terms(**batch)
    torch.testing.assert_close(found.cross_entropy, masked.cross_entropy)
    torch.testing.assert_close(found.router.tokens_per_expert, masked.router.tokens_per_expert)


def test_doc_mask_none_is_recorded(tmp_path, cache, monkeypatch, capsys):
    flags = ["--steps", 2, "--seq-len", 64, "--no-export"]
    with_mask = in_process(monkeypatch, tmp_path / "a", *flags)
    assert "attention  PyTorch's, with a mask for documents" in capsys.readouterr().out
    without = in_process(monkeypatch, tmp_path / "b", *flags, "--doc-mask", "none")
    assert "attention  PyTorch's, causal" in capsys.readouterr().out
    assert 'doc_mask = "none"' in (tmp_path / "b/config.toml").read_text()
    assert with_mask[0]["loss"] != without[0]["loss"]


def test_the_guard_names_a_new_shape_of_a_later_step():
    guard = ShapeGuard(record=True)
    found = []
    for size in (4, 4, 4, 5, 5):
        with guard.step():
            torch.ones(size) + 1
        found.append(guard.changes())
    assert [bool(new) for new in found] == [False, False, False, True, False]
    assert "aten.add.Tensor(float32[5])" in found[3]


def test_the_guard_counts_graphs_of_later_steps():
    guard = ShapeGuard(record=False)
    add = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    for size in (4, 4, 4, 5):
        with guard.step():
            add(torch.ones(size))
    assert (guard.num_graphs, guard.num_late_graphs, guard.changes()) == (2, 1, [])


def test_a_run_names_its_new_shapes(tmp_path, cache, monkeypatch, capsys):
    """On a device that compiles each shape, if a step's rows changed in length, which they do not."""
    import train

    monkeypatch.setattr(Device, "static_shapes", property(lambda self: True))
    flags = ["--steps", 4, "--seq-len", 64, "--no-export", "--global-batch-size", 2]
    in_process(monkeypatch, tmp_path / "a", *flags)
    assert "new shape" not in capsys.readouterr().out
    cut = train.micro_batches

    def shorten(data, position, *rest):
        return [{name: a[:, : 64 - position] for name, a in batch.items()} for batch in cut(data, position, *rest)]

    monkeypatch.setattr(train, "micro_batches", shorten)
    in_process(monkeypatch, tmp_path / "b", *flags)
    said = capsys.readouterr().out
    assert (
        re.search(r"warning: step 3 ran \d+ new shapes, which cpu had to compile: aten\.", said)
        and "step 2 ran" not in said
    )


def test_nothing_of_aws_is_imported_on_a_cpu(tmp_path):
    script = "import json, sys, train, export, qwen3_trn.doctor; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(succeeded(run_python("-c", script, cwd=REPO)).splitlines()[-1])
    aws = {"torch_neuronx", "nki", "nkilib", "neuronxcc", "libneuronxla"}
    assert not aws & {module.split(".")[0] for module in modules}
