"""Stands in for `nki.isa`: the instructions that our kernels use, each with its documented limits and its cost.

Sources: AWS's page of each instruction ("nki.isa.nc_matmul", ...), the "NKI Language Guide" and the "Trainium2
Architecture Guide for NKI". Limits of Trainium2; a destination comes first. VectorE, ScalarE and GpSimd cast their
inputs to float32, compute in float32, and cast the result to the destination's dtype.
"""

from enum import Enum

import numpy as np

from tests.nki import cost
from tests.nki import language as nl
from tests.nki.memory import (
    MAX_COUNT,
    MAX_DIMS,
    MAX_STRIDE,
    PARTITIONS,
    PSUM_BANK_BYTES,
    NkiTensor,
    Register,
    check,
    check_index,
)

MAX_MOVING = 512  # free elements of nc_matmul's moving tile
ARITHMETIC = {nl.add, nl.subtract, nl.multiply}
ACTIVATIONS = {nl.copy, nl.silu, nl.silu_dx}
# What each engine reads and what it writes.
MEMORY_OF = {
    "tensor": (("sbuf",), ("psum",)),
    "vector": (("sbuf", "psum"), ("sbuf", "psum")),
    "scalar": (("sbuf", "psum"), ("sbuf", "psum")),
    "gpsimd": (("sbuf",), ("sbuf",)),
    "dma": (("sbuf", "hbm", "private_hbm", "shared_hbm"),) * 2,
}


class engine(Enum):  # NKI's names are in lower case
    unknown, tensor, vector, scalar, gpsimd = range(5)


class oob_mode(Enum):
    error, skip = range(2)


class reduce_cmd(Enum):
    idle, reset, reduce, reset_reduce = range(4)


# Checks that instructions share


def _choose(what: str, asked: engine, *allowed: str) -> str:
    """The engine that runs an instruction; the first allowed one where the kernel leaves it open."""
    if asked == engine.unknown:
        return allowed[0]
    check(asked.name in allowed, f"{what} does not run on {asked.name}: {' or '.join(allowed)}")
    return asked.name


def _check_operands(what: str, on: str, writes: list[NkiTensor], reads: list[NkiTensor]) -> None:
    """Where operands lie, and how they are addressed."""
    sides = [(t, "reads", MEMORY_OF[on][0]) for t in reads] + [(t, "writes", MEMORY_OF[on][1]) for t in writes]
    for t, way, memories in sides:
        check(isinstance(t, NkiTensor), f"{what}: {t!r} is not a tensor")
        check(t.buffer in memories, f"{what}: {on} engine {way} {' and '.join(memories)}, found {t}")
        check(t.ndim <= MAX_DIMS, f"{what}: {t} has more than {MAX_DIMS} dims")
        check(max(t.shape) <= MAX_COUNT, f"{what}: {t} has a dim of more than {MAX_COUNT}")
        if on != "dma":
            check(max(t.strides[1:]) <= MAX_STRIDE, f"{what}: {t} has strides {t.strides}, limit {MAX_STRIDE}")
            # A quarter or half of the partitions starts at a multiple of its size; all of them at 0.
            start, count = t.offset // t.storage.row, t.shape[0]
            legal = (0,) if count > 64 else (0, 64) if count > 32 else (0, 32, 64, 96)
            check(start in legal, f"{what}: {count} partitions from {start} on; they may start at {legal}")
        check(on != "tensor" or not t.dynamic, f"{what}: {t} has a run-time offset; its cost is not known here")


def _check_same(what: str, dst: NkiTensor, *reads: NkiTensor) -> None:
    """Equal partitions, and equal elements per partition, whatever the number of dims."""
    for t in reads:
        same = t.shape[0] == dst.shape[0] and t.free_size == dst.free_size
        check(same, f"{what}: {t} into {dst}: partitions or elements per partition differ")


def _check_column(what: str, column: NkiTensor, t: NkiTensor) -> None:
    """One float32 value for each partition of t."""
    right = column.dtype == "float32" and column.shape[0] == t.shape[0] and column.free_size == 1
    check(right, f"{what} is {column}: wants float32 [{t.shape[0]}, 1]")


