"""What AWS's documents say that the device cannot do, or must be given, as far as it concerns this trainer; and the
test that checks each, or why none does.

Sources: AWS's Neuron documentation (SDK 2.32 and 2.33), by the title of the page; the source of torch-neuronx's 2.12
beta, of which later releases may lift some limits; reports of users of that beta; torch's own rules for a device that
is not built in (PrivateUse1). Absence from this list proves nothing.
"""

from typing import NamedTuple

_RULES = "tests/test_standin.py::test_breaking_each_rule_is_refused"
_LAYOUTS = "tests/test_standin.py::test_layouts"
_TWO_RANKS = "tests/test_standin.py::test_experts_on_two_ranks"
_SHAPES = "tests/test_standin.py::test_shapes_do_not_change_after_step_2"
_SPLIT = "tests/test_layouts.py::test_models_that_cannot_be_split"
_GONE = "tests/test_resume.py::test_a_rank_that_is_gone_takes_the_others_down"
_RESUME = "tests/test_standin.py::test_stop_resume_export"

_BETA = "torch-neuronx source, 2.12 beta"
_USERS = "users of the 2.12 beta"
_ENVIRONMENT = "Environment variables"
_BEST = "Best practices for PyTorch Neuron"
_COMPILE = "torch.compile reference"
_DISTRIBUTED = "torch.distributed guide"
_MEMORY = "Memory profiling guide"
_TORCH = "torch 2.13, any PrivateUse1 device"

_HARDWARE = "only the hardware can show it"
_SPEED = "speed, not correctness: only the hardware can show it"
_NOT_USED = "the trainer does not use it"


class Limit(NamedTuple):
    name: str
    what: str
    source: str
    test: str | None  # file::function
    why_not: str = ""  # where there is no test


LIMITS = [
    # The device and its process
    Limit("process group first", "init_process_group before the device is touched", _BETA, _RULES),
    Limit("no fork", "a forked child cannot use the runtime", _BETA, _RULES),
    Limit("one core a process", "each process has one logical core", _DISTRIBUTED, _TWO_RANKS),
    Limit("trn2, trn3 only", "wheels from AWS's index for Python 3.12 and later", "Release notes", None, _HARDWARE),
    Limit("device properties", "the device's name is get_device_properties(d).name", _BETA, _RESUME),
    Limit("synchronise before memory", "statistics are of queued work", _MEMORY, None, _HARDWARE),
    Limit("synchronise before clocks", "eager operations are queued", _MEMORY, None, _HARDWARE),
    Limit("fragmentation", "24 GiB in pieces: allocator configuration", _USERS, None, _HARDWARE),
    Limit("no pinned memory", "DataLoader(pin_memory=True) is of no use", _USERS, None, _NOT_USED),
    Limit("environment variables", "auto-cast, stochastic rounding, fallbacks, caches", _ENVIRONMENT, _RESUME),
    # Tensors
    Limit("no 64-bit tensors", "int64 and float64 are cast to 32 bits", _BETA, _RULES),
    Limit("int32 indices", "gather and scatter by int64 are up to 2,486 times slower", _USERS, _RULES),
    Limit("contiguous formats", "channels_last raises", _BETA, _RULES),
    Limit("host tensors", "an operation takes tensors of one device", _TORCH, _RULES),
    Limit("random numbers", "drawn on the CPU, from its stream; torch.Generator is not there", _BETA, _RULES),
    Limit("weights from the CPU", "so they are initialised there and copied", _BETA, _LAYOUTS),
    Limit("no complex numbers", "so RoPE is by cos and sin", _ENVIRONMENT, _RULES),
    Limit("no fp8 of OCP on trn2", "fp8 matmuls are missing or slow", _BETA, None, _NOT_USED),
    Limit("sum of bool", "returned -1 on the older stack: cast first", "users of the XLA stack", _RULES),
    # Shapes
    Limit("static shapes", "each new shape is a compilation, eager too", _BEST, _SHAPES),
    Limit("no data-dependent shapes", "nonzero, boolean masks: a host read and a compilation each", _BETA, _RULES),
    Limit("no host reads", "in forward and backward; one a step", _BEST, _TWO_RANKS),
    Limit("changing numbers", "a Python number is a constant of what is compiled", _COMPILE, _SHAPES),
    Limit("topk", "native on the last dim, largest and sorted", _BETA, None, "other forms are rewritten, not refused"),
    Limit("RoPE by halves", "strided assignment writes whole buffers", _USERS, None, _SPEED),
    Limit("no CPU fallbacks", "get_fallback_ops is empty after a run", "TorchNeuron API reference", None, _HARDWARE),
    # Grouped matmul
    Limit("grouped rows", "_grouped_mm: rows are a multiple of 128", _BETA, _RULES),
    Limit("grouped offsets", "sorted, in range, multiples of 128", _BETA, _RULES),
    Limit("grouped forms", "2D x 3D and 2D x 2D, without bias and out_dtype", _BETA, _RULES),
    Limit("grouped precondition", "a host read each, unless it is switched off", _BETA, _TWO_RANKS),
    Limit("no uneven dispatch", "experts get padded slots of static number", _BETA, _SHAPES),
    # Attention
    Limit("fused attention", "no mask, lengths of 512s, head_dim <= 128, rows x heads <= 512", _USERS,
          "tests/test_device.py::test_attention_is_fused_under_the_documented_conditions"),
    # Compilation
    Limit("no dynamic shapes", "a symbolic size raises", _COMPILE, _RULES),
    Limit("fullgraph", "recommended: graph breaks cost a dispatch each", _COMPILE, None, "torch raises by itself"),
    Limit("compiled blocks", "a graph for each layer and for the ends, not for the model", _USERS, None, _SPEED),
    Limit("recompute outside", "activation checkpointing around the compiled block", _USERS, None, _SPEED),
    Limit("no host tensors in graphs", "they are copied, or refused", _ENVIRONMENT, _LAYOUTS),
    # Collectives
    Limit("all-to-all groups", "4, 8, 16 or a multiple of 32 consecutive ranks", _BETA, _RULES),
    Limit("all-to-all splits", "all equal", _BETA, _RULES),
    Limit("collective layout", "contiguous, not empty", _BETA, _RULES),
    Limit("no point-to-point", "send and recv are not there in the beta", _BETA, _RULES),
    Limit("barrier", "on the default group only", _BETA, _RULES),
    Limit("reductions", "SUM, AVG and the like; no PREMUL_SUM, which FSDP2 asks for", _BETA, _RULES),
    Limit("16 communicators", "distinct replica groups in a program", "Neuron documentation, SDK 2.32", _RULES),
    Limit("collectives below 1 GiB", "the compiler reserves as much again", _USERS, None, _HARDWARE),
    Limit("kv heads", "num_key_value_heads % tp == 0", _USERS, _SPLIT),
    Limit("timeouts", "a rank that dies hangs the others", _USERS, _GONE),
    # torch's rules for a device that is not built in
    Limit("ties", ".to(device) makes new parameters and unties weights", _TORCH, _RULES),
    Limit("sharding", "fully_shard does not move parameters: meta, then materialise", _TORCH, _LAYOUTS),
    Limit("one mesh a foreach", "fused AdamW refuses DTensors beside tensors", _TORCH, _LAYOUTS),
    Limit("recompute and random numbers", "checkpoint saves the device's state if `_initialized`", _TORCH, None,
          "nothing in the model draws numbers"),
    Limit("checkpoints", "saved by way of the CPU; safetensors cannot load onto the device", _TORCH, _RESUME),
]  # fmt: skip
