"""Train Qwen3 or Qwen3-MoE. The whole loop is here; read it from the bottom up.

torchrun --nproc_per_node=2 train.py                                     # the bundled miniature, from random weights
torchrun --nproc_per_node=4 train.py --init hub --model Qwen/Qwen3-0.6B --data my.jsonl
python train.py --init path/to/Qwen3-0.6B --data my.txt --steps 100      # one process works too
python train.py --help
"""

import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from export import export
from qwen3_trn import checkpoint, hub, launch, plan
from qwen3_trn.config import Qwen3Config, TrainConfig, parse_args, parse_size
from qwen3_trn.data import PackedData, PackedSource, cache_folder, find_sources, open_cache, tokenize
from qwen3_trn.device import Device
from qwen3_trn.errors import UserError
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.metrics import RunLog, format_count, write_run_files
from qwen3_trn.model import PADDING_DOCUMENT, Qwen3ForCausalLM, parameter_shapes
from qwen3_trn.moe import RouterStats, balance_loss, z_loss
from qwen3_trn.parallel import build_mesh, build_model, check_layout
from qwen3_trn.titan import clip_grad_norm_

TINY = Path(__file__).parent / "assets" / "tiny"


def print0(*lines: str) -> None:
    if launch.RANK == 0:
        print(*lines, sep="\n", flush=True)


# ------------------------------------------------------------------------------------------------- what to train on


def find_model(args: TrainConfig) -> tuple[Path, str | None]:
    """(folder with config.json, tokenizer and, unless --init random, weights; the hub's commit if it is from there)."""
    if args.init not in ("random", "hub"):
        if args.model is not None:
            raise UserError(f"--init {args.init} names the model's folder already; remove --model {args.model}.")
        if not Path(args.init).is_dir():
            raise UserError(f"--init is {args.init!r}; expected random, hub, or an existing model folder.")
        return Path(args.init), None
    model = args.model or (str(TINY) if args.init == "random" else "Qwen/Qwen3-0.6B")
    if Path(model).is_dir():
        return Path(model), None
    print0(f"fetching {model} from the hub")
    with_weights = args.init == "hub" and not args.plan
    folder, commit = launch.run_once(
        "download", lambda: [str(x) for x in hub.download(model, args.revision, with_weights)], per_node=True
    )
    return Path(folder), commit


def check_flags(args: TrainConfig, config: Qwen3Config) -> None:
    """Raises UserError for settings that the model cannot have."""
    if args.seq_len > config.max_position_embeddings:
        raise UserError(
            f"--seq-len {args.seq_len} is more than the model's max_position_embeddings "
            f"({config.max_position_embeddings})."
        )
    if args.moe_capacity and not config.num_experts:
        raise UserError("--moe-capacity needs a model with experts; this one is dense.")
    if (args.router_aux_loss_coef not in (0, "config") or args.router_z_loss_coef) and not config.num_experts:
        raise UserError(
            "--router-aux-loss-coef and --router-z-loss-coef are for models with experts; this one is dense."
        )


def split_batch(args: TrainConfig, data_ranks: int) -> tuple[int, int]:
    """(rows of a micro-batch, micro-batches a step) of each data rank. Raises UserError if they do not divide."""
    step = data_ranks * (args.micro_batch_size or 1)
    if args.global_batch_size % step:
        micro = f" x --micro-batch-size {args.micro_batch_size}" if args.micro_batch_size else ""
        raise UserError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of {data_ranks} data ranks{micro}; "
            f"{max(1, args.global_batch_size // step) * step} would be."
        )
    micro_batch_size = args.micro_batch_size or args.global_batch_size // data_ranks
    num_micro_steps = args.global_batch_size // (data_ranks * micro_batch_size)
    return micro_batch_size, num_micro_steps


def open_data(args: TrainConfig, config: Qwen3Config, tokenizer: Path) -> PackedData:
    """Tokenise --data once a node, into a cache that later runs share, and open it as packed rows."""
    sources = find_sources(args.data)
    caches = launch.run_once(
        "tokenize",
        lambda: [str(tokenize(source, tokenizer, cache_folder())) for source in sources],
        per_node=True,
    )
    packed = [PackedSource(open_cache(Path(cache)), args.seq_len, args.seed) for cache in caches]
    data = PackedData(packed, [source.weight for source in sources])
    if data.max_token_id >= config.vocab_size:
        raise UserError(
            f"token id {data.max_token_id}, in {data.max_token_file}, is beyond the model's vocabulary of "
            f"{config.vocab_size} rows: the tokenizer in {tokenizer} is not this model's."
        )
    return data


