"""Slots, experts, combine and balance against slow references: plain loops, fp64, hand calculation, transformers.

pytest tests/test_moe.py
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from qwen3_trn import dispatch, moe
from qwen3_trn.config import Qwen3Config
from qwen3_trn.dispatch import Slots, assign_slots, combine, moe_experts
from qwen3_trn.model import Qwen3ForCausalLM
from qwen3_trn.moe import MoE, RouterStats, balance_loss, route, z_loss
from tests.common import tiny_config


def all_valid(x: Tensor) -> Tensor:
    """No padding among tokens x [B, T, H]."""
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


# --------------------------------------------------------------------------------------------------------------- slots


def slow_slots(
    expert_ids: list[list[int]], num_experts: int, block: int
) -> tuple[list[int], list[list[int]], list[int]]:
    """assign_slots, one choice after the other."""
    k = len(expert_ids[0])
    size = math.ceil((len(expert_ids) * min(k, num_experts) + num_experts * (block - 1)) / block) * block
    choice_of_slot = [len(expert_ids) * k] * size
    slot_of_choice = [[size] * k for _ in expert_ids]
    group_ends, end = [], 0
    for expert in range(num_experts):
        start = end
        for n, row in enumerate(expert_ids):
            for j, chosen in enumerate(row):
                if chosen == expert:
                    choice_of_slot[end] = n * k + j
                    slot_of_choice[n][j] = end
                    end += 1
        end = start + math.ceil((end - start) / block) * block
        group_ends.append(end)
    return choice_of_slot, slot_of_choice, group_ends


@st.composite
def routings(draw):
    """(expert ids [N, k], E, block). A token's experts differ, as top-k's do; E means that a choice goes nowhere."""
    num_experts = draw(st.integers(1, 9))
    k = draw(st.integers(1, num_experts))
    num_tokens = draw(st.integers(1, 12))
    some = draw(st.lists(st.integers(0, num_experts - 1), min_size=k, unique=True))  # few experts, or all
    rows = []
    for _ in range(num_tokens):
        row = draw(st.permutations(some))[:k]
        rows.append([num_experts if draw(st.booleans()) and draw(st.booleans()) else expert for expert in row])
    return rows, num_experts, draw(st.sampled_from([1, 4, 128]))


@settings(deadline=None, max_examples=150)
@given(routings())
def test_slots_are_those_of_a_loop(routing):
    rows, num_experts, block = routing
    slots = assign_slots(torch.tensor(rows, dtype=torch.int32), num_experts, block)
    assert all(index.dtype == torch.int32 for index in slots)
    assert tuple(index.tolist() for index in slots) == slow_slots(rows, num_experts, block)


@settings(deadline=None, max_examples=100)
@given(routings())
def test_slots_keep_their_promises(routing):
    """Said again without a reference: own slot, own group, whole blocks, token order, everything within S."""
    rows, num_experts, block = routing
    choice_of_slot, slot_of_choice, group_ends = assign_slots(torch.tensor(rows, dtype=torch.int32), num_experts, block)
    size = choice_of_slot.shape[0]
    assert size % block == 0 and (group_ends % block == 0).all() and group_ends[-1] <= size
    expert_of_choice = torch.tensor(rows).flatten().tolist()
    slot = slot_of_choice.flatten().tolist()
    placed = [choice for choice, expert in enumerate(expert_of_choice) if expert < num_experts]
    assert len({slot[choice] for choice in placed}) == len(placed)
    starts = [0, *group_ends.tolist()]
    for choice in placed:
        expert = expert_of_choice[choice]
        assert starts[expert] <= slot[choice] < starts[expert + 1]
        assert choice_of_slot[slot[choice]] == choice
        assert all(slot[c] < slot[choice] for c in placed if c < choice and expert_of_choice[c] == expert)
    assert all(slot[choice] == size for choice in range(len(slot)) if choice not in placed)
    assert (choice_of_slot < len(slot)).sum() == len(placed)


@pytest.mark.parametrize("block", [1, 4, 128])
def test_the_shapes_of_slots_do_not_depend_on_the_routing(block):
    """On `neuron` a new shape is a new compilation."""
    num_tokens, k, num_experts = 6, 2, 4
    everywhere = torch.arange(num_tokens * k).view(num_tokens, k) % num_experts
    nowhere = torch.full((num_tokens, k), num_experts)
    one = torch.tensor([[0, 1]] * num_tokens)
    shapes = {tuple(i.shape for i in assign_slots(ids.int(), num_experts, block)) for ids in (everywhere, nowhere, one)}
    assert len(shapes) == 1
    # On meta tensors, which have no data, they are the same again.
    meta = assign_slots(torch.empty(num_tokens, k, dtype=torch.int32, device="meta"), num_experts, block)
    assert shapes == {tuple(index.shape for index in meta)}
    assert dispatch.num_slots(num_tokens, k, num_experts, block) == meta.choice_of_slot.shape[0]


def test_the_bound_on_slots_is_reached():
    """A smaller bound would drop tokens."""
    # A token in each of 3 groups of 4: all S = ceil((3 + 3 * 3) / 4) * 4 slots are taken.
    slots = assign_slots(torch.tensor([[0], [1], [2]], dtype=torch.int32), 3, 4)
    assert slots.group_ends.tolist() == [4, 8, 12] and slots.choice_of_slot.shape[0] == 12
    assert dispatch.num_slots(10, 8, 2, 1) == 20  # with fewer experts here than choices a token, at most E of them land


# --------------------------------------------------------------------------------------------------- layer and experts

# name -> (N, k, E, which experts the router prefers, which tokens are padding)
ROUTINGS = {
    "spread": (13, 2, 6, None, ()),
    "k = 1": (13, 1, 6, None, ()),
    "k = E": (7, 6, 6, None, ()),
    "all to one": (13, 1, 6, [4], ()),
    "all to the same two": (13, 2, 6, [5, 0], ()),
    "padding": (13, 2, 6, None, (0, 5, 6, 12)),
    "padding, all to one": (9, 1, 4, [0], (0, 1, 2)),
    "nothing but padding": (5, 2, 4, None, range(5)),
    "one token": (1, 2, 4, None, ()),
    "one expert": (5, 1, 1, None, ()),
}
# name -> dtype, H, I: widths that are multiples of 16 bytes take torch._grouped_mm, others a loop over the experts.
WIDTHS = {
    "fp64": (torch.float64, 6, 5),
    "fp32 grouped": (torch.float32, 8, 12),
    "fp32 loop": (torch.float32, 6, 5),
}


def make_layer(
    k: int, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, block: int, norm: bool
) -> MoE:
    torch.manual_seed(0)
    raw = tiny_config(moe=True, hidden_size=hidden, moe_intermediate_size=intermediate)
    raw |= {"num_experts": num_experts, "num_experts_per_tok": k, "norm_topk_prob": norm}
    layer = MoE(Qwen3Config.from_dict(raw)).to(dtype)
    layer.experts.block = block
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
    return layer


def slow_moe(layer: MoE, x: Tensor, valid: Tensor) -> Tensor:
    """The layer from its definition, one token and one choice at a time."""
    rows = []
    experts = layer.experts
    for token, is_valid in zip(x.flatten(0, 1), valid.flatten(), strict=True):
        out = token * 0
        if is_valid:
            probs = (layer.gate.weight @ token).softmax(-1)
            chosen = sorted(range(len(probs)), key=lambda e: -probs[e].item())[: layer.num_experts_per_tok]
            total = sum(probs[e] for e in chosen) if layer.norm_topk_prob else 1.0
            for e in chosen:
                gate, up = experts.gate_proj[e] @ token, experts.up_proj[e] @ token
                out = out + probs[e] / total * (experts.down_proj[e] @ (gate / (1 + (-gate).exp()) * up))
        rows.append(out)
    return torch.stack(rows).view_as(x)


def gradients_of(layer: MoE, x: Tensor, run) -> tuple[Tensor, dict[str, Tensor]]:
    """(output, gradients) of a loss that weighs every element of run(x) differently."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = run(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def poison(monkeypatch) -> list[int]:
    """Fill the rows that a grouped matmul leaves undefined with NaN; returns the count of such rows, call by call."""
    plain, undefined = dispatch._grouped_mm, []

    def poisoned(a: Tensor, b: Tensor, group_ends: Tensor, equal_groups: bool) -> Tensor:
        out = plain(a, b, group_ends, equal_groups)
        if b.dim() == 3:
            out[group_ends[-1] :] = float("nan")
            undefined.append(out.shape[0] - group_ends[-1].item())
        return out

    monkeypatch.setattr(dispatch, "_grouped_mm", poisoned)
    return undefined


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
def test_the_layer_and_all_its_gradients_are_those_of_a_loop(monkeypatch, routing, widths, block, norm):
    num_tokens, k, num_experts, preferred, padding = ROUTINGS[routing]
    dtype, hidden, intermediate = WIDTHS[widths]
    layer = make_layer(k, num_experts, hidden, intermediate, dtype, block, norm)
    x = torch.randn(1, num_tokens, hidden, dtype=dtype)
    valid = torch.ones(1, num_tokens, dtype=torch.bool)
    valid[0, list(padding)] = False
    if preferred is not None:
        # The first feature is the same for all tokens and decides.
        x[..., 0] = 1.0
        with torch.no_grad():
            layer.gate.weight[:, 0] = -20.0
            for better, expert in enumerate(preferred):
                layer.gate.weight[expert, 0] = 20.0 + better / 2

    expected, expected_gradients = gradients_of(layer.double(), x.double(), lambda x: slow_moe(layer, x, valid))
    layer.to(dtype)
    grouped = []
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a, f=torch._grouped_mm, **kw: grouped.append(1) or f(*a, **kw))
    undefined = poison(monkeypatch)
    out, gradients = gradients_of(layer, x, lambda x: layer(x, valid)[0])

    assert bool(grouped) == (widths == "fp32 grouped")
    assert any(undefined) or (block == 1 and not padding)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert (out - expected).abs().max() <= tolerance * expected.abs().max() + tolerance
    for name, gradient in gradients.items():
        reference = expected_gradients[name]
        assert gradient is not None, name
        # The loop gives no gradient at all where no token came; ours is there and zero, so that no rank ever skips a
        # collective.
        reference = torch.zeros_like(gradient, dtype=torch.float64) if reference is None else reference
        assert (gradient - reference).abs().max() <= tolerance * reference.abs().max() + tolerance, name
    for expert in set(range(num_experts)) - set(preferred or range(num_experts)):
        for name in ("gate_proj", "up_proj", "down_proj"):
            assert (gradients[f"experts.{name}"][expert] == 0).all()
    assert (gradients["x"][~valid] == 0).all() and (out[~valid] == 0).all()


