"""The NKI kernels of the experts against the PyTorch default, under the interpreter in tests/nki/.

pytest tests/test_nki_moe.py

Where AWS's wheel `nki` is installed, its simulator would run them instead; nobody has tried that yet.
"""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from qwen3_trn import dispatch
from qwen3_trn.dispatch import assign_slots, combine
from qwen3_trn.errors import UserError
from qwen3_trn.kernels import nki_moe
from tests.common import REPO

pytestmark = pytest.mark.usefixtures("interpreted")


class Inputs(NamedTuple):
    """What one expert layer computes on. Differentiable: x [N, H], weights [N, k] fp32, the projections."""

    x: Tensor
    weights: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor


def make_inputs(expert_ids: Tensor, num_experts: int, hidden: int, intermediate: int, dtype=torch.float32) -> Inputs:
    """Values that keep gate and up of order 1, where silu bends."""
    torch.manual_seed(0)
    num_tokens = expert_ids.shape[0]
    wide = (num_experts, intermediate, hidden)
    return Inputs(
        torch.randn(num_tokens, hidden).to(dtype),
        torch.rand(expert_ids.shape),
        (torch.randn(wide) * hidden**-0.5).to(dtype),
        (torch.randn(wide) * hidden**-0.5).to(dtype),
        (torch.randn(num_experts, hidden, intermediate) * intermediate**-0.5).to(dtype),
    )


