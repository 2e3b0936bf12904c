"""Attention and experts by AWS's NKI Library against the PyTorch defaults.

pytest tests/test_nkilib.py

`nkilib` is stood in for: functions of the signatures that AWS publishes, by keyword only, which compute what its
documents say, in fp32. So these tests show that we call it as documented. They say nothing of AWS's kernels.
"""

import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tests.nki
from qwen3_trn import dispatch
from qwen3_trn.errors import UserError
from qwen3_trn.kernels import nkilib
from qwen3_trn.model import document_mask
from tests.common import REPO

# ------------------------------------------------------------------------------------------------- stands in for nkilib


class Kernel:
    """@nki.jit of a function: kernel[2](...) launches it on a logical core of two NeuronCores."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, num_cores):
        assert num_cores == 2
        return self.function


def to_tiles(rows: Tensor) -> Tensor:
    """[..., T] -> [..., 128, T / 128]: what the kernels keep of each query's softmax."""
    return rows.unflatten(-1, (-1, 128)).transpose(-1, -2)


def masked_scores(q: Tensor, k: Tensor, causal: bool, bound_min: Tensor | None, bound_max: Tensor | None) -> Tensor:
    """q, k: [..., T, D] of equally many heads; bounds: [..., T, 1] -> [..., T, T] fp32."""
    scores = q.float() @ k.float().transpose(-1, -2)
    keys = torch.arange(k.shape[-2])
    seen = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if bound_min is not None:
        seen = seen & (keys >= bound_min) & (keys < bound_max)
    return scores.masked_fill(~seen, -torch.inf)


