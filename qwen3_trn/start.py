"""All that is settled before step 1: model folder, data, how a step is split, the run's folder.

    model_folder, commit = find_model(args)
    settings = resolve(args, config, data)       # every default filled in

Whatever can be refused is refused here, before anything is written and before a weight is read.
"""

import dataclasses
import fcntl
from io import TextIOBase
from pathlib import Path
from typing import Any

from qwen3_trn import checkpoint, hub, launch
from qwen3_trn.cache import cache_folder, open_cache, tokenize
from qwen3_trn.config import Qwen3Config, TrainConfig
from qwen3_trn.data import PackedData, PackedSource
from qwen3_trn.device import Device
from qwen3_trn.errors import UserError
from qwen3_trn.kernels.registry import uses_default
from qwen3_trn.launch import print0
from qwen3_trn.sources import Source, find_sources
from qwen3_trn.stream import StreamedSource

TINY = Path(__file__).parent.parent / "assets" / "tiny"

_locks: list[TextIOBase] = []  # open as long as the process lives


def find_run(args: TrainConfig) -> Path | None:
    """The checkpoint that the run goes on from, if it does. Raises UserError where --out and --resume do not fit."""
    must = args.resume == "must" or args.init == "resume"
    found = checkpoint.list_checkpoints(Path(args.out)) if args.out else []
    if must and not found:
        raise UserError(
            f"--out {args.out} holds no complete checkpoint to resume from. --resume auto begins where there is none; "
            f"relative paths start from {Path.cwd()}."
        )
    if args.out and args.resume == "never" and not must:
        metrics = Path(args.out) / "metrics.jsonl"
        if found or (metrics.exists() and metrics.stat().st_size):
            last = f", up to {found[-1].name}" if found else ", without a checkpoint"
            raise UserError(
                f"--out {args.out} already holds a run{last}. --resume auto goes on with it; to begin anew, name "
                "another folder, leave --out away, or remove it."
            )
    return found[-1] if found else None


def find_model(args: TrainConfig, resumed: Path | None = None) -> tuple[Path, str | None]:
    """(folder with config.json, tokenizer and, unless --init random, weights; the hub's commit if it is from there).

    A run that is resumed has config and tokenizer in its folder, so a model of the hub is not asked for again.
    """
    if args.init not in ("random", "hub") and args.model is not None:
        raise UserError(f"--init {args.init} names the model's folder already; remove --model {args.model}.")
    model = name_model(args)
    if Path(model).is_dir():
        return Path(model), None
    if resumed:
        state = checkpoint.read_state(resumed)
        if [model, args.revision] != state["model"]:
            raise UserError(
                f"{resumed} was trained from {state['model']} (model, revision), and the flags name "
                f"{[model, args.revision]}. Go on with the same model, or begin another run in another --out."
            )
        kept = resumed.parents[1] / "model"
        return kept if kept.is_dir() else resumed, state["commit"]
    if args.init not in ("random", "hub"):
        raise UserError(f"--init is {args.init!r}; expected random, hub, or an existing model folder.")
    print0(f"fetching {model} from the hub")
    with_weights = args.init == "hub" and not args.plan
    folder, commit = launch.run_once(
        "download", lambda: [str(x) for x in hub.download(model, args.revision, with_weights)], per_node=True
    )
    return Path(folder), commit


def name_model(args: TrainConfig) -> str:
    """The folder or the hub's ID that --init and --model name."""
    if args.init not in ("random", "hub"):
        return args.init
    return args.model or (str(TINY) if args.init == "random" else "Qwen/Qwen3-0.6B")


def check_unchanged(args: TrainConfig, config: Qwen3Config, data: PackedData, resumed: Path) -> None:
    """Raises UserError if the checkpoint is of another model, or its rows would be others from here on."""
    state = checkpoint.read_state(resumed)
    was, was_fingerprint = state["settings"], state["fingerprint"]
    changes = [
        f"--{name.replace('_', '-')} was {was[name]} and is {getattr(args, name)}"
        for name in ("seq_len", "seed", "stream")
        if was[name] != getattr(args, name)
    ]
    if Qwen3Config.from_pretrained(resumed) != config:
        changes.append(f"the model's config.json is another than that in {resumed}")
    names = was_fingerprint.keys() | data.fingerprint.keys() if was["stream"] == args.stream else ()
    for name in sorted(names):
        old, new = was_fingerprint.get(name), data.fingerprint.get(name)
        if old == new:
            continue
        if name == "tokenizer":
            changes.append(f"the tokenizer is another than that in {resumed}")
        elif name == "data":
            changes.append(f"the contents of the data: --data was {' '.join(was['data'])} and is {' '.join(args.data)}")
        else:
            changes.append(f"{name} of the data was {old} and is {new}")
    if changes:
        raise UserError(
            f"{resumed} cannot be gone on with, because what it was trained on has changed: {'; '.join(changes)}. "
            "Restore it, or begin another run in another --out. (Rates, steps, batch and layout may change.)"
        )


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


