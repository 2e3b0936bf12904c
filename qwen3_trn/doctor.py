"""Examines the machine before a run: versions, devices, what works on them, disks, speed.

    python -m qwen3_trn.doctor [--report FILE]
    torchrun --nproc_per_node=4 -m qwen3_trn.doctor          # collectives too

A line each: ok, warning or error, what was found, and what to do. The exit code is 0 if training would work.

Packages are judged by their metadata, without importing them. What belongs together is from AWS's release notes,
"Neuron SDK 2.33.0 component versions" and "Install PyTorch for Neuron"; nothing here has run on Trainium.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.nn.attention import SDPBackend

from qwen3_trn import launch
from qwen3_trn.cache import cache_folder
from qwen3_trn.device import Device
from qwen3_trn.errors import UserError
from qwen3_trn.metrics import format_bytes

AWS_INDEX = "https://pip.repos.neuron.amazonaws.com"
# What PyPI has under the names of AWS's packages. Their description begins with "WRONG PACKAGE".
PLACEHOLDERS = {"torch-neuronx": "1.0", "nki": "0.0.1", "neuronx-cc": "1.0.post1", "torchtitan-neuron": "0.0.1"}
DOCUMENTED = {"neuronx-cc": "2.28", "nki": "0.7"}  # released together with torch-neuronx 2.13.3 and 2.14.3
PACKAGES = ("torch", "torchtitan", "transformers", "datasets", "numpy", "torch-xla", *PLACEHOLDERS)

LOW_DISK = 10 * 10**9  # bytes; a checkpoint of the smallest published model takes 7.2 GB
LOW_SHARED_MEMORY = 10**9  # bytes; containers get 64 MB unless they ask for more
LOW_SHARE_OF_PEAK = 0.25
TIMEOUT = timedelta(minutes=5)  # of a collective, and for a rank's findings: its first step may wait for a compiler

VARIABLES = re.compile(
    "(NEURON|TORCH_NEURONX|NKI|FI|HF|QWEN3_TRN)_.*|TORCH_DEVICE_BACKEND_AUTOLOAD|OMP_NUM_THREADS|PYTORCH_.*"
)
SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD")


class Finding(NamedTuple):
    level: Literal["ok", "warning", "error"]
    what: str
    found: str
    advice: str = ""
    details: str = ""  # for the report only


class Package(NamedTuple):
    version: str
    is_placeholder: bool


# ------------------------------------------------------------------------------------------------------- the software


def find_packages() -> dict[str, Package]:
    """Those of PACKAGES that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        says_so = str(metadata.json.get("description", "")).startswith("WRONG PACKAGE")
        found[name] = Package(metadata["Version"], says_so or PLACEHOLDERS.get(name) == metadata["Version"])
    return found


def check_packages(packages: Mapping[str, Package], python: tuple[int, int]) -> list[Finding]:
    """Do the versions of `python` (major, minor) and of `packages` belong together?"""
    findings = [_check_python(python, "torch-neuronx" in packages)]
    for name, (version, is_placeholder) in packages.items():
        if is_placeholder:
            advice = f"pip uninstall {name}, then install it from AWS: --extra-index-url {AWS_INDEX}"
            findings.append(Finding("error", name, f"{version}, an empty placeholder from PyPI", advice))
        else:
            findings.append(_check_package(name, version, packages))
    if "torch-neuronx" in packages and not packages["torch-neuronx"].is_placeholder:
        if "nki" not in packages:
            advice = f"torch-neuronx imports it: pip install nki --extra-index-url {AWS_INDEX}"
            findings.append(Finding("error", "nki", "not installed", advice))
        if "neuronx-cc" not in packages and not shutil.which("neuronx-cc"):
            advice = f"the compiler: pip install 'neuronx-cc==2.*' --extra-index-url {AWS_INDEX}"
            findings.append(Finding("error", "neuronx-cc", "neither installed nor on PATH", advice))
    return findings


