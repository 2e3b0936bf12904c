"""Mixture of experts: router, dispatch to slots, experts, combine, load balance.

One formulation serves every device. A *slot* is a row of the buffer that the experts work on. Each expert owns a run
of consecutive slots, padded up to a multiple of `block`, and the number of slots S is a bound that depends on shapes
alone: nothing is ever dropped, no size depends on the data, and the host is never asked.

    weights, expert_ids = route(logits, k, norm_topk_prob)                  # [N, k] fp32, [N, k]
    slots = assign_slots(expert_ids, num_experts, block)                    # who sits where
    y, _, _ = run_experts(x, *slots, gate_proj, up_proj, down_proj)         # [S, H]
    out = combine(y, weights, *slots[:2])                                   # [N, H], by gather: no scatter-add

`route`, `run_experts` and `combine` are operations that a kernel can take over, see docs/kernels.md.

Shape letters: N tokens, H hidden, I intermediate, E experts, k experts per token, S slots.
"""

import math
from functools import partial, reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from qwen3_trn.config import Qwen3Config
from qwen3_trn.init import local_tensor
from qwen3_trn.kernels.registry import missing_packages, operation, register


class RouterStats(NamedTuple):
    """Sums over the valid tokens of one micro-batch on this rank; one layer's, or stacked over the MoE layers."""

    tokens_per_expert: Tensor  # [E] fp32, without gradient; sums to (valid tokens) * k
    prob_per_expert: Tensor  # [E] fp32: summed softmax probabilities, with gradient
    logsumexp_squared: Tensor  # [] fp32: for the z-loss, with gradient
    entropy: Tensor  # [] fp32, nats, without gradient
    num_tokens: Tensor  # [] fp32: valid tokens
    num_dropped: Tensor  # [] fp32: choices that --moe-capacity left no slot for, without gradient


class Slots(NamedTuple):
    """Where each of the N*k choices sits. int32 indices."""

    choice_of_slot: Tensor  # [S]: n * k + j, or N * k for a pad slot
    slot_of_choice: Tensor  # [N, k]: the slot, or S for a choice that goes to no expert here
    group_ends: Tensor  # [E]: expert e's slots end here (exclusive) and begin where the previous expert's end