def use_equal_groups(args: TrainConfig, config: Qwen3Config, device: Device) -> bool:
    """Whether each expert gets an equal share of the rows, so that batched matmuls do where grouped ones cannot.

    Raises UserError if so and --moe-capacity does not say how large the shares are.
    """
    if not config.num_experts or not uses_default("moe_experts"):
        return False
    widths = config.hidden_size, config.moe_intermediate_size // (args.tp if args.ep == 1 else 1)
    # torch._grouped_mm takes rows of whole 16 bytes; the loop that stands in for it asks the host for sizes.
    fits = not device.static_shapes or all(
        width * device.compute_dtype(args.dtype).itemsize % 16 == 0 for width in widths
    )
    if fits and device.has_grouped_matmul():
        return False
    if args.moe_capacity is None:
        raise UserError(
            f"{device.type} has no grouped matmul for experts of {widths[0]} x {widths[1]}, so each expert must get an "
            "equal share of the rows: say with --moe-capacity how large, as a multiple of the mean, such as 2."
        )
    return True


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
    """Tokenise --data once a node, into a cache that later runs share, and open it as packed rows.

    With --stream, parts of it are tokenised while they are needed.
    """
    sources = find_sources(args.data)
    if args.stream:
        settings = (args.seq_len, args.seed, args.pack, args.long, args.format, args.train_on, args.mask_empty_think)
        parts: list[Any] = [
            StreamedSource(source, tokenizer, cache_folder(), *settings, args.bad_records) for source in sources
        ]
    else:
        parts = _open_sources("data", sources, args, tokenizer, shuffle=True)
    data = PackedData(parts, [source.weight for source in sources])
    _check_vocabulary(data.max_token_id, data.max_token_file, config, tokenizer)
    return data


def open_eval_data(args: TrainConfig, config: Qwen3Config, tokenizer: Path) -> list[PackedData]:
    """--eval-data, each source by itself: one epoch, in the order of its files."""
    if not args.eval_data:
        return []
    parts = _open_sources("eval-data", find_sources(args.eval_data), args, tokenizer, shuffle=False)
    eval_data = [PackedData([part], [1.0]) for part in parts]
    for data in eval_data:
        _check_vocabulary(data.max_token_id, data.max_token_file, config, tokenizer)
    return eval_data


def _open_sources(
    name: str, sources: list[Source], args: TrainConfig, tokenizer: Path, shuffle: bool
) -> list[PackedSource]:
    settings = args.format, args.train_on, args.mask_empty_think, args.bad_records
    caches = launch.run_once(
        name, lambda: [str(tokenize(source, tokenizer, cache_folder(), *settings)) for source in sources], per_node=True
    )
    return [
        PackedSource(open_cache(Path(cache)), args.seq_len, args.seed, args.pack, args.long, shuffle)
        for cache in caches
    ]


def _check_vocabulary(max_token_id: int, file: str, config: Qwen3Config, tokenizer: Path) -> None:
    if max_token_id >= config.vocab_size:
        raise UserError(
            f"token id {max_token_id}, in {file}, is beyond the model's vocabulary of {config.vocab_size} rows: the "
            f"tokenizer in {tokenizer} is not this model's."
        )


def resolve(args: TrainConfig, config: Qwen3Config, data: PackedData, step: int = 0, position: int = 0) -> TrainConfig:
    """Fill in the settings whose default depends on something: what is printed, saved and used from here on.

    step, position: where a resumed run stands, in steps and in rows.
    """
    steps = args.steps or 200
    if args.epochs is not None:
        if data.rows_per_epoch is None:
            raise UserError("--epochs needs to know how many rows there are, which --stream does not; give --steps.")
        steps = step + max(
            0 if step else 1, round((args.epochs * data.rows_per_epoch - position) / args.global_batch_size)
        )
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
    )


def choose_out(args: TrainConfig, model_folder: Path, resumed: Path | None) -> Path:
    """Make the run's folder, --out or a fresh runs/NAME-K, and make it ours; leftovers of a killed run are removed."""
    if args.out is not None:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        _lock(out)
        if checkpoint.list_checkpoints(out)[-1:] != ([resumed] if resumed else []):
            raise UserError(f"another process has written to {out} while this one started. Start it again.")
        for path in checkpoint.remove_leftovers(out):
            print(f"removed    {path}, which a killed process left unfinished", flush=True)
        return out
    number = 1
    while True:
        out = Path("runs") / f"{model_folder.resolve().name}-{number}"
        try:
            out.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            _lock(out)
            return out


def _lock(out: Path) -> None:
    """Keep other runs out of the folder while this process lives. Raises UserError if one is there."""
    file = (out / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"another process is training in {out}: stop it, wait for it, or name another --out."
        ) from error
    _locks.append(file)