def _check_python(python: tuple[int, int], has_neuron: bool) -> Finding:
    text = platform.python_version() if python == sys.version_info[:2] else "{}.{}".format(*python)
    if python < (3, 11):
        return Finding("error", "Python", text, "the trainer needs 3.11 or later")
    if has_neuron and not (3, 12) <= python <= (3, 14):
        return Finding("warning", "Python", text, "AWS documents torch-neuronx for 3.12 to 3.14")
    return Finding("ok", "Python", text)


def _check_package(name: str, version: str, packages: Mapping[str, Package]) -> Finding:
    release, torch = _release(version), packages["torch"].version
    if name == "torch" and release < (2, 13):
        return Finding("error", name, version, "the trainer needs 2.13 or 2.14")
    if name == "torch" and release > (2, 14):
        return Finding("warning", name, version, "the trainer knows 2.13 and 2.14; this one has not been tried")
    if name == "torchtitan" and version != "0.3.0":
        advice = "the trainer needs 0.3.0. AWS's fork (+neuron) has the same name: give it an environment of its own"
        return Finding("error", name, version, advice)
    if name == "torch-xla" and "torch-neuronx" in packages:
        advice = "it belongs to torch-neuronx 2.9 and older, which must not share an environment with 2.13 and later"
        return Finding("error", name, version, advice)
    if name == "torch-neuronx" and release < (2, 13):
        advice = f"legacy (2.9 and older, on XLA) or a beta: a new environment with 2.13 or 2.14 from {AWS_INDEX}"
        return Finding("error", name, version, advice)
    if name == "torch-neuronx" and release != _release(torch):
        advice = "torch-neuronx 2.13.* goes with torch 2.13, 2.14.* with 2.14: install the one for this torch"
        return Finding("error", name, f"{version} beside torch {torch}", advice)
    if name in DOCUMENTED and release != _release(DOCUMENTED[name]):
        advice = f"AWS documents {DOCUMENTED[name]} with SDK 2.33; take all packages from one SDK"
        return Finding("warning", name, version, advice)
    return Finding("ok", name, version)


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_driver(has_neuron: bool) -> list[Finding]:
    """The Neuron driver, as the kernel tells it, and the devices, as AWS's neuron-ls tells them."""
    findings = []
    version = Path("/sys/module/neuron/version")
    if version.exists():
        findings.append(Finding("ok", "Neuron driver", version.read_text().strip()))
    elif has_neuron:
        advice = "is this a Trn2 or Trn3 instance? lsmod | grep neuron; sudo apt install aws-neuronx-dkms"
        findings.append(Finding("warning", "Neuron driver", "not loaded", advice))
    neuron_ls = shutil.which("neuron-ls", path=os.environ.get("PATH", "") + ":/opt/aws/neuron/bin")
    if neuron_ls:
        done = subprocess.run([neuron_ls], capture_output=True, text=True, timeout=30)
        told = re.sub("instance-id: .*", "instance-id: ***", (done.stdout + done.stderr).strip())
        if done.returncode:
            findings.append(Finding("warning", "neuron-ls", f"exit code {done.returncode}", told, told))
        else:
            findings.append(Finding("ok", "neuron-ls", "lists the machine's devices", "", told))
    return findings


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """The variables that matter here; what could be a secret is masked."""
    findings = []
    for name, value in sorted(environment.items()):
        if not VARIABLES.fullmatch(name):
            continue
        shown = "***" if SECRET.search(name) else re.sub(r"://[^/@\s]*@", "://***@", value)
        if name == "TORCH_DEVICE_BACKEND_AUTOLOAD" and value == "0":
            findings.append(Finding("warning", name, shown, "torch sees no Neuron device; unset it to train on one"))
        else:
            findings.append(Finding("ok", name, shown))
    return findings


