"""Training checkpoints: all that a run needs to go on as if it had not stopped, on any number of ranks.

    saver = Saver(out, companions=model_folder, keep=2)
    saver.save(state, model, optimizer)              # copies to the host; the files are written in the background
    load_checkpoint(find_checkpoint(out), model, optimizer)

OUT/checkpoints/step_N/ holds
    state/          weights and AdamW's moments, by torch.distributed.checkpoint: each rank writes what it owns
    trainer.json    step, position in the data, counters, settings
    SHA256SUMS      of all files; `sha256sum -c` reads it too
    config.json, tokenizer, ...    so that the folder can be exported on its own
It gets this name by one rename, after all of it is on disk; `latest` is a link to the newest. A name that ends in
`.unfinished` was left by a process that was killed. There is no random state to save: train.py seeds every step.

PyTorch's format keeps an index of its tensors in a pickle: load only checkpoints that you wrote.
"""

import dataclasses
import hashlib
import json
import re
import shutil
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from qwen3_trn.errors import UserError
from qwen3_trn.folders import UNFINISHED, fsync, publish
from qwen3_trn.hf import copy_companions, list_some
from qwen3_trn.metrics import format_bytes

SUMS_FILE = "SHA256SUMS"
_NAME = r"step_\d+"
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter, beside the number of its steps
# Ranks wait for the slowest one's disk here, not for a collective of the training step.
_TIMEOUT = timedelta(hours=1)


# ------------------------------------------------------------------------------------------------------ what is there


def list_checkpoints(out: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = [
        path for path in (out / "checkpoints").glob("step_*") if re.fullmatch(_NAME, path.name) and path.is_dir()
    ]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))


def find_checkpoint(run_or_checkpoint: str | Path) -> Path:
    """A run's newest checkpoint, or the given folder if it is a checkpoint itself."""
    path = Path(run_or_checkpoint)
    path = (list_checkpoints(path) or [path])[-1]
    if not (path / "trainer.json").is_file() or path.name.endswith(UNFINISHED):
        raise UserError(
            f"{run_or_checkpoint} is neither a run with a complete checkpoint (runs/NAME) nor a checkpoint "
            "(runs/NAME/checkpoints/step_N)."
        )
    return path


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What trainer.json holds; verify_files comes first. Raises UserError if the folder has another step's name."""
    state = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    name = checkpoint.resolve().name
    if re.fullmatch(_NAME, name) and name != f"step_{state['step']}":
        raise UserError(f"{checkpoint} holds step {state['step']}: it was renamed. Give it its own name back.")
    return state


def remove_leftovers(out: Path) -> list[Path]:
    """Remove what killed processes left unfinished in a run's folder; returns what was removed."""
    leftovers = [*out.glob(f"hf{UNFINISHED}*"), *(out / "checkpoints").glob(f"*{UNFINISHED}")]
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if complete := list_checkpoints(out):
        _point_latest(complete[-1])  # a kill may have come between the folder's rename and the link's
    return leftovers


def _point_latest(checkpoint: Path) -> None:
    link = checkpoint.with_name(f"latest{UNFINISHED}")
    link.symlink_to(checkpoint.name)
    link.rename(checkpoint.with_name("latest"))
    fsync(checkpoint.parent)


def verify_files(checkpoint: Path) -> None:
    """Raises UserError if a file is not as SHA256SUMS says, naming it and the checkpoint that can be taken instead.

    Within a process group it is collective: each rank reads its part of the files, and all raise.
    """
    if dist.is_initialized():
        found: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, find_damaged(checkpoint, dist.get_rank(), dist.get_world_size()))
    else:
        found = [find_damaged(checkpoint)]
    if damaged := sorted({name for names in found for name in names}):
        raise UserError(
            f"{checkpoint} is damaged: {list_some(damaged)} missing or not as {SUMS_FILE} says. "
            f"{_say_what_remains(checkpoint)}"
        )


def find_damaged(checkpoint: Path, part: int = 0, num_parts: int = 1) -> list[str]:
    """Names of files that differ from SHA256SUMS or are missing, of every num_parts-th file."""
    try:
        lines = (checkpoint / SUMS_FILE).read_text(encoding="utf-8").splitlines()
        sums = [(name, digest) for digest, name in (line.split("  ", 1) for line in lines)]
    except (OSError, ValueError):
        return [SUMS_FILE]
    if {f"state/{path.name}" for path in (checkpoint / "state").glob("*")} - dict(sums).keys():
        return [SUMS_FILE]  # it has lost lines
    return [
        name
        for name, digest in sums[part::num_parts]
        if not (checkpoint / name).is_file() or _sha256(checkpoint / name) != digest
    ]


def _say_what_remains(checkpoint: Path) -> str:
    checkpoint = checkpoint.resolve()
    others = list_checkpoints(checkpoint.parents[1])
    older = others[: others.index(checkpoint)] if checkpoint in others else []
    if not older:
        return f"There is no older checkpoint in {checkpoint.parent}."
    return f"The one before is {older[-1]}: to go on from it, move {checkpoint.name} away and start again."


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------------------- saving


class SaveError(UserError):
    """A checkpoint could not be written; the ones before it are as they were. Raised on every rank."""


