"""What the NKI kernels would cost on Trainium2, as the interpreter in tests/nki/ counts it. Nothing here ran on one.

    python -m benchmarks.nki_cost                        # the table of docs/kernels.md, about three minutes
    python -m benchmarks.nki_cost --model Qwen3-30B-A3B --rows 256

A line is an expert's share of a launch on one of the two NeuronCores of a logical core, in microseconds of each
engine; the mean of two experts, one with 16 rows fewer than `rows`, one with 16 more, as random routing gives: of 256
rows, one has 2 tiles of 128 and one 3. The engines work side by side, so that a kernel needs at least the time of the
busiest; waiting of one for another is not in it. Ideal is the tensor engine's time for the FLOPs of the kernel's
matmuls at its peak: of all rows in tiles, and of the routed rows, without the tiles' padding. The sums over choices
have no ideal of matmuls, for moving the rows bounds them: `combine` forward and `sum`, which ends the experts'
backward, for 128 tokens of 8 choices, and `combine` backward for a tile of slots.
"""

import argparse

import torch

import tests.nki
from qwen3_trn.dispatch import assign_slots, num_slots

tests.nki.install()

from qwen3_trn.kernels import nki_combine, nki_moe  # noqa: E402
from qwen3_trn.kernels.nki_combine_kernels import combine_backward, combine_forward, sum_rows  # noqa: E402
from qwen3_trn.kernels.nki_moe_kernels import experts_backward, experts_forward  # noqa: E402

MODELS = {"Qwen3-30B-A3B": (2048, 768), "Qwen3-235B-A22B": (4096, 1536)}  # H, I; both route to 8 of 128 experts
# Rows of an expert whose ranks hold 4,096 tokens each: from the tokens of one rank, of two, of eight.
ROWS = (256, 512, 2048)
ENGINES = ("tensor", "vector", "scalar", "gpsimd", "dma")
PEAK = 2 * 128 * 128 * 2.4e9  # FLOP/s of a core's tensor engine in bf16: 128 x 128 multiply-adds at 2.4 GHz
COLUMNS = ("model", "rows", "kernel", *ENGINES, "bound", "x ideal of tiles", "of rows", "DMA MB", "SBUF KiB", "PSUM")


def measure_experts(model: str, rows: int) -> list[str]:
    """The table's lines, forward and backward, for experts of about `rows` rows."""
    hidden, intermediate = MODELS[model]
    counts = torch.tensor([rows - 16, rows + 16])
    slots = assign_slots(torch.repeat_interleave(torch.arange(2, dtype=torch.int32), counts)[:, None], 2, nki_moe.TILE)
    indices = nki_moe.tile_indices(*slots)
    tiles = int(slots.group_ends[-1]) // nki_moe.TILE
    x = random(2 * rows, hidden)
    weights = (random(2, intermediate, hidden), random(2, intermediate, hidden), random(2, hidden, intermediate))
    slices = [
        nki_moe.count_slices(hidden, intermediate, num_slots(4096, 8, 16, nki_moe.TILE), 16, 2, bytes_of)
        for bytes_of in (nki_moe.forward_bytes, nki_moe.backward_bytes)
    ]
    with tests.nki.record() as forward:
        y, gate, up = experts_forward[2](x, *indices, *weights, slices[0])
    with tests.nki.record() as backward:
        experts_backward[2](random(*y.shape), x, *indices, *weights, gate, up, slices[1])

    lines = []
    for kernel, record, matmuls in (("forward", forward, 3), ("backward", backward, 6)):
        flops = matmuls * 2 * hidden * intermediate / 2  # of a row, on one of two cores
        ideals = [flops * count / 2 / PEAK * 1e6 for count in (tiles * nki_moe.TILE, 2 * rows)]
        ratios = [f"{max(record.time_us.values()) / 2 / ideal:.2f}" for ideal in ideals]
        lines.append(line(model, f"{rows:,}", kernel, record, 2, ratios))
    return lines


def measure_sums(model: str) -> list[str]:
    """The table's lines of the sums over choices: of 256 tokens, half on each core; backward of half of each slot."""
    hidden, _ = MODELS[model]
    num_tokens, k = 256, 8
    every = torch.arange(k, dtype=torch.int32).repeat(num_tokens, 1)
    slots = assign_slots(every, k, nki_moe.TILE, capacity=num_tokens)  # without pads
    num_slots = num_tokens * k
    y, weights, identity = random(num_slots, hidden), torch.rand(num_tokens, k), torch.eye(128).bfloat16()
    indices = nki_moe.token_tiles(slots.slot_of_choice, pad=num_slots)
    with tests.nki.record() as forward:
        combine_forward[2](y, indices, nki_moe.token_tiles(weights, pad=0), identity)
    with tests.nki.record() as backward:
        combine_backward[2](
            random(num_tokens, hidden),
            nki_moe.row_tiles(y),
            nki_moe.token_ids(*slots[:2]),
            nki_moe.slot_tiles(weights.flatten()[slots.choice_of_slot]),
            nki_combine.count_used(slots.choice_of_slot, num_slots),
        )
    with tests.nki.record() as total:
        sum_rows[2](y, indices, identity)
    parts = {"combine forward": (forward, 1), "combine backward": (backward, num_slots // 128), "sum": (total, 1)}
    return [line(model, "128", kernel, record, count, ["", ""]) for kernel, (record, count) in parts.items()]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).mul(0.03).bfloat16()


def line(model: str, rows: str, kernel: str, record, parts: int, ratios: list[str]) -> str:
    """A line of the table; times and bytes are divided by `parts`."""
    times = [f"{record.time_us[engine] / parts:.1f}" for engine in ENGINES]
    memory = [f"{record.dma_bytes / parts / 1e6:.1f}", f"{record.sbuf_peak / 1024:.0f}", str(record.psum_peak)]
    return "| " + " | ".join([model, rows, kernel, *times, record.bound, *ratios, *memory]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS, help="of an expert")
    args = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |")
    print("| " + " | ".join(["---"] * 3 + ["---:"] * 5 + ["---"] + ["---:"] * 5) + " |")
    for model in args.model:
        for rows in args.rows:
            print(*measure_experts(model, rows), sep="\n", flush=True)
        print(*measure_sums(model), sep="\n", flush=True)


if __name__ == "__main__":
    main()
