"""`moe_experts` on Trainium by NKI kernels, in place of the default of qwen3_trn/dispatch.py, of the same signature.

    slots = assign_slots(expert_ids, num_experts, block=128)
    y, gate, up = nki_moe.moe_experts(x, *slots, gate_proj, up_proj, down_proj)

`supports(...)` of the same arguments says why they do not fit, or None. The kernels are in nki_moe_kernels.py, but for
the sum that ends backward, which is in nki_combine_kernels.py. docs/kernels.md: what they cost, and what ran where.
nki_combine.py takes from here what all kernels of slots want.
"""

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from qwen3_trn import dispatch
from qwen3_trn.errors import UserError

TILE = 128  # rows; an expert's slots are a multiple
STEP = 256  # the two cores share the hidden and the intermediate dim, each in blocks of 128
MAX_WIDTH = 512  # columns of a PSUM bank in fp32: what a core computes of the intermediate dim at a time
# Bytes of a partition that a kernel may plan with: of Trainium2's 224 KiB, the DMA engines' descriptor rings take
# 16 KiB (AWS, "Trainium2 Architecture Guide for NKI").
SBUF_BYTES = 208 * 1024
NUM_CORES = 2  # NeuronCores of a logical core, LNC


def forward_bytes(hidden: int, width: int, itemsize: int, sliced: bool) -> int:
    """SBUF that forward needs at the least, in bytes per partition.

    width: columns of the intermediate dim that a core computes at a time; sliced: whether that is not all of its half.
    The weights are counted once: what is left of SBUF, the compiler has for loading the next ones meanwhile, and for
    working on more than one tile at once.
    """
    weights = 3 * hidden * width // TILE
    two_tiles = 2 * 2 * width  # the transposed activations of both cores
    one_tile = 2 * hidden + 3 * width  # x and its transpose; gate, up, act
    return (weights + two_tiles + one_tile) * itemsize + _product_bytes(hidden, itemsize, sliced)


