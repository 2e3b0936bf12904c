"""Training checkpoints (torch.distributed.checkpoint)."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from qwen3_trn.errors import UserError
from qwen3_trn.folders import fsync, publish
from qwen3_trn.hf import copy_companions, list_some


def save_checkpoint(
    out: Path, step: int, parameters: dict[str, Tensor], state: dict[str, Any], companions: Path
) -> Path:
    """Write OUT/checkpoints/step_N and point `latest` at it. Collective: every rank writes the shards it owns.

    state: JSON-able facts of the run (step, position, ...), saved as trainer.json. `companions`: the folder whose
    config and tokenizer files are taken along, so that a checkpoint can be exported on its own.
    """
    folder = out / "checkpoints" / f"step_{step}"
    unfinished = folder.with_name(folder.name + ".unfinished")
    if dist.get_rank() == 0:
        unfinished.mkdir(parents=True)
    dist.barrier()
    dcp.save({"model": parameters}, checkpoint_id=unfinished / "weights")
    if dist.get_rank() == 0:
        copy_companions(companions, unfinished)
        (unfinished / "trainer.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        publish(unfinished, folder)
        pointer = folder.with_name("latest.unfinished")
        pointer.write_text(folder.name + "\n", encoding="utf-8")
        fsync(pointer)
        pointer.rename(folder.with_name("latest"))
    dist.barrier()
    return folder


def find_checkpoint(run_or_checkpoint: str | Path) -> Path:
    """The checkpoint folder that a run's `latest` names, or the given folder if it is a checkpoint itself."""
    path = Path(run_or_checkpoint)
    latest = path / "checkpoints" / "latest"
    if latest.is_file():
        path = path / "checkpoints" / latest.read_text(encoding="utf-8").strip()
    if not (path / "trainer.json").is_file():
        raise UserError(
            f"{run_or_checkpoint} is neither a run with a complete checkpoint (runs/NAME) nor a checkpoint "
            "(runs/NAME/checkpoints/step_N)."
        )
    return path


def check_checkpoint(checkpoint: Path, shapes: dict[str, torch.Size]) -> None:
    """Raises UserError unless the checkpoint holds exactly these parameters."""
    try:
        metadata = dcp.FileSystemReader(checkpoint / "weights").read_metadata().state_dict_metadata
    except OSError as error:
        raise UserError(f"{checkpoint} is not a whole checkpoint: {error}.") from error
    found = {name.removeprefix("model."): getattr(entry, "size", None) for name, entry in metadata.items()}
    if found != shapes:
        wrong = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
        raise UserError(
            f"{checkpoint}: its config.json describes other parameters than its weights hold: {list_some(wrong)}. One "
            "of the two was replaced."
        )


def read_checkpoint(checkpoint: Path, parameters: dict[str, Tensor]) -> None:
    """Read a checkpoint's values for just these parameters into them, in one process, whatever ranks wrote it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what no_dist asks for
        dcp.load({"model": parameters}, checkpoint_id=checkpoint / "weights", no_dist=True)
