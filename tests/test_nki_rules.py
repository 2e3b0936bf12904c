"""The NKI interpreter of tests/nki: instructions against NumPy and PyTorch, and each rule by a kernel that breaks it.

pytest tests/test_nki_rules.py
"""

import importlib.util
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tests.nki
from tests.nki import NkiError
from tests.nki import isa as nisa
from tests.nki import language as nl
from tests.nki.jit import jit

SBUF_BYTES = 208 * 1024  # of a partition, that kernels can use

# Helpers that kernels call.


def tile(shape=(4, 4), dtype=nl.float32, buffer=nl.sbuf, value=0):
    """A tile that was written."""
    t = nl.ndarray(shape, dtype, buffer)
    nisa.memset(t, value)
    return t


def bank(shape=(4, 4), dtype=nl.float32):
    """A tile of PSUM, not written."""
    return nl.ndarray(shape, dtype, nl.psum)


def matmul(dst, stationary, moving, accumulate=False):
    nisa.nc_matmul(dst, stationary, moving, accumulate=accumulate)


def load(hbm):
    t = nl.ndarray(hbm.shape, hbm.dtype, nl.sbuf)
    nisa.dma_copy(t, hbm)
    return t


def store(t):
    """An output with the values of a tile in SBUF."""
    out = nl.ndarray(t.shape, t.dtype, nl.shared_hbm)
    nisa.dma_copy(out, t)
    return out


def summed(**changes):
    """An activation that sums the rows of a tile."""
    arguments = {
        "reduce_op": nl.add,
        "reduce_res": tile((4, 1)),
        "reduce_cmd": nisa.reduce_cmd.reset_reduce,
    }
    nisa.activation(tile(), op=nl.copy, data=tile(), **(arguments | changes))


def store_psum(t):
    copied = nl.ndarray(t.shape, t.dtype, nl.sbuf)
    nisa.tensor_copy(copied, t)
    return store(copied)


def register(value):
    """A register with a value that came from memory."""
    reg = nisa.register_alloc()
    nisa.register_load(reg, tile((1, 1), nl.int32, nl.sbuf, value))
    return reg


# Instructions


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def numbers(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)


def test_bf16_rounds_to_nearest_even():
    def kernel(x):
        t = nl.ndarray(x.shape, nl.bfloat16, nl.sbuf)
        nisa.tensor_copy(t, load(x))
        return store(t)

    eps = 2.0**-7  # between 1 and the next bf16
    x = torch.tensor([[1 + eps / 2, 1 + 1.5 * eps, 1 + 0.501 * eps, -1 - 1.499 * eps, 3.4e38]])
    expected = torch.tensor([[1, 1 + 2 * eps, 1 + eps, -1 - eps, torch.inf]])
    got = jit(kernel)(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.float(), expected)


def test_dma_copy_casts_and_takes_any_shape_of_as_many_elements():
    def kernel(x):
        t = nl.ndarray((6, 2, 10), nl.bfloat16, nl.sbuf)
        nisa.dma_copy(t, x)
        return store(t)

    x = random(12, 10)
    assert torch.equal(jit(kernel)(x), x.view(6, 2, 10).bfloat16())


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1],
        lambda t: t[-1, 2:4],
        lambda t: t[:, 3, 1:9:4],
        lambda t: t[..., 2:-1],
        lambda t: t[0:3, ..., 5],
        lambda t: t[2, 1, 4],
        lambda t: t[1:2][0, 0:2][1],
    ],
)
def test_views_are_numpys(view):
    out_shape = tuple(view(torch.empty(4, 5, 10).numpy()).shape) or (1,)

    def kernel(x, view, shape):
        out = nl.ndarray(shape, x.dtype, nl.shared_hbm)
        assert view(x).shape == shape
        nisa.dma_copy(out, view(x))
        return out

    x = numbers(4, 5, 10)
    assert np.array_equal(jit(kernel)(x, view, out_shape).numpy(), view(x.numpy()).reshape(out_shape))


def test_views_on_chip_keep_the_partition_dim():
    def kernel(x):
        t = load(x)
        assert t[:, 3].shape == (8, 5)
        assert t[2].shape == (1, 4, 5)
        assert t[2, 1, 0].shape == (1, 1)
        return store(t[2, 1:3])

    x = numbers(8, 4, 5)
    assert torch.equal(jit(kernel)(x), x[2:3, 1:3])


def test_access_patterns():
    """A weight [E, K, N] comes in with K split over partitions; a row is broadcast; a tile goes out strided."""

    def kernel(w, row):
        t = nl.ndarray((4, 3, 5), w.dtype, nl.sbuf)
        nisa.dma_copy(t, w.ap([[5, 4], [20, 3], [1, 5]], offset=60))
        same = nl.ndarray((4, 3, 5), w.dtype, nl.sbuf)
        nisa.dma_copy(same, row.ap([[0, 4], [0, 3], [1, 5]]))
        nisa.tensor_tensor(t, t, same, op=nl.add)
        odd = nl.ndarray((4, 5, 3), w.dtype, nl.sbuf)
        nisa.tensor_copy(odd.ap([[15, 4], [1, 3], [3, 5]]), t)
        return store(odd)

    w, row = random(2, 12, 5), random(5)
    expected = w[1].view(3, 4, 5).transpose(0, 1) + row
    assert torch.equal(jit(kernel)(w, row), expected.transpose(1, 2))


def test_run_time_offsets():
    """A device loop over tiles [n, P, F] in HBM, and over columns in SBUF."""

    def kernel(x, first_and_end):
        bounds = load(first_and_end)
        first, end = nisa.register_alloc(), nisa.register_alloc()
        nisa.register_load(first, bounds[:, 0:1])
        nisa.register_load(end, bounds[:, 1:2])
        columns = load(x[0])
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        p, f = x.shape[1:]

        def body(i):
            t = nl.ndarray((p, 2), x.dtype, nl.sbuf)
            nisa.dma_copy(t, x.ap([[f, p], [1, 2]], offset=1, scalar_offset=i, indirect_dim=0))
            column = nl.ndarray((p, 1), x.dtype, nl.sbuf)
            nisa.tensor_copy(column, columns.ap([[f, p], [1, 1]], scalar_offset=i, indirect_dim=1))
            nisa.dma_copy(out.ap([[f, p], [1, 2]], scalar_offset=i, indirect_dim=0), t)
            nisa.dma_copy(out.ap([[f, p], [1, 1]], offset=2, scalar_offset=i, indirect_dim=0), column)

        nl.fori_loop(first, end, body, step=2)
        return out

    x = random(6, 8, 7)
    out = jit(kernel)(x, torch.tensor([[1, 6]], dtype=torch.int32))
    for i in (1, 3, 5):
        assert torch.equal(out[i, :, :2], x[i, :, 1:3])
        assert torch.equal(out[i, :, 2], x[0, :, i])
    assert out[[0, 2, 4]].isnan().all()
    assert out[..., 3:].isnan().all()