def expert_inputs(
    dtype: torch.dtype, hidden: int = 3, intermediate: int = 2, block: int = 4
) -> tuple[Tensor, Slots, list[Tensor]]:
    """(x, slots, [gate, up, down]) of 5 tokens, 3 experts, k 2; expert 1 has no token and one choice goes nowhere."""
    torch.manual_seed(3)
    slots = assign_slots(torch.tensor([[0, 2], [2, 0], [2, 3], [0, 2], [0, 2]], dtype=torch.int32), 3, block)
    x = torch.randn(5, hidden, dtype=dtype, requires_grad=True)
    shapes = (3, intermediate, hidden), (3, intermediate, hidden), (3, hidden, intermediate)
    return x, slots, [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("block", [1, 4])
def test_gradcheck_of_experts_and_combine(block):
    x, slots, weights = expert_inputs(torch.float64, block=block)
    filled = slots.choice_of_slot < 10

    def experts(x, *weights):
        return moe_experts(x, *slots, *weights)[0][filled]

    assert torch.autograd.gradcheck(experts, (x, *weights))
    y = torch.randn(slots.choice_of_slot.shape[0], 3, dtype=torch.float64, requires_grad=True)
    router = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, router: combine(y, router, *slots[:2]), (y, router))


def test_combine_ignores_choices_without_a_slot_even_where_their_weight_is_large():
    _, slots, _ = expert_inputs(torch.float64)
    y = torch.ones(slots.choice_of_slot.shape[0], 1, dtype=torch.float64)
    out = combine(y, torch.full((5, 2), 10.0, dtype=torch.float64), *slots[:2])
    assert out.flatten().tolist() == [20, 20, 10, 20, 20]


