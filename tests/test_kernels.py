"""The door for kernels: what --kernel takes and refuses, that it runs, and that it is compared with PyTorch's.

pytest tests/test_kernels.py
"""

import json
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tests.nki
from qwen3_trn import Qwen3Config, Qwen3ForCausalLM, dispatch, evaluate, moe, plan
from qwen3_trn.config import TrainConfig, parse_args
from qwen3_trn.device import Device
from qwen3_trn.errors import UserError
from qwen3_trn.kernels import registry
from qwen3_trn.kernels.check import check_kernels, check_needs, make_inputs
from qwen3_trn.loss import linear_cross_entropy
from qwen3_trn.model import attention, document_mask, first_keys, rms_norm
from qwen3_trn.parallel import wrap_forward
from tests.common import REPO, TINY, in_process, run_python, succeeded, tiny_config, write_config

DEFAULTS = {
    "attention": attention,
    "rms_norm": rms_norm,
    "linear_cross_entropy": linear_cross_entropy,
    "router": moe.route,
    "moe_experts": dispatch.run_experts,
    "moe_combine": dispatch.combine,
}


@pytest.fixture(autouse=True)
def only_here(cache, monkeypatch):
    """What a test chooses ends with it. Samples are short."""
    monkeypatch.setattr(evaluate, "NEW_TOKENS", 2)
    monkeypatch.setattr(evaluate, "SAMPLE_LENGTHS", 2)
    yield
    registry.choose([])


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A function that writes a module of a user's, outside the project, where Python finds it."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(code: str) -> None:
        monkeypatch.delitem(sys.modules, "my_kernels", raising=False)
        (folder / "my_kernels.py").write_text(code)

    yield write
    sys.modules.pop("my_kernels", None)


EXAMPLE = re.search(r"```python\n(.*?)```", (REPO / "docs" / "kernels.md").read_text(), re.DOTALL)[1]
NORM = "def rms_norm(x, weight, eps):\n    "


def test_the_documentation_has_every_operation_with_its_parameters():
    table = re.findall(r"^\| `(\w+)` \| (.*?) \|", (REPO / "docs" / "kernels.md").read_text(), re.MULTILINE)
    found = {op: re.findall(r"`(\w+)`", parameters) for op, parameters in reversed(table) if op in DEFAULTS}
    assert found == {op: registry.parameters_of(op) for op in DEFAULTS}


# -------------------------------------------------------------------------------------------------- what is refused

REFUSED = {
    "nope=nki": r"there is no operation 'nope'. Expected OP=NAME with OP one of .*moe_experts, moe_combine, router",
    "nki": "there is no operation 'nki'. Expected OP=NAME",
    "moe_experts=fast": r"there is no kernel 'fast' for moe_experts \(ours: nki, nkilib\)",
    "moe_experts=": "there is no kernel '' for moe_experts",
    "moe_experts": "expected moe_experts=NAME, ours: nki, nkilib, or moe_experts=package.module:function, your own",
    "rms_norm": "expected rms_norm=NAME, there is none of ours, or",
    "rms_norm=fast": r"there is no kernel 'fast' for rms_norm \(there is none of ours\)",
    "rms_norm=not_there:f": "importing not_there fails: No module named 'not_there'.*PYTHONPATH",
    "rms_norm=my_kernels.part:f": "importing my_kernels.part fails",
    "rms_norm=my_kernels:f": r"'f' in .*my_kernels.py has nothing of this name",
    "rms_norm=my_kernels:": "there is no kernel 'my_kernels:' for rms_norm.*package.module:function",
    "rms_norm=.my_kernels:f": "there is no kernel '.my_kernels:f' for rms_norm",
    "rms_norm=my_kernels:number": "'number' in .*my_kernels.py is of type int, expected a function",
    "rms_norm=my_kernels:short": r"it takes \(x, weight\); rms_norm is called with \(x, weight, eps\)",
    "rms_norm=my_kernels:swapped": r"it takes \(weight, x, eps\); rms_norm is called with \(x, weight, eps\)",
    "rms_norm=my_kernels:long": r"it takes \(x, weight, eps, more\)",
    "rms_norm=my_kernels:keyword": r"it takes \(x, weight, eps, \*, more\)",
    "rms_norm=my_kernels:swapped_rest": r"it takes \(weight, \*rest\)",
    "rms_norm=my_kernels:builtin": r"no signature found.*Call it from a function \(x, weight, eps\)",
}
SIGNATURES = """
number = 1
builtin = min
def short(x, weight): ...
def swapped(weight, x, eps): ...
def swapped_rest(weight, *rest): ...
def long(x, weight, eps, more): ...
def keyword(x, weight, eps, *, more): ...
def fine(x, weight, eps, more=1, *, other=2): ...
def any_number(*args, **kwargs): ...
"""