def test_scalar_offset_from_memory():
    def kernel(x, at):
        t = nl.ndarray((4, 3), x.dtype, nl.sbuf)
        nisa.dma_copy(t, x.ap([[3, 4], [1, 3]], scalar_offset=load(at)))
        return store(t)

    x = random(10, 3)
    assert torch.equal(jit(kernel)(x, torch.tensor([[5]], dtype=torch.int32)), x[5:9])


def test_gather_of_rows():
    def kernel(x, ids):
        t = tile((5, 4), x.dtype, nl.sbuf, 7)
        width = x.shape[1]
        rows = x.ap([[width, 5], [1, 4]], offset=2, vector_offset=load(ids), indirect_dim=0)
        nisa.dma_copy(t, rows, oob_mode=nisa.oob_mode.skip)
        return store(t)

    x = random(9, 6, dtype=torch.bfloat16)
    ids = torch.tensor([8, 0, 9, -1, 8], dtype=torch.int32)
    expected = torch.full((5, 4), 7, dtype=torch.bfloat16)
    for row in (0, 1, 4):
        expected[row] = x[ids[row], 2:6]
    assert torch.equal(jit(kernel)(x, ids.view(5, 1)), expected)


def test_dma_transpose():
    def kernel(w):
        t = nl.ndarray((7, 2, 12), w.dtype, nl.sbuf)
        nisa.dma_transpose(t[:, 1, :], w[1, 0:12, 2:9])
        return store(t[:, 1, :])

    w = random(2, 16, 9, dtype=torch.bfloat16)
    assert torch.equal(jit(kernel)(w), w[1, :12, 2:9].T)


def test_cores_share_outputs_and_exchange_tiles():
    def kernel(x):
        core = nl.program_id(0)
        mine = load(x[core])
        theirs = nl.ndarray(mine.shape, x.dtype, nl.sbuf)
        nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
        nisa.tensor_tensor(mine, mine, theirs, op=nl.multiply)
        first = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        second = nl.ndarray(x.shape, nl.bfloat16, nl.shared_hbm)
        nisa.dma_copy(first[core], theirs)
        nisa.dma_copy(second[core], mine)
        return first, second

    x = random(2, 4, 3)
    first, second = jit(kernel)[2](x)
    assert torch.equal(first, x.flip(0))
    assert torch.equal(second, (x[0] * x[1]).expand(2, 4, 3).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul(dtype):
    def kernel(left, right):
        left, right = load(left), load(right)
        out = bank((40, 2, 9))
        matmul(out, left[:, 0, :], right[:, 0])
        nisa.nc_matmul(out, left[:, 1, :], right[:, 1], accumulate=True)
        return store_psum(out)

    left, right = random(96, 2, 40, dtype=dtype), random(96, 2, 18, dtype=dtype)
    expected = torch.einsum("kcm,kcn->mn", left.double(), right.double())
    got = jit(kernel)(left, right).view(40, 18)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    assert not torch.equal(got, got.bfloat16().float())  # sums and results are not rounded to bf16


def test_overwriting_matmul_forgets():
    def kernel(x):
        x = load(x)
        out = bank((8, 8))
        for _ in range(2):
            matmul(out, x, x)
        return store_psum(out)

    x = random(8, 8)
    torch.testing.assert_close(jit(kernel)(x), x.T @ x)


def test_transpose():
    def kernel(x):
        out = nl.ndarray((128, 3, 70), x.dtype, nl.psum)
        for j in range(3):
            nisa.nc_transpose(out[:, j, :], load(x)[:, j * 128 : (j + 1) * 128])
        return store_psum(out)

    x = random(70, 384, dtype=torch.bfloat16)
    assert torch.equal(jit(kernel)(x), x.view(70, 3, 128).permute(2, 1, 0))


@pytest.mark.parametrize("engine", nisa.engine)
def test_tensor_copy(engine):
    def kernel(x, engine):
        t = nl.ndarray((8, 6), nl.bfloat16, nl.sbuf)
        nisa.tensor_copy(t, load(x), engine=engine)
        return store(t)

    x = random(8, 2, 3)
    if engine == nisa.engine.tensor:
        with pytest.raises(NkiError, match="does not run on tensor"):
            jit(kernel)(x, engine)
    else:
        assert torch.equal(jit(kernel)(x, engine), x.view(8, 6).bfloat16())


def test_tensor_copy_of_integers_is_exact():
    def kernel(x):
        t = nl.ndarray(x.shape, x.dtype, nl.sbuf)
        nisa.tensor_copy(t, load(x))
        return store(t)

    x = torch.tensor([[2**24 + 1, -7]], dtype=torch.int32)
    assert torch.equal(jit(kernel)(x), x)


def test_memset():
    def kernel():
        t = tile((4, 6), nl.bfloat16, nl.sbuf, 1.0)
        nisa.memset(t[:, 2:4], value=0.1, engine=nisa.engine.gpsimd)
        return store(t), store(tile((2, 2), nl.int32, nl.sbuf, -3))

    floats, integers = jit(kernel)()
    expected = torch.ones(4, 6, dtype=torch.bfloat16)
    expected[:, 2:4] = 0.1
    assert torch.equal(floats, expected)
    assert torch.equal(integers, torch.full((2, 2), -3, dtype=torch.int32))


@pytest.mark.parametrize("op", ["add", "subtract", "multiply"])
def test_tensor_tensor(op):
    def kernel(a, b, op):
        out = nl.ndarray((8, 6), nl.bfloat16, nl.sbuf)
        psum = bank((8, 6))
        nisa.tensor_copy(psum, load(b))
        nisa.tensor_tensor(out, load(a), psum, op=op)
        return store(out)

    a, b = random(8, 2, 3, dtype=torch.bfloat16), random(8, 6)
    expected = getattr(torch, op)(a.view(8, 6).float(), b).bfloat16()
    assert torch.equal(jit(kernel)(a, b, getattr(nl, op)), expected)


@pytest.mark.parametrize("op", ["add", "subtract", "multiply"])
@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum])
def test_tensor_scalar(op, buffer):
    """With a value for each partition, and with a constant; both as float32, whatever the data."""

    def kernel(x, column, op, buffer):
        each = nl.ndarray(column.shape, nl.float32, buffer)
        nisa.tensor_copy(each, load(column))
        out = nl.ndarray((8, 6), nl.bfloat16, nl.sbuf)
        nisa.tensor_scalar(out, data=load(x), op0=op, operand0=each)
        same = nl.ndarray((8, 6), nl.float32, nl.sbuf)
        nisa.tensor_scalar(same, data=load(x), op0=op, operand0=0.1)
        return store(out), store(same)

    x, column = random(8, 2, 3, dtype=torch.bfloat16), random(8, 1)
    out, same = jit(kernel)(x, column, getattr(nl, op), buffer)
    wide = x.view(8, 6).float()
    assert torch.equal(out, getattr(torch, op)(wide, column).bfloat16())
    assert torch.equal(same, getattr(torch, op)(wide, torch.tensor(0.1)))