def ids_of_counts(counts: list[int]) -> Tensor:
    """[N, 1]: expert e is chosen counts[e] times, in mixed order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))][:, None].int()


def top_ids(num_tokens: int, k: int, num_experts: int) -> Tensor:
    """[N, k]: of k different experts each."""
    torch.manual_seed(1)
    return torch.rand(num_tokens, num_experts).argsort(1)[:, :k].int()


def run_layer(op, inputs: Inputs, expert_ids: Tensor, out_grad: Tensor) -> dict[str, Tensor]:
    """The output and every gradient, by name."""
    leaves = Inputs(*(tensor.detach().clone().requires_grad_() for tensor in inputs))
    slots = assign_slots(expert_ids, inputs.gate_proj.shape[0], 128)
    y, _, _ = op(leaves.x, *slots, leaves.gate_proj, leaves.up_proj, leaves.down_proj)
    out = combine(y, leaves.weights, *slots[:2])
    out.backward(out_grad.to(out.dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves._asdict().items()}


def assert_equals_default(inputs: Inputs, expert_ids: Tensor) -> None:
    """The kernels in fp32 equal the default in fp64, output and gradients."""
    out_grad = torch.randn(inputs.x.shape)
    found = run_layer(nki_moe.moe_experts, inputs, expert_ids, out_grad)
    exact = run_layer(dispatch.moe_experts, Inputs(*(t.double() for t in inputs)), expert_ids, out_grad)
    for name, expected in exact.items():
        assert found[name].dtype == inputs.x.dtype
        assert (found[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


# ---------------------------------------------------------------------------------------------------------- the logic

ROUTINGS = {
    "no token, one, around a tile": ids_of_counts([0, 1, 127, 128, 129]),
    "all to one expert": ids_of_counts([0, 300, 0]),
    "two choices": top_ids(200, 2, 4),
    "all experts": top_ids(130, 3, 3),
    "no token at all": torch.full((5, 2), 2, dtype=torch.int32),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_kernels_equal_the_default(name):
    num_experts = {"no token, one, around a tile": 5, "two choices": 4, "no token at all": 2}.get(name, 3)
    assert_equals_default(make_inputs(ROUTINGS[name], num_experts, 256, 256), ROUTINGS[name])


# 2304 = 2 x (1024 + 128): a core's half is more than it stores at once, and not a multiple of a PSUM bank.
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 768), (2304, 256), (512, 1024)])
def test_widths(hidden, intermediate):
    ids = ids_of_counts([129, 3])
    assert_equals_default(make_inputs(ids, 2, hidden, intermediate), ids)


@pytest.mark.parametrize("slices", [2, 3])
def test_slices_of_the_intermediate_dim(monkeypatch, slices):
    """An expert that does not fit is worked on in slices, whose sums go through HBM in fp32."""
    monkeypatch.setattr(nki_moe, "_slices", lambda *args: slices)
    ids = ids_of_counts([260, 0, 128])
    assert_equals_default(make_inputs(ids, 3, 256, 256 * slices), ids)


def test_slices_are_summed_in_fp32(monkeypatch):
    """Two slices, of which one gives the opposite of the other: in bf16 too nothing is left of their sum."""
    monkeypatch.setattr(nki_moe, "_slices", lambda *args: 2)
    ids = ids_of_counts([130, 70])
    inputs = make_inputs(ids, 2, 256, 256, torch.bfloat16)
    gate_proj, up_proj = (weight.repeat(1, 2, 1) for weight in (inputs.gate_proj, inputs.up_proj))
    down_proj = torch.cat((inputs.down_proj, -inputs.down_proj), dim=2)
    found = run_layer(
        nki_moe.moe_experts,
        Inputs(inputs.x, inputs.weights, gate_proj, up_proj, down_proj),
        ids,
        torch.randn(inputs.x.shape),
    )
    assert found["gate_proj"].abs().max() > 0
    assert bool((found["out"] == 0).all()) and bool((found["x"] == 0).all())


def test_parts_of_the_experts_add_up():
    """Expert parallelism: each rank has a slice of the experts, and choices of others get no slot on it."""
    ids, num_experts = top_ids(150, 2, 4), 4
    inputs = make_inputs(ids, num_experts, 256, 256)
    whole = run_layer(dispatch.moe_experts, inputs, ids, torch.ones(150, 256))
    parts = []
    for rank in range(2):
        here = Inputs(*inputs[:2], *(weight[2 * rank : 2 * rank + 2] for weight in inputs[2:]))
        ids_here = torch.where((ids >= 2 * rank) & (ids < 2 * rank + 2), ids - 2 * rank, 2)
        parts.append(run_layer(nki_moe.moe_experts, here, ids_here, torch.ones(150, 256)))
    for name in ("out", "x", "weights"):
        assert torch.allclose(parts[0][name] + parts[1][name], whole[name], atol=1e-4, rtol=1e-5), name
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.allclose(torch.cat([part[name] for part in parts]), whole[name], atol=1e-4, rtol=1e-5), name


def test_order_of_experts_does_not_matter():
    """To the bit: no tile depends on another."""
    ids, order = top_ids(200, 2, 4), torch.tensor([2, 0, 3, 1])
    inputs, out_grad = make_inputs(ids, 4, 256, 256), torch.randn(200, 256)
    permuted = Inputs(*inputs[:2], *(weight[order] for weight in inputs[2:]))
    one = run_layer(nki_moe.moe_experts, inputs, ids, out_grad)
    other = run_layer(nki_moe.moe_experts, permuted, order.argsort()[ids].int(), out_grad)
    for name, expected in one.items():
        assert torch.equal(other[name], expected[order] if name.endswith("proj") else expected), name


def test_pads_are_zeros_and_what_follows_the_groups_is_not_read():
    ids = ids_of_counts([130, 7])
    inputs = make_inputs(ids, 2, 256, 256)
    slots = assign_slots(ids, 2, 128)
    end = int(slots.group_ends[-1])
    assert end < slots.choice_of_slot.shape[0]
    leaves = [t.clone().requires_grad_() for t in (inputs.x, *inputs[2:])]
    outputs = nki_moe.moe_experts(leaves[0], *slots, *leaves[1:])
    pads = slots.choice_of_slot[:end] == ids.numel()
    for rows in outputs:
        assert bool((rows[:end][pads] == 0).all()) and bool(rows[:end].isfinite().all())
        assert bool(rows[end:].isnan().all())  # the interpreter leaves NaN where nothing was written
    y_grad = torch.randn(outputs[0].shape)
    y_grad[:end][pads] = 0
    y_grad[end:] = torch.nan
    grads = torch.autograd.grad(outputs[0], leaves, y_grad)
    assert all(bool(grad.isfinite().all()) for grad in grads)


def turn(tensor: Tensor) -> Tensor:
    """The same values, stored the other way round."""
    return tensor.mT.contiguous().mT


def test_strides_do_not_matter():
    """Of the arguments and of the gradient; the interpreter takes contiguous tensors only."""
    ids = top_ids(150, 2, 3)
    inputs, found = make_inputs(ids, 3, 256, 256), []
    slots = assign_slots(ids, 3, 128)
    y_grad = torch.randn(slots.choice_of_slot.shape[0], 256)
    for form in (torch.Tensor.contiguous, turn):
        leaves = [form(t).requires_grad_() for t in (inputs.x, *inputs[2:])]
        y, _, _ = nki_moe.moe_experts(leaves[0], *slots, *leaves[1:])
        end = int(slots.group_ends[-1])
        found.append([y[:end], *torch.autograd.grad(y, leaves, form(y_grad))])
    assert not leaves[0].is_contiguous() and all(map(torch.equal, *found))


# --------------------------------------------------------------------------------------------------------------- bf16


def rounded_layer(inputs: Inputs, expert_ids: Tensor, out_grad: Tensor) -> dict[str, Tensor]:
    """As `run_layer`, expert by expert in fp32, rounded to bf16 where the kernels and `combine` round."""

    def bf16(tensor: Tensor) -> Tensor:
        return tensor.bfloat16().float()

    x, weights, out_grad = inputs.x.float(), inputs.weights, out_grad.bfloat16().float()
    out, x_grad, weights_grad = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    proj_grads: dict[str, list[Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for expert, projections in enumerate(zip(*(weight.float() for weight in inputs[2:]), strict=True)):
        gate_proj, up_proj, down_proj = projections
        tokens, choices = torch.where(expert_ids == expert)
        rows, weight = x[tokens], weights[tokens, choices][:, None]
        gate, up = bf16(rows @ gate_proj.T), bf16(rows @ up_proj.T)
        silu, sigmoid = bf16(F.silu(gate)), gate.sigmoid()
        act = bf16(silu * up)
        y = bf16(act @ down_proj.T)
        out.index_add_(0, tokens, weight * y)
        weights_grad[tokens, choices] = (out_grad[tokens] * y).sum(-1)
        y_grad = bf16(weight * out_grad[tokens])
        act_grad = y_grad @ down_proj
        slope = bf16(bf16(sigmoid * (1 + gate * (1 - sigmoid))) * up)
        gate_grad, up_grad = bf16(slope * act_grad), bf16(silu * act_grad)
        x_grad.index_add_(0, tokens, bf16(gate_grad @ gate_proj + up_grad @ up_proj))
        for name, grad in zip(proj_grads, (gate_grad.T @ rows, up_grad.T @ rows, y_grad.T @ act), strict=True):
            proj_grads[name].append(grad)
    stacked = {name: torch.stack(grads) for name, grads in proj_grads.items()}
    return {"out": out, "x": x_grad, "weights": weights_grad} | stacked


def assert_equals_rounded(inputs: Inputs, expert_ids: Tensor) -> None:
    """Within 1e-2 of each row's largest value."""
    out_grad = torch.randn(inputs.x.shape)
    found = run_layer(nki_moe.moe_experts, inputs, expert_ids, out_grad)
    for name, expected in rounded_layer(inputs, expert_ids, out_grad).items():
        largest = expected.abs().amax(-1, keepdim=True)
        assert bool(((found[name].float() - expected).abs() <= 1e-2 * largest).all()), name