@operation("router", "logits num_experts_per_tok norm_topk_prob")
def route(logits: Tensor, num_experts_per_tok: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then the k largest, then (norm_topk_prob) rescaled to sum to 1.

    logits: [N, E] fp32. Returns weights [N, k] fp32 and expert ids [N, k] int32, as transformers' Qwen3MoeTopKRouter.
    """
    probs = logits.softmax(dim=-1)
    # Gathering by int32 ids, rather than using topk's values, keeps 64-bit indices out of backward.
    expert_ids = probs.detach().topk(num_experts_per_tok, dim=-1).indices.int()
    weights = probs.gather(1, expert_ids)
    if norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, expert_ids


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


class _GatherTokens(torch.autograd.Function):
    """All-gather of tokens, routing weights and expert ids, in one collective; backward reduce-scatters."""

    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, expert_ids: Tensor, group: dist.ProcessGroup):
        ctx.group = group
        # As bits, whatever they mean, so that one collective takes all three.
        parts = [tensor.contiguous().view(torch.int32) for tensor in (x, weights, expert_ids)]
        packed = funcol.wait_tensor(funcol.all_gather_single(torch.cat(parts, dim=1), 0, group))
        all_x, all_weights, all_ids = packed.split([part.shape[1] for part in parts], dim=1)
        all_ids = all_ids.contiguous()
        ctx.mark_non_differentiable(all_ids)
        return all_x.contiguous().view(x.dtype), all_weights.contiguous().view(weights.dtype), all_ids

    @staticmethod
    def backward(ctx, x_grad: Tensor, weights_grad: Tensor, _ids_grad):
        def reduce_scatter(grad: Tensor) -> Tensor:
            return funcol.wait_tensor(funcol.reduce_scatter_single(grad.contiguous(), "sum", 0, ctx.group))

        return reduce_scatter(x_grad), reduce_scatter(weights_grad), None, None


class Experts(nn.Module):
    """The weights of all experts of a layer, stacked; Hugging Face's per-expert names without the index.

    parallel.py may leave this rank a slice of them, some experts whole (expert parallelism) or a part of every
    expert's intermediate dim (tensor parallelism). Either way the ranks of `group` gather their tokens, each computes
    what its slice contributes, and a reduce-scatter sums the contributions: no token counts are exchanged, no size
    depends on the data.
    """

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.num_experts = config.num_experts
        self.block = 1  # rows that an expert's slots are padded to a multiple of
        self.capacity: float | None = None  # --moe-capacity
        self.equal_groups = False  # for a device without grouped matmuls; needs a capacity
        self.group: dist.ProcessGroup | None = None
        wide = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(wide[0], wide[2], wide[1]))

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x: [N, H], weights: [N, k] fp32, expert_ids: [N, k] int32, E where a token goes nowhere.

        Returns [N, H], and how many choices were dropped here, int32 [].
        """
        if self.group is None:
            return self.contribution(x, weights, expert_ids)
        gathered = _GatherTokens.apply(x, weights, expert_ids, self.group)
        # One source rank at a time: buffers then are those of one rank's tokens, however skewed the routing.
        sources = zip(*(tensor.chunk(self.group.size()) for tensor in gathered), strict=True)
        parts, dropped = zip(*(self.contribution(*source) for source in sources), strict=True)
        out = funcol.wait_tensor(funcol.reduce_scatter_single_autograd(torch.cat(parts), "sum", 0, self.group))
        return out, torch.stack(dropped).sum(dtype=torch.int32)

    def contribution(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank's slice of the experts adds to each token, [N, H], and how many choices it dropped."""
        gate_proj, up_proj, down_proj = map(local_tensor, (self.gate_proj, self.up_proj, self.down_proj))
        num_here = gate_proj.shape[0]
        rank = 0 if self.group is None else self.group.rank()
        capacity = None
        if self.capacity is not None:
            num_tokens, k = expert_ids.shape
            capacity = expert_capacity(num_tokens, k, self.num_experts, self.capacity, self.block)
        # Of experts that are cut along I every rank drops the same choices; one of them counts them.
        counts_drops = num_here < self.num_experts or rank == 0
        if num_here < self.num_experts:
            ids_here = expert_ids - rank * num_here
            expert_ids = torch.where((ids_here >= 0) & (ids_here < num_here), ids_here, num_here)
        slots = assign_slots(expert_ids, num_here, self.block, capacity, self.equal_groups)
        run = partial(moe_experts, equal_groups=True) if self.equal_groups else run_experts
        y, _, _ = run(x, *slots, gate_proj, up_proj, down_proj)
        dropped = (expert_ids < num_here) & (slots.slot_of_choice == y.shape[0])
        out = combine(y, weights, slots.choice_of_slot, slots.slot_of_choice)
        return out, dropped.int().sum(dtype=torch.int32) * counts_drops


class Router(nn.Linear):
    """The router's logits, in fp32 whatever the model computes in."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, H] -> [N, E]."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(dtype), self.weight.to(dtype))


class MoE(nn.Module):
    """Router and experts of one layer, in the place of the dense MLP."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = Router(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, RouterStats]:
        """x: [B, T, H]; valid: [B, T] bool, False for padding, which goes to no expert."""
        tokens, valid = x.flatten(0, 1), valid.flatten()
        logits = self.gate(tokens)
        weights, expert_ids = route(logits, self.num_experts_per_tok, self.norm_topk_prob)
        expert_ids = torch.where(valid[:, None], expert_ids, logits.shape[1])
        out, num_dropped = self.experts(tokens, weights, expert_ids)
        return out.view_as(x), router_stats(logits, expert_ids, valid, num_dropped)

    # The names by which torchtitan's `apply_fsdp_to_decoder` finds the experts' weights.
    @property
    def routed_experts(self) -> nn.Module:
        return self

    @property
    def inner_experts(self) -> nn.Module:
        return self.experts


def router_stats(logits: Tensor, expert_ids: Tensor, valid: Tensor, num_dropped: Tensor | int = 0) -> RouterStats:
    """logits: [N, E] fp32, expert_ids: [N, k] with E where not valid, valid: [N] bool."""
    mask = valid.to(logits.dtype)[:, None]
    log_probs = logits.log_softmax(dim=-1)
    probs = log_probs.exp()
    choices = expert_ids.flatten()
    counts = logits.new_zeros(logits.shape[1] + 1).index_add_(0, choices, torch.ones_like(choices, dtype=logits.dtype))
    return RouterStats(
        tokens_per_expert=counts[:-1],
        prob_per_expert=(mask * probs).sum(0),
        logsumexp_squared=(mask * logits.logsumexp(dim=-1, keepdim=True).square()).sum(),
        entropy=-(mask * probs * log_probs).sum().detach(),
        num_tokens=mask.sum(),
        num_dropped=logits.new_zeros(()) + num_dropped,
    )


def balance_loss(stats: RouterStats, global_stats: RouterStats) -> Tensor:
    """This rank's share of the load-balancing loss; the shares of all data ranks sum to it.

    `stats` are this rank's, stacked over the MoE layers; `global_stats` their sum over the data ranks. The loss is
    E * sum_e f_e * P_e with f_e the choices of expert e and P_e its mean probability, both per token and pooled over
    layers and valid tokens: transformers' `load_balancing_loss_func`, after Switch Transformer, arXiv 2101.03961,
    equations 4 to 6.
    """
    rows = global_stats.num_tokens.sum().clamp(min=1)  # a batch of nothing but padding
    fractions = global_stats.tokens_per_expert.sum(0) / rows
    return fractions.shape[0] * (fractions.detach() * stats.prob_per_expert.sum(0) / rows).sum()


def z_loss(stats: RouterStats, global_stats: RouterStats) -> Tensor:
    """This rank's share of the mean squared logsumexp of the router's logits (ST-MoE, arXiv 2202.08906, equation 5)."""
    return stats.logsumexp_squared.sum() / global_stats.num_tokens.sum().clamp(min=1)
