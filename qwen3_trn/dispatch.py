"""Tokens to the experts' slots, the experts on them, and back: three steps of moe.py.

One formulation serves every device. A *slot* is a row of the buffer that the experts work on. Each expert owns a run
of consecutive slots, padded up to a multiple of `block`, and the number of slots S is a bound that depends on shapes
alone: nothing is ever dropped, no size depends on the data, and the host is never asked.

    slots = assign_slots(expert_ids, num_experts, block)                    # who sits where
    y, _, _ = run_experts(x, *slots, gate_proj, up_proj, down_proj)         # [S, H]
    out = combine(y, weights, *slots[:2])                                   # [N, H], by gather: no scatter-add

`run_experts` and `combine` are operations that a kernel can take over, see docs/kernels.md.

Shape letters: N tokens, H hidden, I intermediate, E experts, k experts per token, S slots.
"""

import math
from functools import partial, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from qwen3_trn.kernels.registry import missing_packages, operation, register


class Slots(NamedTuple):
    """Where each of the N*k choices sits. int32 indices."""

    choice_of_slot: Tensor  # [S]: n * k + j, or N * k for a pad slot
    slot_of_choice: Tensor  # [N, k]: the slot, or S for a choice that goes to no expert here
    group_ends: Tensor  # [E]: expert e's slots end here (exclusive) and begin where the previous expert's end


def expert_capacity(num_tokens: int, k: int, num_experts: int, factor: float, block: int) -> int:
    """Rows that --moe-capacity leaves an expert: `factor` times the mean, rounded up to whole blocks."""
    return math.ceil(factor * num_tokens * k / num_experts / block) * block


