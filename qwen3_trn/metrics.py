"""What a run prints and records: the console line, metrics.jsonl, TensorBoard, loss.png, config.toml and env.json.

    python -c "from qwen3_trn.metrics import draw_loss; draw_loss('runs/NAME')"   # draw a run that still goes on

Only rank 0 writes, and every number it is given is on the host already.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

CODE = Path(__file__).resolve().parent.parent
VERSIONS_OF = ("torch", "torchtitan", "transformers", "safetensors", "numpy")

# The console's columns, in order; a step shows those it has. Lists hold one number a MoE layer.
COLUMNS: dict[str, Callable[[Any], str]] = {
    "loss": lambda loss: f"loss {loss:7.4f}",
    "eval_loss": lambda loss: f"eval {loss:7.4f}",
    "grad_norm": lambda norm: f"grad {norm:7.3f}",
    "lr": lambda lr: f"lr {lr:.2e}",
    "tokens_per_s": lambda rate: f"{format_count(rate):>6} tok/s",
    "mfu": lambda share: f"mfu {share:5.1%}",
    "peak_memory_bytes": lambda peak: f"mem {format_bytes(peak):>8}",
    "load_max_over_mean": lambda layers: f"load {max(layers):5.2f}",
    "dead_experts": lambda layers: f"dead {fmean(layers):5.1%}",
    "dropped_choices": lambda dropped: f"dropped {dropped}",
}


class RunLog:
    """The log of one run in the folder `out`, new or resumed.

    A resumed run logs some steps a second time: what metrics.jsonl and TensorBoard hold from its first logged step on
    is replaced, so that every step is there once.
    """

    def __init__(self, out: Path, total_steps: int):
        self.out = out
        self.total_steps = total_steps
        self.started: tuple[float, int] | None = None  # when the first line was logged, and its step

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Record `values` and print a line. A value is a number, a list of one number a MoE layer, or None (unknown).

        mfu and dead_experts are shares (0 to 1). What is not finite is null in metrics.jsonl.
        """
        if self.started is None:
            self._open(step)
            self.started = time.monotonic(), step
        try:
            self._write(step, values)
        except OSError as error:  # a full disk, with which --on-save-error may want to go on
            print(f"warning: the metrics of step {step} cannot be written to {self.out}: {error}", flush=True)

        columns = [text(values[key]) for key, text in COLUMNS.items() if values.get(key) not in (None, [])]
        started, first_step = self.started
        if step > first_step:
            seconds_a_step = (time.monotonic() - started) / (step - first_step)
            seconds_left = round(seconds_a_step * (self.total_steps - step))
            columns.append(f"eta {datetime.timedelta(seconds=seconds_left)}")
        width = len(str(self.total_steps))
        print(f"step {step:{width}}/{self.total_steps}", *columns, sep="  ", flush=True)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        record = {"step": step} | {key: _strict(value) for key, value in values.items()}
        self.file.write(json.dumps(record) + "\n")
        for key, value in values.items():
            if isinstance(value, list) and value:
                for name, of_layers in (("min", min), ("mean", fmean), ("max", max)):
                    self.tensorboard.add_scalar(f"{key}/{name}", of_layers(value), step)
            elif isinstance(value, int | float):
                self.tensorboard.add_scalar(key, value, step)

    def close(self) -> None:
        """Draw loss.png and close the files. Does nothing when no step was logged."""
        if self.started is None:
            return
        self.file.close()
        self.tensorboard.close()
        draw_loss(self.out)

    def _open(self, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = self.out / "metrics.jsonl"
        kept = [line for line, record in _read_records(path) if record["step"] < first_step]
        _write_atomically(path, "".join(kept))
        self.file = path.open("a", encoding="utf-8", buffering=1)  # line buffered: a killed run loses nothing
        self.tensorboard = SummaryWriter(self.out / "tensorboard", purge_step=first_step)


def write_samples(out: Path, step: int, lines: list[str]) -> None:
    """Print a step's samples, and put them into OUT/samples.txt in place of those from this step on."""
    print(*(f"sample     {line}" for line in lines), sep="\n", flush=True)
    path = out / "samples.txt"
    blocks = path.read_text(encoding="utf-8").split("\n\n")[:-1] if path.exists() else []
    kept = [block for block in blocks if int(block.split("\n")[0].removeprefix("step ")) < step]
    _write_atomically(path, "".join(f"{block}\n\n" for block in [*kept, "\n".join([f"step {step}", *lines])]))


def draw_loss(out: str | Path) -> None:
    """Draw OUT/loss.png, loss and learning rate over steps, from OUT/metrics.jsonl."""
    import numpy as np
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    out = Path(out)
    records = [record for _, record in _read_records(out / "metrics.jsonl")]
    steps = [record["step"] for record in records]
    figure = Figure(figsize=(9, 6), layout="constrained")
    loss_axes, lr_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for axes, key, label in ((loss_axes, "loss", "loss"), (lr_axes, "lr", "learning rate")):
        values = np.array([record.get(key) for record in records], dtype=float)  # null becomes nan, a gap in the line
        axes.plot(steps, values, linewidth=1.2, marker="." if len(steps) < 60 else None)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    evaluated = [record for record in records if record.get("eval_loss") is not None]
    if evaluated:
        steps = [record["step"] for record in evaluated]
        loss_axes.plot(steps, [record["eval_loss"] for record in evaluated], marker="o", label="validation")
        loss_axes.legend()
    loss_axes.set_title(out.resolve().name, parse_math=False)
    lr_axes.set_xlabel("step")
    figure.savefig(out / "loss.png", dpi=120)


def _read_records(path: Path) -> list[tuple[str, dict]]:
    """The lines of metrics.jsonl with their content, without a last line that a killed run left half-written."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [(line, json.loads(line)) for line in file if line.endswith("\n")]


def _strict(value: Any) -> Any:
    # JSON has no nan and no infinity, and most readers refuse them.
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_run_files(out: Path, config: dict[str, Any], extra_env: dict[str, Any]) -> None:
    """Write OUT/config.toml (the resolved flags) and OUT/env.json (what ran, and from which code).

    config: str, int, float, bool, lists of them, and None, which is left out. extra_env: what only the caller knows,
    such as the device and the world size.
    """
    is_checkout = _git("rev-parse", "--show-cdup") == ""  # else a repository that merely contains us, or none
    env = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "git_commit": _git("rev-parse", "HEAD") if is_checkout else None,
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")) if is_checkout else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in VERSIONS_OF},
        **extra_env,
    }
    lines = [f"{key} = {_toml(value)}\n" for key, value in config.items() if value is not None]
    _write_atomically(out / "config.toml", "".join(lines))
    _write_atomically(out / "env.json", json.dumps(env, indent=2) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's too; TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    raise TypeError(f"config.toml cannot hold {value!r}, a {type(value).__name__}")


def _write_atomically(path: Path, text: str) -> None:
    # errors: a --data path that is not UTF-8 has lone surrogates, which TOML cannot hold. They become "?".
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8", errors="replace")
    os.replace(unfinished, path)


def _git(*arguments: str) -> str | None:
    """What git says in the folder of this code; None without git or outside a checkout."""
    try:
        done = subprocess.run(["git", "-C", str(CODE), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def format_count(count: float) -> str:
    """596_049_920 -> "596.0M"; below 1000, a whole number."""
    return "".join(_scale(count, ("", "K", "M", "B", "T")))


def format_bytes(num_bytes: float) -> str:
    """1_200_000_000 -> "1.2 GB"; decimal units, as --max-shard-size and disks count."""
    return " ".join(_scale(num_bytes, ("B", "KB", "MB", "GB", "TB")))


def _scale(number: float, units: tuple[str, ...]) -> tuple[str, str]:
    if number < 999.5:
        return f"{number:.0f}", units[0]
    power = 1
    while number / 1000**power >= 999.95 and power < len(units) - 1:
        power += 1
    return f"{number / 1000**power:.1f}", units[power]
