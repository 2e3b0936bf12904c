"""What AWS's documents say that the device does not have, as checks on each operation and each collective.

A broken rule raises `neuron stand-in: RULE: WHAT (SOURCE)`, or with NEURON_STANDIN_STRICT=0 is only reported. These are
the limits of beta releases and of documents, a lower bound: a run that keeps them all has not run on the device.
"""

import os

import torch

from neuron_standin import build, report

strict = os.environ.get("NEURON_STANDIN_STRICT", "1") != "0"

_BEST_PRACTICES = 'AWS, "Best practices for PyTorch Neuron"'
_DISTRIBUTED = 'AWS, "torch.distributed" guide'
_SOURCE = "torch-neuronx source, 2.12 beta"

RULES = {
    "64-bit tensor": f"eager mode has no int64, float64 and complex numbers; {_SOURCE}",
    "data-dependent shape": f"every new shape is compiled; {_BEST_PRACTICES}",
    "host tensor": "torch's rule on every accelerator",
    "memory format": f"only contiguous and preserve; {_SOURCE}",
    "random numbers": f"they fall to the CPU and use its random stream; {_SOURCE}",
    "grouped matmul": f"preconditions of _grouped_mm; {_SOURCE}",
    "dynamic shape": 'dynamic=True is rejected; AWS, "torch.compile reference"',
    "process group after device": f"Runtime should not be initialized before init_process_group; {_SOURCE}",
    "fork": f"the runtime cannot be used in a forked child, use spawn; {_SOURCE}",
    "communicators": "at most 16 distinct replica groups in a program; AWS Neuron documentation, SDK 2.32",
    "all-to-all group": f"4, 8, 16 or a multiple of 32 consecutive ranks, from a multiple of that; {_SOURCE}",
    "all-to-all splits": f"all equal; {_SOURCE}",
    "collective layout": f"contiguous tensors that are not empty; {_SOURCE}",
    "collective kind": f"no point-to-point, barrier on the default group only; {_DISTRIBUTED}, {_SOURCE}",
    "reduction": f"SUM, AVG, PRODUCT, MIN, MAX; {_SOURCE}",
}

_MAX_COMMUNICATORS = 16
_REDUCTIONS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX")
_GROUPED_MM_BLOCK = 128

_WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex64, torch.complex128)
# Nothing is computed by these.
_ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::resize_"}
# Their int64 results may be there, to be cast to int32.
_INDEX_RESULTS = {"aten::topk", "aten::sort"}
_DATA_DEPENDENT = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
}
_INDEXED = {"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::_unsafe_index"}
_RANDOM_WITHOUT_GENERATOR = {"aten::native_dropout"}
_HOST_READS = {"aten::_local_scalar_dense", "aten::equal"}
_CHANNELS_LAST = ("2", "3")  # torch's numbers for channels_last and channels_last_3d


def refuse(rule: str, what: str) -> None:
    """Report a broken rule and, when strict, raise RuntimeError."""
    report.refused[rule][f"{what} at {report.call_site()}"] += 1
    if strict:
        raise RuntimeError(f"neuron stand-in: {rule}: {what} ({RULES[rule]})")


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "neuron"


def touched(owner: int) -> None:
    """Before this process uses the device for the first time; owner: the one that did before the fork, or 0."""
    if owner:
        refuse("fork", f"the device is used in process {os.getpid()}, forked from {owner}, which used it before")


def check_operation(name: str, tensors: list[tuple[str, torch.Tensor]], others: dict[str, str], is_view: bool) -> None:
    """Before an operation. tensors: (argument, tensor); others: {argument: text}, a generator as "generator"."""
    if is_view or name in _ALLOCATIONS:
        if others.get("memory_format") in _CHANNELS_LAST:
            refuse("memory format", f"{name} in channels_last")
        return
    what = f"{name}({', '.join(report.describe(tensor) for _, tensor in tensors)})"
    if name == "aten::_copy_from":
        _check_copy(what, tensors[0][1], tensors[1][1])
    else:
        are_results = ("indices",) if name in _INDEX_RESULTS else ()
        if any(on_device(t) and t.dtype in _WIDE and key not in are_results for key, t in tensors):
            refuse("64-bit tensor", what)
        if name not in _INDEXED and len({tensor.device.type for _, tensor in tensors if tensor.dim() > 0}) > 1:
            # Always, as torch does.
            raise RuntimeError(f"neuron stand-in: host tensor: {what} ({RULES['host tensor']})")
    if name in _DATA_DEPENDENT:
        refuse("data-dependent shape", what)
    if name in _INDEXED and any(key == "indices" and t.dtype in (torch.bool, torch.uint8) for key, t in tensors):
        refuse("data-dependent shape", f"boolean mask in {what}")
    if "generator" in others or name in _RANDOM_WITHOUT_GENERATOR:
        refuse("random numbers", what)
    if name == "aten::_grouped_mm":
        _check_grouped_mm(what, dict(tensors), others)
    if name in _HOST_READS:
        report.host_reads[report.call_site()] += 1
    report.count(name, tensors, others)