def resolve(args: TrainConfig, config: Qwen3Config, data: PackedData, micro_batch_size: int) -> TrainConfig:
    """Fill in the settings whose default depends on something: what is printed, saved and used from here on."""
    steps = args.steps or 200
    if args.epochs is not None:
        steps = max(1, round(args.epochs * data.rows_per_epoch / args.global_batch_size))
    lr = args.lr or (1e-3 if args.init == "random" else 1e-5)
    if args.min_lr is not None and args.min_lr > lr:
        raise UserError(f"--min-lr {args.min_lr:g} is above --lr {lr:g}.")
    if args.warmup_steps is not None and args.warmup_steps > steps:
        raise UserError(f"--warmup-steps {args.warmup_steps} is more than the run's {steps} steps.")
    aux_coef = config.router_aux_loss_coef if args.router_aux_loss_coef == "config" else args.router_aux_loss_coef
    return dataclasses.replace(
        args,
        steps=steps,
        epochs=None,
        lr=lr,
        min_lr=lr / 10 if args.min_lr is None else args.min_lr,
        warmup_steps=min(100, steps // 10) if args.warmup_steps is None else args.warmup_steps,
        router_aux_loss_coef=aux_coef,
        micro_batch_size=micro_batch_size,
    )


def micro_batches(
    data: PackedData, position: int, num_rows: int, micro_batch_size: int, num_ranks: int, rank: int
) -> list[dict[str, np.ndarray]]:
    """This rank's share of the `num_rows` rows from `position` on in the data's order, a dict of [B, T] a micro-step.

    Micro-step i of all ranks together holds consecutive rows, so the order of rows does not depend on ranks.
    """
    firsts = range(position + rank * micro_batch_size, position + num_rows, micro_batch_size * num_ranks)
    return [data.batch(range(first, first + micro_batch_size))._asdict() for first in firsts]


def count_tokens(rows: list[dict[str, np.ndarray]], tp: int) -> tuple[int, int]:
    """(tokens that are not padding, supervised tokens) of the step, over all ranks; tp of them share the same rows."""
    counts = torch.tensor(
        [
            sum(int((row["document_ids"] != PADDING_DOCUMENT).sum()) for row in rows),
            sum(int((row["labels"] != IGNORE_INDEX).sum()) for row in rows),
        ]
    )
    dist.all_reduce(counts)
    return tuple((counts // tp).tolist())


# ---------------------------------------------------------------------------------------------------------- one step


def learning_rate(step: int, settings: TrainConfig) -> float:
    """The rate of step 1 to settings.steps: linear warm-up to lr, then the schedule, which ends at min_lr."""
    lr, min_lr, warmup_steps = settings.lr, settings.min_lr, settings.warmup_steps
    if step <= warmup_steps:
        return lr * step / warmup_steps
    if settings.schedule == "constant":
        return lr
    decay_steps = settings.steps - warmup_steps
    if settings.schedule == "wsd":
        decay_steps = min(decay_steps, max(1, settings.steps // 5))
    progress = max(0.0, 1 - (settings.steps - step) / decay_steps)
    shape = (1 + math.cos(math.pi * progress)) / 2 if settings.schedule == "cosine" else 1 - progress
    return min_lr + (lr - min_lr) * shape


def build_optimizer(model: Qwen3ForCausalLM, args: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices (embedding and experts among them) and leaves norm weights and biases alone."""
    names = {"experts": [], "matrices": [], "norms and biases": []}
    for name, parameter in model.named_parameters():
        # Experts apart, because under expert parallelism they live on another mesh, and the fused step takes one.
        kind = "norms and biases" if parameter.dim() < 2 else "experts" if ".experts." in name else "matrices"
        names[kind].append(parameter)
    groups = [
        {"name": name, "params": params, "weight_decay": 0.0 if name == "norms and biases" else args.weight_decay}
        for name, params in names.items()
        if params
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=args.adam_betas, eps=args.adam_eps, fused=True)


def sum_over_ranks(stats: RouterStats) -> RouterStats:
    """The router statistics of one micro-step over all ranks, without gradient, in one collective."""
    flat = torch.cat([tensor.detach().flatten() for tensor in stats])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in stats])
    return RouterStats(*(part.view_as(tensor) for part, tensor in zip(parts, stats, strict=True)))


def forward_backward(
    model: Qwen3ForCausalLM,
    batches: list[dict[str, Tensor]],
    num_supervised: int,
    aux_coef: float = 0.0,
    z_coef: float = 0.0,
    tp: int = 1,
) -> tuple[dict[str, Tensor], RouterStats | None]:
    """Accumulate the gradients of one step over this rank's micro-batches.

    batches: input_ids, labels, positions, document_ids, each [B, T] on the device. num_supervised: of the whole step,
    over all ranks and micro-batches. The cross-entropy is a sum divided by it, so it does not depend on how the step
    is split; the auxiliary losses are means over micro-steps. tp: ranks that share a micro-batch and all return its
    loss, of which each then reports a part.

    Returns this rank's share of each loss that is computed ("loss" is the cross-entropy), and the router statistics
    summed over micro-batches (None for a dense model).
    """
    losses: dict[str, Tensor] = {}
    totals = None
    for batch in batches:
        terms = model.loss_terms(**batch)
        parts = {"loss": terms.cross_entropy / num_supervised}
        total = parts["loss"]
        if aux_coef or z_coef:
            global_stats = sum_over_ranks(terms.router)
            if aux_coef:
                parts["aux_loss"] = balance_loss(terms.router, global_stats) / len(batches)
                total = total + aux_coef * parts["aux_loss"]
            if z_coef:
                parts["z_loss"] = z_loss(terms.router, global_stats) / len(batches)
                total = total + z_coef * parts["z_loss"]
        total.backward()
        parts["loss"] = parts["loss"] / tp
        losses = {name: losses.get(name, 0) + part.detach() for name, part in parts.items()}
        if terms.router is not None:
            stats = RouterStats(*(tensor.detach() for tensor in terms.router))
            totals = stats if totals is None else RouterStats(*map(torch.add, totals, stats))
    return losses, totals


def read_step(losses: dict[str, Tensor], grad_norm: Tensor, totals: RouterStats | None) -> dict[str, Any]:
    """Sum a step's numbers over ranks and bring them to the host: the step's one synchronisation."""
    flat = torch.cat([torch.stack(list(losses.values())), *(tensor.flatten() for tensor in totals or ())])
    dist.all_reduce(flat)
    norm, *numbers = torch.cat([grad_norm.reshape(1).to(flat), flat]).tolist()
    values: dict[str, Any] = {**dict(zip(losses, numbers, strict=False)), "grad_norm": norm}
    if totals is not None:
        ends = np.cumsum([tensor.numel() for tensor in totals])[:-1]
        tokens, _, _, entropy, num_tokens, dropped = np.split(np.array(numbers[len(losses) :]), ends)
        tokens = tokens.reshape(totals.tokens_per_expert.shape)  # [MoE layers, E]
        values |= {
            "load_max_over_mean": (tokens.max(1) / tokens.mean(1)).tolist(),
            "dead_experts": (tokens == 0).mean(1).tolist(),
            "router_entropy": (entropy / num_tokens).tolist(),
        }
        if dropped.any():
            values["dropped_choices"] = int(dropped.sum())
    return values


# ----------------------------------------------------------------------------------------------------------- the run


def choose_out(args: TrainConfig, model_folder: Path) -> Path:
    """Make the run's folder: --out, which must not hold a run, or a fresh runs/NAME-K."""
    if args.out is not None:
        out = Path(args.out)
        metrics = out / "metrics.jsonl"
        if (out / "checkpoints").exists() or (metrics.exists() and metrics.stat().st_size):
            raise UserError(f"--out {out} already holds a run. Name another folder, leave --out away, or remove it.")
        out.mkdir(parents=True, exist_ok=True)
        return out
    number = 1
    while True:
        out = Path("runs") / f"{model_folder.resolve().name}-{number}"
        try:
            out.mkdir(parents=True)
            return out
        except FileExistsError:
            number += 1


def check_loaded(loss: float, config: Qwen3Config) -> None:
    """Published weights start far below ln(vocabulary), the loss of a model that knows nothing."""
    ln_vocab = math.log(config.vocab_size)
    print0(f"first loss {loss:.4f}; random weights would give about ln({config.vocab_size}) = {ln_vocab:.2f}")
    if not math.isfinite(loss):
        raise UserError(f"the first loss is {loss}: the loaded weights hold values that are not finite, or overflow.")
    if loss >= 0.95 * ln_vocab:
        raise UserError(
            f"the first loss is {loss:.2f}, and ln(vocabulary) is {ln_vocab:.2f}: the loaded weights look random. "
            "Either they do not belong to this config and tokenizer, or the data is nothing like what they were "
            "trained on. If they are meant to be random, say --no-load-check."
        )


def sample_text(model: Qwen3ForCausalLM, data: PackedData, tokenizer_folder: Path, device: Device) -> str:
    """The data's first words and how the model goes on from them, greedily. Every rank must call it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    prompt = torch.as_tensor(data.sources[0].cache.tokens[:16].astype(np.int64)).to(
        device.torch_device, device.index_dtype
    )
    # 64 tokens in all: sequence parallelism cuts them over the tp ranks.
    ids = model.generate(prompt[None], max_new_tokens=64 - len(prompt))[0].tolist()
    return f"{tokenizer.decode(ids[:16])} [...] {tokenizer.decode(ids[16:])}"


def train(args: TrainConfig) -> Path:
    """Run to the end and return the last checkpoint's folder."""
    device = Device()
    launch.init_process_group(device.backend, args.dist_timeout)
    device.start(launch.LOCAL_RANK, launch.LOCAL_WORLD_SIZE)

    # Whatever can be refused is refused here, before anything is written and before a weight is read.
    model_folder, commit = find_model(args)
    config = Qwen3Config.from_pretrained(model_folder)
    num_ranks = launch.WORLD_SIZE
    dims = build_mesh(num_ranks, args.dp_replicate, args.dp_shard, args.tp, args.ep)
    check_layout(config, dims, args.seq_len)
    check_flags(args, config)
    compile_backend = device.compile_backend(args.compile, args.ac)
    data_ranks = num_ranks // args.tp
    data_rank = launch.RANK // args.tp
    micro_batch_size, num_micro_steps = split_batch(args, data_ranks)
    pretrained = args.init != "random"
    if pretrained:
        weights = checkpoint.HFFolder(model_folder)
        weights.check(config, parameter_shapes(config))
    data = open_data(args, config, model_folder)
    settings = resolve(args, config, data, micro_batch_size)
    out = Path(launch.run_once("out", lambda: str(choose_out(args, model_folder))))
    if launch.RANK == 0:
        facts = {"device": device.type, "world_size": num_ranks, "model_folder": str(model_folder), "commit": commit}
        # Without `out`, so that --config OUT/config.toml repeats the run elsewhere.
        write_run_files(out, dataclasses.asdict(settings) | {"out": None, "config": None}, facts)
    dist.barrier()
    if not (out / "config.toml").is_file():
        raise UserError(
            f"rank {launch.RANK} does not see {out}, which rank 0 made: --out must be on a shared file system."
        )

    compute_dtype = device.compute_dtype(args.dtype)
    model = build_model(config, dims, device, compute_dtype, args.ac, compile_backend, args.moe_capacity)
    if pretrained:
        weights.read(dict(model.named_parameters()))
    else:
        model.init_weights(args.seed)
    optimizer = build_optimizer(model, args)

    peak_flops, peak_source = device.peak_flops(compute_dtype)
    print0(
        f"run        {out}",
        f"model      {model_folder}: {config.model_type}, {format_count(model.num_parameters())} parameters, "
        f"{format_count(model.num_active_parameters())} in the matmuls of a token",
        f"weights    {f'random, seed {args.seed}' if not pretrained else args.init}",
        *(f"data       {line}" for line in data.describe()),
        f"step       {args.global_batch_size} rows = {args.global_batch_size * args.seq_len} tokens: {data_ranks} data "
        f"ranks x {num_micro_steps} micro-batches x {micro_batch_size} rows",
        f"length     {settings.steps} steps = {settings.steps * args.global_batch_size / data.rows_per_epoch:.2f} "
        "epochs",
        f"rate       {settings.lr:g} to {settings.min_lr:g}, {args.schedule}, {settings.warmup_steps} warm-up steps",
        *(
            f"AdamW      {group['name']}: {len(group['params'])} tensors, "
            f"{format_count(sum(p.numel() for p in group['params']))} parameters, decay {group['weight_decay']:g}"
            for group in optimizer.param_groups
        ),
        f"layout     {num_ranks} ranks: dp_replicate {dims.dp_replicate} x dp_shard {dims.dp_shard} x tp {dims.tp}"
        f"{f', ep {dims.ep}' if config.num_experts else ''}; recompute {args.ac}, compile {compile_backend or 'off'}",
        f"device     {num_ranks} x {device.type}; compute {compute_dtype}, weights and optimizer torch.float32",
        f"MFU        against {peak_flops / 1e9:,.0f} GFLOP/s a rank ({peak_source})",
    )

    log = RunLog(out, settings.steps) if launch.RANK == 0 else None
    totals = {"tokens": 0, "supervised_tokens": 0, "skipped_steps": 0}
    if args.moe_capacity:
        totals["dropped_choices"] = 0
    window_start, window_tokens, window_steps = time.perf_counter(), 0, 0
    for step in range(1, settings.steps + 1):
        position = (step - 1) * args.global_batch_size
        rows = micro_batches(data, position, args.global_batch_size, micro_batch_size, data_ranks, data_rank)
        num_tokens, num_supervised = count_tokens(rows, args.tp)
        batches = [
            {name: torch.as_tensor(array).to(device.torch_device, device.index_dtype) for name, array in row.items()}
            for row in rows
        ]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        totals["tokens"] += num_tokens
        totals["supervised_tokens"] += num_supervised
        window_tokens += num_tokens
        window_steps += 1
        if num_supervised == 0:
            totals["skipped_steps"] += 1
            print0(f"warning: step {step} has no supervised token; it is skipped ({totals['skipped_steps']} so far)")
            continue

        losses, router = forward_backward(
            model, batches, num_supervised, settings.router_aux_loss_coef, args.router_z_loss_coef, args.tp
        )
        grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm, ep_enabled=args.ep > 1)
        values = read_step(losses, grad_norm, router)
        if args.moe_capacity:
            totals["dropped_choices"] += values.get("dropped_choices", 0)
        if step == 1 and pretrained and args.load_check:
            check_loaded(values["loss"], config)
        if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            optimizer.step()
        else:
            totals["skipped_steps"] += 1
            print0(
                f"warning: step {step} has loss {values['loss']} and gradient norm {values['grad_norm']}; it is not "
                f"applied ({totals['skipped_steps']} skipped so far)"
            )
        optimizer.zero_grad()

        if step % args.log_every == 0 or step in (1, settings.steps):
            device.synchronize()
            now = time.perf_counter()
            tokens_per_s = window_tokens / (now - window_start)
            values |= totals | {
                "lr": learning_rate(step, settings),
                "tokens_per_s": tokens_per_s,
                "mfu": tokens_per_s * model.flops_per_token(args.seq_len) / (peak_flops * num_ranks),
                "peak_memory_bytes": device.peak_memory(),
                "step_time_s": (now - window_start) / window_steps,
                "position": position + args.global_batch_size,
            }
            if log:
                log.log(step, values)
            window_start, window_tokens, window_steps = now, 0, 0

    state = {"step": settings.steps, "position": settings.steps * args.global_batch_size, **totals}
    state["settings"] = dataclasses.asdict(settings)
    saved = checkpoint.save_checkpoint(out, settings.steps, dict(model.named_parameters()), state, model_folder)
    if totals["skipped_steps"]:
        print0(f"warning: {totals['skipped_steps']} of {settings.steps} steps were skipped, see above")
    print0(f"checkpoint {saved}")
    text = sample_text(model, data, model_folder, device)
    if log:
        log.close()
        (out / "samples.txt").write_text(f"step {settings.steps}: {text}\n", encoding="utf-8")
    print0(f"sample     {text}")
    dist.destroy_process_group()
    return saved


def main() -> None:
    args = parse_args(sys.argv[1:])
    if args.plan:
        plan.print_plan(args)
        return
    saved = train(args)
    # The export needs one process and can take long, so the others have gone by now.
    if args.export and launch.RANK == 0:
        export(saved, saved.parents[1] / "hf", torch.bfloat16, parse_size(args.max_shard_size))


if __name__ == "__main__":
    launch.run(main)
