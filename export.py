"""A training checkpoint to a verified Hugging Face folder.

    python export.py runs/tiny-1 my-model                     # the run's latest checkpoint
    python export.py runs/tiny-1/checkpoints/step_200 my-model --dtype fp32 --max-shard-size 200MB

One process, on the CPU, whatever ranks wrote the checkpoint; it holds one shard, then one layer, never the model. The
folder gets its name only after everything in it was read back and compared with the checkpoint: every tensor's name,
shape, dtype and values, and the logits on a fixed prompt. An export that fails or is interrupted leaves nothing. One
that is killed (SIGKILL) leaves my-model.unfinished-XXXXXXXX: remove it; it is no obstacle to the next.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn

from qwen3_trn import checkpoint, hf, launch
from qwen3_trn.config import Qwen3Config, parse_size
from qwen3_trn.errors import UserError
from qwen3_trn.folders import new_folder
from qwen3_trn.hf import EMBEDDING, HEAD, HFFolder
from qwen3_trn.metrics import format_bytes, format_count
from qwen3_trn.model import Qwen3ForCausalLM, parameter_shapes
from qwen3_trn.rope import rope_tables

MODEL_CARD = """---
library_name: transformers
---
# {name}

A {model_type} model of {parameters} parameters, trained with qwen3-trn for {step} steps on {tokens} tokens. When these
files were written they were read back and compared with the training checkpoint: every tensor, bit for bit after
rounding to {dtype}.

Settings of the run:

