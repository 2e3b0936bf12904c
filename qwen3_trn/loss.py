"""Linear layer + cross-entropy in one, without ever holding the [N, V] logits.

    summed = linear_cross_entropy(hidden, weight, labels)    # hidden [N, H], weight [V, H], labels [N]

With a vocabulary of 151,936 the fp32 logits of 8,192 tokens are 5 GB, and their gradient as much again. So the tokens
are taken in chunks, and the gradients of a chunk are formed while its logits are at hand: three matmuls in all, as
many as an unchunked loss needs, where recomputing the logits in backward would cost a fourth.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from qwen3_trn.kernels.registry import operation

IGNORE_INDEX = -100  # the label of a position that is not supervised; PyTorch's and Hugging Face's convention

# fp32 logits of one chunk: large enough that the matmuls are efficient, small beside the weights they come from.
_CHUNK_BYTES = 256 * 2**20


@operation("linear_cross_entropy", "hidden weight labels group")
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Sum over supervised tokens of -log softmax(hidden @ weight.T)[label], as an fp32 scalar.

    hidden: [N, H], weight: [V, H] of the same dtype; the logits are taken to fp32 before the softmax.
    labels: [N], integers in [0, V) or IGNORE_INDEX, whose rows get exactly zero gradient.
    With no supervised token the sum is 0 and every gradient is zero: never NaN.

    group: the ranks of a vocabulary that is split. Each holds the rows [V / ranks, H] of its turn and the same hidden
    states and labels; each gets the whole sum, and a gradient of hidden that is its part of a sum over the group.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, group, torch.is_grad_enabled())


def count_supervised(labels: Tensor) -> Tensor:
    """Number of labels that are not IGNORE_INDEX, as an int32 scalar on the labels' device."""
    return (labels != IGNORE_INDEX).int().sum(dtype=torch.int32)


def chunk_rows(num_tokens: int, vocab_size: int) -> int:
    """Tokens whose logits are formed at once. vocab_size: the rows of it that are here."""
    return max(1, min(num_tokens, _CHUNK_BYTES // (4 * vocab_size)))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None, grad_enabled: bool
    ) -> Tensor:
        num_tokens, vocab_size = hidden.shape[0], weight.shape[0]
        chunk = chunk_rows(num_tokens, vocab_size)
        # needs_input_grad alone says what the inputs want, also under no_grad.
        needs_hidden, needs_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        # fp32, because it sums over chunks.
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=sum_dtype) if needs_weight else None
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            hidden_chunk, labels_chunk = hidden[rows], labels[rows]
            logits = (hidden_chunk @ weight.T).to(total.dtype)
            supervised = labels_chunk != IGNORE_INDEX
            target, is_here = _local_targets(labels_chunk, supervised, vocab_size, group)
            logsumexp = torch.logsumexp(logits, dim=-1, keepdim=True)
            target_logit = torch.where(is_here, logits.gather(1, target), 0)
            if group is not None:
                logsumexp = _logsumexp_over_ranks(logsumexp, group)
                dist.all_reduce(target_logit, group=group)
            losses = (logsumexp - target_logit).squeeze(1)
            total += torch.where(supervised, losses, 0).sum()
            if hidden_grad is None and weight_grad is None:
                continue
            # d loss / d logits = softmax - one_hot(label), and zero on the rows that are not supervised.
            logits_grad = logits.sub_(logsumexp).exp_()
            logits_grad.scatter_add_(1, target, -is_here.to(logits.dtype))
            logits_grad = torch.where(supervised[:, None], logits_grad, 0).to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = logits_grad @ weight
            if weight_grad is not None and weight_grad.dtype == hidden.dtype:
                weight_grad.addmm_(logits_grad.T, hidden_chunk)
            elif weight_grad is not None:
                weight_grad += logits_grad.T @ hidden_chunk
        ctx.hidden_grad = hidden_grad
        ctx.weight_grad = weight_grad.to(weight.dtype) if weight_grad is not None else None
        return total

    @staticmethod
    def backward(ctx, total_grad: Tensor):
        if ctx.hidden_grad is None and ctx.weight_grad is None:
            raise RuntimeError("linear_cross_entropy hands out its gradients once; a second backward has none")
        hidden_grad, weight_grad = ctx.hidden_grad, ctx.weight_grad
        ctx.hidden_grad = ctx.weight_grad = None
        # In place, which spares a second copy of [V, H]; nobody else holds these tensors.
        for grad in (hidden_grad, weight_grad):
            if grad is not None:
                grad.mul_(total_grad)
        return hidden_grad, weight_grad, None, None, None


def _local_targets(
    labels: Tensor, supervised: Tensor, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The labels as rows [N, 1] of this rank's vocabulary, 0 where they are none, and whether they are, bool [N, 1]."""
    if group is None:
        # A label that is neither IGNORE_INDEX nor in the vocabulary stays as it is, for gather to refuse.
        return torch.where(supervised, labels, 0)[:, None], supervised[:, None]
    local = labels[:, None] - dist.get_rank(group) * vocab_size
    is_here = (local >= 0) & (local < vocab_size)
    return torch.where(is_here, local, 0), is_here


def _logsumexp_over_ranks(logsumexp: Tensor, group: dist.ProcessGroup) -> Tensor:
    """log of the sum over ranks of exp(logsumexp), without overflow."""
    largest = logsumexp.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = (logsumexp - largest).exp()
    dist.all_reduce(total, group=group)
    return largest + total.log()
