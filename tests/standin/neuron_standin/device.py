"""Registers the device `neuron` with torch. `import torch` calls `autoload`, by the distribution's entry point.

Names of `torch.neuron`, by who needs them:
- documented by AWS (TorchNeuron API reference, memory profiling guide): device_count, current_device, set_device,
  get_device_properties (name, total_memory), synchronize, is_available, current_stream, default_stream, set_stream,
  stream, device, Stream, Event, empty_cache, the memory functions, manual_seed and the RNG state,
  get_fallback_ops, get_executed_ops, clear_op_tracking;
- asked for by torch itself: is_initialized (DeviceMesh), _initialized and get_amp_supported_dtype (checkpoint, the
  latter for torch.autocast, which AWS documents), _is_in_bad_fork, default_generators, manual_seed_all,
  get_rng_state_all, StreamContext.
The trainer must need no other. get_dynamo_metrics is documented by name only, so it is left out; autocast itself, which
the trainer does not use, does nothing here.
"""

import os
import types
from dataclasses import dataclass

import torch
import torch.distributed as dist

from neuron_standin import build, report, rules

_MEMORY_BYTES = 24 * 2**30  # as in csrc/device.h


_library = build.load()
DEVICES = int(os.environ.get("NEURON_STANDIN_DEVICES", "8"))
exchange_device = _library.exchange_device  # makes a device current, unless it is -1; returns the one that was


def _index(device=None) -> int:
    """The number of a device, given as such, as torch.device or string, or None for the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return exchange_device(-1) if index is None else index


def current_device() -> int:
    return exchange_device(-1)


def set_device(device) -> None:
    _library.touch()
    exchange_device(_index(device))


class DeviceContext:
    def __init__(self, device):
        self.index, self.previous = _index(device), -1

    def __enter__(self):
        self.previous = exchange_device(self.index)

    def __exit__(self, *error):
        exchange_device(self.previous)


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0):
        return torch.Stream(torch.device("neuron", _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, **kwargs):
        return torch.Event("neuron", enable_timing=enable_timing)


class _StreamContext:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.previous = torch.accelerator.current_stream(self.stream.device_index)
            _library.set_stream(self.stream.stream_id, self.stream.device_index)

    def __exit__(self, *error):
        if self.stream is not None:
            _library.set_stream(self.previous.stream_id, self.previous.device_index)


@dataclass(frozen=True)
class _Properties:
    name: str = "trn2"
    total_memory: int = _MEMORY_BYTES


def _get_device_properties(device=None) -> _Properties:
    _library.touch()
    return _Properties()


def _default_stream(device=None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(kind))


def _generator(device=None) -> torch.Generator:
    return _library.default_generator(_index(device))


def _make_module() -> types.ModuleType:
    neuron = types.ModuleType("torch.neuron")
    neuron.is_available = lambda: True
    neuron.is_initialized = _library.was_touched
    neuron._initialized = True  # without it torch.utils.checkpoint does not save the device's RNG state
    neuron._is_in_bad_fork = lambda: False
    neuron.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    neuron.empty_cache = lambda: None
    neuron.device_count = lambda: DEVICES
    neuron.current_device = current_device
    neuron.set_device = set_device
    neuron.device = DeviceContext
    neuron.synchronize = lambda device=None: _library.touch()
    neuron.get_device_properties = _get_device_properties

    neuron.Stream, neuron.Event, neuron.stream, neuron.StreamContext = Stream, Event, _StreamContext, _StreamContext
    neuron.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    neuron.default_stream = _default_stream
    neuron.set_stream = lambda stream: _library.set_stream(stream.stream_id, stream.device_index)

    neuron.default_generators = [_generator(i) for i in range(DEVICES)]
    neuron.manual_seed = lambda seed: _generator().manual_seed(seed)
    neuron.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in neuron.default_generators]
    neuron.initial_seed = lambda: _generator().initial_seed()
    neuron.get_rng_state = lambda device=None: _generator(device).get_state()
    neuron.set_rng_state = lambda state, device=None: _generator(device).set_state(state)
    neuron.get_rng_state_all = lambda: [generator.get_state() for generator in neuron.default_generators]

    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "memory_stats",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    ):
        setattr(neuron, name, getattr(torch.accelerator, name))

    neuron.get_fallback_ops = lambda: []  # nothing is ever handed to the CPU behind one's back
    neuron.get_executed_ops = lambda: sorted(report.operations)
    neuron.clear_op_tracking = report.operations.clear
    return neuron


_num_groups = 0


def make_process_group(options, backend_options):
    """c10d calls this on each rank of a new group; options: torch's _DistributedBackendOptions."""
    global _num_groups
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    _num_groups += 1
    is_first = _num_groups == 1
    rules.check_new_group(ranks, is_first, _library.was_touched())
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return _library.wrap_backend(gloo, ranks, is_first)


def _register() -> None:
    _library.init(DEVICES, rules.touched, rules.check_operation, rules.check_result, rules.check_collective)
    torch.utils.rename_privateuse1_backend("neuron")
    torch._register_device_module("neuron", _make_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("neuron", make_process_group, extended_api=True, devices=["neuron"])
    report.write_at_exit(_library.was_touched)


_register()


def autoload() -> None:
    """What `import torch` calls; importing this module has done it all."""