@pytest.mark.parametrize("spec", REFUSED)
def test_what_cannot_be_chosen_is_refused_by_name(spec, user_module):
    user_module(SIGNATURES)
    with pytest.raises(UserError, match=REFUSED[spec]):
        registry.choose([spec])
    assert registry.overrides() == {}


def test_signatures_that_fit(user_module):
    user_module(SIGNATURES)
    for name in ("fine", "any_number"):
        lines = registry.choose([f"rms_norm=my_kernels:{name}"])
        assert lines[0] == f"kernels    rms_norm: my_kernels:{name}; the rest PyTorch's"
        assert not registry.uses_default("rms_norm") and registry.uses_default("router")


def test_two_kernels_for_one_operation(user_module):
    user_module(SIGNATURES)
    with pytest.raises(UserError, match="names rms_norm twice: my_kernels:fine and my_kernels:any_number"):
        registry.choose(["rms_norm=my_kernels:fine", "rms_norm=my_kernels:any_number"])


def test_an_error_in_a_users_module_keeps_its_traceback(user_module):
    user_module("1 / 0")
    with pytest.raises(ZeroDivisionError):
        registry.choose(["rms_norm=my_kernels:rms_norm"])
    user_module("import not_there")
    with pytest.raises(UserError, match="importing my_kernels fails: No module named 'not_there'"):
        registry.choose(["rms_norm=my_kernels:rms_norm"])


def test_registered_kernels(user_module, monkeypatch):
    """By name, imported only when chosen; what they lack is said at start."""
    monkeypatch.setitem(registry._alternatives, "rms_norm", {})
    registry.register("rms_norm", "good", "my_kernels:rms_norm", needs="my_kernels:needs")
    registry.register("rms_norm", "bad", "not_there:f", available=lambda: "it needs a package")
    lines = registry.choose([])
    assert "kernels    PyTorch's" in lines
    assert "           not rms_norm=good: it was not chosen" in lines
    assert "           not rms_norm=bad: it needs a package" in lines
    user_module(EXAMPLE + "\ndef needs(x, weight, eps):\n    return f'{x.device.type} {tuple(x.shape)}'\n")
    assert registry.choose(["rms_norm=good"])[0] == "kernels    rms_norm: good; the rest PyTorch's"
    with pytest.raises(
        UserError, match=r"--kernel rms_norm=good cannot take what this run computes: meta \(2, 8, 32\)"
    ):
        check_needs(inputs_of(tiny_config(), num_rows=2, seq_len=8, device="meta"))
    with pytest.raises(UserError, match="--kernel rms_norm=bad cannot run here: it needs a package"):
        registry.choose(["rms_norm=bad"])
    with pytest.raises(UserError, match="there is no operation 'norm'"):
        registry.register("norm", "good", "my_kernels:rms_norm")


def test_without_awss_packages_nki_says_what_to_install(tmp_path, monkeypatch):
    for name in ("nki", "torch_neuronx"):
        monkeypatch.setitem(sys.modules, name, None)
    message = (
        "--kernel moe_experts=nki cannot run here: torch_neuronx and nki must be installed, from AWS's Neuron index"
    )
    with pytest.raises(UserError, match=message):
        in_process(monkeypatch, tmp_path / "run", "--kernel", "moe_experts=nki")
    assert not (tmp_path / "run").exists()
    assert any(
        line.startswith("           not moe_experts=nki: torch_neuronx and nki must") for line in registry.choose([])
    )


# ------------------------------------------------------------------------------------------------------- what runs


def loss_and_gradients(model, compiled: bool = False, **batch) -> list[torch.Tensor]:
    model.zero_grad()
    for layer in model.model.layers:
        forward = type(layer).forward.__get__(layer)
        layer.forward = wrap_forward(forward, "none", "aot_eager") if compiled else forward
    loss, _ = model.loss(**batch)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.fixture
def batch():
    torch.manual_seed(0)
    ids = torch.randint(131, (2, 24))
    documents = torch.tensor([[0] * 9 + [1] * 15, [0] * 12 + [1] * 4 + [-1] * 8])
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "document_ids": documents}