def test_combine_sums_in_fp32():
    """1 + 2^-9 is not a bf16 number; three terms that only fp32 can hold add up to one that bf16 can."""
    slots = assign_slots(torch.tensor([[0, 1, 2]], dtype=torch.int32), 3, 1)
    y = torch.tensor([[1.0], [2.0**-9], [-1.0]], dtype=torch.bfloat16)
    assert combine(y, torch.ones(1, 3), *slots[:2]).item() == 2.0**-9


def test_the_gradient_of_a_token_is_summed_over_its_experts_in_fp32():
    """The same three terms. Where silu(gate) is gate, at 32, expert e is x -> down * 32 * up[e] * x^2, with slope up[e]
    for down 2^-6 at x = 1."""
    slots = assign_slots(torch.tensor([[0, 1, 2]], dtype=torch.int32), 3, 1)
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gate, down = (torch.full((3, 1, 1), value, dtype=torch.bfloat16) for value in (32.0, 2.0**-6))
    up = torch.tensor([1.0, 2.0**-9, -1.0], dtype=torch.bfloat16).view(3, 1, 1)
    moe_experts(x, *slots, gate, up, down)[0].sum().backward()
    assert x.grad.item() == 2.0**-9


@pytest.mark.parametrize("intermediate", [4, 3], ids=["grouped", "loop"])
def test_opcheck_of_the_custom_operations(intermediate):
    """Schema, fake kernels, autograd registration and AOT dispatch, on slots that are all filled."""
    torch.manual_seed(0)
    slots = assign_slots(torch.tensor([[0, 2], [2, 0], [2, 1], [0, 2]], dtype=torch.int32), 3, 1)
    x = torch.randn(4, 4, requires_grad=True)
    shapes = (3, intermediate, 4), (3, intermediate, 4), (3, 4, intermediate)
    weights = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch.library.opcheck(moe_experts, (x, *slots, *weights))
    y, gate, up = moe_experts(x, *slots, *weights)
    inputs = torch.randn_like(y), x, *slots, *weights, gate, up
    torch.library.opcheck(dispatch.moe_experts_backward, tuple(tensor.detach() for tensor in inputs))


