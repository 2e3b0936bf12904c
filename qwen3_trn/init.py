"""Which part of a parameter this rank owns, and random weights for it.

init_weights(dict(model.named_parameters()), std=0.02, seed=0)
"""

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

_BLOCK_ROWS = 1024  # rows that are drawn from one generator; an expert is a block of its own


def local_tensor(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter as a plain tensor, through which gradients flow back."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def owned_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """The local tensor of a parameter, without gradient, and its place in the whole: a slice for each dim.

    A plain tensor is owned whole. A sharded dim is cut as torch.chunk cuts it, which is FSDP2's rule too. Where FSDP
    cuts a dim that tensor or expert parallelism has cut before, its placement is a _StridedShard: it comes second,
    although its mesh axis comes first.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, size) for size in parameter.shape)
    if any(placement.is_partial() for placement in parameter.placements):
        raise NotImplementedError(f"a parameter placed as {parameter.placements} cannot be initialised or loaded")
    bounds = [(0, size) for size in parameter.shape]
    axes = [(axis, p) for axis, p in enumerate(parameter.placements) if isinstance(p, Shard | _StridedShard)]
    for axis, placement in sorted(axes, key=lambda item: isinstance(item[1], _StridedShard)):
        start, stop = bounds[placement.dim]
        chunk = -(-(stop - start) // parameter.device_mesh.size(axis))
        rank = parameter.device_mesh.get_local_rank(axis)
        bounds[placement.dim] = min(start + rank * chunk, stop), min(start + (rank + 1) * chunk, stop)
    return local_tensor(parameter).detach(), tuple(slice(*bound) for bound in bounds)


def init_weights(parameters: dict[str, Tensor], std: float, seed: int) -> None:
    """Fill the parts that this rank owns: normal(0, std) for matrices, ones for norm weights, zeros for biases.

    The draws are transformers' distributions, from CPU generators keyed by seed, parameter name and block of rows: the
    same values on any number of ranks and any layout, and a rank draws only the blocks that it owns a part of.
    """
    for name, parameter in parameters.items():
        local, (rows, *rest) = owned_part(parameter)
        if name.endswith(".bias"):
            local.zero_()
            continue
        if parameter.dim() == 1:
            local.fill_(1.0)
            continue
        block_rows = _BLOCK_ROWS if parameter.dim() == 2 else 1
        for first in range(rows.start // block_rows * block_rows, rows.stop, block_rows):
            size = min(block_rows, parameter.shape[0] - first)
            digest = hashlib.sha256(f"{seed}/{name}/{first // block_rows}".encode()).digest()
            generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            block = torch.empty(size, *parameter.shape[1:], dtype=torch.float32, device="cpu")
            block.normal_(0.0, std, generator=generator)
            start, stop = max(first, rows.start), min(first + size, rows.stop)
            local[start - rows.start : stop - rows.start].copy_(block[start - first : stop - first, *rest])
