"""One step of the real code on tensors that have shapes but no memory, as rank 0 of any number of ranks, counted.

    counts = count_step(config, args, num_ranks=64)         # bytes of tensors that live at once, collectives

In one process: the process group is torch's fake one, which sends nothing, and so are the tensors. Nothing is derived
from formulas, so what changes in the model, the loop or torch changes here too.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from qwen3_trn import dispatch, start
from qwen3_trn.config import Qwen3Config, TrainConfig
from qwen3_trn.device import TRAINIUM2
from qwen3_trn.init import local_tensor
from qwen3_trn.model import Qwen3ForCausalLM
from qwen3_trn.parallel import build_mesh, build_model, check_layout
from qwen3_trn.titan import clip_grad_norm_

_COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
}
_AXES = {
    "fsdp": "FSDP",
    "efsdp": "FSDP of experts",
    "dp_replicate": "HSDP",
    "tp": "tensor parallel",
    "ep": "expert parallel",
}


class _Tracer(TorchDispatchMode):
    """Sees every operation: keeps the bytes of live tensors and their peak in each phase, and counts collectives."""

    def __init__(self, group_names: dict[str, str]):
        super().__init__()
        self.group_names = group_names  # name of a process group -> label
        self.sizes: dict[int, int] = {}  # storage -> bytes
        self.live = 0
        self.peaks: Counter[str] = Counter()
        self.collectives: Counter[tuple] = Counter()
        self.phase = "start"
        self.part: str | None = None  # of the step, that collectives are counted for

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # they come again as operations on plain tensors
        if func is torch.ops.qwen3_trn.moe_experts.default:
            with self:  # what the opaque operations allocate inside counts too
                out = dispatch.moe_experts._init_fn(*args)
        elif func is torch.ops.qwen3_trn.moe_experts_backward.default:
            with self:
                out = dispatch.moe_experts_backward._init_fn(*args)
        else:
            out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._watch(tensor.untyped_storage())
        operation = _COLLECTIVES.get(func.overloadpacket.__name__)
        if operation and self.part:
            leaves = tree_leaves((args, kwargs))
            num_bytes = max(leaf.nbytes for leaf in [*leaves, *tensors] if isinstance(leaf, Tensor))
            key = self.part, self._axis(leaves), operation
            self.collectives[*key, "count"] += 1
            self.collectives[*key, "bytes"] += num_bytes
        return out

    def _axis(self, leaves: list[Any]) -> str:
        for leaf in leaves:
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
                leaf = dist.ProcessGroup.unbox(leaf).group_name
            if isinstance(leaf, str) and leaf in self.group_names:
                return self.group_names[leaf]
        raise AssertionError("a collective of a group that is no axis of the mesh")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch a step. FSDP frees and allocates what it gathers by UntypedStorage.resize_, which is no operation."""
        resize = torch.UntypedStorage.resize_

        def resize_and_watch(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._watch(storage)
            self._resize(storage._cdata, storage.nbytes())

        # DTensor infers the shapes of whole tensors by running operations on fake ones, which a run has not in memory.
        infer_shape = ShardingPropagator._propagate_tensor_meta_non_cached

        def infer_shape_unwatched(*args):
            with _disable_current_modes():
                return infer_shape(*args)

        with (
            mock.patch.object(ShardingPropagator, infer_shape.__name__, infer_shape_unwatched),
            mock.patch.object(torch.UntypedStorage, "resize_", resize_and_watch),
            mock.patch.object(dispatch, "_grouped_mm", _grouped_mm_shape),
            FakeTensorMode(allow_non_fake_inputs=True),
            self,
        ):
            yield

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self._resize, key, 0).atexit = False
            self._resize(key, storage.nbytes())

    def _resize(self, key: int, num_bytes: int) -> None:
        self.live += num_bytes - self.sizes.pop(key, 0)
        if num_bytes:
            self.sizes[key] = num_bytes
        self.peaks[self.phase] = max(self.peaks[self.phase], self.live)


