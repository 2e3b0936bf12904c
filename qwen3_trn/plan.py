"""What a run needs, before a machine is rented: `train.py --plan --plan-ranks N` prints it and exits.

    python train.py --plan --plan-ranks 64 --config configs/qwen3-8b-trn2.48xlarge.toml

One step of the real code is counted without weights, accelerator or other processes: dry_run.py. Layers that are alike
are counted at two depths, and the line through both is extended.

Exact: weights, gradients, optimizer state, collectives. An estimate: the working memory, which is that of PyTorch's
CPU operations run one by one. torch.compile usually needs less; what a device's runtime takes for itself is unknown.
"""

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen3_trn import dispatch, launch, start
from qwen3_trn.config import Qwen3Config, TrainConfig
from qwen3_trn.device import TRAINIUM2, TRAINIUM2_MEMORY
from qwen3_trn.dry_run import count_step
from qwen3_trn.errors import UserError
from qwen3_trn.loss import chunk_rows
from qwen3_trn.metrics import format_bytes, format_count
from qwen3_trn.model import Qwen3ForCausalLM


@dataclass(frozen=True)
class Plan:
    """Bytes are of one device, rank 0's, which holds the most; collectives are those that it takes part in a step."""

    num_ranks: int
    num_parameters: int
    num_active_parameters: int
    weights: int
    gradients: int
    optimizer: int
    working: int  # the most beside them at any time of a step: activations, gathered weights, logits
    gathered_block: int  # of `working`: the largest block of weights that FSDP gathers, in the compute dtype
    logits_chunk: int  # of `working`: fp32
    collectives: dict[tuple[str, str], tuple[int, int]]  # (axis, operation) -> count and bytes, gathered or unreduced
    rows_over_ideal: float | None  # rows that the experts' buffers have, over the rows that balanced routing fills
    micro_batch_size: int
    num_micro_steps: int
    flops_per_token: float
    flops_per_step: float
    checkpoint: int
    export: int

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def memory(self) -> int:
        return self.state + self.working

    @property
    def fits(self) -> bool:
        return self.memory <= TRAINIUM2_MEMORY