@pytest.fixture
def model():
    torch._dynamo.reset()
    return Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(moe=True, num_hidden_layers=1)))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_users_function_runs(user_module, model, batch, compiled):
    """One that doubles is the default with doubled weights; without it the default is back, also once compiled."""
    plain = loss_and_gradients(model, compiled, **batch)
    user_module(EXAMPLE.replace("* weight", "* (2 * weight)"))
    registry.choose(["rms_norm=my_kernels:rms_norm"])
    found = loss_and_gradients(model, compiled, **batch)
    registry.choose([])
    back = loss_and_gradients(model, compiled, **batch)
    assert all(torch.equal(a, b) for a, b in zip(back, plain, strict=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 2 if "norm" in name else 1
    expected = loss_and_gradients(model, compiled, **batch)
    assert abs(expected[0] - plain[0]) > 0.01
    for (name, _), a, b in zip([("loss", None), *model.named_parameters()], found, expected, strict=True):
        b = 2 * b if "norm" in name else b
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item()), name


def scaled_default(op: str, factor: float):
    """An override: the default, whose first output is multiplied by `factor`."""

    def scaled(*args):
        if op == "attention" and args[3] is not None:
            args = *args[:3], document_mask(args[3])
        out = registry.default_of(op)(*args)
        return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

    return registry.Override("scaled", scaled, lambda *args: None)


@pytest.mark.parametrize("op", DEFAULTS)
def test_every_operation_goes_through_the_registry(monkeypatch, model, batch, op):
    """Each, computed by its default, moves the loss not by a bit, and multiplied by 1.5 it does."""
    plain = loss_and_gradients(model, **batch)[0]
    monkeypatch.setitem(registry._overrides, op, scaled_default(op, 1.0))
    assert torch.equal(loss_and_gradients(model, **batch)[0], plain)
    monkeypatch.setitem(registry._overrides, op, scaled_default(op, 1.5))
    assert abs(loss_and_gradients(model, **batch)[0] - plain) > 1e-5


def test_all_compile_without_a_break(monkeypatch, model, batch):
    for op in DEFAULTS:
        monkeypatch.setitem(registry._overrides, op, scaled_default(op, 1.5))
    eager = loss_and_gradients(model, **batch)
    compiled = loss_and_gradients(model, compiled=True, **batch)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(compiled, eager, strict=True))


@pytest.mark.parametrize(
    "documents", [[0] + [1] * 6, [3, 3, 4, 4, 4, -1, -1], [0, 1, 2, 3, 4, 5, 6], [5, 5, 0, 0, 5, 5, 0]]
)
def test_first_keys_say_what_the_mask_says(documents):
    found = first_keys(torch.tensor([documents, [0] * 7]))
    places = torch.arange(7)
    allowed = (places[None, :] >= found[..., None]) & (places[None, :] <= places[:, None])
    if documents[0] == 5:  # an id that comes again is another document
        documents = [0, 0, 1, 1, 2, 2, 3]
    assert found.dtype == torch.int32
    assert torch.equal(allowed[:, None], document_mask(torch.tensor([documents, [0] * 7])))


# -------------------------------------------------------------------------------------------------- what is compared


def inputs_of(raw, num_rows=1, seq_len=24, device="cpu", dtype=torch.float32, block=1, tp_enabled=False, **flags):
    config = Qwen3Config.from_dict(raw)
    dims = SimpleNamespace(tp_enabled=tp_enabled)
    return partial(make_inputs, config, TrainConfig(**flags), dims, block, dtype, num_rows, seq_len, device)


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", DEFAULTS)
def test_the_check_tells_right_from_wrong(monkeypatch, world, op, dtype):
    """The default passes; with an output or a gradient that is off by 3% it does not."""
    off = 0.03

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 + off)

    right = scaled_default(op, 1.0).function

    def change_first(function, *args):
        out = right(*args)
        return (function(out[0]), *out[1:]) if isinstance(out, tuple) else function(out)

    wrong = {
        "output": partial(change_first, lambda out: out * (1 + off)),
        "gradient of": lambda x, *args: right(WrongGradient.apply(x), *args),
        "inf": partial(change_first, lambda out: out.double()),
        "nan": partial(change_first, lambda out: out * torch.nan),
        "gradient of .* inf": partial(change_first, lambda out: out.detach().requires_grad_()),
    }
    inputs = inputs_of(tiny_config(moe=True), dtype=dtype, block=4)
    for message, function in {None: right, **wrong}.items():
        monkeypatch.setitem(registry._overrides, op, registry.Override("mine", function, lambda *args: None))
        if message is None:
            (line, *_) = check_kernels(inputs)
            assert re.fullmatch(rf" +checked {op}, .*: output 0 0.0e\+00, .*", line)
            continue
        with pytest.raises(UserError, match=f"--kernel {op}=mine computes something else.*{message}.*expected at most"):
            check_kernels(inputs)