def _check_bank(what: str, dst: NkiTensor) -> None:
    start = (dst.start() % dst.storage.row) * dst.itemsize
    end = start + (1 + sum((n - 1) * s for n, s in zip(dst.shape[1:], dst.strides[1:], strict=True))) * dst.itemsize
    one = start // PSUM_BANK_BYTES == (end - 1) // PSUM_BANK_BYTES
    check(one, f"{what}: {dst} crosses a PSUM bank: bytes {start} to {end} of a partition, banks of {PSUM_BANK_BYTES}")


def _floats(t: NkiTensor) -> np.ndarray:
    """[partitions, elements per partition] in float32."""
    check(t.dtype != "int32", f"{t} as an operand of arithmetic: the rules of integers are not kept here")
    return t.read().reshape(t.shape[0], -1)


def _spend(what: str, on: str, cycles: float, *operands) -> None:
    described = [
        (t.storage.kind, t.dtype, t.shape, t.strides, t.offset) if isinstance(t, NkiTensor) else t for t in operands
    ]
    cost.core().spend(on, cycles, (what, on, *described))


# Data movement


def dma_copy(dst, src, oob_mode=oob_mode.error):
    """Copy between HBM and SBUF, in row-major order of either side; casts. No PSUM.

    Indexed rows of src (`.ap(vector_offset=)`) are gathered. An index out of range is an error, or with oob_mode.skip
    leaves its row of dst alone.
    """
    _check_operands("dma_copy", "dma", [dst], [src])
    check(dst.size == src.size, f"dma_copy of {src.size} elements, {src}, to {dst.size}, {dst}")
    if src.rows is None:
        dst.write(src.read())
    else:
        check(dst.shape[0] == src.shape[0], f"dma_copy of rows: {src} to {dst}")
        rows = src.rows.read()[:, 0].astype(np.int64)
        legal = (rows >= 0) & (rows < src.storage.shape[0])
        check(
            oob_mode.name == "skip" or bool(legal.all()), f"dma_copy: row {rows[~legal][:1]} of {src.storage.shape[0]}"
        )
        dst.write(src.read_rows(rows[legal]), legal)
        # GpSimd makes the descriptors of a gather.
        cost.core().cycles["gpsimd"] += cost.indexed_rows(src.shape[0])
    _spend_dma("dma_copy", cost.dma(dst, src), dst, src)


def dma_transpose(dst, src):
    """dst[j, i] = src[i, j], from HBM or SBUF to SBUF, of the same dtype. Of its forms only the static 2-D one."""
    _check_operands("dma_transpose", "dma", [dst], [src])
    check(dst.buffer == "sbuf", f"dma_transpose writes SBUF, found {dst}")
    check(src.ndim == 2 and dst.shape == src.shape[::-1], f"dma_transpose of {src} to {dst}")
    check(dst.dtype == src.dtype, f"dma_transpose keeps the dtype, found {src} to {dst}")
    check(not (src.dynamic or dst.dynamic), "dma_transpose: run-time offsets have limits that are not checked here")
    dst.write(src.read().T)
    _spend_dma("dma_transpose", cost.dma_transpose(dst), dst, src)


def sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id):
    """Send src to the other core's dst, and receive its src in dst. SBUF to SBUF, of one shape and dtype on both.

    The n-th on one core meets the n-th on the other.
    """
    _check_operands("sendrecv", "dma", [dst], [src])
    core = cost.core()
    check(dst.buffer == src.buffer == "sbuf", f"sendrecv is between SBUFs, found {src} and {dst}")
    check(dst.shape == src.shape and dst.dtype == src.dtype, f"sendrecv of {src} to {dst}")
    other = 1 - core.program_id
    check(len(core.launch.cores) == 2, "sendrecv on one core: launch kernel[2]")
    check(send_to_rank == recv_from_rank == other, f"sendrecv with {send_to_rank} and {recv_from_rank}, not {other}")
    values, theirs = core.exchange(src.read().copy(), (src.shape, src.dtype, pipe_id))
    check(theirs == (src.shape, src.dtype, pipe_id), f"sendrecv of {src} meets {theirs} on the other core")
    dst.write(values)
    _spend_dma("sendrecv", cost.dma(dst, src), dst, src)