def backward_bytes(hidden: int, width: int, itemsize: int, sliced: bool) -> int:
    """As `forward_bytes`, with the weights' gradients in fp32."""
    weights = 3 * hidden * width // TILE
    two_tiles = 2 * (hidden + hidden // 2 + 6 * width)  # y_grad, half of x, what the cores exchange
    one_tile = hidden + 8 * width  # y_grad transposed; gate, up, silu, slope; the gradients of gate and up transposed
    rounded = max(hidden // 2, 2 * width)
    rows = (weights + two_tiles + one_tile + rounded) * itemsize
    return rows + weights * 4 + _product_bytes(hidden, itemsize, sliced)


def sum_bytes(hidden: int, k: int, num_tokens: int, itemsize: int) -> int:
    """As `forward_bytes`, of the sum over tokens' choices: k rows and their sum, an identity, and all indices."""
    return ((k + 1) * hidden + TILE) * itemsize + choices_bytes(k, num_tokens)


def choices_bytes(k: int, num_tokens: int) -> int:
    """Of what `token_tiles` gives, 4 bytes a choice, and of a copy of a tile's."""
    return 4 * k * (-(-num_tokens // TILE) + 2)


def _product_bytes(hidden: int, itemsize: int, sliced: bool) -> int:
    """Up to 1,024 columns of y or of x's gradient on their way out; sliced: in fp32, with the sum so far."""
    return min(1024, hidden // 2) * (8 if sliced else itemsize)


def count_slices(
    hidden: int,
    intermediate: int,
    num_slots: int,
    num_experts: int,
    itemsize: int,
    bytes_of: Callable[[int, int, int, bool], int],
) -> int:
    """The fewest slices of the intermediate dim with which a kernel fits into SBUF; 0 if it does not.

    bytes_of: `forward_bytes` or `backward_bytes`. num_slots, num_experts and itemsize (bytes) are a rank's.
    """
    indices = 4 * (num_slots // TILE + 3 * num_experts)
    for slices in range(1, intermediate // STEP + 1):
        width = intermediate // slices // 2
        whole = intermediate % (STEP * slices) == 0 and width <= MAX_WIDTH
        if whole and bytes_of(hidden, width, itemsize, slices > 1) + indices <= SBUF_BYTES:
            return slices
    return 0


def _slices(
    x: Tensor, choice_of_slot: Tensor, gate_proj: Tensor, bytes_of: Callable[[int, int, int, bool], int]
) -> int:
    num_experts, intermediate, hidden = gate_proj.shape
    return count_slices(hidden, intermediate, choice_of_slot.shape[0], num_experts, x.itemsize, bytes_of)


def needs_cores() -> str | None:
    """Why the launch, on the cores of a logical core, cannot be; None if it can."""
    lnc = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")
    if lnc != str(NUM_CORES):
        return f"NEURON_LOGICAL_NC_CONFIG={lnc}; the kernels run on logical cores of {NUM_CORES} NeuronCores"
    return None


def needs_shapes(expected: dict[str, tuple[Tensor, str]]) -> str | None:
    """Why shapes do not go together; None if they do.

    expected: by name, a tensor and its dimensions, as "N H". Those of one letter must be of one size, which is not 0.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, letters) in expected.items():
        dims, shape = letters.split(), list(tensor.shape)
        if 0 in shape:
            return f"{name} is empty: its shape is {shape}"
        fitting = [sizes.get(dim, dim) for dim in dims]
        sizes = dict(zip(dims, shape, strict=False)) | sizes
        if shape != [sizes.get(dim) for dim in dims]:
            return f"{name} of shape {shape}; expected [{', '.join(map(str, fitting))}]"
    return None


def needs_slots(choice_of_slot: Tensor, *others: Tensor) -> str | None:
    """Why slots do not fit kernels that take tiles of rows; None if they do. others: the rest of `Slots`, or part."""
    for indices in (choice_of_slot, *others):
        if indices.dtype != torch.int32:
            return f"slots of dtype {indices.dtype}; expected int32"
    if choice_of_slot.shape[0] % TILE:
        return f"{choice_of_slot.shape[0]} slots; expected a multiple of {TILE}: assign_slots(..., block={TILE})"
    return None


def needs_layout(
    x: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    group_ends: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    multiple: int,
) -> str | None:
    """Why arguments of `moe_experts` do not fit kernels that take `multiple` columns of a width; None if they do."""
    shapes = {
        "x": (x, "N H"),
        "choice_of_slot": (choice_of_slot, "S"),
        "slot_of_choice": (slot_of_choice, "N k"),
        "group_ends": (group_ends, "E"),
        "gate_proj": (gate_proj, "E I H"),
        "up_proj": (up_proj, "E I H"),
        "down_proj": (down_proj, "E H I"),
    }
    if reason := needs_shapes(shapes) or needs_slots(choice_of_slot, slot_of_choice, group_ends):
        return reason
    _, intermediate, hidden = gate_proj.shape
    for name, size in (("hidden_size", hidden), ("moe_intermediate_size (of this rank)", intermediate)):
        if size % multiple:
            return f"{name} {size}; expected a multiple of {multiple}"
    return None


def import_failed(what: str, packages: str, error: ImportError) -> UserError:
    """What to say where AWS's packages are missing, or a placeholder is in their place."""
    return UserError(
        f"{what} need AWS's packages {packages}: {error}. They come from AWS's Neuron index; those of the same names "
        "elsewhere are placeholders."
    )


def supports(
    x: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    group_ends: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
) -> str | None:
    """Why the kernels cannot take these arguments of `moe_experts` (meta tensors do), or None if they can.

    Values are not looked at: that groups end at multiples of 128 is up to the caller.
    """
    if reason := needs_cores():
        return reason
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {x.dtype}; the kernels compute in bfloat16 or float32"
    if any(weight.dtype != x.dtype for weight in (gate_proj, up_proj, down_proj)):
        return f"weights of dtype {gate_proj.dtype}, {up_proj.dtype}, {down_proj.dtype} with tokens of {x.dtype}"
    arguments = (x, choice_of_slot, slot_of_choice, group_ends, gate_proj, up_proj, down_proj)
    if reason := needs_layout(*arguments, STEP):
        return reason
    (num_tokens, k), hidden = slot_of_choice.shape, x.shape[1]
    if sum_bytes(hidden, k, num_tokens, x.itemsize) > SBUF_BYTES:
        return f"{num_tokens} tokens with {k} choices: their sum does not fit into {SBUF_BYTES // 1024} KiB of SBUF"
    for kernel, bytes_of in (("forward", forward_bytes), ("backward", backward_bytes)):
        if not _slices(x, choice_of_slot, gate_proj, bytes_of):
            return f"hidden_size {hidden} in {x.dtype}: {kernel} does not fit into {SBUF_BYTES // 1024} KiB of SBUF"
    return None


def tile_indices(choice_of_slot: Tensor, slot_of_choice: Tensor, group_ends: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernels want to know of the slots, int32.

    Returns `token_ids`; and [1, 3E]: each expert's first tile, the end of its pairs of tiles, the end of its tiles.
    """
    ends = group_ends // TILE
    starts = F.pad(ends[:-1], (1, 0))
    pair_ends = starts + (ends - starts) // 2 * 2
    return token_ids(choice_of_slot, slot_of_choice), torch.stack((starts, pair_ends, ends), dim=1).view(1, -1)


def token_ids(choice_of_slot: Tensor, slot_of_choice: Tensor) -> Tensor:
    """The token of each slot by tile, [128, tiles, 1] int32; N, the number of tokens, for a pad."""
    return slot_tiles(choice_of_slot // slot_of_choice.shape[1])


def slot_tiles(of_slot: Tensor) -> Tensor:
    """A value of each slot, [S], as kernels take it from SBUF: [128, tiles, 1]."""
    return of_slot.view(-1, TILE, 1).transpose(0, 1).contiguous()


def token_tiles(of_choice: Tensor, pad: int) -> Tensor:
    """A value of each choice, [N, k], as kernels that sum over choices want it: [128, tiles, k], tiles even."""
    num_tokens, k = of_choice.shape
    padded = F.pad(of_choice, (0, 0, 0, -num_tokens % (NUM_CORES * TILE)), value=pad)
    return padded.view(-1, TILE, k).transpose(0, 1).contiguous()


def row_tiles(rows: Tensor) -> Tensor:
    """[R, C] -> [tiles, 128, C]."""
    return rows.contiguous().view(-1, TILE, rows.shape[1])


@torch.compiler.assume_constant_result  # torch.compile calls it, and does not look into it
def _define_operations() -> None:
    """Define torch.ops.qwen3_trn.nki_moe_experts when it is first used: only then AWS's packages are imported."""
    if hasattr(torch.ops.qwen3_trn, "nki_moe_experts"):
        return
    try:
        from torch_neuronx import nki_op

        from qwen3_trn.kernels.nki_combine_kernels import sum_rows
        from qwen3_trn.kernels.nki_moe_kernels import experts_backward, experts_forward
    except ImportError as error:
        raise import_failed("the NKI kernels of moe_experts", "torch_neuronx and nki", error) from error

    @nki_op("qwen3_trn::nki_moe_experts", mutates_args={})
    def forward(
        x: Tensor,
        choice_of_slot: Tensor,
        slot_of_choice: Tensor,
        group_ends: Tensor,
        gate_proj: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        indices = tile_indices(choice_of_slot, slot_of_choice, group_ends)
        slices = _slices(x, choice_of_slot, gate_proj, forward_bytes)
        weights = (gate_proj.contiguous(), up_proj.contiguous(), down_proj.contiguous())
        y, gate, up = experts_forward[NUM_CORES](x.contiguous(), *indices, *weights, slices)
        return y.flatten(0, 1), gate.flatten(0, 1), up.flatten(0, 1)

    @nki_op("qwen3_trn::nki_moe_experts_backward", mutates_args={})
    def backward(
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots = dispatch.Slots(choice_of_slot, slot_of_choice, group_ends)
        slices = _slices(x, choice_of_slot, gate_proj, backward_bytes)
        weights = (gate_proj.contiguous(), up_proj.contiguous(), down_proj.contiguous())
        slots_x_grad, *weight_grads = experts_backward[NUM_CORES](
            row_tiles(y_grad), x.contiguous(), *tile_indices(*slots), *weights, row_tiles(gate), row_tiles(up), slices
        )
        identity = torch.eye(TILE, dtype=x.dtype, device=x.device)
        indices = token_tiles(slot_of_choice, pad=choice_of_slot.shape[0])
        x_grad = sum_rows[NUM_CORES](slots_x_grad.flatten(0, 1), indices, identity)
        return x_grad.flatten(0, 1)[: x.shape[0]], *weight_grads

    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs, *output[1:])

    def autograd(ctx, y_grad: Tensor, _gate_grad, _up_grad):
        x_grad, *weight_grads = backward(y_grad, *ctx.saved_tensors)
        return x_grad, None, None, None, *weight_grads

    # Shapes and FLOPs are those of the default.
    forward.register_fake(dispatch.moe_experts)
    backward.register_fake(dispatch.moe_experts_backward)
    forward.register_autograd(autograd, setup_context=setup_context)
    for name in ("moe_experts", "moe_experts_backward"):
        default, ours = getattr(torch.ops.qwen3_trn, name), getattr(torch.ops.qwen3_trn, f"nki_{name}")
        register_flop_formula(ours, get_raw=True)(flop_registry[default])


def moe_experts(
    x: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    group_ends: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The SwiGLU experts on their slots, as `qwen3_trn.dispatch.moe_experts`; groups must end at multiples of 128.

    x: [N, H] bf16 or fp32; the indices are `Slots`; gate_proj and up_proj: [E, I, H], down_proj: [E, H, I], all of x's
    dtype. Returns y [S, H], gate and up [S, I]. Sums in fp32. Raises UserError where `supports` gives a reason.
    """
    arguments = (x, choice_of_slot, slot_of_choice, group_ends, gate_proj, up_proj, down_proj)
    if reason := supports(*arguments):
        raise UserError(f"the NKI kernels of moe_experts cannot run: {reason}. Leave out this kernel to use PyTorch's.")
    _define_operations()
    return torch.ops.qwen3_trn.nki_moe_experts(*arguments)