def test_flops_of_forward_and_backward_are_three_and_six_matmuls_on_all_slots():
    block, hidden, intermediate = 4, 8, 12
    x, slots, weights = expert_inputs(torch.float32, hidden, intermediate, block)
    size = 20  # ceil((5 * 2 + 3 * 3) / 4) * 4
    assert slots.choice_of_slot.shape[0] == size
    with FlopCounterMode(display=False) as forward:
        y = moe_experts(x, *slots, *weights)[0]
    assert forward.get_total_flops() == 3 * (2 * size * hidden * intermediate)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert backward.get_total_flops() == 6 * (2 * size * hidden * intermediate)


def test_active_parameters_and_flops_a_token():
    """By hand, for the tiny MoE model: 2 layers, hidden 32, 4 + 2 heads of 16, 2 of 8 experts of 24, vocabulary 131."""
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(moe=True)))
    attention = 32 * (4 + 2 + 2) * 16 + 4 * 16 * 32
    norms = 2 * 32 + 2 * 16
    expert = 3 * 32 * 24
    assert model.num_parameters() == 2 * 131 * 32 + 32 + 2 * (attention + norms + 8 * 32 + 8 * expert)
    active = 131 * 32 + 2 * (attention + norms + 8 * 32 + 2 * expert)
    assert model.num_active_parameters() == active
    # Scores and values: 2 layers, 4 heads, 16 dims, half of 100 positions seen, 2 products of 2 FLOPs, 3 with backward.
    assert model.flops_per_token(100) == 6 * active + 2 * 4 * 16 * (100 / 2) * 2 * 2 * 3


# -------------------------------------------------------------------------------------------------------------- router


def test_route_by_hand():
    logits = torch.tensor([[0.0, math.log(3), math.log(5), math.log(1)], [math.log(6), 0.0, 0.0, math.log(2)]])
    weights, ids = route(logits, 2, norm_topk_prob=False)
    assert ids.tolist() == [[2, 1], [0, 3]] and ids.dtype == torch.int32
    assert torch.allclose(weights, torch.tensor([[0.5, 0.3], [0.6, 0.2]]))
    weights, _ = route(logits, 2, norm_topk_prob=True)
    assert torch.allclose(weights, torch.tensor([[5 / 8, 3 / 8], [3 / 4, 1 / 4]]))