def _spend_dma(what: str, moved_and_time: tuple[int, float], dst: NkiTensor, src: NkiTensor) -> None:
    moved, nanoseconds = moved_and_time
    cost.core().dma_bytes += moved
    _spend(what, "dma", nanoseconds, dst, src)


# Tensor engine


def nc_matmul(dst, stationary, moving, accumulate=None):
    """dst[M, N] = or, if `accumulate`, += stationary[K, M].T @ moving[K, N], products and sums in float32.

    K and M up to 128, N up to 512; dst is float32 in one bank of PSUM. Only what a matmul has begun can be accumulated
    on. `accumulate` must be given here: what None infers inside a device loop is not documented.
    """
    _check_operands("nc_matmul", "tensor", [dst], [stationary, moving])
    check(stationary.shape[0] == moving.shape[0], f"nc_matmul: K of {stationary} and {moving} differ")
    check(stationary.free_size <= PARTITIONS, f"nc_matmul: stationary {stationary}, at most {PARTITIONS} columns")
    check(moving.free_size <= MAX_MOVING, f"nc_matmul: moving {moving}, at most {MAX_MOVING} columns")
    right = dst.shape[0] == stationary.free_size and dst.free_size == moving.free_size
    check(right, f"nc_matmul: {stationary}.T @ {moving} into {dst}")
    check(dst.dtype == "float32", f"nc_matmul writes float32, found {dst}")
    floats = {"float32", "bfloat16"}
    dtypes = {stationary.dtype, moving.dtype}
    check(dtypes <= floats and len(dtypes) == 1, f"nc_matmul of {stationary} and {moving}: float32 goes with float32")
    check(accumulate in (True, False), "nc_matmul: give accumulate=True or False")
    _check_bank("nc_matmul", dst)
    begun = dst.view(dst.storage.accumulating)
    result = _floats(stationary).T @ _floats(moving)
    if accumulate:
        check(bool(begun.all()), f"nc_matmul accumulates on {dst}, which no overwriting matmul has begun")
        result += dst.read().reshape(result.shape)
    dst.write(result)
    begun[...] = True
    _spend("nc_matmul", "tensor", cost.matmul(stationary, moving), dst, stationary, moving, accumulate)


def nc_transpose(dst, data):
    """dst[F, P] = data[P, F] bit by bit, on the tensor engine: from SBUF to PSUM, up to 128 x 128, of one dtype."""
    _check_operands("nc_transpose", "tensor", [dst], [data])
    check(max(data.shape[0], data.free_size) <= PARTITIONS, f"nc_transpose of {data}: up to {PARTITIONS} each way")
    right = dst.shape[0] == data.free_size and dst.free_size == data.shape[0]
    check(right, f"nc_transpose of {data} into {dst}")
    check(dst.dtype == data.dtype, f"nc_transpose keeps the dtype, found {data} into {dst}")
    _check_bank("nc_transpose", dst)
    dst.write(data.read().reshape(data.shape[0], -1).T)
    _spend("nc_transpose", "tensor", cost.transpose(data), dst, data)


# Vector, scalar and GpSimd engines


def tensor_copy(dst, src, engine=engine.unknown):
    """dst = src, cast; of the same dtype bit by bit, except on ScalarE."""
    on = _choose("tensor_copy", engine, "vector", "scalar", "gpsimd")
    _check_operands("tensor_copy", on, [dst], [src])
    _check_same("tensor_copy", dst, src)
    dst.write(src.read() if dst.dtype == src.dtype and on != "scalar" else _floats(src))
    cycles = cost.copy(dst, src) if on == "vector" else cost.elementwise([dst, src])
    _spend("tensor_copy", on, cycles, dst, src)


def memset(dst, value, engine=engine.unknown):
    """dst = a constant."""
    on = _choose("memset", engine, "vector", "gpsimd")
    _check_operands("memset", on, [dst], [])
    legal = type(value) is int and -(2**31) <= value < 2**31 if dst.dtype == "int32" else type(value) in (int, float)
    check(legal, f"memset of {dst} to {value!r}")
    dst.write(np.full(dst.shape, value, np.int32 if dst.dtype == "int32" else np.float32))
    _spend("memset", on, cost.elementwise([dst], 1 / 2 if dst.itemsize == 2 and value == 0 else 1), dst, value)


