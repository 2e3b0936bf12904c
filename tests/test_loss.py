"""linear_cross_entropy against F.cross_entropy: values, gradients, chunks, ignored tokens, precision, memory.

pytest tests/test_loss.py
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qwen3_trn import loss
from qwen3_trn.loss import IGNORE_INDEX, count_supervised, linear_cross_entropy

N, H, V = 23, 8, 37


def make_inputs(
    dtype: torch.dtype = torch.float64, ignored: float = 0.0, scale: float = 2.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(N, H, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), generator=generator)
    return hidden, weight, labels.masked_fill(torch.rand(N, generator=generator) < ignored, IGNORE_INDEX)


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden.double() @ weight.double().T, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def set_chunk(monkeypatch, rows: int) -> None:
    monkeypatch.setattr(loss, "_CHUNK_BYTES", rows * 4 * V)


class Operations(TorchDispatchMode):
    """Records the largest output, in elements, and how many matmuls ran."""

    def __init__(self):
        super().__init__()
        self.largest, self.matmuls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes() // out.element_size())
        self.matmuls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return out


@pytest.mark.parametrize("rows", [1, 5, N - 1, N, 10 * N], ids=lambda rows: f"chunks of {rows}")
@pytest.mark.parametrize("ignored", [0.0, 0.6], ids=["all supervised", "60% ignored"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_loss_and_gradients_are_those_of_cross_entropy(monkeypatch, rows, ignored, dtype):
    set_chunk(monkeypatch, rows)
    hidden, weight, labels = make_inputs(dtype, ignored)
    assert ignored == 0 or 0.4 * N < (labels == IGNORE_INDEX).sum() < 0.8 * N
    total = linear_cross_entropy(hidden, weight, labels)
    expected = reference(hidden, weight, labels)
    assert total.shape == () and total.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert abs(total - expected) < tolerance * expected
    # An upstream gradient that is not 1, as from a division by the number of tokens.
    for ours, theirs in zip(
        torch.autograd.grad(total * -0.37, (hidden, weight)),
        torch.autograd.grad(expected * -0.37, (hidden, weight)),
        strict=True,
    ):
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


def test_gradient_is_the_slope_of_the_loss(monkeypatch):
    """By differences in fp64 along random directions; gradcheck asks for more than one backward."""
    set_chunk(monkeypatch, 5)
    hidden, weight, labels = make_inputs(ignored=0.3)
    linear_cross_entropy(hidden, weight, labels).backward()
    for _ in range(5):
        directions = [torch.randn_like(tensor) for tensor in (hidden, weight)]
        ahead, behind = (
            linear_cross_entropy(hidden + step * directions[0], weight + step * directions[1], labels).item()
            for step in (1e-6, -1e-6)
        )
        slope = sum((grad * d).sum().item() for grad, d in zip((hidden.grad, weight.grad), directions, strict=True))
        assert (ahead - behind) / 2e-6 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("label_dtype", [torch.int64, torch.int32])
def test_ignored_rows_have_exactly_zero_gradient_and_do_not_move_the_rest(monkeypatch, label_dtype):
    set_chunk(monkeypatch, 4)
    hidden, weight, labels = make_inputs(torch.float32, ignored=0.6)
    labels = labels.to(label_dtype)
    ignored = labels == IGNORE_INDEX
    total = linear_cross_entropy(hidden, weight, labels)
    total.backward()
    assert (hidden.grad[ignored] == 0).all()
    assert (hidden.grad[~ignored].abs().amax(-1) > 0).all()
    # What stands in an ignored row has no influence, not even where its logits overflow to infinity and NaN.
    spoilt = hidden.detach().clone()
    spoilt[ignored] = 1e38
    other_weight = weight.detach().clone().requires_grad_()
    other = linear_cross_entropy(spoilt, other_weight, labels)
    other.backward()
    assert torch.equal(other, total) and torch.equal(other_weight.grad, weight.grad)


def test_nothing_supervised_is_zero_with_zero_gradients():
    hidden, weight, labels = make_inputs(torch.float32, ignored=2.0)
    total = linear_cross_entropy(hidden, weight, labels)
    assert total == 0 and count_supervised(labels) == 0
    total.backward()
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()


def test_no_tokens_at_all():
    total = linear_cross_entropy(
        torch.zeros(0, H, requires_grad=True), torch.ones(V, H), torch.zeros(0, dtype=torch.long)
    )
    assert total == 0
    total.backward()


def test_logits_of_thousands_do_not_overflow():
    hidden, weight, labels = make_inputs(torch.float32, scale=3000.0)
    total = linear_cross_entropy(hidden, weight, labels)
    expected = reference(hidden, weight, labels)
    assert abs(total - expected) < 1e-5 * expected
    total.backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_count_supervised():
    count = count_supervised(torch.tensor([[3, IGNORE_INDEX], [0, IGNORE_INDEX]]))
    assert count == 2 and count.dtype == torch.int32 and count.shape == ()


def test_bf16_is_as_exact_as_rounding_its_logits_allows(monkeypatch):
    """bf16 inputs, fp32 softmax and sums.

    The oracle is fp64 on the same bf16 numbers. Logits of up to 2^4 are rounded to bf16 with an error of at most 2^-9
    relative, 2^-5 absolute: that bounds the error of a token's loss. The gradient of the logits (below 1 each) carries
    that error, e^(2^-4) - 1 < 7%, and its own rounding, and errors of independent signs average out in the sums.
    """
    set_chunk(monkeypatch, 5)
    hidden, weight, labels = make_inputs(torch.bfloat16, ignored=0.3, scale=0.8)
    logits = hidden.double() @ weight.double().T
    assert logits.abs().max() < 16
    total = linear_cross_entropy(hidden, weight, labels)
    assert total.dtype == torch.float32
    expected = reference(hidden, weight, labels)
    assert abs(total - expected) < 2**-5 / 4 * count_supervised(labels)
    ours = torch.autograd.grad(total, (hidden, weight))
    for gradient, exact in zip(ours, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - exact.double()).norm() < 0.01 * exact.double().norm()


def test_the_weight_gradient_of_a_bf16_head_is_summed_in_fp32(monkeypatch):
    """512 chunks that each add 1/512 to one element: a bf16 sum would stop growing at 1/2."""
    rows = 512
    monkeypatch.setattr(loss, "_CHUNK_BYTES", 4 * 2)
    hidden = torch.full((rows, 1), 2.0**-8, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(rows, dtype=torch.long)).backward()
    assert weight.grad.flatten().tolist() == [-1.0, 1.0]  # 512 * 2^-8 * (1/2 - 1)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_costs_no_matmul(monkeypatch, frozen):
    set_chunk(monkeypatch, N)
    hidden, weight, labels = make_inputs(torch.float32, ignored=0.3)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    with Operations() as operations:
        total = linear_cross_entropy(hidden, weight, labels)
        total.backward()
    assert operations.matmuls == 2
    expected_hidden, expected_weight, _ = make_inputs(torch.float32)
    reference(expected_hidden, expected_weight, labels).backward()
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (frozen == "weight")
    ours, theirs = (weight, expected_weight) if frozen == "hidden" else (hidden, expected_hidden)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)


def test_without_gradients_the_value_is_the_same():
    hidden, weight, labels = make_inputs(torch.float32, ignored=0.3)
    with_gradient = linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad():
        total = linear_cross_entropy(hidden, weight, labels)
    assert not total.requires_grad and torch.equal(total, with_gradient)
    assert torch.equal(linear_cross_entropy(hidden.detach(), weight.detach(), labels), with_gradient)


def test_without_gradients_there_is_one_matmul_a_chunk(monkeypatch):
    set_chunk(monkeypatch, N)
    hidden, weight, labels = make_inputs(torch.float32)
    with torch.no_grad(), Operations() as operations:
        linear_cross_entropy(hidden, weight, labels)
    assert operations.matmuls == 1


def test_a_second_backward_gives_the_same_gradients_or_an_error():
    hidden, weight, labels = make_inputs(torch.float32)
    total = linear_cross_entropy(hidden, weight, labels)
    first = [gradient.clone() for gradient in torch.autograd.grad(total * 2, (hidden, weight), retain_graph=True)]
    try:
        second = torch.autograd.grad(total * 2, (hidden, weight))
    except RuntimeError:
        return
    for once, again in zip(first, second, strict=True):
        assert torch.equal(once, again)


def test_matmuls_are_three_a_chunk(monkeypatch):
    set_chunk(monkeypatch, 10)
    with Operations() as operations:
        linear_cross_entropy(*make_inputs(torch.float32)).backward()
    assert operations.matmuls == 3 * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_tensor_is_as_large_as_all_logits(monkeypatch, dtype):
    """The largest is a chunk's logits or the head's gradient; the whole [N, V] is never there."""
    num_tokens, vocab_size, rows = 400, 300, 16
    monkeypatch.setattr(loss, "_CHUNK_BYTES", rows * 4 * vocab_size)
    hidden = torch.randn(num_tokens, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab_size, H, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab_size, (num_tokens,))
    with Operations() as operations:
        linear_cross_entropy(hidden, weight, labels).backward()
    assert operations.largest == max(rows * vocab_size, vocab_size * H, num_tokens * H)
    assert operations.largest < num_tokens * vocab_size / 20


@pytest.mark.parametrize("label", [-1, -5])
def test_a_negative_label_that_does_not_mean_ignored_is_not_taken_for_token_0(label):
    hidden, weight, labels = make_inputs(torch.float32)
    labels[3] = label
    try:
        total = linear_cross_entropy(hidden, weight, labels)
    except (IndexError, RuntimeError):
        return
    assert not torch.equal(total, linear_cross_entropy(hidden, weight, labels.clamp(min=0)))


def test_a_label_beyond_the_vocabulary_is_an_error():
    hidden, weight, labels = make_inputs(torch.float32)
    labels[3] = V
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, labels)