def test_router_works_in_fp32_in_a_bf16_model():
    """Two experts whose logits differ by less than bf16 can tell are still told apart."""
    layer = make_layer(1, 2, 8, 8, torch.bfloat16, 1, True)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[:, 0] = 1.0
        layer.gate.weight[1, 1] = 2.0**-12
    x = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    x[..., :2] = 1.0
    assert layer(x, all_valid(x))[1].tokens_per_expert.tolist() == [0, 1]
    layer.gate.weight.data[1, 1] *= -1
    assert layer(x, all_valid(x))[1].tokens_per_expert.tolist() == [1, 0]


def stats_of(logits: Tensor, k: int, valid: Tensor | None = None) -> RouterStats:
    """Stacked statistics of logits [L, N, E]."""
    valid = torch.ones(logits.shape[1], dtype=torch.bool) if valid is None else valid
    layers = []
    for layer in logits:
        ids = torch.where(valid[:, None], route(layer, k, True)[1], layer.shape[1])
        layers.append(moe.router_stats(layer, ids, valid))
    return RouterStats(*map(torch.stack, zip(*layers, strict=True)))


def sum_over_ranks(*ranks: RouterStats) -> RouterStats:
    return RouterStats(*map(sum, zip(*ranks, strict=True)))


def test_statistics_by_hand():
    """4 experts, k 2, 3 tokens of which the second is padding; probabilities in eighths."""
    probs = torch.tensor([[4, 2, 1, 1], [1, 1, 1, 5], [1, 1, 4, 2]]) / 8
    logits = (probs.log() + torch.tensor([[1.0], [2.0], [3.0]]))[None]  # a shift changes the logsumexp alone
    stats = stats_of(logits, 2, torch.tensor([True, False, True]))
    assert stats.num_tokens.tolist() == [2]
    assert stats.tokens_per_expert.tolist() == [[1, 1, 1, 1]]
    assert torch.allclose(stats.prob_per_expert, torch.tensor([[5, 3, 5, 3]]) / 8)
    assert torch.allclose(stats.logsumexp_squared, torch.tensor([1.0 + 9.0]))
    # -1/2 ln 1/2 - 1/4 ln 1/4 - 2/8 ln 1/8 = (1/2 + 2/4 + 3 * 2/8) ln 2 = 1.75 ln 2, for both
    assert torch.allclose(stats.entropy, torch.tensor([2 * 1.75 * math.log(2)]))
    assert not stats.tokens_per_expert.requires_grad


def test_balance_and_z_loss_by_hand():
    """4 experts, k 2, 3 tokens."""
    probs = torch.tensor([[4, 2, 1, 1], [4, 2, 1, 1], [1, 1, 2, 4]]) / 8
    logits = (probs.log() + torch.tensor([[1.0], [2.0], [-3.0]]))[None]
    stats = stats_of(logits, 2)
    # f = (2, 2, 1, 1) / 3; P = (9, 5, 4, 6) / 24; 4 * (18 + 10 + 4 + 6) / 72
    assert torch.allclose(balance_loss(stats, stats), torch.tensor(4 * 38 / 72))
    assert torch.allclose(z_loss(stats, stats), torch.tensor((1 + 4 + 9) / 3))


def test_balanced_routing_has_the_least_loss_which_is_k():
    """f and P uniform: E * E * (k/E) * (1/E) = k, whatever the number of layers."""
    stats = RouterStats(
        torch.full((3, 8), 5.0), torch.full((3, 8), 2.5), *torch.zeros(2, 3), torch.full((3,), 20.0), torch.zeros(3)
    )
    assert torch.allclose(balance_loss(stats, stats), torch.tensor(2.0))


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_balance_loss_and_its_gradient_are_those_of_transformers(k, padded):
    torch.manual_seed(0)
    logits = torch.randn(3, 8, 5).mul(2).requires_grad_()  # 3 layers, 2 rows of 4 tokens, 5 experts
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]) if padded else None
    stats = stats_of(logits, k, mask.flatten().bool() if padded else None)
    loss = balance_loss(stats, stats)
    expected = load_balancing_loss_func(tuple(logits), 5, k, mask)
    assert torch.allclose(loss, expected, rtol=1e-6)
    ours, theirs = (torch.autograd.grad(value, logits)[0] for value in (loss, expected))
    assert torch.allclose(ours, theirs, atol=1e-7) and ours.abs().max() > 1e-3 * (k < 5)
    # Ten times the logits are another loss: it is the probabilities, and not only the choices, that are balanced.
    sharper = stats_of(logits.detach() * 10, k, mask.flatten().bool() if padded else None)
    assert k == 5 or abs(balance_loss(sharper, sharper) - loss) > 0.01
    assert torch.allclose(
        balance_loss(sharper, sharper), load_balancing_loss_func(tuple(logits.detach() * 10), 5, k, mask), rtol=1e-6
    )