def tensor_tensor(dst, data1, data2, op, engine=engine.unknown):
    """dst = data1 op data2, element by element; at most one of the inputs is in PSUM."""
    on = _choose("tensor_tensor", engine, "vector", "gpsimd")
    _check_operands("tensor_tensor", on, [dst], [data1, data2])
    _check_same("tensor_tensor", dst, data1, data2)
    both = data1.buffer == data2.buffer == "psum"
    check(not both, f"tensor_tensor: at most one input is in PSUM, found {data1} and {data2}")
    check(op in ARITHMETIC, f"tensor_tensor: op {op}")
    dst.write(op(_floats(data1), _floats(data2)))
    cycles = cost.two_tensors(dst, data1, data2) if on == "vector" else cost.elementwise([dst, data1, data2], 2)
    _spend("tensor_tensor", on, cycles, dst, data1, data2, op.__name__)


def tensor_scalar(dst, data, op0, operand0, engine=engine.unknown):
    """dst = data op0 operand0: a constant, or a float32 tile [P, 1] with a value for each partition.

    Of its operations only one; on VectorE, since the other engines take few of them.
    """
    on = _choose("tensor_scalar", engine, "vector")
    is_tile = isinstance(operand0, NkiTensor)
    check(is_tile or type(operand0) in (int, float), f"tensor_scalar: operand0 {operand0!r} is no number and no tensor")
    _check_operands("tensor_scalar", on, [dst], [data, operand0] if is_tile else [data])
    _check_same("tensor_scalar", dst, data)
    check(op0 in ARITHMETIC, f"tensor_scalar: op0 {op0}")
    if is_tile:
        _check_column("tensor_scalar: operand0", operand0, data)
        check(not operand0.dynamic, "tensor_scalar: operand0 has a run-time offset; its cost is not known here")
    dst.write(op0(_floats(data), _floats(operand0) if is_tile else np.float32(operand0)))
    _spend("tensor_scalar", on, cost.copy(dst, data), dst, data, op0.__name__, operand0)


def activation(dst, op, data, reduce_op=None, reduce_res=None, reduce_cmd=reduce_cmd.idle):
    """dst = op(data) on ScalarE, and with reduce_cmd.reset_reduce reduce_res[P, 1] = the sum of op(data) over a row.

    ScalarE sums in registers that outlive the instruction: the other commands, which leave something in them for a
    later one, are refused here.
    """
    _check_operands("activation", "scalar", [dst], [data])
    _check_same("activation", dst, data)
    check(op in ACTIVATIONS, f"activation: op {op}")
    result = op(_floats(data))
    dst.write(result)
    sums = reduce_cmd.name == "reset_reduce"
    check(sums or reduce_cmd.name == "idle", f"activation: {reduce_cmd} keeps sums in ScalarE's registers")
    given = [reduce_op is not None, reduce_res is not None]
    check(given == [sums, sums], "activation: a sum wants reduce_op, reduce_res and reduce_cmd")
    if sums:
        check(reduce_op == nl.add, f"activation: reduce_op {reduce_op}; ScalarE only adds")
        _check_operands("activation", "scalar", [reduce_res], [])
        _check_column("activation: reduce_res", reduce_res, data)
        check(not reduce_res.dynamic, "activation: reduce_res has a run-time offset; its cost is not known here")
        reduce_res.write(result.sum(1, dtype=np.float32))
    cycles = cost.elementwise([dst, data]) + (cost.MIN_CYCLES if sums else 0)
    _spend("activation", "scalar", cycles, dst, data, op.__name__, reduce_res)


# Registers


def register_alloc(x=None) -> Register:
    """A register; x: its value, a Python integer."""
    check(x is None or type(x) is int, f"register_alloc of {x!r}: wants a Python integer")
    return Register(x)


def register_load(dst, src) -> None:
    """Load a [1, 1] int32 SBUF tensor into a register."""
    check(isinstance(dst, Register), f"register_load to {dst!r}")
    check_index(src, (1, 1), "register_load's src")
    dst.value = int(src.read()[0, 0])
    _spend("register_load", "gpsimd", cost.MIN_CYCLES, src)
