"""All that differs between neuron, cuda and cpu. Nothing else in the project asks what device it runs on.

    device = Device()
    batch = torch.as_tensor(rows, dtype=device.index_dtype, device=device.torch_device)

Facts about `neuron` come from AWS's TorchNeuron and Trainium2 pages; nothing here has run on that hardware.
"""

import os
import platform
import resource
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from qwen3_trn.errors import UserError

# Dense bf16 peak of one device as a process sees it, FLOP/s. Trainium2: 667 TFLOPS a chip with 4 logical cores (AWS,
# "Trainium2 architecture"). A device that is not listed is measured.
_PEAK_FLOPS = {"trn2": 667e12 / 4}

TRAINIUM2_MEMORY = 24 * 2**30  # bytes of HBM of a logical core: 96 GiB a chip with 4 of them (AWS, the same page)


def _device_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator else "cpu"


@dataclass(frozen=True)
class Device:
    """The device of this process. `torch_device` and what needs it may be used only after the process group is up."""

    type: str = field(default_factory=_device_type)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.type)

    @property
    def backend(self) -> str:
        """The process group's backend. Accelerators get gloo for CPU tensors beside their own."""
        own = dist.get_default_backend_for_device(self.type)
        return own if self.type == "cpu" else f"{self.type}:{own},cpu:gloo"

    @property
    def index_dtype(self) -> torch.dtype:
        """neuron has no 64-bit integers, and gathers by int32 many times faster."""
        return torch.int32 if self.type == "neuron" else torch.int64

    def put(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Integers of the host as tensors of `index_dtype` on the device."""
        return {name: torch.as_tensor(array).to(self.torch_device, self.index_dtype) for name, array in arrays.items()}

    def start(self, local_rank: int, local_world_size: int) -> None:
        """Take this process's device (after the process group is up), or its share of the CPU's cores."""
        if self.type == "cpu":
            # For more than one process torchrun sets OMP_NUM_THREADS=1, which leaves most cores idle. Another value is
            # the user's choice.
            if os.environ.get("OMP_NUM_THREADS") in (None, "1" if local_world_size > 1 else None):
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
        elif torch.accelerator.device_count() > 1:
            torch.accelerator.set_device_index(local_rank)

    def compute_dtype(self, flag: str) -> torch.dtype:
        """The dtype of matmuls for --dtype.

        auto is fp32 on a CPU: without AVX512-BF16 or AMX, bf16 matmuls there are several times slower.
        """
        if flag == "auto":
            flag = "fp32" if self.type == "cpu" else "bf16"
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[flag]

    def compile_backend(self, flag: str, recompute: str) -> str | None:
        """torch.compile's backend for --compile and --ac, None for not at all. auto compiles on accelerators."""
        if flag == "off" or (flag == "auto" and self.type == "cpu"):
            return None
        if self.type != "neuron":
            return "inductor"
        if recompute == "selective":
            raise UserError("--ac selective inside a compiled layer has not been tried on neuron: add --compile off.")
        return "neuron"

    def synchronize(self) -> None:
        """Wait for all queued work: before reading a clock."""
        if self.type != "cpu":
            torch.accelerator.synchronize()

    def peak_memory(self) -> int:
        """Largest memory so far, bytes: allocated on the accelerator, or this process's resident set on the CPU."""
        if self.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return torch.accelerator.max_memory_allocated()

    def peak_flops(self, dtype: torch.dtype) -> tuple[float, str]:
        """(FLOP/s of this process's device, where the figure is from): the denominator of MFU."""
        name = "" if self.type == "cpu" else torch.get_device_module(self.type).get_device_name()
        for known, flops in _PEAK_FLOPS.items():
            if known in name.lower():
                return flops, f"{name}, documented bf16 peak"
        size, repeats = 1024, 5
        a = torch.ones(size, size, dtype=dtype, device=self.torch_device)
        best = float("inf")
        for _ in range(repeats + 1):  # the first one warms up, and cannot be the fastest
            self.synchronize()
            start = time.perf_counter()
            a @ a
            self.synchronize()
            best = min(best, time.perf_counter() - start)
        return 2 * size**3 / best, f"measured: {size} x {size} matmul, {str(dtype).removeprefix('torch.')}"

    def inventory(self) -> tuple[str, int, int]:
        """(name, how many of them this process sees, bytes of memory of one)."""
        if self.type == "cpu":
            return f"cpu ({platform.machine()})", 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        module = torch.get_device_module(self.type)
        properties = module.get_device_properties(module.current_device())
        return f"{self.type} ({properties.name})", torch.accelerator.device_count(), properties.total_memory


TRAINIUM2 = Device("neuron")  # what --plan plans for, on any machine