def test_inputs_have_the_shapes_of_the_run(monkeypatch):
    """Those that the model passes, recorded; and on the meta device the same."""
    config = tiny_config(moe=True)
    seen = {op: set() for op in DEFAULTS}

    def describe(args):
        return tuple((a.shape, a.dtype, a.stride()) if isinstance(a, torch.Tensor) else a for a in args)

    for op in DEFAULTS:

        def record(*args, op=op):
            seen[op].add(describe(args))
            if op == "attention":
                args = *args[:3], document_mask(args[3])
            return registry.default_of(op)(*args)

        monkeypatch.setitem(registry._overrides, op, registry.Override("record", record, lambda *args: None))
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(config))
    for experts in (layer.mlp.experts for layer in model.model.layers):
        experts.block, experts.capacity = 4, 1.5
    ids = torch.arange(48, dtype=torch.int32).view(2, 24)
    model.loss(ids, ids, document_ids=torch.zeros_like(ids))
    for device in ("cpu", "meta"):
        made = inputs_of(config, 2, 24, device, block=4, moe_capacity=1.5)
        kinds = {op: {describe(arguments) for arguments in made(op)} for op in DEFAULTS}
        key_norm = {kind for kind in seen["rms_norm"] if kind[0][0] == (2, 24, 2, 16)}  # as the queries', fewer heads
        assert kinds == seen | {"rms_norm": seen["rms_norm"] - key_norm}


def test_inputs_of_a_rank():
    """Under --tp and --ep: its heads, its tokens, its experts."""
    wide = inputs_of(tiny_config(moe=True), tp=2, ep=4, device="meta")
    assert [a.shape[1] for a in wide("attention")[0][:3]] == [2, 1, 1]
    assert wide("router")[0][0].shape == (12, 8)
    x, *_, gate_proj, _, down_proj = wide("moe_experts")[0]
    assert (x.shape, gate_proj.shape, down_proj.shape) == ((12, 32), (2, 24, 32), (2, 32, 24))
    gate_proj = inputs_of(tiny_config(moe=True), tp=2, device="meta")("moe_experts")[0][-2]
    assert gate_proj.shape == (8, 12, 32)
    assert inputs_of(tiny_config(), doc_mask="none")("attention")[0][3] is None


def test_experts_of_a_dense_model(user_module):
    user_module("def router(*args): ...")
    registry.choose(["router=my_kernels:router"])
    with pytest.raises(UserError, match="--kernel router is for models with experts; this one is dense"):
        check_needs(inputs_of(tiny_config(), device="meta"))


def test_a_kernel_spares_the_need_for_grouped_matmuls(monkeypatch):
    from qwen3_trn import start

    config, device = Qwen3Config.from_dict(tiny_config(moe=True)), Device("cpu")
    monkeypatch.setattr(Device, "has_grouped_matmul", lambda self: False)
    with pytest.raises(UserError, match="no grouped matmul"):
        start.use_equal_groups(TrainConfig(), config, device)
    monkeypatch.setitem(registry._overrides, "moe_experts", None)
    assert not start.use_equal_groups(TrainConfig(), config, device)


# ------------------------------------------------------------------------------------------------------ whole runs

SHORT = ("--steps", 2, "--seq-len", 32, "--global-batch-size", 2, "--no-export")


def test_the_example_of_the_documentation_trains(tmp_path, monkeypatch, user_module, capsys):
    user_module(EXAMPLE)
    plain = in_process(monkeypatch, tmp_path / "plain", *SHORT)
    assert "kernels    PyTorch's\n" in capsys.readouterr().out
    kernel = ("--kernel", "rms_norm=my_kernels:rms_norm", "--check-kernels")
    found = in_process(monkeypatch, tmp_path / "own", *SHORT, *kernel)
    said = capsys.readouterr().out
    assert "kernels    rms_norm: my_kernels:rms_norm; the rest PyTorch's\n" in said
    assert said.count("checked rms_norm, differences over the largest value: output 0 ") == 2
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in plain], rel=1e-5)
    assert 'kernel = ["rms_norm=my_kernels:rms_norm"]' in (tmp_path / "own" / "config.toml").read_text()


