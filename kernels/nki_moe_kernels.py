"""The SwiGLU experts as NKI kernels: forward and backward. nki_moe.py binds them to PyTorch.

Written for NKI 0.6 and 0.7 and a logical core of two NeuronCores (LNC 2): `experts_forward[2](...)`.

Slots come in tiles of 128 rows. Experts are unrolled; an expert's weights stay in SBUF while a device loop goes through
its tiles, two at a time, then the one that may be left. The two cores share each tile: a core computes its half of the
intermediate dim, they exchange what they have, and it computes its half of the hidden dim. Each weight is so read, and
each of its gradients written, by one core only, and both do equal work, whatever the routing. Where an expert does not
fit into SBUF, its intermediate dim is cut into slices that are worked on one after the other.

Everything is token-major, [128 tokens, features]. A matmul contracts over partitions, so what it contracts over must be
transposed to there: activations by the tensor engine, forward's weights by the DMA that loads them. Backward wants
weights as they are stored.

Sources: AWS's pages "NKI Language Guide", "NKI Access Patterns", "nki.isa" and "Trainium2 Architecture Guide for NKI".
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128  # partitions, and rows of a tile
BANK = 512  # fp32 columns of a bank of PSUM: what one matmul can write


@nki.jit
def experts_forward(x, token_ids, tile_bounds, gate_proj, up_proj, down_proj, num_slices):
    """y = down(silu(gate(x)) * up(x)), each slot by its expert.

    x: [N, H] bf16 or fp32; token_ids: [128, tiles, 1] int32, N for a pad slot, which reads as zeros; tile_bounds:
    [1, 3E] int32, see `loop_over_tiles`; gate_proj and up_proj: [E, I, H], down_proj: [E, H, I]. Returns y
    [tiles, 128, H], gate and up [tiles, 128, I] in x's dtype; tiles of no expert are not written. Matmuls accumulate in
    fp32.
    """
    num_tiles = token_ids.shape[1]
    num_experts, intermediate, hidden = gate_proj.shape
    core = nl.program_id(0)
    width = intermediate // num_slices // 2  # columns of the intermediate dim that this core computes at a time
    blocks = width // P
    half = hidden // 2

    y = nl.ndarray((num_tiles, P, hidden), dtype=x.dtype, buffer=nl.shared_hbm)
    gate = nl.ndarray((num_tiles, P, intermediate), dtype=x.dtype, buffer=nl.shared_hbm)
    up = nl.ndarray((num_tiles, P, intermediate), dtype=x.dtype, buffer=nl.shared_hbm)
    sums = slice_sums(num_slices, num_tiles, half)
    ids = load(token_ids)
    bounds = load(tile_bounds)
    registers = (nisa.register_alloc(), nisa.register_alloc(), nisa.register_alloc())

    def forward_slice(expert, index):
        first = 2 * index * width  # where the slice begins
        own = first + core * width  # and this core's part of it
        gate_T = load_transposed(gate_proj, expert, own, width, 0, hidden)
        up_T = load_transposed(up_proj, expert, own, width, 0, hidden)
        down_T = load_transposed(down_proj, expert, core * half, half, first, 2 * width)

        def body(i, num_here):
            act_T = nl.ndarray((P, 2 * blocks, num_here, P), dtype=x.dtype, buffer=nl.sbuf)
            for t in range(num_here):
                x_rows = nl.ndarray((P, hidden), dtype=x.dtype, buffer=nl.sbuf)
                x_T = nl.ndarray((P, hidden // P, P), dtype=x.dtype, buffer=nl.sbuf)
                gather_tile(x_rows, x, 0, ids, i, t)
                transpose(x_T, x_rows)
                gate_ps = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
                up_ps = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
                matmul(gate_ps, x_T, gate_T)
                matmul(up_ps, x_T, up_T)
                gate_rows = nl.ndarray((P, width), dtype=x.dtype, buffer=nl.sbuf)
                up_rows = nl.ndarray((P, width), dtype=x.dtype, buffer=nl.sbuf)
                nisa.tensor_copy(dst=gate_rows, src=gate_ps, engine=nisa.engine.scalar)
                nisa.tensor_copy(dst=up_rows, src=up_ps, engine=nisa.engine.scalar)
                nisa.dma_copy(dst=tile_view(gate, own, width, i, t), src=gate_rows)
                nisa.dma_copy(dst=tile_view(up, own, width, i, t), src=up_rows)
                act = nl.ndarray((P, width), dtype=x.dtype, buffer=nl.sbuf)
                nisa.activation(dst=act, op=nl.silu, data=gate_rows)
                nisa.tensor_tensor(dst=act, data1=act, data2=up_rows, op=nl.multiply)
                transpose(act_T[:, core * blocks : (core + 1) * blocks, t, :], act)
            exchange(act_T, core)
            for t in range(num_here):
                store_product(y, sums, index, i, t, act_T[:, :, t, :], down_T, core)

        loop_over_tiles(registers, bounds, expert, body)

    for expert in range(num_experts):
        for index in range(num_slices):
            forward_slice(expert, index)
    return y, gate, up


@nki.jit
def experts_backward(y_grad, x, token_ids, tile_bounds, gate_proj, up_proj, down_proj, gate, up, num_slices):
    """Gradients of the rows of x by slot, and of the weights.

    y_grad: [tiles, 128, H]; gate and up: [tiles, 128, I], forward's; the others as in forward. Returns x_grad
    [tiles, 128, H], whose tiles of no expert are not written, and the gradients of gate_proj, up_proj and down_proj in
    their shapes and x's dtype, summed in fp32; an expert without tokens gets zeros.

    Data and weight gradients in one kernel: both need y_grad, and while the tensor engine is at the first, the vector
    engine adds up the second, which takes it 19 us for a core's half of an expert of 30B-A3B, once for two tiles.
    """
    num_tiles = token_ids.shape[1]
    num_experts, intermediate, hidden = gate_proj.shape
    dtype = x.dtype
    core = nl.program_id(0)
    width = intermediate // num_slices // 2
    blocks = width // P
    half = hidden // 2

    x_grad = nl.ndarray((num_tiles, P, hidden), dtype=dtype, buffer=nl.shared_hbm)
    gate_grad = nl.ndarray(gate_proj.shape, dtype=dtype, buffer=nl.shared_hbm)
    up_grad = nl.ndarray(up_proj.shape, dtype=dtype, buffer=nl.shared_hbm)
    down_grad = nl.ndarray(down_proj.shape, dtype=dtype, buffer=nl.shared_hbm)
    sums = slice_sums(num_slices, num_tiles, half)
    ids = load(token_ids)
    bounds = load(tile_bounds)
    registers = (nisa.register_alloc(), nisa.register_alloc(), nisa.register_alloc())

    def backward_slice(expert, index):
        first = 2 * index * width
        own = first + core * width
        down = nl.ndarray((P, hidden // P, width), dtype=dtype, buffer=nl.sbuf)
        gate_up = nl.ndarray((P, 4 * blocks, half), dtype=dtype, buffer=nl.sbuf)
        load_blocks(down, down_proj, expert, 0, own)
        load_blocks(gate_up[:, : 2 * blocks, :], gate_proj, expert, first, core * half)
        load_blocks(gate_up[:, 2 * blocks :, :], up_proj, expert, first, core * half)
        gate_sum = nl.ndarray((P, 2 * blocks, half), dtype=nl.float32, buffer=nl.sbuf)
        up_sum = nl.ndarray((P, 2 * blocks, half), dtype=nl.float32, buffer=nl.sbuf)
        down_sum = nl.ndarray((P, half // P, 2 * width), dtype=nl.float32, buffer=nl.sbuf)
        for total in (gate_sum, up_sum, down_sum):
            nisa.memset(dst=total, value=0.0, engine=nisa.engine.gpsimd)

        def body(i, num_here):
            x_rows = nl.ndarray((P, num_here, half), dtype=dtype, buffer=nl.sbuf)
            y_grad_rows = nl.ndarray((P, num_here, hidden), dtype=dtype, buffer=nl.sbuf)
            # Activations and the gradients of gate and up: core 0's three, then core 1's.
            exchanged = nl.ndarray((P, 6, num_here, width), dtype=dtype, buffer=nl.sbuf)
            act, gate_out_grad, up_out_grad = 3 * core, 3 * core + 1, 3 * core + 2
            for t in range(num_here):
                gather_tile(x_rows[:, t, :], x, core * half, ids, i, t)
                load_tile(y_grad_rows[:, t, :], y_grad, 0, i, t)
                y_grad_T = nl.ndarray((P, hidden // P, P), dtype=dtype, buffer=nl.sbuf)
                transpose(y_grad_T, y_grad_rows[:, t, :])
                act_grad = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
                matmul(act_grad, y_grad_T, down)
                gate_rows = nl.ndarray((P, width), dtype=dtype, buffer=nl.sbuf)
                up_rows = nl.ndarray((P, width), dtype=dtype, buffer=nl.sbuf)
                load_tile(gate_rows, gate, own, i, t)
                load_tile(up_rows, up, own, i, t)
                silu = nl.ndarray((P, width), dtype=dtype, buffer=nl.sbuf)
                slope = nl.ndarray((P, width), dtype=dtype, buffer=nl.sbuf)  # of silu(gate) * up, along gate
                nisa.activation(dst=silu, op=nl.silu, data=gate_rows)
                nisa.activation(dst=slope, op=nl.silu_dx, data=gate_rows)
                nisa.tensor_tensor(dst=slope, data1=slope, data2=up_rows, op=nl.multiply)
                nisa.tensor_tensor(dst=exchanged[:, act, t, :], data1=silu, data2=up_rows, op=nl.multiply)
                nisa.tensor_tensor(dst=exchanged[:, gate_out_grad, t, :], data1=slope, data2=act_grad, op=nl.multiply)
                nisa.tensor_tensor(dst=exchanged[:, up_out_grad, t, :], data1=silu, data2=act_grad, op=nl.multiply)
            exchange(exchanged, core)
            y_grad_half = y_grad_rows[:, :, core * half : (core + 1) * half]
            for part in (core, 1 - core):  # this core's first: meanwhile the other's arrives
                rows, columns = part * blocks, part * width
                add_outer_product(gate_sum[:, rows : rows + blocks, :], exchanged[:, 3 * part + 1, :, :], x_rows)
                add_outer_product(up_sum[:, rows : rows + blocks, :], exchanged[:, 3 * part + 2, :, :], x_rows)
                add_outer_product(down_sum[:, :, columns : columns + width], y_grad_half, exchanged[:, 3 * part, :, :])
            order = (1, 4, 2, 5)  # of gate_up's rows: gate's of both cores, then up's
            for t in range(num_here):
                grads_T = nl.ndarray((P, 4 * blocks, P), dtype=dtype, buffer=nl.sbuf)
                for n in range(4):
                    transpose(grads_T[:, n * blocks : (n + 1) * blocks, :], exchanged[:, order[n], t, :])
                store_product(x_grad, sums, index, i, t, grads_T, gate_up, core)

        loop_over_tiles(registers, bounds, expert, body)
        store_blocks(gate_grad, expert, first, core * half, gate_sum)
        store_blocks(up_grad, expert, first, core * half, up_sum)
        store_blocks(down_grad, expert, core * half, first, down_sum)

    for expert in range(num_experts):
        for index in range(num_slices):
            backward_slice(expert, index)
    return x_grad, gate_grad, up_grad, down_grad


# Views and loads


def tile_view(tensor, column, width, i, t):
    """`width` columns of tile i + t of a [tiles, 128, F] tensor in HBM; i is a device register, t a number."""
    columns = tensor.shape[2]
    return tensor.ap([[columns, P], [1, width]], offset=t * P * columns + column, scalar_offset=i, indirect_dim=0)


def block_view(weight, expert, row, column, width):
    """128 rows of a weight [E, R, C] in HBM from `row` on, `width` columns."""
    return weight[expert, row : row + P, column : column + width]


def values_view(values, i, t):
    """What values [128, tiles, n] in SBUF hold of tile i + t: [128, n]."""
    num_tiles, n = values.shape[1], values.shape[2]
    return values.ap([[num_tiles * n, P], [1, n]], offset=t * n, scalar_offset=i, indirect_dim=1)


def take(values, i, t, engine):
    """A copy of `values_view`, at an address that is known beforehand."""
    taken = nl.ndarray((P, values.shape[2]), dtype=values.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=taken, src=values_view(values, i, t), engine=engine)
    return taken


def load(tensor):
    """A small tensor, whole, into SBUF."""
    loaded = nl.ndarray(tensor.shape, dtype=tensor.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=tensor)
    return loaded


def load_tile(dst, tensor, column, i, t):
    """dst [128, width] in SBUF = `tile_view`."""
    nisa.dma_copy(dst=dst, src=tile_view(tensor, column, dst.shape[1], i, t))


def gather_tile(dst, x, column, ids, i, t):
    """dst [128, width] = columns of the rows of x [N, H] that the ids of tile i + t name; zeros where an id is N."""
    tile_ids = take(ids, i, t, nisa.engine.gpsimd)
    nisa.memset(dst=dst, value=0.0, engine=nisa.engine.gpsimd)
    gather(dst, x, column, tile_ids)


def gather(dst, rows, column, ids):
    """dst [128, width] = columns of the rows [R, C] in HBM that ids [128, 1] name; where an id is R, dst stays."""
    named = rows.ap([[rows.shape[1], P], [1, dst.shape[1]]], offset=column, vector_offset=ids, indirect_dim=0)
    nisa.dma_copy(dst=dst, src=named, oob_mode=nisa.oob_mode.skip)


def load_blocks(dst, weight, expert, row, column):
    """dst [128, blocks, n] in SBUF: a window of a weight [E, R, C], its row 128 b + p at dst[p, b]."""
    for b in range(dst.shape[1]):
        nisa.dma_copy(dst=dst[:, b, :], src=block_view(weight, expert, row + b * P, column, dst.shape[2]))


def store_blocks(weight, expert, row, column, total):
    """What `load_blocks` would load becomes `total`, fp32, rounded."""
    for b in range(total.shape[1]):
        rounded = nl.ndarray((P, total.shape[2]), dtype=weight.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rounded, src=total[:, b, :], engine=nisa.engine.scalar)
        nisa.dma_copy(dst=block_view(weight, expert, row + b * P, column, total.shape[2]), src=rounded)


def load_transposed(weight, expert, row, num_rows, column, num_columns):
    """A window of a weight [E, R, C] with its columns on partitions: [128, num_columns / 128, num_rows]."""
    loaded = nl.ndarray((P, num_columns // P, num_rows), dtype=weight.dtype, buffer=nl.sbuf)
    for b in range(num_columns // P):
        window = weight[expert, row : row + num_rows, column + b * P : column + (b + 1) * P]
        nisa.dma_transpose(dst=loaded[:, b, :], src=window)
    return loaded


# Loops


def loop_over_tiles(registers, bounds, expert, body):
    """body(i, 2) for tiles i and i + 1, pair after pair, then body(i, 1) if one is left.

    bounds: [1, 3E] in SBUF: an expert's first tile, the end of its pairs, the end of its tiles.
    """
    first, pairs_end, end = registers
    nisa.register_load(first, bounds[0:1, 3 * expert : 3 * expert + 1])
    nisa.register_load(pairs_end, bounds[0:1, 3 * expert + 1 : 3 * expert + 2])
    nisa.register_load(end, bounds[0:1, 3 * expert + 2 : 3 * expert + 3])

    def pair(i):
        body(i, 2)

    def single(i):
        body(i, 1)

    nl.fori_loop(first, pairs_end, pair, step=2)
    nl.fori_loop(pairs_end, end, single)


# Arithmetic


def transpose(dst, src):
    """dst [128, n, 128] in SBUF: dst[:, b, :] is the transpose of src[:, 128 b : 128 (b + 1)], src [128, 128 n]."""
    num_blocks = src.shape[1] // P
    per_bank = BANK // P * (1 if src.dtype == nl.float32 else 2)
    for start in range(0, num_blocks, per_bank):
        count = min(per_bank, num_blocks - start)
        bank = nl.ndarray((P, count, P), dtype=src.dtype, buffer=nl.psum)
        for b in range(count):
            nisa.nc_transpose(dst=bank[:, b, :], data=src[:, (start + b) * P : (start + b + 1) * P])
        nisa.tensor_copy(dst=dst[:, start : start + count, :], src=bank, engine=nisa.engine.vector)


def matmul(dst, left_T, right):
    """dst [128, n] in PSUM = left @ right; left_T [128, K / 128, 128] and right [128, K / 128, n] in SBUF."""
    for b in range(left_T.shape[1]):
        nisa.nc_matmul(dst=dst, stationary=left_T[:, b, :], moving=right[:, b, :], accumulate=b > 0)


def exchange(both, core):
    """both [128, n, ...] in SBUF: core 0 sends the first half of the n and receives the second, core 1 the reverse."""
    size = both.shape[1] // 2
    nisa.sendrecv(
        src=both[:, core * size : (core + 1) * size],
        dst=both[:, (1 - core) * size : (2 - core) * size],
        send_to_rank=1 - core,
        recv_from_rank=1 - core,
        pipe_id=0,
    )


def slice_sums(num_slices, num_tiles, half):
    """For each slice but the last, what the slices so far sum to, in fp32: each read after a loop that wrote it."""
    sums = []
    for _ in range(num_slices - 1):
        sums.append(nl.ndarray((num_tiles, P, half), dtype=nl.float32, buffer=nl.private_hbm))
    return sums


def store_product(out, sums, index, i, t, left_T, right, core):
    """This core's half of the columns of out's tile i + t: left @ right, added to those of the slices before.

    left_T: [128, K / 128, 128], right: [128, K / 128, H / 2]. Until the last slice the sum goes to `sums`.
    """
    half = right.shape[2]
    last = index == len(sums)
    chunk = 2 * BANK  # columns: rows of 2 KiB in bf16, which the DMA engines want
    for start in range(0, half, chunk):
        width = min(chunk, half - start)
        rows = nl.ndarray((P, width), dtype=out.dtype if last else nl.float32, buffer=nl.sbuf)
        if index > 0:
            before = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.sbuf)
            load_tile(before, sums[index - 1], start, i, t)
        for column in range(0, width, BANK):
            end = min(column + BANK, width)
            product = nl.ndarray((P, end - column), dtype=nl.float32, buffer=nl.psum)
            matmul(product, left_T, right[:, :, start + column : start + end])
            if index > 0:
                nisa.tensor_tensor(dst=rows[:, column:end], data1=before[:, column:end], data2=product, op=nl.add)
            else:
                nisa.tensor_copy(dst=rows[:, column:end], src=product, engine=nisa.engine.scalar)
        if last:
            nisa.dma_copy(dst=tile_view(out, core * half + start, width, i, t), src=rows)
        else:
            nisa.dma_copy(dst=tile_view(sums[index], start, width, i, t), src=rows)


def add_outer_product(total, left, right):
    """total += left^T @ right, summed over tokens.

    total: [128, M / 128, n] fp32 in SBUF; left: [128, tiles, M], right: [128, tiles, n], tokens on partitions.
    """
    num_columns = total.shape[2]
    for b in range(total.shape[1]):
        for start in range(0, num_columns, BANK):
            end = min(start + BANK, num_columns)
            product = nl.ndarray((P, end - start), dtype=nl.float32, buffer=nl.psum)
            for t in range(left.shape[1]):
                rows = left[:, t, b * P : (b + 1) * P]
                nisa.nc_matmul(dst=product, stationary=rows, moving=right[:, t, start:end], accumulate=t > 0)
            part = total[:, b, start:end]
            nisa.tensor_tensor(dst=part, data1=part, data2=product, op=nl.add)
