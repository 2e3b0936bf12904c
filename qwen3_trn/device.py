"""All that differs between neuron, cuda and cpu. Nothing else in the project asks what device it runs on.

    device = Device()
    batch = torch.as_tensor(rows, dtype=device.index_dtype, device=device.torch_device)

Facts about `neuron` come from AWS's TorchNeuron and Trainium pages (SDK 2.33); nothing here has run on that hardware.
"""

import os
import platform
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from qwen3_trn.errors import UserError

# Dense bf16 peak of one device as a process sees it, FLOP/s: a quarter of a chip's 667 and 671 TFLOPS, since a chip has
# 4 logical cores (AWS, "Trainium2 architecture" and "Trainium3 architecture"). A device that is not listed is measured.
_PEAK_FLOPS = {"trn2": 667e12 / 4, "trn3": 671e12 / 4}

TRAINIUM2_MEMORY = 24 * 2**30  # bytes of HBM of a logical core: 96 GiB a chip with 4 of them (AWS, the same page)

# What the runtime and the compiler of neuron are told, unless the user has (TorchNeuron, "Environment variables").
_NEURON_ENVIRONMENT = {
    # Matmuls of fp32, as the router's, stay fp32.
    "NEURON_CC_FLAGS": "--auto-cast=none",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
    # Compiled programs survive a reboot; the default is below /tmp.
    "TORCH_NEURONX_NEFF_CACHE_DIR": str(Path.home() / ".cache/qwen3_trn/neff"),
    # An operation that exists but fails is an error, not a slow run on the CPU.
    "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1",
    # torch._grouped_mm would ask the host whether its offsets are multiples of 128; ours are, by construction.
    "TORCH_NEURONX_SKIP_OP_PRECONDITIONS": "1",
    # Against memory that is free but in pieces: users of 24 GiB a core ran out of memory in step 2 without it.
    "TORCH_NEURONX_SEGMENT_ALLOCATOR_CONFIG": "kMaxSplitSizeBytes=268435456,kMaxNonSplitRoundingBytes=67108864",
}


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

    @property
    def static_shapes(self) -> bool:
        """Whether each new shape of an operation is compiled first, which takes seconds to minutes."""
        return self.type == "neuron"

    @property
    def expert_block(self) -> int:
        """Rows that an expert's share of the buffer is a multiple of: neuron's grouped matmul takes 128s."""
        return 128 if self.type == "neuron" else 1

    def set_environment(self) -> list[str]:
        """Set the variables that the device should run with and the user has not set; returns all as NAME=value.

        Call it before the process group is formed, which starts the runtime.
        """
        if self.type != "neuron":
            return []
        return [f"{name}={os.environ.setdefault(name, value)}" for name, value in _NEURON_ENVIRONMENT.items()]

    def put(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Integers of the host as tensors of `index_dtype` on the device."""
        return {
            name: torch.as_tensor(array).to(self.index_dtype).to(self.torch_device) for name, array in arrays.items()
        }

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

    def attention_kernel(self, rows: int, seq_len: int, num_heads: int, head_dim: int, masked: bool) -> str:
        """What runs scaled_dot_product_attention on [rows, num_heads, seq_len, head_dim], for the start-up lines.

        neuron has a fused kernel under the conditions checked here (TorchNeuron, "Best practices", and its rewrite of
        SDPA to NKI); otherwise all scores are formed, which was measured 6 times slower.
        """
        if self.type != "neuron":
            return "PyTorch's, with a mask for documents" if masked else "PyTorch's, causal"
        misses = [
            *(
                ["documents are masked (--no-pack, --doc-mask none and --kernel attention=nkilib need no mask)"]
                if masked
                else []
            ),
            *([f"--seq-len {seq_len} is not a multiple of 512"] if seq_len % 512 else []),
            *([f"head_dim {head_dim} is above 128"] if head_dim > 128 else []),
            *([f"{rows} rows x {num_heads} heads are above 512"] if rows * num_heads > 512 else []),
        ]
        if not misses:
            return "fused"
        gib = 4 * rows * num_heads * seq_len**2 / 2**30
        return f"not fused, so {gib:.2f} GiB of fp32 scores a layer and several times slower: {'; '.join(misses)}"

    def has_grouped_matmul(self) -> bool:
        """Whether torch._grouped_mm runs here. On neuron the first call compiles a small program."""
        if not hasattr(torch, "_grouped_mm"):
            return False
        a = torch.zeros(128, 128, dtype=torch.bfloat16, device=self.torch_device)
        ends = torch.full((1,), 128, dtype=torch.int32, device=self.torch_device)
        try:
            torch._grouped_mm(a, a[None], offs=ends)
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def fallback_operations(self) -> list[str]:
        """Names of the operations that ran on the CPU because the device lacks them: each costs two copies."""
        return sorted(torch.get_device_module("neuron").get_fallback_ops()) if self.type == "neuron" else []

    def synchronize(self) -> None:
        """Wait for all queued work: before reading a clock."""
        if self.type != "cpu":
            torch.accelerator.synchronize()

    def peak_memory(self) -> int:
        """Largest memory so far, bytes: allocated on the accelerator, or this process's resident set on the CPU."""
        if self.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.synchronize()  # neuron allocates asynchronously
        return torch.accelerator.max_memory_allocated()

    def peak_flops(self, dtype: torch.dtype) -> tuple[float, str]:
        """(FLOP/s of this process's device, where the figure is from): the denominator of MFU."""
        module = torch.get_device_module(self.type)
        name = "" if self.type == "cpu" else module.get_device_properties(module.current_device()).name
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