def test_a_wrong_kernel_stops_the_run_before_it_begins(tmp_path, monkeypatch, user_module):
    user_module(EXAMPLE.replace("* weight", "* weight * 1.001"))
    kernel = ("--kernel", "rms_norm=my_kernels:rms_norm", "--check-kernels")
    with pytest.raises(UserError, match=r"output 0 1.0e-03, .*expected at most 0.0001. \(rank 0\)"):
        in_process(monkeypatch, tmp_path / "run", *SHORT, *kernel)
    assert not (tmp_path / "run").exists()


DEFAULT = "from qwen3_trn.kernels import registry\n"
MISTAKES = {
    "rms_norm": (
        "x.data.zero_()\n    return x * weight",
        r"rms_norm=my_kernels:kernel changes its argument x, which others read",
    ),
    "linear_cross_entropy": (
        "labels.fill_(5)\n    return registry.default_of('linear_cross_entropy')(hidden, weight, labels, group)",
        "changes its argument labels",
    ),
    "moe_combine": (
        "y.mul_(2)\n    return registry.default_of('moe_combine')(y, weights, choice_of_slot, slot_of_choice)",
        "moe_combine=my_kernels:kernel changes its argument y, which others read too",
    ),
    "router": ("return None", r"computes something else than PyTorch's router.*output 0 inf"),
    "attention": (  # row 0's keys for every row
        "return registry.default_of('attention')(q, k[:1].expand_as(k), v[:1].expand_as(v), None)",
        "computes something else than PyTorch's attention",
    ),
    "moe_experts": (
        "return registry.default_of('moe_experts')(x, choice_of_slot, slot_of_choice, group_ends, gate_proj, up_proj, "
        "down_proj)[:1]",
        "output 0 inf",
    ),
}


@pytest.mark.parametrize("op", MISTAKES)
def test_the_check_finds_common_mistakes(op, tmp_path, monkeypatch, user_module):
    body, message = MISTAKES[op]
    parameters = ", ".join(registry.parameters_of(op)).replace("first_keys", "mask")
    user_module(f"{DEFAULT}def kernel({parameters}):\n    {body}\n")
    flags = ("--no-pack", "--kernel", f"{op}=my_kernels:kernel", "--check-kernels")
    with pytest.raises(UserError, match=message):
        in_process(monkeypatch, tmp_path / "run", *SHORT, *flags)


def test_an_exception_in_the_check_names_the_kernel(tmp_path, monkeypatch, user_module):
    user_module("def rms_norm(x, weight, eps):\n    return x / 0 // None\n")
    with pytest.raises(TypeError) as caught:
        in_process(monkeypatch, tmp_path / "run", *SHORT, "--kernel", "rms_norm=my_kernels:rms_norm", "--check-kernels")
    assert caught.value.__notes__ == [
        "In --kernel rms_norm=my_kernels:rms_norm, on the small input of --check-kernels."
    ]


def test_attention_that_sees_other_documents_is_refused(tmp_path, monkeypatch, user_module):
    user_module(
        "import torch.nn.functional as F\n"
        "def attention(q, k, v, mask):\n"
        "    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)\n"
    )
    with pytest.raises(UserError, match="documents in one row see each other"):
        in_process(monkeypatch, tmp_path / "run", *SHORT, "--kernel", "attention=my_kernels:attention")


PLAIN_TENSORS = """
from torch import Tensor
from qwen3_trn.kernels import registry
from qwen3_trn.model import document_mask

def override(op):
    def function(*args):
        tensors = [a for a in args if isinstance(a, Tensor)]
        assert all(type(tensor) is Tensor for tensor in tensors), (op, tensors)
        if op == "attention" and args[3] is not None:
            args = *args[:3], document_mask(args[3])
        return registry.default_of(op)(*args)
    return function

attention, rms_norm, linear_cross_entropy = map(override, ("attention", "rms_norm", "linear_cross_entropy"))
router, moe_experts, moe_combine = map(override, ("router", "moe_experts", "moe_combine"))
wrong = lambda *args: router(*args) if launch.RANK == 0 else (router(*args)[0] * 2, router(*args)[1])
changing = lambda logits, *args: router(logits if launch.RANK == 0 else logits.mul_(2), *args)
"""


