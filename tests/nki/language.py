"""Stands in for `nki.language`: dtypes, buffers, operators, tensors and device loops.

Sources: AWS's pages "NKI Language Guide", "nki.language" and those of its functions. What is not here, our kernels do
not use; some of what NKI has had was removed (`nl.dynamic_range`) or has no instruction (`nl.divide`).
"""

import numpy as np

from tests.nki import cost
from tests.nki.memory import PSUM_BANK_BYTES, Buffer, NkiTensor, Register, check, whole

float32, bfloat16, int32 = "float32", "bfloat16", "int32"
sbuf, psum, private_hbm, shared_hbm = "sbuf", "psum", "private_hbm", "shared_hbm"


# Operators, given to instructions as op=.
add, subtract, multiply = np.add, np.subtract, np.multiply


# Functions of nisa.activation. The hardware approximates those of silu by polynomials.
def copy(x):
    return x


def silu(x):
    return x * _sigmoid(x)


def silu_dx(x):
    return _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))


def _sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))  # which does not overflow


def ndarray(shape, dtype, buffer=sbuf, name="") -> NkiTensor:
    """A tensor that nothing was written to. In PSUM it takes whole banks. `name` is for people."""
    core = cost.core()
    check(buffer in (sbuf, psum, private_hbm, shared_hbm), f"buffer {buffer!r}")
    if buffer == shared_hbm:
        check(core.loop is None, "shared HBM is made in a device loop's body, which ends with the iteration")
        return whole(_shared(core, tuple(shape), dtype))
    storage = Buffer(buffer, tuple(shape), dtype)
    size = -(-storage.row_bytes // PSUM_BANK_BYTES) if buffer == psum else storage.row_bytes
    storage.lifetime = core.allocate(buffer, size, f"{name or 'tensor'} {list(shape)} {dtype}")
    return whole(storage)


def _shared(core: cost.Core, shape: tuple[int, ...], dtype: str) -> Buffer:
    """The n-th tensor in shared HBM is one and the same on both cores."""
    index = core.num_shared
    core.num_shared += 1
    with core.launch.lock:
        if index == len(core.launch.shared):
            core.launch.shared.append(Buffer(shared_hbm, shape, dtype))
    storage = core.launch.shared[index]
    found = (storage.shape, storage.dtype)
    check(found == (shape, dtype), f"shared HBM tensor {index} differs between the cores: {shape} {dtype}, {found}")
    return storage


def program_id(axis) -> int:
    """Which core runs: 0, or 1 of kernel[2]."""
    check(axis == 0, f"axis {axis} of a one-dimensional launch")
    return cost.core().program_id


def fori_loop(lower, upper, body, step=1) -> None:
    """body(i) for i in range(lower, upper, step), looped by the device: i and bounds in registers are no Python ints.

    The compiler sees the body once, so that every iteration must issue the same instructions. What is declared in the
    body ends with the iteration. A loop inside a loop is refused: AWS's release notes know it to fail to compile.
    """
    core = cost.core()
    check(core.loop is None, "a device loop inside a device loop")
    check(type(step) is int and step > 0, f"step {step}: wants a positive Python integer")
    for bound in (lower, upper):
        check(isinstance(bound, Register) or type(bound) is int, f"loop bound {bound}: wants an integer or a register")
    iterations = range(*(bound.read() if isinstance(bound, Register) else bound for bound in (lower, upper)), step)
    core.trip_counts.append(len(iterations))
    num_outer, began, first = len(core.lifetimes), core.now, None
    for i in iterations:
        core.loop, num_before = [], len(core.lifetimes)
        check(body(Register(i)) is None, "a loop body returns nothing")
        for lifetime in core.lifetimes[num_before:]:
            lifetime.usable = False
        if first is None:
            first = core.loop
            core.instructions += len(first)
        check(core.loop == first, "a device loop's iterations differ: Python state changed in its body")
    core.loop = None
    # What the body used from outside, the next iteration needs again: it is alive to the end of the loop.
    for lifetime in core.lifetimes[:num_outer]:
        if lifetime.end >= began:
            lifetime.end = max(lifetime.end, core.now - 1)