def check_result(name: str, results: list[torch.Tensor], is_view: bool) -> None:
    """After an operation."""
    if is_view or name in _ALLOCATIONS or name in _INDEX_RESULTS:
        return
    if any(on_device(tensor) and tensor.dtype in _WIDE for tensor in results):
        refuse("64-bit tensor", f"{name} returns {', '.join(map(report.describe, results))}")


def _check_copy(what: str, source: torch.Tensor, target: torch.Tensor) -> None:
    if on_device(source) and not on_device(target):
        report.host_reads[report.call_site()] += 1
    is_index_cast = source.dtype == torch.int64 and target.dtype == torch.int32
    if any(on_device(t) and t.dtype in _WIDE for t in (source, target)) and not is_index_cast:
        refuse("64-bit tensor", what)


def _check_grouped_mm(what: str, tensors: dict[str, torch.Tensor], others: dict[str, str]) -> None:
    a, b = tensors["self"], tensors["mat2"]
    if a.dim() != 2 or "offs" not in tensors or "bias" in tensors or "out_dtype" in others:
        refuse("grouped matmul", f"{what}; only 2D x 3D and 2D x 2D with offsets, without bias and out_dtype")
        return
    rows = a.shape[0] if b.dim() == 3 else a.shape[1]
    if rows % _GROUPED_MM_BLOCK:
        refuse("grouped matmul", f"{what}; {rows} rows are not a multiple of {_GROUPED_MM_BLOCK}")
    ends = build.load().host_alias(tensors["offs"]).tolist()
    if ends != sorted(ends) or not all(0 <= end <= rows and end % _GROUPED_MM_BLOCK == 0 for end in ends):
        refuse("grouped matmul", f"offsets {ends} of {rows} rows; expected sorted multiples of {_GROUPED_MM_BLOCK}")
    # The device looks at the offsets itself, and waits for them, unless it is told not to.
    if os.environ.get("TORCH_NEURONX_SKIP_OP_PRECONDITIONS") != "1":
        report.host_reads[f"_grouped_mm's precondition: {report.call_site()}"] += 1


def check_new_group(ranks: tuple[int, ...], is_first: bool, was_touched: bool) -> None:
    """Before a process group is made. is_first: it is the default one."""
    if is_first and was_touched:
        refuse("process group after device", "init_process_group came after the first use of the device")
    if len(ranks) > 1:
        report.communicators.add(ranks)
    if len(report.communicators) > _MAX_COMMUNICATORS:
        refuse(
            "communicators", f"{len(report.communicators)} groups of different ranks, the last of them {list(ranks)}"
        )


def check_collective(
    name: str, ranks: list[int], is_default: bool, tensors: list[torch.Tensor], reduction: str, is_uneven: bool
) -> None:
    """Before a collective. reduction: its name, or ""; is_uneven: an all-to-all's splits or chunks differ."""
    what = f"{name}({', '.join(map(report.describe, tensors))}) over ranks {ranks}"
    if name in ("send", "recv") or (name == "barrier" and not is_default):
        refuse("collective kind", what)
    if reduction not in _REDUCTIONS:
        refuse("reduction", f"{reduction} in {what}")
    if any(tensor.dtype in _WIDE for tensor in tensors):
        refuse("64-bit tensor", what)
    if any(tensor.numel() == 0 or not tensor.is_contiguous() for tensor in tensors):
        refuse("collective layout", what)
    if name.startswith("all_to_all"):
        if is_uneven:
            refuse("all-to-all splits", what)
        size = len(ranks)
        consecutive = ranks == list(range(ranks[0], ranks[0] + size)) and ranks[0] % size == 0
        if not consecutive or (size not in (4, 8, 16) and size % 32):
            refuse("all-to-all group", what)
    report.count(f"collective {name} over {len(ranks)} {reduction}".strip(), [("", tensor) for tensor in tensors], {})