@pytest.mark.slow
def test_tensor_parallel_ranks_give_kernels_plain_tensors(tmp_path, user_module):
    """All six, which compute the default; then one that is wrong on the second rank stops both, without a traceback."""
    user_module("from qwen3_trn import launch\n" + PLAIN_TENSORS)
    kernels = [f"{op}=my_kernels:{op}" for op in DEFAULTS]
    flags = (REPO / "train.py", *SHORT, "--tp", 2, "--check-kernels", "--kernel")
    paths = {"PYTHONPATH": f"{REPO}:{tmp_path / 'elsewhere'}"}
    said = succeeded(run_python(*flags, *kernels, "--out", tmp_path / "run", ranks=2, **paths))
    assert len(re.findall(r"checked .*: output 0 0.0e\+00, ", said)) == 7
    for name, what in {"wrong": "computes something else", "changing": "changes its argument logits"}.items():
        result = run_python(*flags, f"router=my_kernels:{name}", "--out", tmp_path / name, ranks=2, **paths)
        assert result.returncode == 1 and f"--kernel router=my_kernels:{name} {what}" in result.stderr
        assert "(rank 1)" in result.stderr and '/check.py", line' not in result.stderr


def test_the_plan_says_that_it_knows_no_kernels(capsys):
    plan.print_plan(parse_args(["--plan", "--kernel", "rms_norm=a:b", "--seq-len", "32"]))
    assert "kernels    planned with PyTorch's, not with --kernel rms_norm=a:b\n" in capsys.readouterr().out


def wide_config() -> dict:
    """The miniature in the least width that the NKI kernels take."""
    raw = json.loads((TINY / "config.json").read_text())
    raw |= {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 3}
    return raw | {"num_hidden_layers": 1}


def wide_model(folder):
    """A folder with it and the miniature's tokenizer."""
    write_config(folder, wide_config())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return folder


def test_a_run_with_the_nki_kernels_has_the_defaults_losses(tmp_path, monkeypatch, interpreted, capsys):
    """Five steps and the export; and three steps, then two more by the settings of the run's folder."""
    monkeypatch.setattr(Device, "expert_block", 128)
    flags = ("--model", wide_model(tmp_path / "model"), "--seq-len", 32, "--global-batch-size", 1)
    flags = (*flags, "--lr", "1e-2", "--schedule", "constant", "--warmup-steps", 0)
    plain = in_process(monkeypatch, tmp_path / "plain", *flags, "--steps", 5, "--no-export")
    capsys.readouterr()
    kernel = ("--kernel", "moe_experts=nki", "moe_combine=nki", "--check-kernels")
    found = in_process(monkeypatch, tmp_path / "nki", *flags, *kernel, "--steps", 5)
    said = capsys.readouterr().out
    assert "kernels    moe_experts: nki; moe_combine: nki; the rest PyTorch's\n" in said
    assert "           checked moe_experts, differences over the largest value: output 0 " in said
    assert "missing 0, unexpected 0" in said
    assert len(found) == 5 and plain[-1]["loss"] < plain[0]["loss"] - 0.5
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in plain], rel=1e-4)
    assert [r["grad_norm"] for r in found] == pytest.approx([r["grad_norm"] for r in plain], rel=1e-3)

    in_process(monkeypatch, tmp_path / "stopped", *flags, *kernel, "--steps", 3, "--no-export")
    resumed = in_process(monkeypatch, tmp_path / "stopped", "--init", "resume", "--steps", 5)
    assert "kernels    moe_experts: nki; moe_combine: nki; the rest PyTorch's\n" in capsys.readouterr().out
    assert [r["loss"] for r in resumed] == [r["loss"] for r in found]


def test_selective_recomputation_keeps_what_the_nki_kernels_return(interpreted):
    """As it keeps what the default returns: their forward runs once."""
    if not interpreted:
        pytest.skip("AWS's simulator does not count launches")
    (arguments,) = inputs_of(wide_config(), block=128)("moe_experts")
    registry.choose(["moe_experts=nki"])
    x = arguments[0].requires_grad_()
    with tests.nki.record() as r:
        wrap_forward(dispatch.run_experts, "selective", None)(x, *arguments[1:])[0].sum().backward()
    assert len(r.launches) == 3  # forward, backward, the sum of backward


def test_nki_kernels_refuse_what_they_cannot_take(tmp_path, monkeypatch, interpreted):
    monkeypatch.setattr(Device, "expert_block", 128)
    with pytest.raises(UserError, match="--kernel moe_experts=nki cannot take what this run computes: hidden_size 128"):
        in_process(monkeypatch, tmp_path / "run", *SHORT, "--kernel", "moe_experts=nki")
    assert not (tmp_path / "run").exists()