class Saver:
    """Writes checkpoints of one run while its training goes on, one at a time. Every rank calls every method."""

    def __init__(self, out: Path, companions: Path, keep: int, saved_step: int = 0):
        """companions: the folder whose config and tokenizer go into each checkpoint. keep: how many stay."""
        self.saved_step = saved_step  # of the last checkpoint that is complete
        self.out = out
        self.companions = companions
        self.keep = keep
        self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._running: tuple[int, Any] | None = None  # the step, and the future that dcp.async_save gives

    def save(self, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy everything to the host and begin to write it. The save before must have been awaited.

        state: JSON-able facts, saved as trainer.json; "step" names the folder.
        """
        start = time.perf_counter()
        facts = json.dumps(state, indent=2)
        folder = self._folder(state["step"])
        unfinished = folder.with_name(folder.name + UNFINISHED)

        def finish(sums: dict[str, str]) -> None:
            copy_companions(self.companions, unfinished)
            (unfinished / "trainer.json").write_text(facts + "\n", encoding="utf-8")
            names = {path.relative_to(unfinished).as_posix() for path in unfinished.rglob("*") if path.is_file()}
            sums |= {name: _sha256(unfinished / name) for name in names - sums.keys()}
            lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
            (unfinished / SUMS_FILE).write_text("".join(lines), encoding="utf-8")
            publish(unfinished, folder)
            _point_latest(folder)
            for old in list_checkpoints(self.out)[: -self.keep]:
                # Renamed first, so that half a folder is never taken for a checkpoint.
                shutil.rmtree(old.rename(old.with_name(old.name + UNFINISHED)))
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            seconds = time.perf_counter() - start
            print(f"checkpoint {folder}: {format_bytes(size)} in {seconds:.1f} s", flush=True)

        tensors = training_tensors(model, optimizer)
        writer = _Writer(unfinished / "state", finish)
        future = dcp.async_save(tensors, storage_writer=writer, process_group=self.group)
        self._running = state["step"], future

    def _folder(self, step: int) -> Path:
        return self.out / "checkpoints" / f"step_{step}"

    def has_failed(self) -> bool:
        """Whether this rank knows that the running save has failed; wait() then raises its SaveError."""
        return self._running is not None and self._running[1].done() and self._running[1].exception() is not None

    def wait(self) -> None:
        """Wait for the running save, if there is one. Raises SaveError, on every rank, if it failed."""
        if self._running is None:
            return
        (step, future), self._running = self._running, None
        try:
            future.result()
        except CheckpointException as error:
            folder = self._folder(step)
            if dist.get_rank() == 0:  # every rank has stopped writing
                shutil.rmtree(folder.with_name(folder.name + UNFINISHED), ignore_errors=True)
            causes = {f"rank {rank}: {cause!r}" for rank, (cause, _) in error.failures.items()}
            raise SaveError(
                f"{folder} could not be written: {'; '.join(sorted(causes)[:4])}. "
                f"{format_bytes(shutil.disk_usage(self.out).free)} are free there."
            ) from error
        self.saved_step = step


@dataclasses.dataclass(frozen=True)
class _HashedResult(WriteResult):
    sha256: str  # of the file that holds the tensor


class _Writer(dcp.FileSystemWriter):
    """Writes and syncs a rank's file and reads it back for its checksum.

    `publish` is called with all checksums when all ranks have written, on rank 0; what it raises reaches every rank.
    """

    def __init__(self, folder: Path, publish: Callable[[dict[str, str]], None]):
        super().__init__(folder)
        self._publish = publish

    def write_data(self, plan, planner):
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None  # the file system's own words; torch.save's error hides them
            raise
        files = {result.storage_data.relative_path for result in results}
        sums = {file: _sha256(Path(self.path) / file) for file in files}
        future = torch.futures.Future()
        future.set_result([_HashedResult(**vars(r), sha256=sums[r.storage_data.relative_path]) for r in results])
        return future

    def finish(self, metadata, results):
        super().finish(metadata, results)
        folder = Path(self.path).name
        self._publish({f"{folder}/{r.storage_data.relative_path}": r.sha256 for part in results for r in part})


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """{"model": parameters, "exp_avg": ..., "exp_avg_sq": ...}, each by parameter name; AdamW's are made if missing."""
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, **{moment: {} for moment in MOMENTS}}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments |= {moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS}
        tensors["model"][name] = parameter.detach()
        for moment in MOMENTS:
            tensors[moment][name] = moments[moment]
    return tensors


# ------------------------------------------------------------------------------------------------------------ loading


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Read weights and AdamW's state, whatever ranks and layout wrote them. Collective; verify_files comes first.

    num_steps: optimizer steps that were applied.
    """
    dcp.load(training_tensors(model, optimizer), checkpoint_id=checkpoint / "state")
    for parameter in model.parameters():
        optimizer.state[parameter]["step"].fill_(num_steps)


def check_checkpoint(checkpoint: Path, shapes: dict[str, torch.Size]) -> None:
    """Raises UserError unless the checkpoint holds exactly these parameters. verify_files comes first."""
    metadata = dcp.FileSystemReader(checkpoint / "state").read_metadata().state_dict_metadata
    parts = [name.split(".", 1) for name in metadata]
    found = {name: getattr(metadata[f"{part}.{name}"], "size", None) for part, name in parts if part == "model"}
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
        try:
            dcp.load({"model": parameters}, checkpoint_id=checkpoint / "state", no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from None  # also an interrupt is wrapped, in what is not an Exception
