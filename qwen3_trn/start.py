"""All that is settled before step 1: model folder, data, how a step is split, the run's folder.

    model_folder, commit = find_model(args)
    settings = resolve(args, config, data, micro_batch_size)     # every default filled in

Whatever can be refused is refused here, before anything is written and before a weight is read.
"""

import dataclasses
from pathlib import Path

from qwen3_trn import hub, launch
from qwen3_trn.config import Qwen3Config, TrainConfig
from qwen3_trn.data import PackedText, cache_folder, find_files, tokenize
from qwen3_trn.errors import UserError
from qwen3_trn.launch import print0

TINY = Path(__file__).parent.parent / "assets" / "tiny"


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


def open_data(args: TrainConfig, config: Qwen3Config, tokenizer: Path) -> PackedText:
    """Tokenise --data once a node, into a cache that later runs share, and open it as packed rows."""
    files = find_files(args.data)
    cache = launch.run_once("tokenize", lambda: str(tokenize(files, tokenizer, cache_folder())), per_node=True)
    data = PackedText(Path(cache), args.seq_len, args.seed)
    if data.max_token_id >= config.vocab_size:
        raise UserError(
            f"token id {data.max_token_id}, in {data.max_token_file}, is beyond the model's vocabulary of "
            f"{config.vocab_size} rows: the tokenizer in {tokenizer} is not this model's."
        )
    return data


def resolve(args: TrainConfig, config: Qwen3Config, data: PackedText, micro_batch_size: int) -> TrainConfig:
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