```json
{settings}
```
"""
TOLERANCE = 1e-4  # of transformers' logits in fp32, relative to the largest


@dataclass(frozen=True)
class ExportConfig:
    """Write a training checkpoint as a verified Hugging Face folder."""

    run: tyro.conf.Positional[str]  # A run's folder (its latest checkpoint is taken), or a checkpoint's.
    folder: tyro.conf.Positional[str]  # The folder to make; it must not exist, or be empty.
    dtype: Literal["bf16", "fp32"] = "bf16"  # Of the files; training weights are fp32.
    # One tensor an expert, the published form, or two a layer, which only transformers 5 reads.
    experts: Literal["per-expert", "fused"] = "per-expert"
    max_shard_size: str = "5GB"  # Largest safetensors file; a larger tensor gets a file of its own.
    # Also compare the logits with those of transformers' model, which needs memory for the whole model in fp32.
    verify_with: Literal["transformers"] | None = None


def export(
    source: Path,
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    fused: bool = False,
    with_transformers: bool = False,
    replace: bool = False,
) -> None:
    """Write `folder` from the checkpoint `source`, and verify it.

    fused: how the experts are written, see hf.save_hf. with_transformers: compare the logits with transformers' too.
    Raises UserError if the folder cannot be written, or holds something that may not be replaced; RuntimeError, and
    leaves no folder, if what was written is not what was read.
    """
    checkpoint.verify_files(source)
    config = Qwen3Config.from_pretrained(source)
    shapes = parameter_shapes(config)
    checkpoint.check_checkpoint(source, shapes)
    kept = source.resolve().parent if source.resolve().parent.name == "checkpoints" else source.resolve()
    if kept in folder.resolve().parents:
        raise UserError(f"{folder} is inside of {kept}, which belongs to training. Name a folder outside.")
    if with_transformers:
        import_transformers_models()

    def read(name: str, target: Tensor) -> None:
        checkpoint.read_checkpoint(source, {name: target})

    num_values = sum(shape.numel() for shape in shapes.values())
    with new_folder(folder, replace) as unfinished:
        needed, free = num_values * dtype.itemsize, shutil.disk_usage(unfinished).free
        if needed > free:
            raise UserError(f"{folder} needs {format_bytes(needed)}; on its disk {format_bytes(free)} are free.")
        state = checkpoint.read_state(source)
        hf.copy_companions(source, unfinished)
        if state.get("stop_tokens"):
            hf.add_stop_tokens(unfinished, state["stop_tokens"])
        hf.save_hf(unfinished, config, shapes, read, dtype, max_shard_bytes, fused)
        card = MODEL_CARD.format(
            name=folder.resolve().parent.name if folder.name == "hf" else folder.resolve().name,
            model_type=config.model_type,
            parameters=format_count(num_values),
            step=state["step"],
            tokens=format_count(state["tokens"]),
            dtype=hf.DTYPE_NAMES[dtype],
            settings=json.dumps(state["settings"], indent=2),
        )
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        written = HFFolder(unfinished)
        written.check(config, shapes)
        if Qwen3Config.from_pretrained(unfinished) != config:
            raise RuntimeError(f"export: {unfinished / 'config.json'} describes another model than {source} holds")
        logits = verify(written, config, source, dtype)
        verified = [
            f"verified   missing 0, unexpected 0; {len(written.file_of)} tensors and the logits equal to {source}, bit "
            "for bit"
        ]
        if with_transformers:
            difference = compare_with_transformers(unfinished, config, logits)
            verified.append(f"verified   transformers' logits differ by at most {difference:.1e} (fp32)")
        total_bytes = sum(path.stat().st_size for path in unfinished.iterdir())
    print(f"exported   {folder}: {format_bytes(total_bytes)}, {hf.DTYPE_NAMES[dtype]}", *verified, sep="\n", flush=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of every bit, for which nan equals itself. Of tensors of one dtype."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def fixed_prompt(config: Qwen3Config) -> Tensor:
    """Token ids [1, T] for comparing logits, T at most 64."""
    return torch.arange(min(64, config.max_position_embeddings))[None] * 7919 % config.vocab_size


def verify_values(written: HFFolder, name: str, expected: Tensor) -> None:
    """Compare all that the files hold of one parameter with `expected`, which has the dtype they must have."""
    num_values = 0
    for key, wanted, found in written.parts(name, expected):
        if found.dtype != expected.dtype or not same_bits(found, wanted):
            raise RuntimeError(f"export: {key} in {written.folder} is not what the checkpoint holds")
        num_values += found.numel()
    if num_values != expected.numel():
        raise RuntimeError(f"export: {num_values} of the {expected.numel()} values of {name} were compared")


@torch.no_grad()
def verify(written: HFFolder, config: Qwen3Config, source: Path, dtype: torch.dtype) -> Tensor:
    """Compare the files with the checkpoint rounded to `dtype`: every value, then what is computed from it, in fp32.

    A fixed prompt goes through both sides, a block at a time; all hidden states and logits must be equal. One side is
    the checkpoint, the other what a user's `--init` reads from the folder. Returns the logits [1, T, V].
    """

    def fill_from_checkpoint(parameters: dict[str, Tensor]) -> None:
        checkpoint.read_checkpoint(source, parameters)
        for name, parameter in parameters.items():
            rounded = parameter.to(dtype)
            verify_values(written, name, rounded)
            parameter.copy_(rounded)

    def fill_from_folder(parameters: dict[str, Tensor]) -> None:
        for parameter in parameters.values():
            parameter.fill_(torch.nan)  # a value that is not read must not look as if it was
        written.read(parameters)

    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    if config.tie_word_embeddings:  # two parameters for now, so that each block can come and go on its own
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    ids = fixed_prompt(config)
    cos, sin = rope_tables(config, torch.arange(ids.shape[1])[None], torch.float32)
    valid = torch.ones_like(ids, dtype=torch.bool)
    blocks: list[tuple[str, nn.Module, Callable]] = [
        ("model.embed_tokens", model.model.embed_tokens, lambda block, x: block(ids)),
        *(
            (f"model.layers.{i}", layer, lambda block, x: block(x, cos, sin, None, valid)[0])
            for i, layer in enumerate(model.model.layers)
        ),
        ("model.norm", model.model.norm, lambda block, x: block(x)),
        ("lm_head", model.lm_head, lambda block, x: block(x)),
    ]
    unseen = set(parameter_shapes(config))
    from_both = torch.empty(0), torch.empty(0)
    for prefix, block, run in blocks:
        block.to_empty(device="cpu")
        parameters = {f"{prefix}.{name}": parameter for name, parameter in block.named_parameters()}
        if config.tie_word_embeddings and HEAD in parameters:
            parameters[EMBEDDING] = parameters.pop(HEAD)
        unseen -= parameters.keys()
        outputs = []
        for fill, x in zip((fill_from_checkpoint, fill_from_folder), from_both, strict=True):
            fill(parameters)
            outputs.append(run(block, x))
        if not same_bits(*outputs):
            raise RuntimeError(f"export: {prefix} computes other values from {written.folder} than from the checkpoint")
        from_both = tuple(outputs)
        block.to("meta")
    if unseen:
        raise RuntimeError(f"export: no block holds {sorted(unseen)}, so they were not verified")
    return from_both[1]


def import_transformers_models() -> type:
    """transformers' AutoModelForCausalLM. Raises UserError if it cannot be imported."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UserError(f"--verify-with transformers: its models cannot be imported: {error}") from error
    return AutoModelForCausalLM


@torch.no_grad()
def compare_with_transformers(folder: Path, config: Qwen3Config, logits: Tensor) -> float:
    """The largest difference between `logits`, of the fixed prompt, and those of transformers' model from `folder`.

    In fp32. Raises RuntimeError if it is too large, or if transformers misses a tensor or finds one too many.
    """
    model, report = import_transformers_models().from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        experts_implementation="eager",  # the default refuses widths that are not a multiple of 16 bytes
    )
    if any(report.values()):
        raise RuntimeError(f"export: transformers reads {folder} otherwise than it was written: {report}")
    difference = (model(fixed_prompt(config)).logits - logits).abs().max().item()
    if not difference <= TOLERANCE * max(1, logits.abs().max().item()):
        raise RuntimeError(f"export: the logits of transformers' model from {folder} differ by {difference}")
    return difference


def main() -> None:
    # Huge pages, which PyTorch decides on at its first tensor: most of an export is filling memory for the first time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    args = tyro.cli(ExportConfig, prog="export.py", args=sys.argv[1:])
    if launch.RANK == 0:
        export(
            checkpoint.find_checkpoint(args.run),
            Path(args.folder),
            {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype],
            parse_size(args.max_shard_size),
            fused=args.experts == "fused",
            with_transformers=args.verify_with == "transformers",
        )


if __name__ == "__main__":
    launch.run(main)