def num_slots(num_tokens: int, k: int, num_experts: int, block: int, capacity: int | None = None) -> int:
    """The static bound S. Without a capacity every choice and every expert's padding fits, whatever the routing."""
    rows = num_tokens * min(k, num_experts) + num_experts * (block - 1)
    worst_case = -(-rows // block) * block
    return worst_case if capacity is None else min(worst_case, num_experts * capacity)


@torch.no_grad()
def assign_slots(
    expert_ids: Tensor, num_experts: int, block: int, capacity: int | None = None, equal_groups: bool = False
) -> Slots:
    """Give every choice a slot, expert by expert, in token order.

    expert_ids: [N, k], a token's all different; an id of E means no expert. capacity: slots an expert has at most, a
    multiple of `block`; the choices that come after it is full get none. equal_groups: every expert gets exactly
    `capacity` slots, used or not.
    """
    num_tokens, k = expert_ids.shape
    # A running count over tokens, instead of a sort, which is slow on neuron and returns 64-bit indices.
    experts = torch.arange(num_experts, device=expert_ids.device, dtype=torch.int32)
    chosen = reduce(torch.logical_or, (ids[:, None] == experts for ids in expert_ids.unbind(1)))  # [N, E]
    running = chosen.int().cumsum(0, dtype=torch.int32)
    kept = running[-1] if capacity is None else running[-1].clamp(max=capacity)
    if equal_groups:
        assert capacity is not None
        size, padded = num_experts * capacity, torch.full_like(kept, capacity)
    else:
        size = num_slots(num_tokens, k, num_experts, block, capacity)
        padded = (kept + block - 1) // block * block
    group_ends = padded.cumsum(0, dtype=torch.int32)
    slot_of_expert = torch.where(running <= kept, group_ends - padded + running - 1, size)  # [N, E], where chosen
    slot_of_choice = F.pad(slot_of_expert, (0, 1), value=size).gather(1, expert_ids)
    # Choices without a slot all write the extra last element, which is then cut off.
    choices = torch.arange(num_tokens * k, device=expert_ids.device, dtype=torch.int32)
    choice_of_slot = torch.full((size + 1,), num_tokens * k, device=expert_ids.device, dtype=torch.int32)
    choice_of_slot = choice_of_slot.scatter_(0, slot_of_choice.flatten(), choices)[:size]
    return Slots(choice_of_slot, slot_of_choice, group_ends)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] by rows, where an index past the end gives a zero row. x: [R, H], index: [...] int32 -> [..., H]."""
    inside = index < x.shape[0]
    rows = x.index_select(0, torch.where(inside, index, 0).flatten()).view(*index.shape, -1)
    return torch.where(inside[..., None], rows, 0)


def sum_over_choices(rows: Tensor, slot_of_choice: Tensor) -> Tensor:
    """The sum of each token's rows, in fp32: a gather, where the transpose of a gather would scatter-add.

    rows: [S, H], slot_of_choice: [N, k] -> [N, H] in rows' dtype.
    """
    sum_dtype = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros(slot_of_choice.shape[0], rows.shape[1], dtype=sum_dtype)
    for slots in slot_of_choice.T:
        total += gather_rows(rows, slots)
    return total.to(rows.dtype)


def _grouped_mm(a: Tensor, b: Tensor, group_ends: Tensor, equal_groups: bool) -> Tensor:
    """One matmul a group. a: [S, K] with b: [E, K, M] -> [S, M]; or a: [K, S] with b: [S, M] -> [E, K, M].

    Rows of the result past the last group are undefined.
    """
    if equal_groups:
        num_groups = group_ends.shape[0]
        if b.dim() == 2:
            return a.unflatten(1, (num_groups, -1)).transpose(0, 1) @ b.unflatten(0, (num_groups, -1))
        return (a.unflatten(0, (num_groups, -1)) @ b).flatten(0, 1)
    strides = [stride for t in (a, b) for stride in t.stride() if stride != 1] + [b.shape[-1]]
    if a.dtype in (torch.float32, torch.bfloat16) and all(s * a.element_size() % 16 == 0 for s in strides):
        return torch._grouped_mm(a, b, offs=group_ends)
    # fp64, and widths that are not a multiple of 16 bytes, which torch._grouped_mm refuses or pads.
    ends = group_ends.tolist()
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in groups])
    out = a.new_zeros(a.shape[0], b.shape[2])
    for expert, (start, end) in enumerate(groups):
        out[start:end] = a[start:end] @ b[expert]
    return out


@torch.library.custom_op("qwen3_trn::moe_experts", mutates_args=())
def moe_experts(
    x: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    group_ends: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    equal_groups: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The SwiGLU experts on their slots: down(silu(gate(x)) * up(x)).

    x: [N, H]; the indices are `Slots`; gate_proj and up_proj: [E, I, H], down_proj: [E, H, I]. equal_groups: as given
    to assign_slots; then the matmuls are batched ones.
    Returns y [S, H] and what backward needs, gate and up [S, I]. Rows past the last group are undefined.
    An opaque operation, so that compile, meta tensors and recomputation see one node.
    """
    grouped_mm = partial(_grouped_mm, group_ends=group_ends, equal_groups=equal_groups)
    slots_x = gather_rows(x, choice_of_slot // slot_of_choice.shape[1])
    gate = grouped_mm(slots_x, gate_proj.transpose(1, 2))
    up = grouped_mm(slots_x, up_proj.transpose(1, 2))
    y = grouped_mm(F.silu(gate) * up, down_proj.transpose(1, 2))
    return y, gate, up


@moe_experts.register_fake
def _(x, choice_of_slot, slot_of_choice, group_ends, gate_proj, up_proj, down_proj, equal_groups=False):
    size, intermediate = choice_of_slot.shape[0], gate_proj.shape[1]
    return x.new_empty(size, x.shape[1]), x.new_empty(size, intermediate), x.new_empty(size, intermediate)


@torch.library.custom_op("qwen3_trn::moe_experts_backward", mutates_args=())
def moe_experts_backward(
    y_grad: Tensor,
    x: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    group_ends: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    gate: Tensor,
    up: Tensor,
    equal_groups: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate_proj, up_proj and down_proj; an expert without tokens gets zeros."""
    grouped_mm = partial(_grouped_mm, group_ends=group_ends, equal_groups=equal_groups)
    y_grad = y_grad.contiguous()
    slots_x = gather_rows(x, choice_of_slot // slot_of_choice.shape[1])
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    act_grad = grouped_mm(y_grad, down_proj)
    down_grad = grouped_mm(y_grad.T, silu * up)
    up_out_grad = act_grad * silu
    gate_out_grad = act_grad * up * (sigmoid + silu - silu * sigmoid)
    gate_grad = grouped_mm(gate_out_grad.T, slots_x)
    up_grad = grouped_mm(up_out_grad.T, slots_x)
    slots_x_grad = grouped_mm(gate_out_grad, gate_proj) + grouped_mm(up_out_grad, up_proj)
    return sum_over_choices(slots_x_grad, slot_of_choice), gate_grad, up_grad, down_grad


@moe_experts_backward.register_fake
def _(
    y_grad, x, choice_of_slot, slot_of_choice, group_ends, gate_proj, up_proj, down_proj, gate, up, equal_groups=False
):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gate_proj, up_proj, down_proj))


def _save_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.equal_groups = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _moe_experts_autograd(ctx, y_grad: Tensor, _gate_grad, _up_grad):
    x_grad, *weight_grads = moe_experts_backward(y_grad, *ctx.saved_tensors, ctx.equal_groups)
    return x_grad, None, None, None, *weight_grads, None


moe_experts.register_autograd(_moe_experts_autograd, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.qwen3_trn.moe_experts)
def _moe_experts_flops(x, choice_of_slot, slot_of_choice, group_ends, gate_proj, *args, **kwargs) -> int:
    """Of the matmuls on all S slots, padding included: three of [S, H] x [H, I]."""
    return 3 * 2 * choice_of_slot[0] * gate_proj[1] * gate_proj[2]


@register_flop_formula(torch.ops.qwen3_trn.moe_experts_backward)
def _moe_experts_backward_flops(
    y_grad, x, choice_of_slot, slot_of_choice, group_ends, gate_proj, *args, **kwargs
) -> int:
    return 6 * 2 * choice_of_slot[0] * gate_proj[1] * gate_proj[2]


run_experts = operation("moe_experts", "x choice_of_slot slot_of_choice group_ends gate_proj up_proj down_proj")(
    moe_experts
)
register(
    "moe_experts",
    "nki",
    "qwen3_trn.kernels.nki_moe:moe_experts",
    available=partial(missing_packages, "torch_neuronx", "nki"),
    needs="qwen3_trn.kernels.nki_moe:supports",
)
register(
    "moe_experts",
    "nkilib",
    "qwen3_trn.kernels.nkilib:moe_experts",
    available=partial(missing_packages, "torch_neuronx", "nki", "nkilib"),
    needs="qwen3_trn.kernels.nkilib:needs_experts",
)


class _Combine(torch.autograd.Function):
    """out[n] = sum over j of weights[n, j] * y[slot_of_choice[n, j]], in fp32; backward gathers too."""

    @staticmethod
    def forward(ctx, y: Tensor, weights: Tensor, choice_of_slot: Tensor, slot_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, choice_of_slot, slot_of_choice)
        out = torch.zeros(weights.shape[0], y.shape[1], dtype=weights.dtype, device=y.device)
        for j in range(weights.shape[1]):
            out += weights[:, j, None] * gather_rows(y, slot_of_choice[:, j])
        return out.to(y.dtype)

    @staticmethod
    def backward(ctx, out_grad: Tensor):
        y, weights, choice_of_slot, slot_of_choice = ctx.saved_tensors
        k = weights.shape[1]
        weight_of_slot = gather_rows(weights.reshape(-1, 1), choice_of_slot)
        y_grad = (weight_of_slot * gather_rows(out_grad, choice_of_slot // k)).to(y.dtype)
        out_grad = out_grad.to(weights.dtype)
        weights_grad = [(out_grad * gather_rows(y, slot_of_choice[:, j])).sum(-1) for j in range(k)]
        return y_grad, torch.stack(weights_grad, dim=1), None, None


@operation("moe_combine", "y weights choice_of_slot slot_of_choice")
def combine(y: Tensor, weights: Tensor, choice_of_slot: Tensor, slot_of_choice: Tensor) -> Tensor:
    """Each token's weighted sum of its experts' rows. y: [S, H], weights: [N, k] -> [N, H] in y's dtype."""
    return _Combine.apply(y, weights, choice_of_slot, slot_of_choice)


register(
    "moe_combine",
    "nki",
    "qwen3_trn.kernels.nki_combine:moe_combine",
    available=partial(missing_packages, "torch_neuronx", "nki"),
    needs="qwen3_trn.kernels.nki_combine:supports",
)
