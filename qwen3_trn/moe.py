"""Mixture of experts: router, experts, load balance. dispatch.py has what happens between router and output:

    weights, expert_ids = route(logits, k, norm_topk_prob)                  # [N, k] fp32, [N, k]
    slots = assign_slots(expert_ids, num_experts, block)                    # who sits where
    y, _, _ = run_experts(x, *slots, gate_proj, up_proj, down_proj)         # [S, H]
    out = combine(y, weights, *slots[:2])                                   # [N, H]

`route`, as the last two, is an operation that a kernel can take over, see docs/kernels.md.

Shape letters: N tokens, H hidden, I intermediate, E experts, k experts per token, S slots.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_trn.config import Qwen3Config
from qwen3_trn.dispatch import assign_slots, combine, expert_capacity, moe_experts, run_experts
from qwen3_trn.init import local_tensor
from qwen3_trn.kernels.registry import operation


class RouterStats(NamedTuple):
    """Sums over the valid tokens of one micro-batch on this rank; one layer's, or stacked over the MoE layers."""

    tokens_per_expert: Tensor  # [E] fp32, without gradient; sums to (valid tokens) * k
    prob_per_expert: Tensor  # [E] fp32: summed softmax probabilities, with gradient
    logsumexp_squared: Tensor  # [] fp32: for the z-loss, with gradient
    entropy: Tensor  # [] fp32, nats, without gradient
    num_tokens: Tensor  # [] fp32: valid tokens
    num_dropped: Tensor  # [] fp32: choices that --moe-capacity left no slot for, without gradient


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