def test_activations():
    def kernel(x, op):
        out = nl.ndarray(x.shape, nl.float32, nl.sbuf)
        nisa.activation(out, op=op, data=load(x))
        return store(out)

    x = torch.cat([random(4, 50) * 10, torch.tensor([[0.0, -1e4, 1e4, -88.0]] * 4)], dim=1)
    torch.testing.assert_close(jit(kernel)(x, nl.silu), F.silu(x.double()).float(), rtol=1e-5, atol=1e-5)
    wide = x.double().requires_grad_()
    F.silu(wide).sum().backward()
    torch.testing.assert_close(jit(kernel)(x, nl.silu_dx), wide.grad.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(jit(kernel)(x, nl.copy), x)


def test_activation_with_a_sum():
    """Of each partition, over all free dims, of what comes out of the function; each call sums anew."""

    def kernel(x):
        x = load(x)
        out, total = nl.ndarray(x.shape, nl.float32, nl.sbuf), nl.ndarray((8, 2), nl.float32, nl.sbuf)
        for column, op in enumerate((nl.copy, nl.silu)):
            nisa.activation(
                out,
                op=op,
                data=x,
                reduce_op=nl.add,
                reduce_res=total[:, column : column + 1],
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )
        return store(out), store(total)

    x = random(8, 3, 50, dtype=torch.bfloat16)
    out, total = jit(kernel)(x)
    silu = F.silu(x.double())
    torch.testing.assert_close(out.double(), silu, rtol=1e-5, atol=1e-5)
    expected = torch.stack([x.double().sum((1, 2)), silu.sum((1, 2))], dim=1)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


# Rules: what each kernel below does, a rule forbids.


# In HBM: x, y and ids.
INPUTS = (numbers(128, 128), numbers(2, 4, 16).bfloat16(), torch.tensor([[0], [3], [99], [3]], dtype=torch.int32))

BROKEN = [
    # Memory and tensors
    ("129 partitions", lambda x, y, ids: nl.ndarray((129, 4), nl.float32, nl.sbuf)),
    ("at least one free dim", lambda x, y, ids: nl.ndarray((128,), nl.float32, nl.sbuf)),
    ("wants positive Python integers", lambda x, y, ids: nl.ndarray((4, 0), nl.float32, nl.sbuf)),
    ("dtype 'float64'", lambda x, y, ids: nl.ndarray((4, 4), "float64", nl.sbuf)),
    ("buffer 'hbm2'", lambda x, y, ids: nl.ndarray((4, 4), nl.float32, "hbm2")),
    ("is an input", lambda x, y, ids: nisa.dma_copy(x[0:4], tile((4, 128)))),
    ("which overlap", lambda x, y, ids: nisa.dma_copy(tile((4, 8)).ap([[8, 4], [2, 3], [1, 3]]), x[0:4, 0:9])),
    (
        "rows are gathered, not scattered",
        lambda x, y, ids: nisa.dma_copy(
            nl.ndarray((128, 4), nl.float32, nl.private_hbm).ap([[4, 4], [1, 4]], vector_offset=load(ids)), tile()
        ),
    ),
    ("a cast of int32 to float32", lambda x, y, ids: nisa.dma_copy(nl.ndarray((4, 1), nl.float32, nl.sbuf), ids)),
    (
        "a cast of float32 to int32",
        lambda x, y, ids: nisa.tensor_copy(nl.ndarray((4, 4), nl.int32, nl.sbuf), tile()),
    ),
    # Views
    ("3 indices", lambda x, y, ids: x[0, 0, 0]),
    ("index 128 in dim 1", lambda x, y, ids: x[0, 128]),
    ("slice 120:129:1 in dim 0", lambda x, y, ids: x[120:129]),
    ("slice 4:4:1 in dim 1", lambda x, y, ids: x[:, 4:4]),
    ("indexed by list", lambda x, y, ids: x[[0, 1]]),
    ("bounds are Python integers", lambda x, y, ids: x[0 : load(ids)]),
    ("not sliced in steps", lambda x, y, ids: tile((128, 4))[0:128:2]),
    ("run-time offset cannot be sliced", lambda x, y, ids: x.ap([[128, 4], [1, 4]], scalar_offset=register(1))[0:2]),
    ("wants a whole tensor", lambda x, y, ids: x[0:4].ap([[128, 4], [1, 4]])),
    ("wants Python integers", lambda x, y, ids: x.ap([[128, 4], [-1, 4]], offset=4)),
    ("wants Python integers", lambda x, y, ids: x.ap([[128, 4], [1, 4]], offset=register(0))),
    ("first stride is a partition's 8", lambda x, y, ids: tile((8, 8)).ap([[16, 4], [1, 8]])),
    (
        "one of scalar_offset and vector_offset",
        lambda x, y, ids: x.ap([[128, 4], [1, 4]], scalar_offset=register(1), vector_offset=load(ids)),
    ),
    (
        "a partition offset is not dynamic",
        lambda x, y, ids: tile((8, 8)).ap([[8, 4], [1, 8]], scalar_offset=register(1), indirect_dim=0),
    ),
    ("scalar_offset is a register or", lambda x, y, ids: x.ap([[128, 4], [1, 4]], scalar_offset=1)),
    (
        r"scalar_offset is sbuf\[4, 1\]:int32: wants SBUF \[1, 1\] int32",
        lambda x, y, ids: x.ap([[128, 4], [1, 4]], scalar_offset=load(ids)),
    ),
    ("indexed rows want 2-D HBM", lambda x, y, ids: y.ap([[64, 4], [1, 4]], vector_offset=load(ids))),
    ("first stride is a row's 128", lambda x, y, ids: x.ap([[64, 4], [1, 4]], vector_offset=load(ids))),
    (r"vector_offset is sbuf\[4, 1\]:float32", lambda x, y, ids: x.ap([[128, 4], [1, 4]], vector_offset=tile((4, 1)))),
    (r"vector_offset is input\[4, 1\]:int32", lambda x, y, ids: x.ap([[128, 4], [1, 4]], vector_offset=ids)),
    (
        "out of range of input",
        lambda x, y, ids: nisa.dma_copy(tile((8, 128)), x.ap([[128, 8], [1, 128]], offset=121 * 128)),
    ),
    (
        "out of range of input",
        lambda x, y, ids: nisa.dma_copy(tile((8, 128)), x.ap([[128, 8], [1, 128]], scalar_offset=register(121))),
    ),
    (
        "out of range of input",
        lambda x, y, ids: nisa.dma_copy(tile((8, 128)), x.ap([[128, 8], [1, 128]], scalar_offset=register(-1))),
    ),
    (
        "out of range of sbuf",
        lambda x, y, ids: nisa.tensor_copy(tile((4, 8)), tile((8, 8)).ap([[8, 4], [1, 8]], offset=1)),
    ),
    (
        "out of range of sbuf",
        lambda x, y, ids: nisa.tensor_copy(tile((16, 8)), tile((40, 8)).ap([[8, 16], [1, 8]], offset=32 * 8)),
    ),
    (
        "out of range of input",
        lambda x, y, ids: nisa.dma_copy(tile(), x.ap([[128, 4], [1, 4]], offset=125, vector_offset=load(ids))),
    ),
    # Registers and device loops
    ("not a Python number", lambda x, y, ids: register(1) + 1),
    ("read before it is loaded", lambda x, y, ids: nl.fori_loop(0, nisa.register_alloc(), tile)),
    ("register_alloc of", lambda x, y, ids: nisa.register_alloc(load(ids))),
    ("register_load to 3", lambda x, y, ids: nisa.register_load(3, tile((1, 1), nl.int32))),
    ("register_load's src is", lambda x, y, ids: nisa.register_load(nisa.register_alloc(), tile((1, 1)))),
    ("loop bound sbuf", lambda x, y, ids: nl.fori_loop(0, tile((1, 1), nl.int32), tile)),
    ("step 0", lambda x, y, ids: nl.fori_loop(0, 4, tile, step=0)),
    # Operands of any instruction
    ("3 is not a tensor", lambda x, y, ids: nisa.tensor_copy(tile(), 3)),
    ("vector engine reads sbuf and psum, found input", lambda x, y, ids: nisa.tensor_copy(tile((128, 128)), x)),
    ("dma engine reads", lambda x, y, ids: store(tile(buffer=nl.psum))),
    ("dma engine writes", lambda x, y, ids: nisa.dma_copy(bank(), x[0:4, 0:4])),
    (
        "gpsimd engine reads sbuf",
        lambda x, y, ids: nisa.tensor_copy(tile(), tile(buffer=nl.psum), engine=nisa.engine.gpsimd),
    ),
    ("gpsimd engine writes sbuf", lambda x, y, ids: nisa.memset(bank(), 0, engine=nisa.engine.gpsimd)),
    (
        "tensor engine writes psum",
        lambda x, y, ids: matmul(tile(), tile(), tile()),
    ),
    (
        "more than 5 dims",
        lambda x, y, ids: nisa.dma_copy(tile((1, 1)), x.ap([[1, 1], [1, 1], [1, 1], [1, 1], [1, 1], [1, 1]])),
    ),
    ("a dim of more than 65535", lambda x, y, ids: nisa.dma_copy(tile((1, 1)), x.ap([[0, 65536]]))),
    ("limit 32767", lambda x, y, ids: nisa.memset(nl.ndarray((1, 2, 32768), nl.bfloat16, nl.sbuf)[:, :, 0], 0)),
    ("65 partitions from 32 on", lambda x, y, ids: nisa.memset(tile((128, 4))[32:97], 0)),
    ("33 partitions from 32 on", lambda x, y, ids: nisa.memset(tile((128, 4))[32:65], 0)),
    ("4 partitions from 16 on", lambda x, y, ids: nisa.memset(tile((128, 4))[16:20], 0)),
    ("partitions or elements per partition differ", lambda x, y, ids: nisa.tensor_copy(tile(), tile((4, 5)))),
    (
        "partitions or elements per partition differ",
        lambda x, y, ids: nisa.activation(tile(), op=nl.silu, data=tile((2, 8))),
    ),
    (
        "partitions or elements per partition differ",
        lambda x, y, ids: nisa.tensor_tensor(tile(), tile(), tile((4, 1)), op=nl.add),
    ),
    # Instructions
    ("dma_copy of 12 elements", lambda x, y, ids: nisa.dma_copy(tile(), x[0:4, 0:3])),
    (
        "dma_copy of rows",
        lambda x, y, ids: nisa.dma_copy(tile((2, 8)), x.ap([[128, 4], [1, 4]], vector_offset=load(ids))),
    ),
    (
        "dma_transpose writes SBUF",
        lambda x, y, ids: nisa.dma_transpose(nl.ndarray((4, 8), nl.float32, nl.private_hbm), x[0:8, 0:4]),
    ),
    ("dma_transpose of", lambda x, y, ids: nisa.dma_transpose(tile((8, 4)), x[0:8, 0:4])),
    ("dma_transpose keeps the dtype", lambda x, y, ids: nisa.dma_transpose(tile((4, 8), nl.bfloat16), x[0:8, 0:4])),
    (
        "run-time offsets have limits",
        lambda x, y, ids: nisa.dma_transpose(tile((4, 8)), x.ap([[128, 8], [1, 4]], scalar_offset=register(1))),
    ),
    ("K of .* differ", lambda x, y, ids: matmul(bank(), tile((32, 4)), tile((64, 4)))),
    (
        "at most 128 columns",
        lambda x, y, ids: matmul(bank((128, 4)), tile((4, 129)), tile()),
    ),
    (
        "at most 512 columns",
        lambda x, y, ids: matmul(bank((4, 513)), tile(), tile((4, 513))),
    ),
    (
        "nc_matmul: .* into psum",
        lambda x, y, ids: matmul(bank((4, 5)), tile(), tile()),
    ),
    (
        "nc_matmul writes float32",
        lambda x, y, ids: matmul(bank(dtype=nl.bfloat16), tile(), tile()),
    ),
    (
        "float32 goes with float32",
        lambda x, y, ids: matmul(bank(), tile(), tile(dtype=nl.bfloat16)),
    ),
    ("give accumulate=", lambda x, y, ids: nisa.nc_matmul(bank(), tile(), tile())),
    (
        "crosses a PSUM bank: bytes 1024 to 3072",
        lambda x, y, ids: matmul(bank((4, 1024))[:, 256:768], tile(), tile((4, 512))),
    ),
    (
        "no overwriting matmul has begun",
        lambda x, y, ids: matmul(bank(), tile(), tile(), accumulate=True),
    ),
    (
        "operand of arithmetic",
        lambda x, y, ids: nisa.tensor_tensor(tile((4, 1), nl.int32), load(ids), load(ids), op=nl.add),
    ),
    ("nc_transpose of .* up to 128 each way", lambda x, y, ids: nisa.nc_transpose(bank((128, 4)), tile((4, 129)))),
    ("nc_transpose of .* into", lambda x, y, ids: nisa.nc_transpose(bank((4, 8)), tile((4, 8)))),
    ("nc_transpose keeps the dtype", lambda x, y, ids: nisa.nc_transpose(bank((8, 4)), tile((4, 8), nl.bfloat16))),
    (
        "nc_transpose: .* crosses a PSUM bank",
        lambda x, y, ids: nisa.nc_transpose(bank((8, 9, 128)).ap([[9 * 128, 8], [9, 128]]), tile((128, 8))),
    ),
    ("tensor_tensor: op", lambda x, y, ids: nisa.tensor_tensor(tile(), tile(), tile(), op=nl.silu)),
    ("tensor_scalar: op0", lambda x, y, ids: nisa.tensor_scalar(tile(), tile(), op0=nl.silu, operand0=1.0)),
    (
        "tensor_scalar does not run on scalar",
        lambda x, y, ids: nisa.tensor_scalar(tile(), tile(), op0=nl.add, operand0=1.0, engine=nisa.engine.scalar),
    ),
    (
        "partitions or elements per partition differ",
        lambda x, y, ids: nisa.tensor_scalar(tile(), tile((4, 5)), op0=nl.add, operand0=1.0),
    ),
    (
        "is no number and no tensor",
        lambda x, y, ids: nisa.tensor_scalar(tile(), tile(), op0=nl.add, operand0=register(1)),
    ),
    (
        "vector engine reads sbuf and psum, found input",
        lambda x, y, ids: nisa.tensor_scalar(tile(), tile(), op0=nl.add, operand0=x[0:4, 0:1]),
    ),
    (
        r"operand0 is sbuf\[4, 1\]:bfloat16: wants float32 \[4, 1\]",
        lambda x, y, ids: nisa.tensor_scalar(tile(), tile(), op0=nl.add, operand0=tile((4, 1), nl.bfloat16)),
    ),
    (
        r"operand0 is sbuf\[4, 2\]:float32: wants float32 \[4, 1\]",
        lambda x, y, ids: nisa.tensor_scalar(tile(), tile(), op0=nl.add, operand0=tile((4, 2))),
    ),
    (
        r"operand0 is sbuf\[1, 1\]:float32: wants float32 \[4, 1\]",
        lambda x, y, ids: nisa.tensor_scalar(tile(), tile(), op0=nl.add, operand0=tile((1, 1))),
    ),
    (
        "operand0 has a run-time offset",
        lambda x, y, ids: nisa.tensor_scalar(
            tile(), tile(), op0=nl.add, operand0=tile().ap([[4, 4], [1, 1]], scalar_offset=register(1), indirect_dim=1)
        ),
    ),
    ("activation: op", lambda x, y, ids: nisa.activation(tile(), op=nl.add, data=tile())),
    (
        "keeps sums in ScalarE's registers",
        lambda x, y, ids: summed(reduce_cmd=nisa.reduce_cmd.reduce),
    ),
    ("keeps sums in ScalarE's registers", lambda x, y, ids: summed(reduce_cmd=nisa.reduce_cmd.reset)),
    ("a sum wants reduce_op, reduce_res and", lambda x, y, ids: summed(reduce_cmd=nisa.reduce_cmd.idle)),
    ("a sum wants reduce_op, reduce_res and", lambda x, y, ids: summed(reduce_op=None)),
    ("a sum wants reduce_op, reduce_res and", lambda x, y, ids: summed(reduce_res=None)),
    ("ScalarE only adds", lambda x, y, ids: summed(reduce_op=nl.multiply)),
    ("scalar engine writes sbuf and psum, found input", lambda x, y, ids: summed(reduce_res=x[0:4, 0:1])),
    (
        r"reduce_res is sbuf\[4, 1\]:bfloat16: wants float32",
        lambda x, y, ids: summed(reduce_res=tile((4, 1), nl.bfloat16)),
    ),
    (r"reduce_res is sbuf\[4, 4\]:float32: wants float32 \[4, 1\]", lambda x, y, ids: summed(reduce_res=tile())),
    (r"reduce_res is sbuf\[2, 1\]:float32: wants float32 \[4, 1\]", lambda x, y, ids: summed(reduce_res=tile((2, 1)))),
    (
        "reduce_res has a run-time offset",
        lambda x, y, ids: summed(reduce_res=tile().ap([[4, 4], [1, 1]], scalar_offset=register(1), indirect_dim=1)),
    ),
    (f"memset of .* to {2**31}", lambda x, y, ids: tile((4, 4), nl.int32, nl.sbuf, 2**31)),
    ("memset of .* to 0.5", lambda x, y, ids: tile((4, 4), nl.int32, nl.sbuf, 0.5)),
    ("memset does not run on scalar", lambda x, y, ids: nisa.memset(tile(), 0, engine=nisa.engine.scalar)),
    # Memory in all, and the end of a kernel
    ("returns whole tensors in shared_hbm, found sbuf", lambda x, y, ids: tile()),
    ("returns whole tensors in shared_hbm, found None", lambda x, y, ids: None),
    ("returns whole tensors in shared_hbm, found shared_hbm", lambda x, y, ids: store(tile())[0:2]),
    # Two cores
    ("axis 1", lambda x, y, ids: nl.program_id(1)),
    (
        "sendrecv on one core",
        lambda x, y, ids: nisa.sendrecv(tile(), tile(), send_to_rank=1, recv_from_rank=1, pipe_id=0),
    ),
]


@pytest.mark.parametrize("message, instruction", BROKEN, ids=[message for message, _ in BROKEN])
def test_broken_instruction(message, instruction):
    def kernel(x, y, ids, instruction):
        return instruction(x, y, ids)

    with pytest.raises(NkiError, match=message):
        jit(kernel)(*INPUTS, instruction)


BROKEN_KERNELS = []


def breaks(message, cores=1):
    """The kernel below must stop with an NkiError that matches `message`."""

    def add(kernel):
        BROKEN_KERNELS.append(pytest.param(kernel, message, cores, id=kernel.__name__))
        return kernel

    return add


# Memory and tensors


@breaks("read before it is written")
def uninitialised_read(x, y, ids):
    t = nl.ndarray((4, 4), nl.float32, nl.sbuf)
    nisa.dma_copy(t[:, 0:3], x[0:4, 0:3])
    store(t)


@breaks("read before it is written")
def uninitialised_gather(x, y, ids):
    scratch = nl.ndarray((9, 4), nl.float32, nl.private_hbm)
    t = nl.ndarray((2, 4), nl.float32, nl.sbuf)
    nisa.dma_copy(t, scratch.ap([[4, 2], [1, 4]], vector_offset=load(ids[0:2])))


@breaks("read before it is written")
def skipped_rows_are_not_written(x, y, ids):
    t = nl.ndarray((4, 4), nl.float32, nl.sbuf)
    rows = x[0:5, 0:4]
    few = nl.ndarray((5, 4), nl.float32, nl.private_hbm)
    nisa.dma_copy(few, rows)
    nisa.dma_copy(t, few.ap([[4, 4], [1, 4]], vector_offset=load(ids)), oob_mode=nisa.oob_mode.skip)
    store(t)


# Registers and device loops


@breaks("not a Python number")
def branch_on_a_register(x, y, ids):
    if register(1):
        pass


@breaks("not a Python number")
def comparison_of_a_register(x, y, ids):
    assert register(1) < 2


@breaks("not a Python number")
def index_by_a_loop_register(x, y, ids):
    def body(i):
        list(range(i))

    nl.fori_loop(0, 2, body)


@breaks("a loop body returns nothing")
def loop_body_with_a_result(x, y, ids):
    def body(i):
        return i

    nl.fori_loop(0, 4, body)


@breaks("a device loop inside a device loop")
def nested_loops(x, y, ids):
    def inner(i):
        pass

    def outer(i):
        nl.fori_loop(0, 2, inner)

    nl.fori_loop(0, 2, outer)


@breaks("Python state changed in its body")
def loop_with_python_state(x, y, ids):
    t = tile()
    state = [0]

    def body(i):
        nisa.memset(t[:, state[0] : state[0] + 1], 1.0)
        state[0] += 1

    nl.fori_loop(0, 2, body)


def kept_from_a_loop_body(make):
    kept = []

    def body(i):
        kept.append(make())

    nl.fori_loop(0, 1, body)
    return kept[0]


def scratch():
    t = nl.ndarray((128, 4), nl.float32, nl.private_hbm)
    nisa.dma_copy(t, tile((128, 4)))
    return t


@breaks("body that has ended")
def read_of_a_tensor_from_a_loop_body(x, y, ids):
    store(kept_from_a_loop_body(tile))


@breaks("body that has ended")
def write_to_a_tensor_from_a_loop_body(x, y, ids):
    nisa.memset(kept_from_a_loop_body(tile), 0)


@breaks("body that has ended")
def gather_from_a_tensor_from_a_loop_body(x, y, ids):
    rows = kept_from_a_loop_body(scratch).ap([[4, 4], [1, 4]], vector_offset=load(ids))
    nisa.dma_copy(tile(), rows)


@breaks("shared HBM is made in a device loop's body")
def output_from_a_loop_body(x, y, ids):
    def body(i):
        nl.ndarray((4, 4), nl.float32, nl.shared_hbm)

    nl.fori_loop(0, 1, body)


# Operands of any instruction


@breaks("tensor engine reads sbuf")
def matmul_of_psum(x, y, ids):
    matmul(bank(), tile(buffer=nl.psum), tile())


# Instructions


@breaks(r"row \[99\] of 5")
def gather_out_of_range(x, y, ids):
    few = nl.ndarray((5, 4), nl.float32, nl.private_hbm)
    nisa.dma_copy(few, x[0:5, 0:4])
    nisa.dma_copy(tile(), few.ap([[4, 4], [1, 4]], vector_offset=load(ids)))


@breaks("no overwriting matmul has begun")
def accumulate_on_a_memset(x, y, ids):
    out = tile(buffer=nl.psum)
    matmul(out, tile(), tile())
    nisa.memset(out, 0)
    nisa.nc_matmul(out, tile(), tile(), accumulate=True)


@breaks("no overwriting matmul has begun")
def accumulate_on_more_than_was_begun(x, y, ids):
    out = bank((4, 8))
    matmul(out[:, 0:4], tile(), tile())
    nisa.nc_matmul(out, tile(), tile((4, 8)), accumulate=True)


@breaks("has a run-time offset")
def matmul_at_a_run_time_offset(x, y, ids):
    out = bank()
    moving = tile((4, 8)).ap([[8, 4], [1, 4]], scalar_offset=register(1), indirect_dim=1)
    matmul(out, tile(), moving)


@breaks("at most one input is in PSUM")
def two_inputs_in_psum(x, y, ids):
    t = tile(buffer=nl.psum)
    nisa.tensor_tensor(tile(), t, t, op=nl.add)


# Memory in all, and the end of a kernel


@breaks(f"{SBUF_BYTES + 4} bytes a partition of SBUF are alive at once, of {SBUF_BYTES}: weights ")
def too_much_sbuf(x, y, ids):
    weights = nl.ndarray((1, SBUF_BYTES // 4), nl.float32, nl.sbuf, name="weights")
    nisa.memset(weights, 0)
    small = tile((1, 1))
    nisa.tensor_copy(small, weights[:, 0:1])


@breaks("9 banks of PSUM are alive at once, of 8")
def too_many_banks(x, y, ids):
    banks = []
    for _ in range(9):
        banks.append(tile((1, 1), nl.float32, nl.psum))
    for one in banks:
        nisa.tensor_copy(tile((1, 1)), one)


# Two cores


@breaks("sendrecv with 0 and 1, not 1", cores=2)
def exchange_with_oneself(x, y, ids):
    core = nl.program_id(0)
    nisa.sendrecv(tile(), tile(), send_to_rank=core, recv_from_rank=1 - core, pipe_id=0)


@breaks("sendrecv of sbuf.* to sbuf", cores=2)
def exchange_into_another_dtype(x, y, ids):
    other = 1 - nl.program_id(0)
    nisa.sendrecv(tile(), tile(dtype=nl.bfloat16), send_to_rank=other, recv_from_rank=other, pipe_id=0)


@breaks("sendrecv is between SBUFs", cores=2)
def exchange_with_hbm(x, y, ids):
    other = 1 - nl.program_id(0)
    nisa.sendrecv(x[0:4, 0:4], tile(), send_to_rank=other, recv_from_rank=other, pipe_id=0)


@breaks("meets .* on the other core", cores=2)
def exchange_of_different_shapes(x, y, ids):
    core = nl.program_id(0)
    shape = (4, 4 + core)
    nisa.sendrecv(tile(shape), tile(shape), send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)


@breaks("ended without a matching sendrecv", cores=2)
def exchange_with_a_core_that_has_ended(x, y, ids):
    if nl.program_id(0) == 0:
        nisa.sendrecv(tile(), tile(), send_to_rank=1, recv_from_rank=1, pipe_id=0)
    return nl.ndarray((4, 4), nl.float32, nl.shared_hbm)


@breaks("vector engine reads sbuf and psum", cores=2)
def exchange_with_a_core_that_fails(x, y, ids):
    """The error shown is the one of the core that failed, not of the one that waits for it."""
    if nl.program_id(0) == 1:
        nisa.tensor_copy(tile(), x)
    nisa.sendrecv(tile(), tile(), send_to_rank=1, recv_from_rank=1, pipe_id=0)


@breaks("device loops ran differently on the two cores", cores=2)
def different_trip_counts(x, y, ids):
    def body(i):
        pass

    nl.fori_loop(0, nl.program_id(0), body)
    return nl.ndarray((4, 4), nl.float32, nl.shared_hbm)


@breaks("both cores write the same elements", cores=2)
def both_cores_write_one_row(x, y, ids):
    store(tile())


@breaks("was written by the other core", cores=2)
def read_of_what_the_other_core_wrote(x, y, ids):
    core = nl.program_id(0)
    out = nl.ndarray((2, 4), nl.float32, nl.shared_hbm)
    nisa.dma_copy(out[core], tile((1, 4)))
    t = tile((1, 4))
    nisa.sendrecv(tile((1, 4)), t, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.dma_copy(t, out[1 - core])


@breaks("shared HBM tensor 0 differs between the cores", cores=2)
def different_outputs(x, y, ids):
    return nl.ndarray((4, 4 + nl.program_id(0)), nl.float32, nl.shared_hbm)


@breaks("the cores return different tensors", cores=2)
def different_returns(x, y, ids):
    first = nl.ndarray((4, 4), nl.float32, nl.shared_hbm)
    second = nl.ndarray((4, 4), nl.float32, nl.shared_hbm)
    return (first, second)[nl.program_id(0)]


@breaks("a logical core has 1 or 2", cores=4)
def four_cores(x, y, ids):
    pass


# The Python of kernels


@pytest.mark.parametrize(
    "line, message",
    [
        ("raise ValueError", "raise: use assert"),
        ("assert x is None", "is: use =="),
        ("assert x is not None", "is not: use !="),
        ("f = lambda: x", "lambda: use def"),
        ("y = [i for i in x]", "a comprehension: use a loop"),
        ("y = {i for i in x}", "a comprehension: use a loop"),
        ("y = {i: i for i in x}", "a comprehension: use a loop"),
        ("y = sum(i for i in x)", "a generator: use a loop"),
        ("y = print(*x)", r"\*"),
        ("print(y := x)", ":="),
        ("with x: pass", "with"),
        ("yield x", "yield"),
        ("yield from x", "yield"),
        ("global x2; x2 = x", "global"),
        ("del x", "del"),
        ("import nki", "import"),
        ("from nki import isa", "import"),
        ("class C: pass", "class"),
        ("def f(*, y): pass", "keyword-only or variable arguments"),
        ("def f(*y): pass", "keyword-only or variable arguments"),
        ("def f(**y): pass", "keyword-only or variable arguments"),
        ("async def f(): pass", "async"),
        ("try: f(x)\n    finally: pass", "try"),
        ("match x:\n        case 1: pass", "match"),
        ("def f():\n        nonlocal x", "nonlocal"),
        ("y = np.zeros(3)", "the module numpy"),
        ("y = prod(x)", "the module numpy"),
        ("@nl.jit\n    def f(): pass", "a decorator on a helper"),
    ],
)
def test_refused_python(tmp_path, line, message):
    """With the file and the line to look at."""
    (tmp_path / "kernels.py").write_text(f"import numpy as np; from numpy import prod\n\ndef kernel(x):\n    {line}\n")
    spec = importlib.util.spec_from_file_location("kernels_that_are_refused", tmp_path / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(NkiError, match=rf"kernels\.py:[45]: in kernel, a kernel may not use {message}$"):
        jit(module.kernel)


def helper_with_keywords(*, value):
    return value


@breaks("in helper_with_keywords, a kernel may not use keyword-only")
def calls_a_helper_with_keywords(x, y, ids):
    helper_with_keywords(value=1)


def helper_of_a_helper(t):
    return np.zeros(t.shape)


def innocent_helper(t):
    return helper_of_a_helper(t)


@breaks("in helper_of_a_helper, a kernel may not use the module numpy")
def calls_a_helper_that_uses_numpy(x, y, ids):
    innocent_helper(x)


this_module = sys.modules[__name__]


@breaks("in helper_of_a_helper, a kernel may not use the module numpy")
def calls_a_helper_of_a_module(x, y, ids):
    this_module.innocent_helper(x)


@pytest.mark.parametrize("kernel, message, cores", BROKEN_KERNELS)
def test_broken_kernel(kernel, message, cores):
    with pytest.raises(NkiError, match=message):
        jit(kernel)[cores](*INPUTS)


def test_arguments():
    """Only what a device has: no lists, no 64-bit tensors, none with holes or turned."""

    def kernel(x):
        return store(load(x))

    with pytest.raises(NkiError, match="is a list"):
        jit(kernel)([1, 2])
    with pytest.raises(NkiError, match=r"torch\.int64"):
        jit(kernel)(torch.zeros(4, 4, dtype=torch.int64))
    x = random(4, 4)
    assert torch.equal(jit(kernel)(x.numpy()), x)
    assert torch.equal(jit(kernel)(x=x), x)
    for turned in (x.T, x[:, :2]):
        with pytest.raises(NkiError, match="an argument has strides"):
            jit(kernel)(turned)


def test_instructions_outside_of_a_kernel():
    with pytest.raises(RuntimeError, match="outside of a kernel"):
        nl.ndarray((4, 4), nl.float32, nl.sbuf)


def test_legal_starts_of_partitions():
    def kernel():
        t = tile((128, 4))
        for start, count in ((0, 128), (0, 64), (64, 64), (32, 32), (96, 32), (64, 33), (96, 1)):
            nisa.memset(t[start : start + count], start)
        return store(t)

    assert jit(kernel)()[[0, 32, 64, 96, 97], 0].tolist() == [0, 32, 64, 96, 96]


# What is recorded


def test_cycles_of_instructions():
    """By hand from the rules of cost.py: matmul a column a cycle, VectorE and ScalarE an element a cycle."""

    def kernel(x):
        wide = load(x)
        sums = bank((128, 512))
        matmul(sums, wide[:, 0:128], wide)
        nisa.activation(wide, op=nl.silu, data=sums)
        nisa.tensor_tensor(wide, wide, sums, op=nl.add)
        nisa.memset(wide, 0, engine=nisa.engine.gpsimd)
        return store(wide)

    with tests.nki.record() as r:
        jit(kernel)(random(128, 512, dtype=torch.bfloat16))
    assert r.cycles["tensor"] == 512
    assert r.cycles["scalar"] == 512
    assert r.cycles["vector"] == 512
    assert r.cycles["gpsimd"] == 256
    # 128 KiB in and out, in runs of 1 KiB, which reach 1024 / (1024 + 512) of 368 GB/s.
    assert r.dma_bytes == 2 * 128 * 1024
    assert r.cycles["dma"] == pytest.approx(2 * 128 * 1024 / 368 * 1.5)
    times = {"tensor": 512 / 2400, "vector": 512 / 960, "scalar": 512 / 1200, "gpsimd": 256 / 1200}
    assert r.time_us == pytest.approx({**times, "dma": r.cycles["dma"] / 1000})
    assert r.bound == "dma"
    assert r.instructions == 6


def cycles_of(kernel, *args, cores=1):
    with tests.nki.record() as r:
        jit(kernel)[cores](*args)
    return r


@pytest.mark.parametrize(
    "dst, src, cycles",
    [
        ((nl.bfloat16, nl.sbuf), (nl.bfloat16, nl.sbuf), 128),
        ((nl.bfloat16, nl.sbuf), (nl.bfloat16, nl.psum), 256),
        ((nl.bfloat16, nl.sbuf), (nl.float32, nl.psum), 512),
        ((nl.float32, nl.sbuf), (nl.float32, nl.sbuf), 512),
    ],
)
def test_cycles_of_copies(dst, src, cycles):
    """Against a kernel without the copy. 16-bit data goes at four elements a cycle, at two with PSUM."""

    def kernel(dst, src, copies):
        read, written = tile((8, 512), src[0], src[1]), tile((8, 512), dst[0], dst[1])
        if copies:
            nisa.tensor_copy(written, read)
        return store(written)

    both = [cycles_of(kernel, dst, src, copies).cycles["vector"] for copies in (True, False)]
    assert both[0] - both[1] == cycles


@pytest.mark.parametrize(
    "dtype, columns, cycles",
    [
        (nl.bfloat16, slice(0, 512), 512),
        (nl.float32, slice(0, 512), 1024),  # two reads of SBUF take turns
        (nl.float32, slice(0, 2048, 4), 1024),  # 16 bytes from one element to the next
        (nl.float32, slice(0, 2560, 5), 2048),  # more than 16
    ],
)
def test_cycles_of_two_tensors(dtype, columns, cycles):
    def kernel(dtype, columns):
        wide = nl.ndarray((8, 2560), dtype, nl.sbuf)
        nisa.memset(wide, 0, engine=nisa.engine.gpsimd)
        part = wide[:, columns]
        nisa.tensor_tensor(part, part, part, op=nl.add)
        return store(wide)

    assert cycles_of(kernel, dtype, columns).cycles["vector"] == cycles


@pytest.mark.parametrize("dtype, cycles", [(nl.bfloat16, 128), (nl.float32, 512)])
def test_cycles_of_tensor_scalar(dtype, cycles):
    """As those of a copy."""

    def kernel(dtype):
        wide = nl.ndarray((8, 512), dtype, nl.sbuf)
        nisa.memset(wide, 0, engine=nisa.engine.gpsimd)
        nisa.tensor_scalar(wide, wide, op0=nl.multiply, operand0=2.0)
        return store(wide)

    assert cycles_of(kernel, dtype).cycles["vector"] == cycles


def test_reading_a_sum_out_takes_64_cycles_more():
    def kernel(x):
        x, total = load(x), nl.ndarray((8, 1), nl.float32, nl.sbuf)
        nisa.activation(
            x, op=nl.copy, data=x, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce
        )
        return store(x)

    assert cycles_of(kernel, random(8, 512)).cycles["scalar"] == 512 + 64


def test_float32_matmuls_take_four_passes():
    def kernel(x):
        x = load(x)
        sums = bank((16, 400))
        matmul(sums, x[:, 0:16], x)
        turned = nl.ndarray((16, 100), x.dtype, nl.psum)
        nisa.nc_transpose(turned, x[:, 0:16])
        return store(x)

    assert cycles_of(kernel, random(100, 400, dtype=torch.bfloat16)).cycles["tensor"] == 400 + 100
    assert cycles_of(kernel, random(100, 400)).cycles["tensor"] == 4 * (400 + 100)


def test_short_and_dynamic_instructions_have_a_minimum():
    def kernel(x):
        t = load(x)
        nisa.activation(t, op=nl.silu, data=t)
        column = nl.ndarray((128, 1), nl.float32, nl.sbuf)
        nisa.tensor_copy(column, t.ap([[4, 128], [1, 1]], scalar_offset=register(1), indirect_dim=1))
        return store(column)

    r = cycles_of(kernel, random(128, 4))
    assert r.cycles["scalar"] == 64
    assert r.cycles["vector"] == 64 + 600  # the memset in `register`, and the copy


def test_few_partitions_reach_few_dma_engines():
    def kernel(x):
        return store(load(x))

    full, few = (cycles_of(kernel, random(rows, 512)).cycles["dma"] / rows for rows in (128, 32))
    assert few == pytest.approx(4 * full)


@pytest.mark.parametrize("dtypes", [(torch.float32, nl.bfloat16), (torch.bfloat16, nl.float32)])
def test_a_dma_that_casts_moves_the_wider_side(dtypes):
    """From HBM to HBM, in long runs, by all 16 engines."""

    def kernel(x, dtype):
        out = nl.ndarray(x.shape, dtype, nl.shared_hbm)
        nisa.dma_copy(out, x)
        return out

    r = cycles_of(kernel, random(4, 2048, dtype=dtypes[0]), dtypes[1])
    assert r.dma_bytes == 4 * 2048 * 4
    assert r.cycles["dma"] == pytest.approx(4 * 2048 * 4 / 368)


def test_gathers_and_transposes_by_dma():
    def kernel(x, ids):
        t = nl.ndarray((128, 1024), x.dtype, nl.sbuf)
        nisa.dma_copy(t, x.ap([[1024, 128], [1, 1024]], vector_offset=load(ids)))
        turned = nl.ndarray((128, 128), x.dtype, nl.sbuf)
        nisa.dma_transpose(turned, x[0:128, 0:128])
        return store(t)

    ids = torch.arange(128, dtype=torch.int32).view(128, 1)
    r = cycles_of(kernel, random(200, 1024, dtype=torch.bfloat16), ids)
    assert r.cycles["gpsimd"] == 1200  # 1 us
    rows, ids_bytes, turned = 128 * 2048, 128 * 4, 128 * 256
    assert r.dma_bytes == 2 * rows + ids_bytes + turned
    ids_time = ids_bytes / 368 * (4 + 512) / 4  # a partition's run is 4 bytes
    assert r.cycles["dma"] == pytest.approx(2 * rows / 368 + ids_time + turned / 368 / 0.9)


def test_peaks_are_of_what_is_alive_at_once():
    def kernel():
        first = tile((128, 100))  # 400 bytes a partition, for the whole kernel
        for _ in range(5):
            second = tile((128, 25))  # 100 bytes, one after the other
            nisa.tensor_copy(first[:, 0:25], second)
        bank = tile((128, 1), nl.float32, nl.psum)
        two = tile((128, 513), nl.float32, nl.psum)
        nisa.tensor_copy(first[:, 0:1], bank)
        nisa.tensor_copy(first[:, 0:1], two[:, 0:1])
        last = tile((128, 50))  # 200 bytes
        nisa.tensor_copy(last, first[:, 0:50])
        return store(last)

    r = cycles_of(kernel)
    assert r.sbuf_peak == 600
    assert r.psum_peak == 3
    peak, alive = r.launches[0].cores[0].peak("sbuf")
    assert (peak, [lifetime.size for lifetime in alive]) == (600, [400, 200])


def test_a_loop_keeps_what_its_next_iteration_needs():
    """In one iteration `outer` ends before `inner` begins; in the next it is wanted again."""

    def kernel(n):
        outer = tile((128, 10))
        total = tile((128, 10))

        def body(i):
            nisa.tensor_copy(total, outer)
            inner = tile((128, 100))
            nisa.tensor_copy(total, inner[:, 0:10])

        nl.fori_loop(0, n, body)
        return store(total)

    for n in (1, 3):
        r = cycles_of(kernel, n)
        assert r.sbuf_peak == 480
        assert r.instructions == 2 + 3 + 1  # the body's three count once


def test_the_busier_core_counts():
    def kernel():
        t = tile((4, 512))
        for _ in range(nl.program_id(0)):
            nisa.memset(t, 1)
        out = nl.ndarray((2, 4, 512), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out[nl.program_id(0)], t)
        return out

    with tests.nki.record() as r:
        jit(kernel)[2]()
        jit(kernel)[2]()
    assert [core.cycles["vector"] for core in r.launches[0].cores] == [512, 1024]
    assert r.cycles["vector"] == 2048
    assert r.dma_bytes == 2 * 4 * 2048


def test_nothing_is_recorded_outside_of_the_block():
    def kernel(x):
        return store(load(x))

    with tests.nki.record() as outer:
        with tests.nki.record() as inner:
            jit(kernel)(random(4, 4))
        jit(kernel)(random(4, 4))
    jit(kernel)(random(4, 4))
    assert (len(outer.launches), len(inner.launches)) == (2, 1)


def test_install_stands_in_where_the_wheel_is_absent(monkeypatch):
    """`import nki` finds the interpreter, torch_neuronx.nki_op makes operations; a real wheel is left alone."""
    modules = ("nki", "nki.language", "nki.isa", "torch_neuronx")
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    installed = tests.nki.install()
    import nki
    import nki.isa
    import nki.language
    from torch_neuronx import nki_op

    assert installed == (nki.language is nl) == (nki.isa is nisa) == (nki.jit is jit)
    assert tests.nki.install() == installed

    @nki_op("nki_rules::double", mutates_args={})
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    theirs = types.ModuleType("nki.language")
    monkeypatch.setitem(sys.modules, "nki.language", theirs)
    assert not tests.nki.install()
    assert sys.modules["nki.language"] is theirs
