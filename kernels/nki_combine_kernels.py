"""Sums over tokens' choices as NKI kernels: `combine`, forward and backward, and the sum at the end of the experts'.

nki_combine.py and nki_moe.py bind them to PyTorch. They are launched on two cores, as those of nki_moe_kernels.py,
which has the sources and the helpers.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from qwen3_trn.kernels.nki_moe_kernels import (
    BANK,
    P,
    gather,
    gather_tile,
    load,
    load_tile,
    take,
    tile_view,
    values_view,
)


@nki.jit
def combine_forward(y, slots, weights, identity):
    """out[n] = sum over j of weights[n, j] * y[slots[n, j]], in fp32, rounded once.

    y: [S, H] bf16 or fp32; slots: [128, tiles, k] int32, of token 128 t + p at [p, t], S where a choice has no slot;
    tiles is even; weights: the same in fp32; identity: [128, 128] in y's dtype. Returns [tiles, 128, H] in y's dtype.
    Each core has half of the tiles.

    The tensor engine multiplies and adds: the vector engine would need more than twice its time.
    """
    num_tiles, k = slots.shape[1], slots.shape[2]
    first = nl.program_id(0) * (num_tiles // 2)
    out = nl.ndarray((num_tiles, P, y.shape[1]), dtype=y.dtype, buffer=nl.shared_hbm)
    all_slots = load(slots)
    all_weights = load(weights)
    ones = load(identity)

    def body(i):
        parts = weight_parts(take(all_weights, i, first, nisa.engine.scalar), y.dtype)
        diagonals = []
        for j in range(k):
            of_choice = []
            for part in parts:
                diagonal = nl.ndarray((P, P), dtype=y.dtype, buffer=nl.sbuf)
                nisa.tensor_scalar(dst=diagonal, data=ones, op0=nl.multiply, operand0=part[:, j : j + 1])
                of_choice.append(diagonal)
            diagonals.append(of_choice)
        store_sum(out, diagonals, y, all_slots, i, first)

    nl.fori_loop(0, num_tiles // 2, body)
    return out


@nki.jit
def combine_backward(out_grad, y, token_ids, weights, num_used):
    """Gradients of y, and of the weight of each slot.

    out_grad: [N, H]; y: [tiles, 128, H], both bf16 or both fp32; token_ids: [128, tiles, 1] int32, N for a slot that
    holds no choice; weights: the same in fp32, 0 for those; num_used: [1, 1] int32, tiles up to the last one that holds
    a choice. Returns y_grad [tiles, 128, H] in y's dtype, zeros where a slot holds no choice, and [2, 128, tiles] fp32:
    what each half of the hidden dim adds to the gradient of a slot's weight, undefined where it holds no choice.

    By slot also the weights' gradients: out_grad's rows are gathered once for both, and choices that live on other
    ranks cost nothing. Each core has half of the hidden dim, so that both do the same whatever the routing.
    """
    num_tiles, hidden = y.shape[0], y.shape[2]
    dtype = y.dtype
    half = hidden // 2
    core = nl.program_id(0)
    column = core * half
    y_grad = nl.ndarray(y.shape, dtype=dtype, buffer=nl.shared_hbm)
    weight_grads = nl.ndarray((2, P, num_tiles), dtype=nl.float32, buffer=nl.shared_hbm)
    ids = load(token_ids)
    all_weights = load(weights)
    sums = nl.ndarray((P, num_tiles, 1), dtype=nl.float32, buffer=nl.sbuf)
    zeros = nl.ndarray((P, half), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=sums, value=0.0, engine=nisa.engine.vector)
    nisa.memset(dst=zeros, value=0.0, engine=nisa.engine.vector)
    end = nisa.register_alloc()
    nisa.register_load(end, load(num_used))

    def used(i):
        out_grad_rows = nl.ndarray((P, half), dtype=dtype, buffer=nl.sbuf)
        y_rows = nl.ndarray((P, half), dtype=dtype, buffer=nl.sbuf)
        gather_tile(out_grad_rows, out_grad, column, ids, i, 0)
        load_tile(y_rows, y, column, i, 0)
        products = nl.ndarray((P, half), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=products, data1=y_rows, data2=out_grad_rows, op=nl.multiply)
        total = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=products,
            op=nl.copy,
            data=products,
            reduce_op=nl.add,
            reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        nisa.tensor_copy(dst=values_view(sums, i, 0), src=total, engine=nisa.engine.scalar)
        weight = take(all_weights, i, 0, nisa.engine.scalar)
        y_grad_rows = nl.ndarray((P, half), dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=y_grad_rows, data=out_grad_rows, op0=nl.multiply, operand0=weight)
        nisa.dma_copy(dst=tile_view(y_grad, column, half, i, 0), src=y_grad_rows)

    def unused(i):
        nisa.dma_copy(dst=tile_view(y_grad, column, half, i, 0), src=zeros)

    nl.fori_loop(0, end, used)
    nl.fori_loop(end, num_tiles, unused)
    nisa.dma_copy(dst=weight_grads[core], src=sums)
    return y_grad, weight_grads


@nki.jit
def sum_rows(rows, slots, identity):
    """Each token's sum of its choices' rows, in fp32, by gather: what a scatter-add would do in no fixed order.

    rows: [S, H]; the others, and what is returned, are as in `combine_forward`.
    """
    num_tiles, k = slots.shape[1], slots.shape[2]
    first = nl.program_id(0) * (num_tiles // 2)
    out = nl.ndarray((num_tiles, P, rows.shape[1]), dtype=rows.dtype, buffer=nl.shared_hbm)
    all_slots = load(slots)
    ones = load(identity)
    identities = []
    for _ in range(k):
        identities.append([ones])

    def body(i):
        store_sum(out, identities, rows, all_slots, i, first)

    nl.fori_loop(0, num_tiles // 2, body)
    return out


def weight_parts(weights, dtype):
    """Of weights [128, k] fp32, one or two tiles of the same shape, whose values matmuls of `dtype` can take.

    In bf16 two: the weights rounded, and the rest. Rounded too, they are within 2^-17 of the weights.
    """
    if dtype == nl.float32:
        return [weights]
    rounded = nl.ndarray(weights.shape, dtype=dtype, buffer=nl.sbuf)
    high = nl.ndarray(weights.shape, dtype=nl.float32, buffer=nl.sbuf)  # as tensor_scalar wants its operand
    low = nl.ndarray(weights.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rounded, src=weights, engine=nisa.engine.vector)
    nisa.tensor_copy(dst=high, src=rounded, engine=nisa.engine.vector)
    nisa.tensor_tensor(dst=low, data1=weights, data2=high, op=nl.subtract)
    return [high, low]


def store_sum(out, factors, rows, slots, i, t):
    """out's tile i + t = the sum over choices j, and over the matrices factors[j], of matrix.T @ (j's rows).

    factors: for each choice a list of [128, 128] in SBUF; rows [S, H] in HBM; slots [128, tiles, k] in SBUF. A choice
    without a slot adds nothing.
    """
    k, hidden = slots.shape[2], rows.shape[1]
    ids = take(slots, i, t, nisa.engine.gpsimd)
    named = nl.ndarray((P, k, hidden), dtype=rows.dtype, buffer=nl.sbuf)
    nisa.memset(dst=named, value=0.0, engine=nisa.engine.vector)
    for j in range(k):
        gather(named[:, j, :], rows, 0, ids[:, j : j + 1])
    total = nl.ndarray((P, hidden), dtype=rows.dtype, buffer=nl.sbuf)
    for start in range(0, hidden, BANK):
        end = min(start + BANK, hidden)
        total_ps = nl.ndarray((P, end - start), dtype=nl.float32, buffer=nl.psum)
        for j in range(k):
            for m in range(len(factors[j])):
                nisa.nc_matmul(
                    dst=total_ps, stationary=factors[j][m], moving=named[:, j, start:end], accumulate=j + m > 0
                )
        nisa.tensor_copy(dst=total[:, start:end], src=total_ps, engine=nisa.engine.scalar)
    nisa.dma_copy(dst=tile_view(out, 0, hidden, i, t), src=total)