def check_disks() -> list[Finding]:
    """Free space where runs, caches and compiled graphs go, and shared memory."""
    neff_cache = os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR")
    folders = {
        "current folder": Path.cwd(),
        "token cache": cache_folder(),
        "temporary files": Path(tempfile.gettempdir()),
        **({"compiled graphs": Path(neff_cache)} if neff_cache else {}),
        "shared memory": Path("/dev/shm"),
    }
    findings = []
    for what, folder in folders.items():
        exists = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(exists).free
        found = f"{format_bytes(free)} free, {folder}"
        if not exists.is_dir() or not os.access(exists, os.W_OK):
            findings.append(Finding("error", what, f"{folder} cannot be written to", "choose another, or its rights"))
        elif what == "shared memory" and free < LOW_SHARED_MEMORY:
            findings.append(Finding("warning", what, found, "in Docker give it more: --shm-size=16g"))
        elif what != "shared memory" and free < LOW_DISK:
            findings.append(Finding("warning", what, found, "--plan says how large a model's checkpoints are"))
        else:
            findings.append(Finding("ok", what, found))
    return findings


# --------------------------------------------------------------------------------------------------------- the device


def check_device(device: Device, has_neuron: bool) -> list[Finding]:
    """How many devices this process sees, and the memory of one."""
    name, count, memory = device.inventory()
    found = f"{count} x {name}, {memory / 2**30:.1f} GiB each; {launch.WORLD_SIZE} processes"
    if has_neuron and torch.accelerator.current_accelerator() is None:
        advice = "torch-neuronx is here, but torch sees no device, and would train on the CPU. Look at neuron-ls"
        return [Finding("warning", "device", found, advice)]
    return [Finding("ok", "device", found)]


def check_paths(device: Device) -> Iterator[Finding]:
    """Which fast paths exist: each tried on a small tensor, forward and backward."""
    dtype = device.compute_dtype("auto")
    draw = partial(_draw, device, dtype)
    paths: list[tuple[str, Callable[[], str], Literal["ok", "warning", "error"], str]] = [
        ("fused attention", partial(_attend, draw), "warning", "attention will be slow, and large for long rows"),
        (
            "grouped matmul",
            partial(_multiply_groups, draw, device),
            "warning",
            "models with experts need --moe-capacity",
        ),
        ("fused AdamW", partial(_optimize, draw, "fused"), "error", "the trainer's optimizer"),
        ("foreach AdamW", partial(_optimize, draw, "foreach"), "ok", "not used while fused works"),
        ("all-to-all", partial(_exchange, draw), "ok", "not used: experts gather and scatter"),
        ("deterministic mode", partial(_repeat, draw, device), "ok", "not used: a resumed run may differ in rounding"),
        ("torch.compile", partial(_compile, draw, device), "warning", "train with --compile off"),
    ]
    for what, probe, level_of_no, without in paths:
        try:
            yield Finding("ok", what, f"yes: {probe()}")
        except Exception as error:
            yield Finding(level_of_no, what, f"no: {_first_line(error)}", without, traceback.format_exc())


