"""The NKI kernels of `combine` against the PyTorch default, under the interpreter in tests/nki/.

pytest tests/test_nki_combine.py
"""

import pytest
import torch
from torch import Tensor

from qwen3_trn.dispatch import Slots, assign_slots, combine
from qwen3_trn.errors import UserError
from qwen3_trn.kernels import nki_combine

pytestmark = pytest.mark.usefixtures("interpreted")


def choose(num_tokens: int, k: int, num_experts: int, num_here: int, capacity: int | None = None) -> Slots:
    """The slots of tokens that choose k experts each, of which the first `num_here` are on this rank."""
    torch.manual_seed(1)
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :k].int().clamp(max=num_here)
    return assign_slots(ids, num_here, 128, capacity)


def make_inputs(slots: Slots, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """y, weights, and the gradient of the output. Where no group of slots reaches, y is NaN: nothing was written."""
    torch.manual_seed(0)
    y = torch.randn(slots.choice_of_slot.shape[0], hidden)
    y[int(slots.group_ends[-1]) :] = torch.nan
    shape = slots.slot_of_choice.shape
    return y.to(dtype), torch.rand(shape), torch.randn(shape[0], hidden).to(dtype)


def run(op, y: Tensor, weights: Tensor, out_grad: Tensor, slots: Slots) -> dict[str, Tensor]:
    """The output and both gradients, by name."""
    y, weights = y.clone().requires_grad_(), weights.clone().requires_grad_()
    out = op(y, weights, *slots[:2])
    out.backward(out_grad)
    return {"out": out.detach(), "y": y.grad, "weights": weights.grad}


CASES = {
    "one choice": (200, 1, 4, 4),
    "eight choices": (130, 8, 8, 8),
    "experts of other ranks": (300, 8, 32, 4),  # many a token has no choice here
    "one token": (1, 2, 4, 4),
    "nothing here": (5, 2, 2, 0),
    "some are dropped": (300, 2, 4, 4, 128),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_default(name):
    """In fp32 the default in fp64, output and gradients, also those of slots that hold no choice."""
    num_tokens, k, num_experts, num_here, *capacity = CASES[name]
    slots = choose(num_tokens, k, num_experts, max(num_here, 1), *capacity)
    if num_here == 0:
        slots = assign_slots(torch.full((num_tokens, k), 1, dtype=torch.int32), 1, 128)
    y, weights, out_grad = make_inputs(slots, 256, torch.float32)
    found = run(nki_combine.moe_combine, y, weights, out_grad, slots)
    exact = run(combine, y.double(), weights.double(), out_grad.double(), slots)
    for key, expected in exact.items():
        assert found[key].dtype == torch.float32
        assert (found[key] - expected).abs().max() <= 1e-5 * expected.abs().max(), key
    no_choice = slots.choice_of_slot == weights.numel()
    assert bool((found["y"][no_choice] == 0).all())
    assert bool((found["weights"][slots.slot_of_choice == y.shape[0]] == 0).all())


# 1,100: a core's half is neither a multiple of 128 nor of a bank of PSUM.
@pytest.mark.parametrize("hidden", [2, 1100, 2048, 4096])
def test_widths_in_bf16(hidden):
    """One rounding of the exact values, 2^-8 of each; what fp32 and weights of 17 bits are off by comes on top."""
    slots = choose(140, 8, 16, 8)
    y, weights, out_grad = make_inputs(slots, hidden, torch.bfloat16)
    found = run(nki_combine.moe_combine, y, weights, out_grad, slots)
    exact = run(combine, y.double(), weights.double(), out_grad.double(), slots)
    for key in ("out", "y"):
        assert found[key].dtype == torch.bfloat16
        largest = exact[key].abs().amax(-1, keepdim=True)
        allowed = 2**-8 * exact[key].abs() + (2**-15 if key == "out" else 2**-22) * largest
        assert bool(((found[key].double() - exact[key]).abs() <= allowed).all()), key
    assert (found["weights"] - exact["weights"]).abs().max() <= 1e-5 * exact["weights"].abs().max()


def test_weights_are_not_rounded_to_bf16():
    """A weight that bf16 cannot hold, of rows that cancel all but what it is off by."""
    slots = assign_slots(torch.tensor([[0, 1]], dtype=torch.int32), 2, 128)
    y = torch.zeros(slots.choice_of_slot.shape[0], 256, dtype=torch.bfloat16)
    y[slots.slot_of_choice[0, 0]], y[slots.slot_of_choice[0, 1]] = 1.0, -1.0
    weights = torch.tensor([[1 + 2**-10, 1.0]])
    out = nki_combine.moe_combine(y, weights, *slots[:2])
    assert bool((out == 2**-10).all())


def test_strides_do_not_matter():
    """Of the arguments and of the gradient; the interpreter takes contiguous tensors only."""
    slots = choose(140, 3, 4, 4)
    inputs = make_inputs(slots, 256, torch.float32)
    turned = [tensor.T.contiguous().T for tensor in inputs]
    plain, found = (run(nki_combine.moe_combine, *tensors, slots) for tensors in (inputs, turned))
    assert not turned[0].clone().is_contiguous()
    assert all(torch.equal(found[name], expected) for name, expected in plain.items())


def test_the_operation_is_one_node_that_compiles_without_a_break():
    slots = choose(20, 2, 2, 2)
    y, weights, out_grad = make_inputs(slots, 256, torch.float32)
    y = y.nan_to_num()
    plain = run(nki_combine.moe_combine, y, weights, out_grad, slots)
    compiled = torch.compile(nki_combine.moe_combine, backend="aot_eager", fullgraph=True)
    found = run(compiled, y, weights, out_grad, slots)
    assert all(torch.equal(found[name], expected) for name, expected in plain.items())
    arguments = (y.requires_grad_(), weights.requires_grad_(), *slots[:2])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.qwen3_trn.nki_moe_combine.default, arguments, test_utils=tests)


@pytest.mark.parametrize(("hidden", "dtype"), [(512, torch.float32), (2048, torch.bfloat16)])
def test_memory_is_within_the_formulas(record, hidden, dtype):
    slots = choose(300, 8, 8, 8)
    y, weights, out_grad = make_inputs(slots, hidden, dtype)
    with record() as r:
        run(nki_combine.moe_combine, y, weights, out_grad, slots)
    forward, backward = (launch.cores[0].peak("sbuf")[0] for launch in r.launches)
    most = nki_combine.forward_bytes(hidden, 8, 300, dtype.itemsize)
    assert 0.85 * most <= forward <= most
    most = nki_combine.backward_bytes(hidden, y.shape[0], dtype.itemsize)
    assert 0.8 * most <= backward <= most
    assert r.psum_peak <= 8


def test_slots_that_hold_nothing_are_not_looked_at(record):
    """Choices of other ranks cost backward no gather: of the bound's tiles only the used ones are worked on."""
    moved = []
    for num_here in (2, 8):
        slots = choose(256, 8, 8, num_here)
        slots = slots._replace(choice_of_slot=torch.nn.functional.pad(slots.choice_of_slot, (0, 1280), value=256 * 8))
        slots.slot_of_choice[slots.slot_of_choice == slots.choice_of_slot.shape[0] - 1280] += 1280
        with record() as r:
            run(nki_combine.moe_combine, *make_inputs(slots, 256, torch.bfloat16), slots)
        trips = r.launches[1].cores[0].trip_counts
        assert sum(trips) == slots.choice_of_slot.shape[0] // 128
        assert trips[0] == int(slots.group_ends[-1]) // 128
        moved.append(r.launches[1].cores[0].dma_bytes / sum(trips))
    assert moved[0] < moved[1]


REASONS = {
    "dtype torch.float64": {"dtype": torch.float64},
    "weights of dtype torch.bfloat16": {"weights": torch.bfloat16},
    "slots of dtype torch.int64": {"indices": torch.int64},
    "slots of dtype torch.int16": {"choices": torch.int16},
    "300 slots; expected a multiple of 128": {"slots": 300},
    "y is empty: its shape is [0, 256]": {"slots": 0},
    "choice_of_slot of shape [384]; expected [512]": {"num_indices": 384},
    "slot_of_choice of shape [100, 3]; expected [100, 2]": {"num_choices": 3},
    "hidden_size 255; expected a multiple of 2": {"hidden": 255},
    "100 tokens with 64 choices: forward does not fit": {"hidden": 2048, "k": 64},
    "hidden_size 40000, 512 slots: backward does not fit": {"hidden": 40000, "k": 1},
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_does_not_fit_is_refused_by_name(reason):
    change = {"hidden": 256, "dtype": torch.bfloat16, "slots": 512, "k": 2}
    change |= {"weights": torch.float32, "indices": torch.int32} | REASONS[reason]
    choices = change.get("num_choices", change["k"]), change.get("choices", change["indices"])
    with torch.device("meta"):
        arguments = (
            torch.empty(change["slots"], change["hidden"], dtype=change["dtype"]),
            torch.empty(100, change["k"], dtype=change["weights"]),
            torch.empty(change.get("num_indices", change["slots"]), dtype=change["indices"]),
            torch.empty(100, choices[0], dtype=choices[1]),
        )
    assert reason in nki_combine.supports(*arguments)
    with pytest.raises(UserError, match="the NKI kernels of moe_combine cannot run: "):
        nki_combine.moe_combine(*arguments)


def test_one_neuron_core_is_refused(monkeypatch):
    slots = choose(20, 2, 2, 2)
    arguments = (*make_inputs(slots, 256, torch.float32)[:2], *slots[:2])
    assert nki_combine.supports(*arguments) is None
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert "NEURON_LOGICAL_NC_CONFIG=1" in nki_combine.supports(*arguments)