@pytest.mark.parametrize("sizes", [(6, 6), (1, 11), (3, 4, 5)])
def test_shares_of_ranks_sum_to_the_whole(sizes):
    """Loss and gradient of a batch that is split over data ranks, unevenly too, with padding on one of them."""
    torch.manual_seed(0)
    logits = torch.randn(2, 12, 6, requires_grad=True)
    valid = torch.ones(12, dtype=torch.bool)
    valid[[0, 1, 9]] = False
    whole = stats_of(logits, 2, valid)
    ranks = [stats_of(part, 2, v) for part, v in zip(logits.split(sizes, 1), valid.split(sizes), strict=True)]
    # The all-reduce carries numbers, not gradients.
    total = RouterStats(*(statistic.detach() for statistic in sum_over_ranks(*ranks)))
    for loss in (balance_loss, z_loss):
        expected = loss(whole, whole)
        shares = [loss(rank, total) for rank in ranks]
        assert torch.allclose(sum(shares), expected)
        ours = torch.autograd.grad(sum(shares), logits, retain_graph=True)[0]
        assert torch.allclose(ours, torch.autograd.grad(expected, logits, retain_graph=True)[0], atol=1e-8)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_tokens_per_expert_sums_to_valid_tokens_times_k_exactly(k):
    torch.manual_seed(0)
    layer = make_layer(k, 8, 8, 8, torch.float32, 4, True)
    valid = torch.rand(2, 300) < 0.7
    _, stats = layer(torch.randn(2, 300, 8), valid)
    assert stats.tokens_per_expert.sum().item() == valid.sum().item() * k
    assert stats.num_tokens.item() == valid.sum().item()
    _, stats = layer(torch.randn(2, 300, 8), torch.ones(2, 300, dtype=torch.bool))
    assert stats.tokens_per_expert.sum().item() == 600 * k


def test_statistics_of_extreme_logits_are_finite():
    logits = torch.tensor([[[1e4, -1e4, 0.0, 1.0]]], requires_grad=True)
    stats = stats_of(logits, 2)
    assert all(statistic.isfinite().all() for statistic in stats)
    assert stats.entropy.item() == 0
    (balance_loss(stats, stats) + z_loss(stats, stats)).backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("loss", [balance_loss, z_loss])
def test_losses_of_a_batch_of_nothing_but_padding_are_zero(loss):
    logits = torch.randn(1, 4, 6, requires_grad=True)
    stats = stats_of(logits, 2, torch.zeros(4, dtype=torch.bool))
    value = loss(stats, stats)
    assert value == 0
    assert (torch.autograd.grad(value, logits)[0] == 0).all()


def test_entropy_and_counts_carry_no_gradient_and_probabilities_do():
    logits = torch.randn(1, 5, 6, requires_grad=True)
    stats = stats_of(logits, 2)
    assert [s.requires_grad for s in stats] == [False, True, True, False, False, False]
    assert torch.allclose(stats.prob_per_expert.sum(), torch.tensor(5.0))


def test_a_layer_is_the_same_function_whatever_the_block():
    layer = make_layer(2, 6, 8, 12, torch.float32, 1, True)
    x = torch.randn(2, 9, 8)
    out = layer(x, all_valid(x))[0]
    for layer.experts.block in (4, 128):
        assert torch.allclose(layer(x, all_valid(x))[0], out, atol=1e-6)