def _draw(device: Device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers, drawn on the host: a device may have no generator of its own."""
    return torch.randn(*shape).to(device.torch_device, dtype).requires_grad_()


def _backward(out: Tensor) -> None:
    # Not sum().backward(), whose gradient is one number with strides of 0: grouped matmuls refuse it.
    out.backward(torch.ones_like(out))


def _attend(draw: Callable[..., Tensor]) -> str:
    q, k, v = draw(1, 4, 512, 128), draw(1, 4, 512, 128), draw(1, 4, 512, 128)
    _backward(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    backend = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True))
    if backend == SDPBackend.MATH:
        raise RuntimeError("torch chooses the unfused one (SDPBackend.MATH)")
    return f"{backend.name}, causal, 512 tokens, head_dim 128"


def _multiply_groups(draw: Callable[..., Tensor], device: Device) -> str:
    rows, weights = draw(256, 64), draw(2, 64, 128)
    ends = torch.tensor([128, 256], dtype=torch.int32, device=device.torch_device)
    out = torch._grouped_mm(rows, weights, offs=ends)
    _backward(out)
    expected = torch.cat([rows[:128] @ weights[0], rows[128:] @ weights[1]])
    torch.testing.assert_close(out, expected, atol=0.5, rtol=0.05)
    return "torch._grouped_mm, 2 groups of 128 rows"


def _optimize(draw: Callable[..., Tensor], kind: Literal["fused", "foreach"]) -> str:
    weights = draw(64, 64).float().detach().requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr=0.1, fused=kind == "fused", foreach=kind == "foreach")
    weights.grad = torch.ones_like(weights)
    before = weights.detach().clone()
    optimizer.step()
    step = (before - weights.detach() - 0.1 * 0.01 * before).mean().item()  # 0.01 is AdamW's default decay
    if not math.isclose(step, 0.1, rel_tol=1e-3):
        raise RuntimeError(f"the first step is {step}, and should be the learning rate, 0.1")
    return "one step"


def _exchange(draw: Callable[..., Tensor]) -> str:
    sent = draw(8 * launch.WORLD_SIZE, 8).detach()
    dist.all_to_all_single(torch.empty_like(sent), sent)
    return f"{launch.WORLD_SIZE} ranks"


def _repeat(draw: Callable[..., Tensor], device: Device) -> str:
    table, rows = draw(64, 64), (torch.arange(512) % 64).to(device.torch_device, device.index_dtype)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            torch.autograd.grad(F.embedding(rows, table).square().mean(), table)[0].cpu() for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    if not torch.equal(first, second):
        raise RuntimeError("two gradients of an embedding differ")
    return "two gradients of an embedding are equal"


def _compile(draw: Callable[..., Tensor], device: Device) -> str:
    backend = device.compile_backend("on", "none")
    assert backend is not None  # with "on" there is one
    x, weights = draw(128, 64), draw(64, 64)
    started = time.perf_counter()
    compiled = torch.compile(lambda x: F.silu(x @ weights), backend=backend, dynamic=False, fullgraph=True)
    out = compiled(x)
    _backward(out)
    torch.testing.assert_close(out, F.silu(x @ weights), atol=0.5, rtol=0.05)
    return f"backend {backend}, {time.perf_counter() - started:.1f} s for one small graph"


def check_fallbacks(device: Device) -> list[Finding]:
    """Operations of the checks so far that ran on the CPU instead of the device."""
    names = device.fallback_operations()
    if names:
        return [Finding("warning", "ran on the CPU", ", ".join(names), "slow if a model needs them in every step")]
    return [Finding("ok", "ran on the CPU", "nothing, so far as the device tells")]


def check_speed(device: Device, seconds: float) -> list[Finding]:
    """FLOP/s of a large matmul, repeated for `seconds`, against the peak that MFU is against."""
    dtype = device.compute_dtype("auto")
    peak, source = device.peak_flops(dtype)

    def multiply(a: Tensor, repeats: int) -> tuple[Tensor, float]:
        """(the product, seconds for all repeats)"""
        device.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            out = a @ a
        device.synchronize()
        return out, time.perf_counter() - started

    for size in (1024, 2048, 4096, 8192):  # as large as it must be to fill the device, and no larger
        a = torch.ones(size, size, dtype=dtype, device=device.torch_device)
        multiply(a, 1)  # warms up
        once = multiply(a, 1)[1]
        if once > 0.005:
            break
    repeats = max(1, round(seconds / once))
    out, taken = multiply(a, repeats)
    speed = 2 * size**3 * repeats / taken
    what = f"{size} x {size} matmul"
    found = f"{speed / 1e12:.3g} TFLOP/s, {speed / peak:.0%} of {peak / 1e12:.3g} ({source})"
    if not bool((out.cpu() == size).all()):
        return [Finding("error", what, f"{found}; ones times ones is not {size}", "the device computes wrongly")]
    if speed < LOW_SHARE_OF_PEAK * peak:
        return [Finding("warning", what, found, "does another process use the device? neuron-ls --show-all-procs")]
    return [Finding("ok", what, found)]


def check_all_reduce(device: Device) -> list[Finding]:
    """The value and the time of a sum over all ranks."""
    ranks, numbers, repeats = launch.WORLD_SIZE, 2**20, 5
    expected = ranks * (ranks + 1) / 2
    for repeat in range(repeats + 1):  # the first one warms up
        if repeat == 1:
            device.synchronize()
            started = time.perf_counter()
        tensor = torch.full((numbers,), launch.RANK + 1.0).to(device.torch_device)
        dist.all_reduce(tensor)
    device.synchronize()
    milliseconds = 1e3 * (time.perf_counter() - started) / repeats
    if not bool((tensor.cpu() == expected).all()):
        found = f"{tensor.flatten()[0].item()} instead of {expected}"
        return [Finding("error", "all-reduce", found, "the collectives are broken: same versions on all nodes?")]
    return [Finding("ok", "all-reduce", f"{ranks} ranks, 4 MB: {milliseconds:.2f} ms")]


# -------------------------------------------------------------------------------------------------------- all together


def _attempt(what: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:
        return [Finding("error", what, _first_line(error), "the report has the traceback", traceback.format_exc())]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def find_all() -> Iterator[Finding]:
    """All findings of this rank, as they are made. The device is touched only after the process group is there."""
    packages = find_packages()
    has_neuron = "torch-neuronx" in packages and not packages["torch-neuronx"].is_placeholder
    yield from check_packages(packages, sys.version_info[:2])
    yield from _attempt("driver", partial(check_driver, has_neuron))
    device = Device()
    device.set_environment()
    yield from check_environment(os.environ)
    yield from check_disks()

    def start() -> list[Finding]:
        launch.init_process_group(device.backend, TIMEOUT.seconds)
        device.start(launch.LOCAL_RANK, launch.LOCAL_WORLD_SIZE)
        return check_device(device, has_neuron)

    (started,) = _attempt("process group", start)
    yield started
    if started.level == "error":
        return
    if launch.WORLD_SIZE > 1:
        yield from _attempt("all-reduce", partial(check_all_reduce, device))
    yield from check_paths(device)
    yield from check_fallbacks(device)
    yield from _attempt("matmul", partial(check_speed, device, seconds=2.0))


def show(finding: Finding) -> list[str]:
    """A finding as lines of text."""
    lines = [f"{finding.level:<8} {finding.what:<20} {finding.found}"]
    return lines + [f"{'':<29} {line}" for line in finding.advice.splitlines()]


def conclude(by_rank: list[list[Finding]], report: str | None) -> int:
    """Print what went wrong on other ranks than 0, and the verdict; write the report. Returns the exit code."""
    lines = []
    for rank, findings in enumerate(by_rank[1:], start=1):
        worse = [f._replace(what=f"{f.what}, rank {rank}") for f in findings if f.level == "error"]
        lines += [line for finding in worse for line in show(finding)]
    errors = sum(finding.level == "error" for findings in by_rank for finding in findings)
    lines.append(f"training would not work: {errors} errors" if errors else "training would work")
    print(*lines, sep="\n", flush=True)
    if report:
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "packages": sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions()),
            "findings_by_rank": [[finding._asdict() for finding in findings] for findings in by_rank],
        }
        Path(report).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return int(errors > 0)


def examine(report: str | None = None) -> None:
    """Examine the machine before a run.

    Args:
        report: A file to write all findings to, with details, as JSON. Values of variables that could be secrets are
            masked.
    """
    if report and not Path(report).absolute().parent.is_dir():
        raise UserError(f"--report {report}: the folder does not exist; make it, or name another file.")
    if report and Path(report).is_dir():
        raise UserError(f"--report {report} is a folder; name a file.")
    store = launch.store()
    findings = []
    for finding in find_all():
        launch.print0(*show(finding))
        findings.append(finding)
    store.set(f"doctor/{launch.RANK}", json.dumps(findings))

    def collect() -> int:
        keys = [f"doctor/{rank}" for rank in range(launch.WORLD_SIZE)]
        store.wait(keys, 2 * TIMEOUT)
        found = [json.loads(store.get(key)) for key in keys]
        return conclude([[Finding(*finding) for finding in findings] for findings in found], report)

    sys.exit(launch.run_once("doctor", collect))


if __name__ == "__main__":
    launch.run(lambda: tyro.cli(examine, prog="python -m qwen3_trn.doctor", console_outputs=launch.RANK == 0))