def test_bf16_rounds_where_it_should():
    ids = top_ids(200, 2, 4)
    assert_equals_rounded(make_inputs(ids, 4, 512, 512, torch.bfloat16), ids)


def test_an_ep_rank_of_30b_a3b():
    """8 experts of Qwen3-30B-A3B in full size on 1,024 rows: right, within SBUF and PSUM."""
    ids = ids_of_counts([128, 0, 129, 127, 256, 1, 200, 183])
    inputs = make_inputs(ids, 8, 2048, 768, torch.bfloat16)
    assert_equals_rounded(inputs, ids)


# name -> H, I, slices of forward and of backward
MODELS = {"Qwen3-30B-A3B": (2048, 768, 1, 1), "Qwen3-235B-A22B": (4096, 1536, 2, 3)}


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_within_the_formulas(name, record):
    """And the formulas within SBUF, with the slots of 4,096 tokens on a rank of 16 experts."""
    hidden, intermediate, *slices = MODELS[name]
    ids = ids_of_counts([257])
    inputs = make_inputs(ids, 1, hidden, intermediate, torch.bfloat16)
    slots = assign_slots(ids, 1, 128)
    num_slots = dispatch.num_slots(4096, 8, 16, 128)
    x, *weights = (t.requires_grad_() for t in (inputs.x, *inputs[2:]))
    for bytes_of, expected in zip((nki_moe.forward_bytes, nki_moe.backward_bytes), slices, strict=True):
        found = nki_moe.count_slices(hidden, intermediate, num_slots, 16, 2, bytes_of)
        assert found == expected, bytes_of
    with record() as forward:
        y, _, _ = nki_moe.moe_experts(x, *slots, *weights)
    with record() as backward:
        y.backward(torch.ones_like(y))
    indices = 4 * (slots.choice_of_slot.shape[0] // 128 + 3)
    for counted, bytes_of, count in zip(
        (forward, backward), (nki_moe.forward_bytes, nki_moe.backward_bytes), slices, strict=True
    ):
        most = bytes_of(hidden, intermediate // count // 2, 2, count > 1) + indices
        assert 0.88 * most <= counted.sbuf_peak <= most <= nki_moe.SBUF_BYTES, bytes_of
        assert counted.psum_peak <= 8


# -------------------------------------------------------------------------------------------------------- the binding


def test_the_operation_is_one_node_with_the_default_shapes_and_flops():
    ids = top_ids(20, 2, 2)
    inputs = make_inputs(ids, 2, 256, 256)
    slots = assign_slots(ids, 2, 128)
    arguments = (inputs.x.requires_grad_(), *slots, *inputs[2:])
    nki_moe.moe_experts(*arguments)
    torch.library.opcheck(
        torch.ops.qwen3_trn.nki_moe_experts.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    meta = [tensor.detach().to("meta").requires_grad_(tensor.is_floating_point()) for tensor in arguments]
    flops = []
    for op in (nki_moe.moe_experts, dispatch.moe_experts):
        with FlopCounterMode(display=False) as counter:
            outputs = op(*meta)
            outputs[0].sum().backward()
        flops.append(counter.get_total_flops())
        assert [output.shape for output in outputs] == [(384, 256)] * 3
    assert flops[0] == flops[1] == 9 * 2 * 384 * 256 * 256


def test_memory_of_the_sum_is_within_the_formula(record):
    ids = top_ids(300, 8, 8)
    inputs = make_inputs(ids, 8, 512, 256)
    with record() as r:
        run_layer(nki_moe.moe_experts, inputs, ids, torch.ones(300, 512))
    found, _ = r.launches[-1].cores[0].peak("sbuf")
    most = nki_moe.sum_bytes(512, 8, 300, 4)
    assert 0.9 * most <= found <= most


def test_it_compiles_without_a_break():
    ids = top_ids(20, 2, 2)
    inputs, out_grad = make_inputs(ids, 2, 256, 256), torch.randn(20, 256)
    compiled = torch.compile(nki_moe.moe_experts, backend="aot_eager", fullgraph=True)
    plain, found = (run_layer(op, inputs, ids, out_grad) for op in (nki_moe.moe_experts, compiled))
    assert all(torch.equal(found[name], expected) for name, expected in plain.items())


REASONS = {
    "hidden_size 384": {"hidden": 384},
    "moe_intermediate_size (of this rank) 128": {"intermediate": 128},
    "dtype torch.float64": {"dtype": torch.float64},
    "torch.bfloat16, torch.float32, torch.bfloat16 with tokens of torch.bfloat16": {
        "dtype_of": {"up_proj": torch.float32}
    },
    "torch.bfloat16, torch.bfloat16, torch.float32 with tokens of torch.bfloat16": {
        "dtype_of": {"down_proj": torch.float32}
    },
    "300 slots; expected a multiple of 128": {"slots": 300},
    "backward does not fit into 208 KiB": {"hidden": 16384},
    "100 tokens with 64 choices: their sum does not fit": {"hidden": 2048, "k": 64},
    "slots of dtype torch.int64": {"dtype_of": {"group_ends": torch.int64}},
    "x of shape [100, 1, 256]; expected [N, H]": {"shape_of": {"x": (100, 1, 256)}},
    "x is empty: its shape is [0, 256]": {"shape_of": {"x": (0, 256)}},
    "choice_of_slot of shape [4, 128]; expected [S]": {"shape_of": {"choice_of_slot": (4, 128)}},
    "slot_of_choice of shape [200]; expected [100, k]": {"shape_of": {"slot_of_choice": (200,)}},
    "slot_of_choice of shape [50, 2]; expected [100, k]": {"shape_of": {"slot_of_choice": (50, 2)}},
    "gate_proj of shape [3, 256, 256]; expected [4, I, 256]": {"shape_of": {"gate_proj": (3, 256, 256)}},
    "gate_proj of shape [4, 512, 512]; expected [4, I, 256]": {"shape_of": {"gate_proj": (4, 512, 512)}},
    "up_proj of shape [4, 512, 256]; expected [4, 256, 256]": {"shape_of": {"up_proj": (4, 512, 256)}},
    "down_proj of shape [4, 512, 256]; expected [4, 256, 512]": {
        "shape_of": {"down_proj": (4, 512, 256)},
        "intermediate": 512,
    },
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_does_not_fit_is_refused_by_name(reason):
    change = {"hidden": 256, "intermediate": 256, "dtype": torch.bfloat16, "slots": 512, "k": 2} | REASONS[reason]
    hidden, intermediate = change["hidden"], change["intermediate"]
    shapes = {
        "x": (100, hidden),
        "choice_of_slot": (change["slots"],),
        "slot_of_choice": (100, change["k"]),
        "group_ends": (4,),
        "gate_proj": (4, intermediate, hidden),
        "up_proj": (4, intermediate, hidden),
        "down_proj": (4, hidden, intermediate),
    } | change.get("shape_of", {})
    dtypes = dict.fromkeys(shapes, change["dtype"]) | dict.fromkeys(dispatch.Slots._fields, torch.int32)
    dtypes |= change.get("dtype_of", {})
    arguments = [torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()]
    assert reason in nki_moe.supports(*arguments)
    with pytest.raises(UserError, match="the NKI kernels of moe_experts cannot run: "):
        nki_moe.moe_experts(*arguments)


def test_the_table_of_costs_is_that_of_the_documentation(record):
    """One model and one number of rows of it."""
    from benchmarks import nki_cost  # which imports nki

    table = (REPO / "docs" / "kernels.md").read_text().splitlines()
    lines = [*nki_cost.measure_experts("Qwen3-30B-A3B", 256), *nki_cost.measure_sums("Qwen3-30B-A3B")]
    assert [line for line in lines if line not in table] == []


def test_one_neuron_core_is_refused(monkeypatch):
    ids = top_ids(20, 2, 2)
    inputs = make_inputs(ids, 2, 256, 256)
    arguments = (inputs.x, *assign_slots(ids, 2, 128), *inputs[2:])
    assert nki_moe.supports(*arguments) is None
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert "NEURON_LOGICAL_NC_CONFIG=1" in nki_moe.supports(*arguments)


def test_the_folder_is_not_taken_for_the_library_of_its_name():
    """transformers imports beside it and finds no library `kernels`. Ours imports no wheel of AWS before it is used."""
    code = """
import importlib.util, sys
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.utils import is_kernels_available
from qwen3_trn.errors import UserError
from qwen3_trn.kernels import nki_moe
spec = importlib.util.find_spec("kernels")
print(spec.origin, list(spec.submodule_search_locations)[0], is_kernels_available())
print(sorted({"nki", "torch_neuronx"} & sys.modules.keys()))

import torch
from qwen3_trn.dispatch import assign_slots
sys.modules["nki"] = sys.modules["torch_neuronx"] = None  # as if not installed
weights = torch.zeros(2, 256, 256)
try:
    nki_moe.moe_experts(torch.zeros(1, 256), *assign_slots(torch.zeros(1, 1).int(), 2, 128), weights, weights, weights)
except UserError as error:
    print(str(error).split(":")[0])
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    needs = "the NKI kernels of moe_experts need AWS's packages torch_neuronx and nki"
    assert result.stdout.splitlines() == [f"None {REPO / 'kernels'} False", "[]", needs], result.stderr
