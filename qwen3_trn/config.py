"""The two settings objects: `Qwen3Config` is a model folder's config.json, `TrainConfig` is the command line.

    python train.py --help

Architecture comes from config.json alone. There is no table of sizes and no architectural default: a key that is
missing is an error that names it.
"""

import contextlib
import itertools
import json
import math
import re
import sys
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import tyro

from qwen3_trn.cache import BadRecords
from qwen3_trn.chat import Long, TrainOn
from qwen3_trn.encode import Format
from qwen3_trn.errors import UserError
from qwen3_trn.launch import tell_once

# Keys that every config.json must have, with the line to add where one is missing. The values in the hints are those of
# the released Qwen3 models; sizes have no hint because nobody but the file's author knows them.
_HINTS = {
    "attention_bias": "false",
    "hidden_act": '"silu"',
    "initializer_range": "0.02",
    "rms_norm_eps": "1e-06",
    "use_sliding_window": "false",
    "tie_word_embeddings": "false",
    "decoder_sparse_step": "1",
    "mlp_only_layers": "[]",
    "norm_topk_prob": "true",
    "router_aux_loss_coef": "0.001",
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")

# TrainConfig's numbers by the least they may be.
_POSITIVE = (
    *("seq_len", "steps", "epochs", "global_batch_size", "micro_batch_size"),
    *("lr", "adam_eps", "max_grad_norm", "dist_timeout", "log_every", "max_minutes", "max_bad_steps", "keep"),
    *("dp_replicate", "tp", "ep", "moe_capacity", "plan_ranks"),
)
# What a run's config.toml holds as a number although it follows from another setting, unless it was given.
_DERIVED = {"epochs": ("steps", "warmup_steps"), "steps": ("warmup_steps",), "lr": ("min_lr",)}
_NOT_NEGATIVE = (
    *("seed", "min_lr", "warmup_steps", "weight_decay", "router_aux_loss_coef", "router_z_loss_coef", "save_every"),
    *("eval_every", "sample_every"),
)


@dataclass(frozen=True)
class Qwen3Config:
    """A Qwen3 or Qwen3-MoE architecture, with config.json's own names.

    Read one with `from_pretrained(DIR)` or `from_dict(raw)`. Both spellings of transformers 4 and 5 are understood:
    `num_local_experts` for `num_experts`, `rope_parameters` for `rope_theta` and `rope_scaling`, `dtype` for
    `torch_dtype`. `raw` keeps the file's other keys so that `to_dict` can write them back.
    """

    model_type: Literal["qwen3", "qwen3_moe"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    initializer_range: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # None is plain RoPE; otherwise it holds "rope_type": "yarn" and its numbers
    # Mixture of experts. num_experts 0 is a dense model, and then the rest means nothing.
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.0
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Qwen3Config":
        """Read `folder`/config.json. Raises UserError when it is absent, not JSON, or not a Qwen3 architecture."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise UserError(f"no config.json in {folder}: expected a Hugging Face model folder.")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise UserError(f"{path}: expected a JSON object, found {type(raw).__name__}.")
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config.json") -> "Qwen3Config":
        """Check `raw` (config.json's content) and build the config; `where` is the file's name for error messages."""
        model_type = raw.get("model_type")
        if model_type not in ("qwen3", "qwen3_moe"):
            raise UserError(f'{where}: model_type is {model_type!r}; this trainer knows "qwen3" and "qwen3_moe".')
        is_moe = model_type == "qwen3_moe"

        def need(key: str, *other_spellings: str) -> Any:
            found = {name: raw[name] for name in (key, *other_spellings) if raw.get(name) is not None}
            if not found:
                hint = f'add the line "{key}": {_HINTS.get(key, "<the value the weights were made with>")},'
                raise UserError(f'{where}: the key "{key}" is missing, and no default is assumed: {hint}')
            values = list(found.values())
            if any(value != values[0] for value in values):
                raise UserError(f"{where}: two spellings of one key disagree: {found}. Remove the wrong one.")
            return values[0]

        def size(key: str, *other_spellings: str) -> int:
            value = need(key, *other_spellings)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{where}: {key} is {value!r}; expected a whole number of 1 or more.")
            return value

        def number(key: str) -> float:
            return _positive_number(need(key), key, where)

        def boolean(key: str) -> bool:
            value = need(key)
            if not isinstance(value, bool):
                raise UserError(f"{where}: {key} is {value!r}; expected true or false.")
            return value

        if need("hidden_act") != "silu":
            raise UserError(f'{where}: hidden_act is {raw["hidden_act"]!r}; only "silu" (SwiGLU) is implemented.')
        # An absent layer_types or attention_dropout means what the released files, which have neither or zero, mean.
        if boolean("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
            raise UserError(
                f"{where}: use_sliding_window (or layer_types) asks for sliding-window attention, which is not "
                "implemented. No released Qwen3 model uses it; with use_sliding_window false, the window is ignored."
            )
        if raw.get("quantization_config"):
            raise UserError(
                f"{where}: quantization_config is there, but quantized weights cannot be trained. Use the model's bf16 "
                "release, or remove the key if the weights are not quantized."
            )
        if raw.get("attention_dropout"):
            raise UserError(
                f"{where}: attention_dropout is {raw['attention_dropout']}; dropout is not implemented. Set it to 0.0."
            )
        rope_theta, rope_scaling = _read_rope(raw, where)
        values: dict[str, Any] = {key: size(key) for key in _SIZES}
        if is_moe:
            values |= {key: size(key) for key in _MOE_SIZES if key != "num_experts"}
            values["num_experts"] = size("num_experts", "num_local_experts")
            values["norm_topk_prob"] = boolean("norm_topk_prob")
            values["decoder_sparse_step"] = size("decoder_sparse_step")
            layers = need("mlp_only_layers")
            if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
                raise UserError(f"{where}: mlp_only_layers is {layers!r}; expected a list of layer numbers.")
            values["mlp_only_layers"] = tuple(layers)
            values["router_aux_loss_coef"] = number("router_aux_loss_coef")
            if values["num_experts_per_tok"] > values["num_experts"]:
                raise UserError(
                    f"{where}: num_experts_per_tok is {values['num_experts_per_tok']}, more than the "
                    f"{values['num_experts']} experts there are."
                )
        if values["num_attention_heads"] % values["num_key_value_heads"]:
            raise UserError(
                f"{where}: num_attention_heads ({values['num_attention_heads']}) is not a multiple of "
                f"num_key_value_heads ({values['num_key_value_heads']})."
            )
        if values["head_dim"] % 2:
            raise UserError(f"{where}: head_dim is {values['head_dim']}; rotary embedding needs an even number.")
        return cls(
            model_type=model_type,
            rms_norm_eps=number("rms_norm_eps"),
            attention_bias=boolean("attention_bias"),
            tie_word_embeddings=boolean("tie_word_embeddings"),
            initializer_range=number("initializer_range"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            raw=dict(raw),
            **values,
        )

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) holds experts, by transformers' Qwen3MoeDecoderLayer rule."""
        return (
            self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )

    def to_dict(self, dtype: str) -> dict[str, Any]:
        """config.json for a folder whose tensors have `dtype` ("bfloat16" or "float32").

        The original keys are kept. Where transformers 4 and 5 spell a key differently both spellings are written, so
        that 4.51 and later read the folder.
        """
        written = {"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False} | self.raw
        moe_only = {"num_experts", "num_local_experts"} | {f.name for f in fields(self) if f.default is not MISSING}
        for name in {f.name for f in fields(self)} - {"raw"} - (set() if self.num_experts else moe_only):
            value = getattr(self, name)
            written[name] = list(value) if isinstance(value, tuple) else value
        written["architectures"] = ["Qwen3MoeForCausalLM" if self.num_experts else "Qwen3ForCausalLM"]
        written["torch_dtype"] = written["dtype"] = dtype
        written["rope_parameters"] = {
            "rope_type": "default",
            **(self.rope_scaling or {}),
            "rope_theta": self.rope_theta,
        }
        if self.num_experts:
            written["num_local_experts"] = self.num_experts
        return written


def _positive_number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{where}: {key} is {value!r}; expected a number above 0.")
    return float(value)


_YARN_KEYS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


def _read_rope(raw: dict[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """(rope_theta, rope_scaling) from transformers 4's two keys, transformers 5's `rope_parameters`, or both."""
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(f"{where}: partial_rotary_factor is {raw['partial_rotary_factor']}; it is not implemented.")
    thetas = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    scalings = {}
    for source in ("rope_scaling", "rope_parameters"):
        if raw.get(source) is None:
            continue
        if not isinstance(raw[source], dict):
            raise UserError(f"{where}: {source} is {raw[source]!r}; expected null or an object with a rope_type.")
        scaling = {key: value for key, value in raw[source].items() if value is not None}
        if "rope_theta" in scaling:
            thetas[f"{source}.rope_theta"] = scaling.pop("rope_theta")
        legacy_type = scaling.pop("type", None)  # the spelling before transformers 4.43
        rope_type = scaling.pop("rope_type", legacy_type) or "default"
        scalings[source] = _read_rope_type(rope_type, scaling, raw, f"{where}: {source}")
    if not thetas:
        raise UserError(
            f'{where}: neither "rope_theta" nor "rope_parameters": {{"rope_theta": ...}} is there, and no default is '
            "assumed. The released Qwen3 models have 1000000."
        )
    for found in (thetas, scalings):
        if any(value != next(iter(found.values())) for value in found.values()):
            raise UserError(f"{where}: {' and '.join(found)} disagree: {list(found.values())}. Remove the wrong one.")
    theta = _positive_number(next(iter(thetas.values())), "rope_theta", where)
    return theta, next(iter(scalings.values()), None)


def _read_rope_type(rope_type: str, scaling: dict[str, Any], raw: dict[str, Any], where: str) -> dict[str, Any] | None:
    """What `rope_scaling` means: None for plain RoPE, else YaRN's checked numbers."""
    if rope_type not in ("default", "yarn"):
        raise UserError(f'{where}: rope_type is {rope_type!r}; "default" and "yarn" are implemented.')
    needed = ("factor", "original_max_position_embeddings") if rope_type == "yarn" else ()
    unknown = sorted(scaling.keys() - set(needed) - set(_YARN_KEYS if needed else ()))
    if unknown:
        raise UserError(
            f'{where}: {unknown} is not implemented for rope_type "{rope_type}". Remove it if it is unused.'
        )
    if rope_type == "default":
        return None
    for key in needed:
        if key not in scaling:
            raise UserError(f'{where}: rope_type "yarn" needs "{key}" beside it, and it is missing.')
    for key in scaling.keys() - {"truncate"}:
        _positive_number(scaling[key], key, where)
    original_length = scaling["original_max_position_embeddings"]
    if raw.get("original_max_position_embeddings", original_length) != original_length:
        raise UserError(
            f"{where}: original_max_position_embeddings differs from the one outside. Remove the wrong one."
        )
    return {"rope_type": "yarn", **scaling}


@dataclass(frozen=True)
class TrainConfig:
    """Train Qwen3 or Qwen3-MoE: torchrun --nproc_per_node=N train.py [--config FILE.toml] [--flag value ...]"""

    # A TOML file of these settings; a flag on the command line wins over it.
    config: str | None = None

    # Where weights come from: random, hub, or the folder of a published model. resume: go on with --out, by the
    # settings in its config.toml unless they are given anew.
    init: str = "random"
    # Architecture and tokenizer: a Hugging Face ID or a folder. Default: assets/tiny for random, Qwen/Qwen3-0.6B for
    # hub.
    model: str | None = None
    # Branch, tag or commit on the hub. Default: main.
    revision: str | None = None
    # Go on with the run in --out: never; auto, if it has a checkpoint; must.
    resume: Literal["never", "auto", "must"] = "never"
    # After loading weights, stop if the first loss is that of random ones. Off for folders of random weights.
    load_check: bool = True

    # Files or globs of .txt, .jsonl (also .gz, .zst) or .parquet, hf:USER/NAME[/CONFIG][:SPLIT], or "sample"; several
    # with :WEIGHT are mixed.
    data: tuple[str, ...] = ("sample",)
    # Records are text ("text") or conversations ("messages", "prompt" and "completion", "conversations"). auto: as the
    # first.
    format: Format = "auto"
    # Turns of a conversation to learn: the assistant's, its last one, or all.
    train_on: TrainOn = "assistant"
    # Do not learn the empty think block that the chat template puts in.
    mask_empty_think: bool = True
    # Put several documents into a row; none sees another. Else one a row, and padding.
    pack: bool = True
    # What keeps documents in a row apart: a mask; or none, so that a token sees all that stands before it in its row,
    # and positions count through. Fused attention of some devices takes no mask.
    doc_mask: Literal["documents", "none"] = "documents"
    # Conversations longer than --seq-len.
    long: Long = "drop"
    # Records that cannot be used: stop at the first, or leave them out and count them.
    bad_records: BadRecords = "error"
    # Tokenize the data in parts while the run goes on, for data too large to be tokenized first.
    stream: bool = False
    # Like --data: what the validation loss is of. Each source counts whole, whatever its weight.
    eval_data: tuple[str, ...] = ()
    # Steps from one validation to the next; 0 validates only at the end.
    eval_every: int = 100
    # Texts, or .txt files with one a line, that the model goes on from; with conversations, a user's turns. Default: a
    # piece of the data.
    prompts: tuple[str, ...] = ()
    # Steps from one look at what the model writes to the next; 0 looks only at the end.
    sample_every: int = 0
    # Tokens in a row.
    seq_len: int = 512

    # Optimizer steps. Default: 200, unless --epochs is given.
    steps: int | None = None
    # Passes over the data, instead of --steps.
    epochs: float | None = None
    # Rows a step, over all ranks.
    global_batch_size: int = 8
    # Rows a rank takes through the model at once. Default: its whole share of the step.
    micro_batch_size: int | None = None
    # Of random weights and of the order of the data.
    seed: int = 0

    # Peak learning rate. Default: 1e-3 for random weights, 1e-5 for published ones.
    lr: float | None = None
    # Learning rate at the end. Default: a tenth of --lr.
    min_lr: float | None = None
    # After warm-up: cosine to the minimum; wsd: constant, then linear to it over the last fifth; constant.
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    # Steps of linear warm-up. Default: a tenth of the steps, at most 100.
    warmup_steps: int | None = None
    # AdamW's, on matrices only.
    weight_decay: float = 0.1
    # AdamW's decay rates of the first and second moment.
    adam_betas: tuple[float, float] = (0.9, 0.95)
    # AdamW's epsilon.
    adam_eps: float = 1e-8
    # Gradients are scaled down to this norm; "inf" never scales.
    max_grad_norm: float = 1.0
    # Weight of the load-balancing loss; config takes config.json's; 0 does not compute it.
    router_aux_loss_coef: float | Literal["config"] = 0.0
    # Weight of the router's z-loss; 0 does not compute it.
    router_z_loss_coef: float = 0.0

    # Data ranks that hold whole copies of the weights (HSDP).
    dp_replicate: int = 1
    # Data ranks that share the weights (FSDP). -1: all that are left.
    dp_shard: int = -1
    # Ranks that share each matmul and the sequence (tensor parallelism).
    tp: int = 1
    # Ranks among dp-shard x tp that share the experts (expert parallelism).
    ep: int = 1
    # Activation checkpointing: none; full keeps each layer's input; selective also what matmuls and attention return.
    ac: Literal["none", "full", "selective"] = "none"
    # torch.compile of each layer, the embedding, and the head with its loss. auto: on accelerators.
    compile: Literal["auto", "on", "off"] = "auto"
    # Rows an expert takes at most, times the mean; what overflows is dropped, counted, printed. Default: no bound.
    moe_capacity: float | None = None
    # OP=NAME: compute an operation by a kernel of ours, or by your own as OP=package.module:function; docs/kernels.md
    # has the list.
    kernel: tuple[str, ...] = ()
    # Compare each --kernel with PyTorch's on a small input first, and stop where they disagree.
    check_kernels: bool = False
    # Of compute; weights and optimizer stay fp32. auto: bf16 on accelerators, fp32 on CPU.
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    # Seconds that a collective waits for a missing rank.
    dist_timeout: int = 600
    # Minutes from the start after which the run saves and stops. Default: no limit.
    max_minutes: float | None = None
    # Steps in a row with a loss or gradient that is not finite, none of them applied, after which the run stops.
    max_bad_steps: int = 10

    # Print what a run needs, without weights or an accelerator, and exit.
    plan: bool = False
    # ... for this many ranks. Default: those of torchrun.
    plan_ranks: int | None = None

    # The run's folder. Default: a fresh runs/NAME-K.
    out: str | None = None
    # Steps from one checkpoint to the next; 0 saves only at the end.
    save_every: int = 500
    # Checkpoints that stay; older ones are removed once a newer one is complete.
    keep: int = 2
    # What to do when a checkpoint cannot be written, as on a full disk.
    on_save_error: Literal["stop", "continue"] = "stop"
    # Steps from one console line to the next.
    log_every: int = 10
    # Write a verified Hugging Face folder, OUT/hf, at the end.
    export: bool = True
    # Largest safetensors file of the export.
    max_shard_size: str = "5GB"

    @property
    def mask_documents(self) -> bool:
        """Whether attention needs a mask beside causality; a row of one document and padding needs none."""
        return self.pack and self.doc_mask == "documents"

    def __post_init__(self):
        """Refuse what no run could use; what depends on ranks, model or data is checked by train.py."""
        for name in _POSITIVE + _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is None or value == "config":
                continue
            # `not >=` rather than `<`, so that nan is refused too.
            finite = value < math.inf or name == "max_grad_norm"
            if not value >= 0 or not finite or (name in _POSITIVE and value == 0):
                expected = "more than 0" if name in _POSITIVE else "0 or more"
                raise UserError(f"--{name.replace('_', '-')} is {value}; expected {expected}, and finite.")
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise UserError(f"--dp-shard is {self.dp_shard}; expected 1 or more, or -1 for all ranks that are left.")
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise UserError(f"--adam-betas are {self.adam_betas}; expected two numbers from 0 up to, not including, 1.")
        if self.plan_ranks is not None and not self.plan:
            raise UserError("--plan-ranks says for how many ranks to plan; add --plan, or remove it.")
        if self.steps is not None and self.epochs is not None:
            raise UserError("--steps and --epochs are both given; either says how long to train. Remove one.")
        if self.out is None and (self.resume != "never" or self.init == "resume"):
            flag = "--init resume" if self.init == "resume" else f"--resume {self.resume}"
            raise UserError(f"{flag} needs --out: the folder of the run to go on with.")
        parse_size(self.max_shard_size)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "200MB", "1.5GiB" or a plain number. Raises UserError."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(match[1]) * units.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise UserError(f"{text!r} is not a size; write it as 5GB, 200MB or 1.5GiB.")
    return size


def toml_to_argv(path: str, without: Collection[str] = ()) -> list[str]:
    """A TOML file's settings, but those in `without`, as command-line arguments: both go through the same checks."""
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--config {path} cannot be read as TOML: {error}") from error
    argv = []
    for key, value in settings.items():
        if key in without:
            continue
        flag = key.replace("_", "-")
        if isinstance(value, dict):
            raise UserError(f"--config {path}: [{key}] is a table; expected only lines of the form flag = value.")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            argv += [f"--{flag}", *map(str, value)]
        else:
            argv += [f"--{flag}", str(value)]
    return argv


def parse_args(argv: list[str]) -> TrainConfig:
    """TrainConfig from the command line. Help and errors are printed by one process; then every process exits.

    With --init resume, the settings that are not given come from the run's own config.toml.
    """
    flags = [argument.split("=")[0].replace("_", "-") for argument in argv if argument.startswith("--")]
    for setting in fields(TrainConfig):
        flag = f"--{setting.name.replace('_', '-')}"
        if isinstance(setting.default, tuple) and flags.count(flag) > 1:
            raise UserError(f"{flag} is given {flags.count(flag)} times; put all values after one {flag}.")
    args = _parse(argv)
    if args.init != "resume" or args.out is None:
        return args
    settings = Path(args.out) / "config.toml"
    if not settings.is_file():
        raise UserError(
            f"--init resume: {args.out} holds no run (no config.toml); relative paths start from {Path.cwd()}."
        )
    given = {argument.removeprefix("--").split("=")[0].replace("-", "_") for argument in argv}
    derived = {name for base, names in _DERIVED.items() if base in given for name in names}
    return _parse(argv, toml_to_argv(str(settings), without=derived))


def _parse(argv: list[str], first: Sequence[str] = ()) -> TrainConfig:
    files = [value for flag, value in itertools.pairwise(argv) if flag == "--config"]
    files += [argument.removeprefix("--config=") for argument in argv if argument.startswith("--config=")]
    argv = [*first, *(argument for file in files for argument in toml_to_argv(file)), *argv]

    def parse(console_outputs: bool) -> TrainConfig:
        return tyro.cli(TrainConfig, prog="train.py", args=argv, console_outputs=console_outputs)

    try:
        return parse(console_outputs=False)
    except SystemExit as quiet:

        def tell() -> None:
            with contextlib.suppress(SystemExit):
                parse(console_outputs=True)

        tell_once(" ".join(argv), tell)
        sys.exit(quiet.code)