def attention_cte(
    *,
    q,
    k,
    v,
    scale=1.0,
    causal_mask=True,
    tp_q=True,
    tp_k=False,
    tp_out=False,
    cache_softmax=False,
    bound_min=None,
    bound_max=None,
):
    """q [heads, T, D], or transposed if not tp_q; k as tp_k says; v [heads of k, T, D]; bounds [heads, T, 1]."""
    q, k = (tensor if in_rows else tensor.transpose(1, 2) for tensor, in_rows in ((q, tp_q), (k, tp_k)))
    assert all(tensor.is_contiguous() for tensor in (q, k, v)) and q.shape[0] % k.shape[0] == 0
    assert bound_min is None or bound_min.shape == bound_max.shape == (*q.shape[:2], 1)
    k, v = (tensor.repeat_interleave(q.shape[0] // k.shape[0], 0) for tensor in (k, v))
    scores = masked_scores(q, k, causal_mask, bound_min, bound_max) * scale
    maximum = scores.amax(-1)
    weights = (scores - maximum[..., None]).exp()
    total = weights.sum(-1)
    out = (weights @ v.float() / total[..., None]).to(q.dtype)
    out = out.transpose(1, 2) if tp_out else out
    return (out, to_tiles(-maximum), to_tiles(1 / total)) if cache_softmax else out


def attention_bwd(
    *,
    q_ref,
    k_ref,
    v_ref,
    o_ref,
    dy_ref,
    lse_ref,
    sinks_ref=None,
    bound_min=None,
    bound_max=None,
    use_causal_mask=False,
    mixed_precision=False,
    softmax_scale=None,
    sliding_window=None,
):
    """All [B, heads, D, T]; lse_ref [B, heads, 128, T / 128]; bounds fp32 [B, T]."""
    batch, heads, head_dim, length = q_ref.shape
    num_keys = k_ref.shape[1]
    assert all(t.is_contiguous() and t.dtype == q_ref.dtype for t in (q_ref, k_ref, v_ref, o_ref, dy_ref))
    assert lse_ref.shape == (batch, heads, 128, length // 128) and length % 512 == 0 and mixed_precision
    if bound_min is not None:
        assert bound_min.shape == bound_max.shape == (batch, length)
        assert bound_min.dtype == bound_max.dtype == torch.float32
        bound_min, bound_max = bound_min[:, None, :, None], bound_max[:, None, :, None]
    q, out, out_grad = (tensor.transpose(2, 3).float() for tensor in (q_ref, o_ref, dy_ref))
    k, v = (t.transpose(2, 3).float().repeat_interleave(heads // num_keys, 1) for t in (k_ref, v_ref))
    scale = softmax_scale or head_dim**-0.5
    lse = lse_ref.transpose(2, 3).flatten(2)
    weights = (masked_scores(q, k, use_causal_mask, bound_min, bound_max) * scale - lse[..., None]).exp()
    scores_grad = weights * (out_grad @ v.transpose(2, 3) - (out_grad * out).sum(-1, keepdim=True)) * scale
    k_grad, v_grad = (
        grad.unflatten(1, (num_keys, -1)).sum(2) for grad in (scores_grad.transpose(2, 3) @ q, weights.mT @ out_grad)
    )
    return tuple(grad.transpose(2, 3).to(q_ref.dtype).contiguous() for grad in (scores_grad @ k, k_grad, v_grad))


def check_blocks(hidden_states, affinities, weights, token_position_to_id, block_to_expert, block_size) -> int:
    """Shapes that both kernels of the experts document. Returns the number of blocks."""
    (num_experts, hidden, two, intermediate), num_blocks = weights[0].shape, token_position_to_id.shape[0] // block_size
    assert two == 2 and weights[1].shape == (num_experts, intermediate, hidden) and block_size in (128, 256, 512, 1024)
    assert affinities.shape == (hidden_states.shape[0] * num_experts, 1) and block_to_expert.shape == (num_blocks, 1)
    assert token_position_to_id.dtype == block_to_expert.dtype == torch.int32
    assert all(weight.is_contiguous() for weight in weights)
    return num_blocks


def blockwise_mm_baseline_shard_hidden(
    *,
    hidden_states,
    expert_affinities_masked,
    gate_up_proj_weight,
    down_proj_weight,
    block_size,
    token_position_to_id,
    block_to_expert,
    gate_up_activations_T=None,
    down_activations=None,
):
    """Adds affinity * expert(row) of each block's tokens to the output, [T + 1, H] as hidden_states."""
    weights = (gate_up_proj_weight, down_proj_weight)
    num_blocks = check_blocks(
        hidden_states, expert_affinities_masked, weights, token_position_to_id, block_to_expert, block_size
    )
    affinities = expert_affinities_masked.view(hidden_states.shape[0], -1).float()
    assert not hidden_states[-1].any()  # the row of padding
    output = torch.zeros_like(hidden_states)
    for block in range(num_blocks):
        ids, expert = token_position_to_id[block * block_size :][:block_size], block_to_expert[block, 0]
        gate, up = torch.einsum("bh,hgi->gbi", hidden_states[ids].float(), gate_up_proj_weight[expert].float())
        gate_up_activations_T[block] = torch.stack((gate, up)).transpose(1, 2)
        down = (F.silu(gate) * up) @ down_proj_weight[expert].float()
        output[ids] += (down * affinities[ids, expert, None]).to(output.dtype)
    return output, gate_up_activations_T


def blockwise_mm_bwd(
    *,
    hidden_states,
    expert_affinities_masked,
    gate_up_proj_weight,
    down_proj_weight,
    gate_up_proj_act_checkpoint_T,
    down_proj_act_checkpoint,
    token_position_to_id,
    block_to_expert,
    output_hidden_states_grad,
    block_size,
    accumulation_dtype=None,
):
    """Gradients of hidden_states [T, H], the affinities and the weights."""
    weights = (gate_up_proj_weight, down_proj_weight)
    num_blocks = check_blocks(
        hidden_states, expert_affinities_masked, weights, token_position_to_id, block_to_expert, block_size
    )
    hidden, intermediate = down_proj_weight.shape[2], down_proj_weight.shape[1]
    assert output_hidden_states_grad.shape == hidden_states.shape
    assert gate_up_proj_act_checkpoint_T.shape == (num_blocks, 2, intermediate, block_size)
    assert down_proj_act_checkpoint.shape == (num_blocks, block_size, hidden)
    dtype = torch.float32 if accumulation_dtype == "float32" else torch.bfloat16
    inputs = (hidden_states, expert_affinities_masked, *weights)
    x_grad, affinities_grad, gate_up_grad, down_grad = (torch.zeros_like(t, dtype=dtype) for t in inputs)
    affinities = expert_affinities_masked.view(hidden_states.shape[0], -1).float()
    for block in range(num_blocks):
        ids, expert = token_position_to_id[block * block_size :][:block_size], block_to_expert[block, 0]
        row_grad = output_hidden_states_grad[ids].float()
        affinities_grad.view_as(affinities)[ids, expert] += (
            (row_grad * down_proj_act_checkpoint[block]).sum(1).to(dtype)
        )
        row_grad = row_grad * affinities[ids, expert, None]
        gate, up = gate_up_proj_act_checkpoint_T[block].float().transpose(1, 2)
        sigmoid, act_grad = gate.sigmoid(), row_grad @ down_proj_weight[expert].float().T
        silu_slope = sigmoid * (1 + gate * (1 - sigmoid))
        gate_up_out_grad = torch.stack((act_grad * up * silu_slope, act_grad * F.silu(gate)))
        down_grad[expert] += (F.silu(gate) * up).T @ row_grad
        gate_up_grad[expert] += torch.einsum("bh,gbi->hgi", hidden_states[ids].float(), gate_up_out_grad)
        x_grad[ids] += torch.einsum("gbi,hgi->bh", gate_up_out_grad, gate_up_proj_weight[expert].float())
    grads = (x_grad, affinities_grad, gate_up_grad, down_grad)
    return tuple(grad.to(tensor.dtype) for grad, tensor in zip(grads, inputs, strict=True))


KERNELS = {
    "nkilib.core.attention.attention_cte": attention_cte,
    "nkilib.core.attention.attention_bwd": attention_bwd,
    "nkilib.experimental.moe.forward.bwmm_shard_on_H": blockwise_mm_baseline_shard_hidden,
    "nkilib.experimental.moe.bwd.blockwise_mm_backward": blockwise_mm_bwd,
}


@pytest.fixture(scope="module", autouse=True)
def packages():
    """Stand-ins for AWS's packages, for these tests only; for nkilib even where it is installed."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("nkilib", "nki")}
    tests.nki.install()
    names = {".".join(name.split(".")[:n]) for name in KERNELS for n in range(1, 6)}
    sys.modules |= {name: ModuleType(name) for name in names}
    for name, function in KERNELS.items():
        setattr(sys.modules[name], function.__name__, Kernel(function))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("nkilib", "nki", "torch_neuronx")]:
        if name not in before:
            del sys.modules[name]
    sys.modules |= before


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """bf16 results against fp64 ones of the same inputs."""
    for name, expected in exact.items():
        assert found[name].dtype == torch.bfloat16
        assert (found[name] - expected).abs().max() <= 1e-2 * expected.abs().max(), name


# ---------------------------------------------------------------------------------------------------------- attention


def default_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def run_attention(op, tensors: dict[str, Tensor], mask: Tensor | None, out_grad: Tensor) -> dict[str, Tensor]:
    """The output and every gradient, by name."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    out = op(*leaves.values(), mask)
    out.backward(out_grad.to(out.dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def make_heads(batch: int, heads: int, key_heads: int, head_dim: int = 32) -> dict[str, Tensor]:
    """q, k, v [B, heads, 512, D] of bf16, as the model gives them: transposed from [B, 512, heads, D]."""
    torch.manual_seed(0)
    sizes = {"q": heads, "k": key_heads, "v": key_heads}
    return {n: torch.randn(batch, 512, size, head_dim).bfloat16().transpose(1, 2) for n, size in sizes.items()}


DOCUMENTS = {
    "ragged": [[1, 2, 125, 129, 255], [300, 1, 1, 210]],
    "whole": [[512], [256, 256]],
}


def document_ids(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


def first_keys(ids: Tensor) -> Tensor:
    """Where each token's document starts, int32 [B, T]."""
    return (ids[:, :, None] > ids[:, None, :]).sum(2, dtype=torch.int32)


def test_bounds_are_those_of_the_documents():
    """The example of attention_bwd's docstring; bound_max as the kernel clamps it for causal attention."""
    bound_min, bound_max = nkilib.key_bounds(first_keys(document_ids([[2, 3, 2]])))
    assert bound_min.tolist() == [[0, 0, 2, 2, 2, 5, 5]]
    assert bound_max.tolist() == [[1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 1), (2, 2)])
def test_attention_equals_the_default(name, heads, key_heads):
    ids, tensors = document_ids(DOCUMENTS[name]), make_heads(2, heads, key_heads)
    out_grad = torch.randn(tensors["q"].shape)
    found = run_attention(nkilib.attention, tensors, first_keys(ids), out_grad)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    assert_close(found, run_attention(default_attention, exact, document_mask(ids), out_grad.bfloat16()))


def test_plain_causal_attention():
    tensors, out_grad = make_heads(1, 4, 2, head_dim=128), torch.randn(1, 4, 512, 128)
    found = run_attention(nkilib.attention, tensors, None, out_grad)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    assert_close(found, run_attention(default_attention, exact, None, out_grad.bfloat16()))


def test_attention_compiles_without_a_break():
    tensors, mask = make_heads(1, 2, 1), first_keys(document_ids([[100, 412]]))
    out_grad = torch.randn(tensors["q"].shape)
    compiled = torch.compile(nkilib.attention, backend="aot_eager", fullgraph=True)
    plain, found = (run_attention(op, tensors, mask, out_grad) for op in (nkilib.attention, compiled))
    assert all(torch.equal(found[name], expected) for name, expected in plain.items())


ATTENTION_REASONS = {
    "dtype torch.float32": {"dtype": torch.float32},
    "head_dim 256; expected at most 128": {"head_dim": 256},
    "sequences of 640 tokens; expected a multiple of 512": {"length": 640},
    "9 sequences with 64 heads each": {"batch": 9, "heads": 64},
    "a mask of torch.bool [1, 1, 512, 512]": {"mask": torch.ones(1, 1, 512, 512, dtype=torch.bool)},
    "k of shape [1, 2, 1024, 128]; expected [1, K, 512, 128]": {"k": torch.empty(1, 2, 1024, 128)},
    "v of shape [1, 2, 512]; expected [1, 2, 512, 128]": {"v": torch.empty(1, 2, 512)},
    "4 heads of q with 3 of k and v": {"k": torch.empty(1, 3, 512, 128), "v": torch.empty(1, 3, 512, 128)},
    "NEURON_LOGICAL_NC_CONFIG=1": {"lnc": "1"},
}


@pytest.mark.parametrize("reason", ATTENTION_REASONS)
def test_attention_that_does_not_fit(monkeypatch, reason):
    sizes = {"batch": 1, "heads": 4, "length": 512, "head_dim": 128, "dtype": torch.bfloat16} | ATTENTION_REASONS[
        reason
    ]
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", sizes.get("lnc", "2"))
    q = torch.empty(*(sizes[n] for n in ("batch", "heads", "length", "head_dim")), dtype=sizes["dtype"], device="meta")
    k, v = (sizes.get(name, q[:, :2]).to(q) for name in ("k", "v"))
    arguments = (q, k, v, sizes.get("mask"))
    assert reason in nkilib.needs_attention(*arguments)
    with pytest.raises(UserError, match="nkilib's attention cannot run"):
        nkilib.attention(*arguments)
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
    fits = torch.empty(1, 4, 512, 128, dtype=torch.bfloat16, device="meta")
    assert nkilib.needs_attention(fits, fits, fits, torch.empty(1, 512, dtype=torch.int32, device="meta")) is None


# -------------------------------------------------------------------------------------------------------- the experts


def make_experts(num_tokens: int, num_experts: int, hidden: int = 64, intermediate: int = 128) -> dict[str, Tensor]:
    torch.manual_seed(0)
    wide = (num_experts, intermediate, hidden)
    return {
        "x": torch.randn(num_tokens, hidden).bfloat16(),
        "gate_proj": (torch.randn(wide) * hidden**-0.5).bfloat16(),
        "up_proj": (torch.randn(wide) * hidden**-0.5).bfloat16(),
        "down_proj": (torch.randn(num_experts, hidden, intermediate) * intermediate**-0.5).bfloat16(),
    }


def run_experts(op, tensors: dict[str, Tensor], expert_ids: Tensor, weights: Tensor, out_grad: Tensor):
    """The layer's output and every gradient, by name."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    slots = dispatch.assign_slots(expert_ids, leaves["gate_proj"].shape[0], 128)
    x, *projections = leaves.values()
    y, gate, up = op(x, *slots, *projections)
    out = dispatch.combine(y, weights, *slots[:2])
    out.backward(out_grad.to(out.dtype))
    used = slots.choice_of_slot < expert_ids.numel()
    outputs = {"out": out, "y": y[used], "gate": gate[used], "up": up[used]}
    return {name: tensor.detach() for name, tensor in outputs.items()} | {n: leaf.grad for n, leaf in leaves.items()}


def top_ids(num_tokens: int, k: int, num_experts: int) -> Tensor:
    """[N, k]: of k different experts each."""
    torch.manual_seed(1)
    return torch.rand(num_tokens, num_experts).argsort(1)[:, :k].int()


ROUTINGS = {
    "two choices": (top_ids(300, 2, 4), 4),
    "an expert without tokens, one with more than a block": (torch.tensor([[0], [2]]).repeat(150, 1).int(), 4),
    "choices that live elsewhere": (torch.where(top_ids(200, 2, 6) < 3, top_ids(200, 2, 6), 3).int(), 3),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_equal_the_default(name):
    expert_ids, num_experts = ROUTINGS[name]
    tensors = make_experts(expert_ids.shape[0], num_experts)
    weights, out_grad = torch.rand(expert_ids.shape), torch.randn(tensors["x"].shape)
    found = run_experts(nkilib.moe_experts, tensors, expert_ids, weights, out_grad)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    assert_close(found, run_experts(dispatch.moe_experts, exact, expert_ids, weights.double(), out_grad.bfloat16()))


def test_weights_gradients_are_summed_in_fp32():
    """Of 40 blocks, each too small to change a sum in bf16 that the first has filled."""
    expert_ids = torch.zeros(128 * 40, 1, dtype=torch.int32)
    tensors = make_experts(expert_ids.shape[0], 1)
    tensors["x"][128:] = tensors["x"][:1] / 64
    weights, out_grad = torch.ones(expert_ids.shape), torch.ones(tensors["x"].shape)
    found = run_experts(nkilib.moe_experts, tensors, expert_ids, weights, out_grad)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    assert_close(found, run_experts(dispatch.moe_experts, exact, expert_ids, weights.double(), out_grad))


def test_experts_compile_without_a_break():
    expert_ids, num_experts = ROUTINGS["two choices"]
    tensors, weights = make_experts(expert_ids.shape[0], num_experts), torch.rand(expert_ids.shape)
    out_grad = torch.randn(tensors["x"].shape)
    compiled = torch.compile(nkilib.moe_experts, backend="aot_eager", fullgraph=True)
    plain, found = (run_experts(op, tensors, expert_ids, weights, out_grad) for op in (nkilib.moe_experts, compiled))
    assert all(torch.equal(found[name], expected) for name, expected in plain.items())


EXPERTS_REASONS = {
    "hidden_size 96; expected a multiple of 64": {"hidden": 96},
    "moe_intermediate_size (of this rank) 224; expected a multiple of 64": {"intermediate": 224},
    "dtype torch.float32": {"dtype": torch.float32},
    "300 slots; expected a multiple of 128": {"slots": 300},
    "gate_proj of shape [8, 768, 2048]; expected [16, I, 2048]": {"experts": 8},
    "NEURON_LOGICAL_NC_CONFIG=1": {"lnc": "1"},
}


@pytest.mark.parametrize("reason", EXPERTS_REASONS)
def test_experts_that_do_not_fit(monkeypatch, reason):
    sizes = {"hidden": 2048, "intermediate": 768, "slots": 1024, "dtype": torch.bfloat16} | EXPERTS_REASONS[reason]
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", sizes.get("lnc", "2"))

    def arguments(hidden=2048, intermediate=768, slots=1024, dtype=torch.bfloat16, experts=16, lnc=None):
        with torch.device("meta"):
            indices = (torch.empty(n, dtype=torch.int32) for n in ((slots,), (100, 8), (16,)))
            wide = [torch.empty(experts, intermediate, hidden, dtype=dtype) for _ in range(2)]
            return torch.empty(100, hidden, dtype=dtype), *indices, *wide, wide[0].transpose(1, 2)

    assert reason in nkilib.needs_experts(*arguments(**EXPERTS_REASONS[reason]))
    with pytest.raises(UserError, match="nkilib's moe_experts cannot run"):
        nkilib.moe_experts(*arguments(**EXPERTS_REASONS[reason]))
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
    assert nkilib.needs_experts(*arguments()) is None


# ----------------------------------------------------------------------------------------------------------- packages


def test_missing_packages_are_named():
    """In a process of its own: here an operation that was defined once stays."""
    code = """
import sys
from qwen3_trn.errors import UserError
from qwen3_trn.kernels import nkilib
print([name for name in ("nkilib", "nki", "torch_neuronx") if name in sys.modules])
sys.modules["nkilib"] = None
for define in (nkilib._define_attention, nkilib._define_experts):
    try:
        define()
    except UserError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    lines = result.stdout.splitlines()
    assert lines[0] == "[]", result.stderr
    for line, operation in zip(lines[1:], ("attention", "moe_experts"), strict=True):
        assert line.startswith(f"nkilib's kernels of {operation} need AWS's packages torch_neuronx, nki and nkilib")