def test_compiled_layer_has_no_graph_break_and_the_same_gradients():
    """The custom operations are one node each; nothing in the layer asks the host."""
    layer = make_layer(2, 6, 8, 12, torch.float32, 4, True)
    x = torch.randn(1, 9, 8)
    valid = torch.ones(1, 9, dtype=torch.bool)
    valid[0, -2:] = False
    out, gradients = gradients_of(layer, x, lambda x: layer(x, valid)[0])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    compiled_out, compiled_gradients = gradients_of(layer, x, lambda x: compiled(x, valid)[0])
    assert torch.allclose(compiled_out, out, atol=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(compiled_gradients[name], gradient, atol=1e-6), name


def test_activation_recomputation_changes_nothing():
    layer = make_layer(2, 6, 8, 12, torch.float32, 4, True)
    x = torch.randn(1, 9, 8)
    out, gradients = gradients_of(layer, x, lambda x: layer(x, all_valid(x))[0])
    recomputed, recomputed_gradients = gradients_of(
        layer,
        x,
        lambda x: torch.utils.checkpoint.checkpoint(lambda x: layer(x, all_valid(x))[0], x, use_reentrant=False),
    )
    assert torch.equal(out, recomputed)
    assert all(torch.equal(gradients[name], recomputed_gradients[name]) for name in gradients)


def test_a_meta_forward_allocates_nothing_and_asks_nothing():
    with torch.device("meta"):
        layer = MoE(Qwen3Config.from_dict(tiny_config(moe=True)))
        out, stats = layer(torch.empty(2, 5, 32), torch.empty(2, 5, dtype=torch.bool))
        out.sum().backward()
    assert out.shape == (2, 5, 32) and stats.tokens_per_expert.shape == (8,)
    assert layer.experts.gate_proj.grad.shape == (8, 24, 32)


def test_silu_gradient_formula():
    """backward writes out silu's derivative; F.silu's own is the oracle, at both tails too."""
    gate = torch.linspace(-30, 30, 4001, dtype=torch.float64, requires_grad=True)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    expected = torch.autograd.grad(F.silu(gate).sum(), gate)[0]
    assert torch.allclose(sigmoid + silu - silu * sigmoid, expected, atol=1e-14)


# ------------------------------------------------------------------------------------------------------- capacity


@pytest.mark.parametrize("block, capacity", [(1, 3), (4, 4)])
def test_a_full_expert_drops_what_comes_later_and_the_count_is_exact(block, capacity):
    """7 tokens to expert 0, one to expert 2: of capacity c, the first c stay, in token order."""
    ids = torch.tensor([[0]] * 7 + [[2]], dtype=torch.int32)
    slots = assign_slots(ids, 3, block, capacity)
    size = slots.choice_of_slot.shape[0]
    assert size == min(3 * capacity, dispatch.num_slots(8, 1, 3, block))
    kept = slots.slot_of_choice.flatten() < size
    assert kept.tolist() == [True] * capacity + [False] * (7 - capacity) + [True]


@pytest.mark.parametrize("factor, expected", [(None, 0), (1.0, 24), (2.0, 16), (4.0, 0)])
def test_dropped_choices_are_counted_and_give_zero(factor, expected, monkeypatch):
    """32 tokens, all to expert 1 of 4, k 1: the mean is 8 rows an expert, so factor f keeps 8 f of them."""
    layer = make_layer(1, 4, 8, 8, torch.float32, 1, True)
    layer.experts.capacity = factor
    monkeypatch.setattr(moe, "route", lambda logits, k, norm: (torch.ones(32, 1), torch.ones(32, 1).int()))
    x = torch.randn(2, 16, 8)
    out, stats = layer(x, all_valid(x))
    assert stats.num_dropped.item() == expected
    assert stats.tokens_per_expert.tolist() == [0, 32, 0, 0]  # what the router chose, kept or not
    is_zero = (out.flatten(0, 1) == 0).all(-1)
    assert is_zero.tolist() == [False] * (32 - expected) + [True] * expected


def test_the_default_drops_nothing_however_skewed():
    layer = make_layer(2, 8, 8, 8, torch.float32, 1, True)
    assert layer.experts.capacity is None
    x = torch.randn(1, 1, 8).expand(4, 64, 8)  # one token repeated: all choose the same two experts
    _, stats = layer(x, all_valid(x))
    assert stats.num_dropped.item() == 0 and stats.tokens_per_expert.max().item() == 256