def make_plan(config: Qwen3Config, args: TrainConfig, num_ranks: int) -> Plan:
    """Count what a run of `args` needs on num_ranks. Raises UserError for what the run would refuse."""
    start.check_flags(args, config)
    if num_ranks % args.tp == 0:  # else the mesh says so
        start.split_batch(args, num_ranks // args.tp)
    TRAINIUM2.compile_backend(args.compile, args.ac)
    depth = config.num_hidden_layers
    if depth > 4 and len({config.is_moe_layer(layer) for layer in range(depth)}) == 1:
        # Not fewer: the last layers' weights and gradients are still on their way when the one before needs its own.
        three, four = (
            count_step(dataclasses.replace(config, num_hidden_layers=layers), args, num_ranks) for layers in (3, 4)
        )
        counts = {key: three[key] + (depth - 3) * (four[key] - three[key]) for key in four}
    else:
        counts = dict(count_step(config, args, num_ranks))
    peak = max(number for key, number in counts.items() if key[0] == "peak")
    state = counts["weights"] + counts["gradients"] + counts["optimizer"]
    keys = {key[1:3] for key in counts if key[0] == "collectives"}

    with torch.device("meta"):
        whole = Qwen3ForCausalLM(config)
    micro_batch_size, num_micro_steps = start.split_batch(args, num_ranks // args.tp)
    num_tokens = micro_batch_size * args.seq_len
    flops_per_token = whole.flops_per_token(args.seq_len)
    return Plan(
        num_ranks=num_ranks,
        num_parameters=whole.num_parameters(),
        num_active_parameters=whole.num_active_parameters(),
        weights=counts["weights"],
        gradients=counts["gradients"],
        optimizer=counts["optimizer"],
        working=peak - state,
        gathered_block=counts["gathered_block"],
        logits_chunk=4 * chunk_rows(num_tokens, config.vocab_size // args.tp) * config.vocab_size // args.tp,
        collectives={
            key: (counts["collectives", *key, "count"], counts["collectives", *key, "bytes"]) for key in sorted(keys)
        },
        rows_over_ideal=_rows_over_ideal(config, args, num_tokens // args.tp) if config.num_experts else None,
        micro_batch_size=micro_batch_size,
        num_micro_steps=num_micro_steps,
        flops_per_token=flops_per_token,
        flops_per_step=flops_per_token * args.global_batch_size * args.seq_len,
        checkpoint=12 * whole.num_parameters(),  # fp32: weights and two moments
        export=2 * whole.num_parameters(),
    )


def _rows_over_ideal(config: Qwen3Config, args: TrainConfig, num_tokens: int) -> float:
    """Slots for one source rank's tokens, over the choices of them that balanced routing sends to this rank."""
    block = TRAINIUM2.expert_block
    num_here, k = config.num_experts // args.ep, config.num_experts_per_tok
    capacity = None
    if args.moe_capacity is not None:
        capacity = dispatch.expert_capacity(num_tokens, k, config.num_experts, args.moe_capacity, block)
    return dispatch.num_slots(num_tokens, k, num_here, block, capacity) * args.ep / (num_tokens * k)


# ---------------------------------------------------------------------------------------------- what to do, and print


def nearest_fit(config: Qwen3Config, args: TrainConfig, plan: Plan) -> tuple[str, Plan] | None:
    """The first change that makes a plan fit, as flags to add, and the plan then; None where none was found.

    In this order: smaller micro-batches, recomputation, more tensor parallelism, more ranks.
    """
    ranks, least = plan.num_ranks, {"micro_batch_size": 1, "ac": "full"}
    changes: list[dict[str, Any]] = []
    if plan.state < TRAINIUM2_MEMORY:  # otherwise only ranks help
        sizes = [size for size in range(plan.micro_batch_size - 1, 0, -1) if plan.micro_batch_size % size == 0]
        changes += [{"micro_batch_size": size} for size in sizes]
        levels = ["none", "selective", "full"]
        changes += [{"ac": level} for level in levels[levels.index(args.ac) + 1 :]]
        changes += [least]
        kv_heads = config.num_key_value_heads
        changes += [{**least, "tp": tp} for tp in range(args.tp + 1, kv_heads + 1) if kv_heads % tp == 0]
    for factor in (2, 4, 8, 16, 32, 64):
        changes += [{"plan_ranks": factor * ranks}, {"plan_ranks": factor * ranks, **least}]
    for change in changes:
        new_ranks = change.get("plan_ranks", ranks)
        if args.dp_shard != -1 and ("tp" in change or "plan_ranks" in change):
            change["dp_shard"] = -1  # the given number would not fit the new ranks
        tried = dataclasses.replace(args, **change)
        data_ranks = new_ranks // tried.tp
        rows = data_ranks * (tried.micro_batch_size or max(1, args.global_batch_size // data_ranks))
        if args.global_batch_size % rows:
            change["global_batch_size"] = -(-args.global_batch_size // rows) * rows
            tried = dataclasses.replace(tried, **change)
        try:
            new = make_plan(config, tried, new_ranks)
        except UserError:  # a layout that cannot be, or that nobody has tried
            continue
        if new.fits:
            changed = {key: value for key, value in change.items() if value != getattr(args, key)}
            return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in changed.items()), new
    return None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def describe(plan: Plan, config: Qwen3Config, args: TrainConfig, free_disk: int) -> list[str]:
    """The lines that --plan prints."""
    ranks = plan.num_ranks
    lines = [
        f"model      {config.model_type}, {format_count(plan.num_parameters)} parameters, "
        f"{format_count(plan.num_active_parameters)} in the matmuls of a token",
        f"layout     {ranks} ranks: dp_replicate {args.dp_replicate} x dp_shard "
        f"{ranks // args.tp // args.dp_replicate} x tp {args.tp}{f', ep {args.ep}' if config.num_experts else ''}; "
        f"recompute {args.ac}",
        f"step       {args.global_batch_size} rows = {format_count(args.global_batch_size * args.seq_len)} tokens: "
        f"{ranks // args.tp} data ranks x {plan.num_micro_steps} micro-batches x {plan.micro_batch_size} rows",
        f"FLOPs      {plan.flops_per_token / 1e9:,.1f} G a token, {plan.flops_per_step / 1e12:,.1f} T a step",
    ]
    if plan.rows_over_ideal is not None:
        lines += [f"experts    buffers have {plan.rows_over_ideal:.2f} times the rows that balanced routing fills"]
    lines += ["", f"{'memory':<28}{'rank 0':>14}{f'times {ranks}':>16}"]
    for name in ("weights", "gradients", "optimizer"):
        number = getattr(plan, name)
        lines += [f"  {name:<26}{_gib(number):>14}{_gib(number * ranks):>16}"]
    lines += [f"  {'activations, buffers ~':<26}{_gib(plan.working):>14}{_gib(plan.working * ranks):>16}"]
    for name, number in (("gathered weights", plan.gathered_block), ("logits chunk", plan.logits_chunk)):
        lines += [f"    {'of it, ' + name:<24}{_gib(number):>14}"]
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines += [
        f"  {'sum ~':<26}{_gib(plan.memory):>14}{_gib(plan.memory * ranks):>16}",
        f"  {verdict} in the {_gib(TRAINIUM2_MEMORY)} of a Trainium2 logical core "
        f"({plan.memory / TRAINIUM2_MEMORY:.0%}); rank 0 holds the most; ~ estimate",
        "",
        f"{'collectives a step':<28}{'count':>14}{'bytes in all':>16}{'mean':>12}",
    ]
    for (axis, operation), (count, num_bytes) in plan.collectives.items():
        name = f"{axis} {operation}"
        lines += [f"  {name:<26}{count:>14}{format_bytes(num_bytes):>16}{format_bytes(num_bytes / count):>12}"]
    at_once = args.keep + 1  # a new one is written before the oldest goes
    enough = "enough" if at_once * plan.checkpoint + plan.export <= free_disk else "NOT ENOUGH"
    return [
        *lines,
        "",
        f"disk       up to {at_once} checkpoints of {format_bytes(plan.checkpoint)}, export "
        f"{format_bytes(plan.export)}; free: {format_bytes(free_disk)}, {enough}",
    ]


def print_plan(args: TrainConfig) -> None:
    """Print the plan of a run; under torchrun one process does."""
    if launch.RANK != 0:
        return
    folder, _ = start.find_model(args)
    config = Qwen3Config.from_pretrained(folder)
    plan = make_plan(config, args, args.plan_ranks or launch.WORLD_SIZE)
    out = Path(args.out or "runs").absolute()
    existing = next(parent for parent in (out, *out.parents) if parent.exists())
    print(f"plan       {folder}", *describe(plan, config, args, shutil.disk_usage(existing).free), sep="\n")
    if args.kernel:
        print(f"kernels    planned with PyTorch's, not with --kernel {' '.join(args.kernel)}")
    if not plan.fits:
        found = nearest_fit(config, args, plan)
        if found:
            print(f"to fit     {found[0]}   ({_gib(found[1].memory)} a device)")
        else:
            print("to fit     nothing tried helps: micro-batches of one row, --ac full, more --tp, 64 times the ranks")
