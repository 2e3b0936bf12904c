"""What a process did on the device: counted while it runs, written when it ends.

NEURON_STANDIN_REPORT=FOLDER gives FOLDER/rank_R.json with
    launches            operations run on the device; views and allocations are none
    operations          {name: launches}
    compiled_graphs     forward and backward graphs of torch.compile
    signatures          [{operation, tensors (shape and dtype), launch}]: each new one is a compilation on the device;
                        `launch` is the number of launches before it
    changing_arguments  {signature: values}: numbers that differed between launches of one signature
    optimizer_launches  the launches that were a fused AdamW, to tell where a step ends
    host_reads          {place: count}: the host waited for a value of the device
    refused             {rule: what and where: count}
    communicators       ranks of each process group of more than one rank
    devices             numbers of the devices that were used
"""

import atexit
import json
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import torch

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)

operations: Counter[str] = Counter()
compiled_graphs = 0
host_reads: Counter[str] = Counter()
refused: defaultdict[str, Counter[str]] = defaultdict(Counter)
communicators: set[tuple[int, ...]] = set()
_devices: set[int] = set()
_signatures: dict[tuple, int] = {}
_arguments: defaultdict[tuple, set[str]] = defaultdict(set)
_optimizer_launches: list[int] = []


def call_site() -> str:
    """The two innermost lines outside torch and this package, else the node of the backward that is running."""
    places = []
    frame = sys._getframe()
    while frame is not None and len(places) < 2:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")):
            places.append(f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    return " < ".join([*([f"backward {node.name()}"] if node else []), *places])


def describe(tensor: torch.Tensor) -> str:
    """`float32[4, 128]`, with the device where it is not neuron's."""
    where = "" if tensor.device.type == "neuron" else f"{tensor.device.type} "
    return f"{where}{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def count(name: str, tensors: list[tuple[str, torch.Tensor]], others: dict[str, str]) -> None:
    """Count a launch. Numbers, which come as host tensors without dims or as text, are no part of a signature."""
    launches = operations.total()
    is_copy = name == "aten::_copy_from"  # of a number to the device: it arrives as a tensor
    is_number = [tensor.device.type == "cpu" and tensor.dim() == 0 and not is_copy for _, tensor in tensors]
    shapes = tuple(describe(t) for (_, t), number in zip(tensors, is_number, strict=True) if not number)
    signature = (name, *shapes)
    _signatures.setdefault(signature, launches)
    numbers = [str(t.item()) for (_, t), number in zip(tensors, is_number, strict=True) if number]
    _arguments[signature].add(", ".join(numbers + [f"{key}={value}" for key, value in others.items()]))
    if name == "aten::_fused_adamw_":
        _optimizer_launches.append(launches)
    _devices.update(tensor.device.index for _, tensor in tensors if tensor.device.type == "neuron")
    operations[name] += 1


def write(folder: Path) -> None:
    """Write this process's file."""
    found = {
        "launches": operations.total(),
        "operations": dict(operations.most_common()),
        "compiled_graphs": compiled_graphs,
        "signatures": [
            {"operation": name, "tensors": tensors, "launch": launch}
            for (name, *tensors), launch in _signatures.items()
        ],
        "changing_arguments": {
            " ".join(signature): sorted(values) for signature, values in _arguments.items() if len(values) > 1
        },
        "optimizer_launches": _optimizer_launches,
        "host_reads": dict(host_reads),
        "refused": {rule: dict(places) for rule, places in refused.items()},
        "communicators": sorted(communicators),
        "devices": sorted(_devices),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found, indent=1))


def write_at_exit(was_touched) -> None:
    """Write the file when this process ends, if it used the device: torchrun's agent and workers do not."""
    folder = os.environ.get("NEURON_STANDIN_REPORT")
    if not folder:
        return
    process, leave = os.getpid(), os._exit

    def write_once() -> None:
        if os.getpid() == process and was_touched():  # a forked child ends here too
            write(Path(folder))

    def write_and_leave(code: int) -> None:
        write_once()
        leave(code)

    atexit.register(write_once)
    os._exit = write_and_leave  # the trainer leaves by it, which calls no atexit handlers
