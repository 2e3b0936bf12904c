"""A training checkpoint to a verified Hugging Face folder.

    python export.py runs/tiny-1 my-model                     # the run's latest checkpoint
    python export.py runs/tiny-1/checkpoints/step_200 my-model --dtype fp32 --max-shard-size 200MB

One process, on the CPU, whatever ranks wrote the checkpoint; it holds one shard and one parameter at a time. The folder
gets its name only after everything in it was read back and compared with the checkpoint: every tensor's name, shape,
dtype and values, and the logits on a fixed prompt.
"""

import json
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
from qwen3_trn.folders import new_folder
from qwen3_trn.hf import EMBEDDING, HEAD, HFFolder, pieces_of
from qwen3_trn.metrics import format_bytes, format_count
from qwen3_trn.model import Qwen3ForCausalLM, parameter_shapes, rope_tables

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


@dataclass(frozen=True)
class ExportConfig:
    """Write a training checkpoint as a verified Hugging Face folder."""

    run: tyro.conf.Positional[str]  # A run's folder (its latest checkpoint is taken), or a checkpoint's.
    folder: tyro.conf.Positional[str]  # The folder to make; it must not exist, or be empty.
    dtype: Literal["bf16", "fp32"] = "bf16"  # Of the files; training weights are fp32.
    max_shard_size: str = "5GB"  # Largest safetensors file.


def export(source: Path, folder: Path, dtype: torch.dtype, max_shard_bytes: int, replace: bool = False) -> None:
    """Write `folder` from the checkpoint `source`, and verify it.

    Raises UserError if the folder holds something, unless it may be replaced; RuntimeError, and leaves no folder, if
    what was written is not what was read.
    """
    checkpoint.verify_files(source)
    config = Qwen3Config.from_pretrained(source)
    shapes = parameter_shapes(config)
    checkpoint.check_checkpoint(source, shapes)

    def read(name: str) -> Tensor:
        tensor = torch.empty(shapes[name])
        checkpoint.read_checkpoint(source, {name: tensor})
        return tensor

    with new_folder(folder, replace) as unfinished:
        hf.copy_companions(source, unfinished)
        hf.save_hf(unfinished, config, shapes, read, dtype, max_shard_bytes)
        state = json.loads((source / "trainer.json").read_text(encoding="utf-8"))
        card = MODEL_CARD.format(
            name=folder.resolve().parent.name if folder.name == "hf" else folder.resolve().name,
            model_type=config.model_type,
            parameters=format_count(sum(shape.numel() for shape in shapes.values())),
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
        num_tensors = verify_values(written, shapes, read, dtype)
        verify_logits(written, config, read, dtype)
        total_bytes = sum(path.stat().st_size for path in unfinished.iterdir())
    print(
        f"exported   {folder}: {format_bytes(total_bytes)}, {hf.DTYPE_NAMES[dtype]}",
        f"verified   missing 0, unexpected 0; {num_tensors} tensors and the logits equal to {source}, bit for bit",
        sep="\n",
        flush=True,
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of every bit, for which nan equals itself. Of tensors of one dtype."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def verify_values(
    written: HFFolder, shapes: dict[str, torch.Size], read: Callable[[str], Tensor], dtype: torch.dtype
) -> int:
    """Compare every tensor in the files with the checkpoint's, rounded to `dtype`. Returns how many there are."""
    num_tensors = 0
    for name, shape in shapes.items():
        expected = read(name).to(dtype)
        for piece in pieces_of(name, shape, fused=False):
            tensor = written.view(piece.key)[:]
            wanted = expected if piece.expert is None else expected[piece.expert]
            if tensor.dtype != dtype or not same_bits(tensor, wanted):
                raise RuntimeError(f"export: {piece.key} in {written.folder} is not what the checkpoint holds")
            num_tensors += 1
    return num_tensors


@torch.no_grad()
def verify_logits(written: HFFolder, config: Qwen3Config, read: Callable[[str], Tensor], dtype: torch.dtype) -> None:
    """Run a fixed prompt through both sides, block by block, in fp32: all hidden states and logits must be equal.

    One side is the checkpoint rounded to `dtype`, the other what a user's `--init` reads from the folder.
    """

    def from_checkpoint(parameters: dict[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            parameter.copy_(read(name).to(dtype))

    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    if config.tie_word_embeddings:  # two parameters for now, so that each block can come and go on its own
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    length = min(64, config.max_position_embeddings)
    ids = torch.arange(length)[None] * 7919 % config.vocab_size
    cos, sin = rope_tables(config, torch.arange(length)[None], torch.float32)
    valid = torch.ones(1, length, dtype=torch.bool)
    blocks: list[tuple[str, nn.Module, Callable]] = [
        ("model.embed_tokens", model.model.embed_tokens, lambda block, x: block(ids)),
        *(
            (f"model.layers.{i}", layer, lambda block, x: block(x, cos, sin, None, valid)[0])
            for i, layer in enumerate(model.model.layers)
        ),
        ("model.norm", model.model.norm, lambda block, x: block(x)),
        ("lm_head", model.lm_head, lambda block, x: block(x)),
    ]
    from_both = torch.empty(0), torch.empty(0)
    for prefix, block, run in blocks:
        outputs = []
        for fill, x in zip((from_checkpoint, written.read), from_both, strict=True):
            block.to_empty(device="cpu")
            parameters = {f"{prefix}.{name}": parameter for name, parameter in block.named_parameters()}
            if config.tie_word_embeddings and HEAD in parameters:
                parameters[EMBEDDING] = parameters.pop(HEAD)
            fill(parameters)
            outputs.append(run(block, x))
            block.to("meta")
        if not same_bits(*outputs):
            raise RuntimeError(f"export: {prefix} computes other values from {written.folder} than from the checkpoint")
        from_both = tuple(outputs)


def main() -> None:
    args = tyro.cli(ExportConfig, prog="export.py", args=sys.argv[1:])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    if launch.RANK == 0:
        export(checkpoint.find_checkpoint(args.run), Path(args.folder), dtype, parse_size(args.max_shard_size))


if __name__ == "__main__":
    launch.run(main)
