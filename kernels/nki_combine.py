"""`moe_combine` on Trainium by NKI kernels, in place of the default of qwen3_trn/dispatch.py, of the same signature.

    slots = assign_slots(expert_ids, num_experts, block=128)
    out = nki_combine.moe_combine(y, weights, *slots[:2])

`supports(...)` of the same arguments says why they do not fit, or None. The kernels are in nki_combine_kernels.py.
docs/kernels.md: what they cost, and what ran where.
"""

import torch
from torch import Tensor

from qwen3_trn.dispatch import gather_rows
from qwen3_trn.errors import UserError
from qwen3_trn.kernels.nki_moe import (
    NUM_CORES,
    SBUF_BYTES,
    TILE,
    choices_bytes,
    import_failed,
    needs_cores,
    needs_shapes,
    needs_slots,
    row_tiles,
    slot_tiles,
    sum_bytes,
    token_ids,
    token_tiles,
)


def forward_bytes(hidden: int, k: int, num_tokens: int, itemsize: int) -> int:
    """SBUF that forward needs at the least, in bytes per partition: a sum's, all weights, and matrices of a tile's."""
    parts = 2 if itemsize == 2 else 1
    tile = 4 * k * (2 * parts - 1)  # the weights of a tile are counted above: beside them what they are split into
    matrices = parts * k * TILE * itemsize
    return sum_bytes(hidden, k, num_tokens, itemsize) + choices_bytes(k, num_tokens) + tile + matrices


def backward_bytes(hidden: int, num_slots: int, itemsize: int) -> int:
    """As `forward_bytes`: half rows of y, of both gradients and of zeros, products in fp32, three values of a slot."""
    return hidden // 2 * (4 * itemsize + 4) + 4 * 3 * (num_slots // TILE + 1)


def supports(y: Tensor, weights: Tensor, choice_of_slot: Tensor, slot_of_choice: Tensor) -> str | None:
    """Why the kernels cannot take these arguments of `moe_combine` (meta tensors do), or None if they can."""
    if reason := needs_cores():
        return reason
    if y.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {y.dtype}; the kernels compute in bfloat16 or float32"
    if weights.dtype != torch.float32:
        return f"weights of dtype {weights.dtype}; expected float32"
    shapes = {
        "y": (y, "S H"),
        "weights": (weights, "N k"),
        "choice_of_slot": (choice_of_slot, "S"),
        "slot_of_choice": (slot_of_choice, "N k"),
    }
    if reason := needs_shapes(shapes) or needs_slots(choice_of_slot, slot_of_choice):
        return reason
    (num_slots, hidden), (num_tokens, k) = y.shape, weights.shape
    if hidden % NUM_CORES:
        return f"hidden_size {hidden}; expected a multiple of {NUM_CORES}"
    if forward_bytes(hidden, k, num_tokens, y.itemsize) > SBUF_BYTES:
        return f"{num_tokens} tokens with {k} choices: forward does not fit into {SBUF_BYTES // 1024} KiB of SBUF"
    if backward_bytes(hidden, num_slots, y.itemsize) > SBUF_BYTES:
        return f"hidden_size {hidden}, {num_slots} slots: backward does not fit into {SBUF_BYTES // 1024} KiB of SBUF"
    return None


def count_used(choice_of_slot: Tensor, num_choices: int) -> Tensor:
    """Tiles up to the last one that holds a choice, int32 [1, 1]: the others' gradients are zeros without a look."""
    holds_one = (choice_of_slot < num_choices).view(-1, TILE).any(1)
    ends = torch.arange(1, holds_one.shape[0] + 1, dtype=torch.int32, device=choice_of_slot.device)
    return torch.where(holds_one, ends, 0).amax().view(1, 1)


@torch.compiler.assume_constant_result  # torch.compile calls it, and does not look into it
def _define_operations() -> None:
    """Define torch.ops.qwen3_trn.nki_moe_combine when it is first used: only then AWS's packages are imported."""
    if hasattr(torch.ops.qwen3_trn, "nki_moe_combine"):
        return
    try:
        from torch_neuronx import nki_op

        from qwen3_trn.kernels.nki_combine_kernels import combine_backward, combine_forward
    except ImportError as error:
        raise import_failed("the NKI kernels of moe_combine", "torch_neuronx and nki", error) from error

    @nki_op("qwen3_trn::nki_moe_combine", mutates_args={})
    def forward(y: Tensor, weights: Tensor, choice_of_slot: Tensor, slot_of_choice: Tensor) -> Tensor:
        slots = token_tiles(slot_of_choice, pad=choice_of_slot.shape[0])
        identity = torch.eye(TILE, dtype=y.dtype, device=y.device)
        out = combine_forward[NUM_CORES](y.contiguous(), slots, token_tiles(weights, pad=0), identity)
        return out.flatten(0, 1)[: weights.shape[0]]

    @nki_op("qwen3_trn::nki_moe_combine_backward", mutates_args={})
    def backward(
        out_grad: Tensor, y: Tensor, weights: Tensor, choice_of_slot: Tensor, slot_of_choice: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight_of_slot = gather_rows(weights.reshape(-1, 1), choice_of_slot)
        y_grad, weight_grads = combine_backward[NUM_CORES](
            out_grad.contiguous(),
            row_tiles(y),
            token_ids(choice_of_slot, slot_of_choice),
            slot_tiles(weight_of_slot),
            count_used(choice_of_slot, weights.numel()),
        )
        by_slot = weight_grads.sum(0).T.reshape(-1, 1)
        return y_grad.flatten(0, 1), gather_rows(by_slot, slot_of_choice).squeeze(-1)

    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    def autograd(ctx, out_grad: Tensor):
        return *backward(out_grad, *ctx.saved_tensors), None, None

    @forward.register_fake
    def _(y, weights, choice_of_slot, slot_of_choice):
        return y.new_empty(weights.shape[0], y.shape[1])

    @backward.register_fake
    def _(out_grad, y, weights, choice_of_slot, slot_of_choice):
        return torch.empty_like(y, memory_format=torch.contiguous_format), torch.empty_like(
            weights, memory_format=torch.contiguous_format
        )

    forward.register_autograd(autograd, setup_context=setup_context)


def moe_combine(y: Tensor, weights: Tensor, choice_of_slot: Tensor, slot_of_choice: Tensor) -> Tensor:
    """Each token's weighted sum of its experts' rows, as `qwen3_trn.dispatch.combine`; slots are a multiple of 128.

    y: [S, H] bf16 or fp32; weights: [N, k] fp32; the indices are those of `Slots`. Returns [N, H] in y's dtype, summed
    in fp32. Raises UserError where `supports` gives a reason.
    """
    arguments = (y, weights, choice_of_slot, slot_of_choice)
    if reason := supports(*arguments):
        raise UserError(f"the NKI kernels of moe_combine cannot run: {reason}. Leave out this kernel to use PyTorch's.")
    _define_operations()
    return torch.ops.qwen3_trn.nki_moe_combine(*arguments)