def _grouped_mm_shape(a: Tensor, b: Tensor, group_ends: Tensor, equal_groups: bool) -> Tensor:
    """dispatch.py's, whose fp32 form torch cannot fake: the memory it allocates."""
    return a.new_empty((group_ends.shape[0], a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2]))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that this rank's parts of the tensors hold; several may be views of one storage."""
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def count_step(config: Qwen3Config, args: TrainConfig, num_ranks: int) -> Counter:
    """One step of train.py as rank 0 of num_ranks. All numbers are linear in the number of layers, from 3 on.

    weights, gradients, optimizer, gathered_block (the largest that FSDP gathers): bytes. ("peak", phase): the most
    bytes alive in a part of the step. ("collectives", axis, operation, "count" or "bytes"): of the whole step; bytes
    gathered, or not yet reduced.
    """
    import train  # not at the top: train.py imports plan.py, and that this file

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        dims = build_mesh(num_ranks, args.dp_replicate, args.dp_shard, args.tp, args.ep)
        check_layout(config, dims, args.seq_len)
        micro_batch_size, num_micro_steps = start.split_batch(args, num_ranks // args.tp)
        compute_dtype = TRAINIUM2.compute_dtype(args.dtype)
        model = build_model(
            config,
            dims,
            TRAINIUM2,
            compute_dtype,
            args.ac,
            moe_capacity=args.moe_capacity,
            mask_documents=args.mask_documents,
            allocate=False,
        )
        tracer = _Tracer(_group_names(model))

        def enter_second_half(grad: Tensor) -> None:
            tracer.phase = "second half"

        def watch_gradient(module: torch.nn.Module, inputs: tuple) -> None:
            inputs[0].register_hook(enter_second_half)

        # The gradient of the last layer's input: what live bytes grow with changes from activations to gradients.
        model.model.layers[-1].register_forward_pre_hook(watch_gradient)
        aux_coef = config.router_aux_loss_coef if args.router_aux_loss_coef == "config" else args.router_aux_loss_coef
        names = ("input_ids", "labels", "positions", "document_ids")
        with tracer.step():
            model.materialize("cpu")
            optimizer = train.build_optimizer(model, args)
            shape = (micro_batch_size, args.seq_len)
            batch = {name: torch.zeros(shape, dtype=TRAINIUM2.index_dtype) for name in names}
            tracer.part = "step"
            with contextlib.suppress(DataDependentOutputException):  # what it would return
                train.agree([], args.tp, False, False)
            # A second micro-batch has the gradients of the first beside it; all further ones are like it.
            for tracer.part in ("micro-batch", None)[:num_micro_steps]:
                tracer.phase = "first half"
                losses, router = train.forward_backward(model, [batch], 1, aux_coef, args.router_z_loss_coef, args.tp)
                if tracer.part:
                    gradients = _storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
            tracer.part = "step"
            norm = clip_grad_norm_(model.parameters(), args.max_grad_norm, ep_enabled=args.ep > 1)
            with contextlib.suppress(DataDependentOutputException):
                train.read_step(losses, norm, router)
            tracer.phase = "update"
            optimizer.step()
            state = [value for values in optimizer.state.values() for value in values.values()]
            counts: Counter[Any] = Counter(
                weights=_storage_bytes(model.parameters()), gradients=gradients, optimizer=_storage_bytes(state)
            )
    finally:
        dist.destroy_process_group()
        # They hold meshes, which the next count would take for its own.
        _clear_fast_path_sharding_prop_cache()
        _clear_python_sharding_prop_cache()
    for (part, *key), number in tracer.collectives.items():
        counts["collectives", *key] += number * (num_micro_steps if part == "micro-batch" else 1)
    for phase, peak in tracer.peaks.items():
        # A run's optimizer state is there in every phase, here only after the first update.
        counts["peak", phase] = peak + (counts["optimizer"] if phase != "update" else 0)
    counts["gathered_block"] = _largest_gathered(model) * compute_dtype.itemsize
    return counts


def _group_names(model: Qwen3ForCausalLM) -> dict[str, str]:
    """Label of each process group by its name: those of the meshes that parameters are spread over."""
    names: dict[str, str] = {dist.distributed_c10d._get_default_group().group_name: "all ranks"}
    for mesh in {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}:
        names |= {mesh.get_group(axis).group_name: _AXES[axis] for axis in mesh.mesh_dim_names or ()}
    return names


def _largest_gathered(model: Qwen3ForCausalLM) -> int:
    """Elements of the largest group of parameters that FSDP gathers at once."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return max(
        sum(parameter._orig_size.numel() for group in state._fsdp_param_groups for parameter in group.fsdp_params)
        for state in states
    )
