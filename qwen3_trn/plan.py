"""What a run needs, before a machine is rented: `train.py --plan --plan-ranks N` prints it and exits.

    torchrun train.py --plan --plan-ranks 64 --config configs/qwen3-8b-trn2.48xlarge.toml

One step of the real code runs as rank 0 of N, in one process: its process group is torch's fake one, which sends
nothing, and its tensors are torch's fake ones, which have shapes but no memory. What is printed is therefore counted,
not derived from formulas: bytes of tensors that live at once, and collectives. Layers that are alike are counted at
two depths and the line through both is extended.

Exact: weights, gradients, optimizer state, collectives. An estimate: the working memory, which is that of PyTorch's
CPU operations run one by one. torch.compile usually needs less; what a device's runtime takes for itself is unknown.
"""

import contextlib
import dataclasses
import shutil
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
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

from qwen3_trn import launch, moe
from qwen3_trn.config import Qwen3Config, TrainConfig
from qwen3_trn.device import TRAINIUM2_MEMORY, Device
from qwen3_trn.errors import UserError
from qwen3_trn.init import local_tensor
from qwen3_trn.loss import chunk_rows
from qwen3_trn.metrics import format_bytes, format_count
from qwen3_trn.model import Qwen3ForCausalLM
from qwen3_trn.parallel import build_mesh, build_meta_model, check_layout
from qwen3_trn.titan import clip_grad_norm_

_DEVICE = Device("neuron")  # what is planned for; nothing here touches one
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


@dataclass(frozen=True)
class Plan:
    """Bytes are of one device, rank 0's, which holds the most; collectives are those that it takes part in a step."""

    num_ranks: int
    num_parameters: int
    num_active_parameters: int
    weights: int
    gradients: int
    optimizer: int
    working: int  # the most beside them at any time of a step: activations, gathered weights, logits
    gathered_block: int  # of `working`: the largest block of weights that FSDP gathers, in the compute dtype
    logits_chunk: int  # of `working`: fp32
    collectives: dict[tuple[str, str], tuple[int, int]]  # (axis, operation) -> count and bytes, gathered or unreduced
    rows_over_ideal: float | None  # rows that the experts' buffers have, over the rows that balanced routing fills
    micro_batch_size: int
    num_micro_steps: int
    flops_per_token: float
    flops_per_step: float
    checkpoint: int
    export: int

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def memory(self) -> int:
        return self.state + self.working

    @property
    def fits(self) -> bool:
        return self.memory <= TRAINIUM2_MEMORY


# ------------------------------------------------------------------------------------------------- one step, watched


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
                out = moe.moe_experts._init_fn(*args)
        elif func is torch.ops.qwen3_trn.moe_experts_backward.default:
            with self:
                out = moe.moe_experts_backward._init_fn(*args)
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
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in leaf._type().name():
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
            mock.patch.object(moe, "_grouped_mm", _grouped_mm_shape),
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


def _grouped_mm_shape(a: Tensor, b: Tensor, group_ends: Tensor) -> Tensor:
    """moe.py's, whose fp32 form torch cannot fake: the memory it allocates."""
    return a.new_empty((group_ends.shape[0], a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2]))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that this rank's parts of the tensors hold; several may be views of one storage."""
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _count_step(config: Qwen3Config, args: TrainConfig, num_ranks: int) -> Counter:
    """One step of train.py as rank 0 of num_ranks: all numbers of a Plan that are linear in the number of layers."""
    import train  # not at the top: train.py imports this file

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        dims = build_mesh(num_ranks, args.dp_replicate, args.dp_shard, args.tp, args.ep)
        check_layout(config, dims, args.seq_len)
        micro_batch_size, num_micro_steps = train.split_batch(args, num_ranks // args.tp)
        compute_dtype = _DEVICE.compute_dtype(args.dtype)
        model = build_meta_model(config, dims, compute_dtype, args.ac, moe_capacity=args.moe_capacity)
        tracer = _Tracer(_group_names(model))

        def enter_second_half(grad: Tensor) -> None:
            tracer.phase = "second half"

        # The gradient of the last layer's input: what live bytes grow with changes from activations to gradients.
        model.model.layers[-1].register_forward_pre_hook(
            lambda module, inputs: None if inputs[0].register_hook(enter_second_half) else None
        )
        aux_coef = config.router_aux_loss_coef if args.router_aux_loss_coef == "config" else args.router_aux_loss_coef
        names = ("input_ids", "labels", "positions", "document_ids")
        with tracer.step():
            model.materialize("cpu")
            optimizer = train.build_optimizer(model, args)
            shape = (micro_batch_size, args.seq_len)
            batch = {name: torch.zeros(shape, dtype=_DEVICE.index_dtype) for name in names}
            tracer.part = "step"
            with contextlib.suppress(DataDependentOutputException):  # what it would return
                train.count_tokens([], args.tp)
            # A second micro-batch has the gradients of the first beside it; all further ones are like it.
            for tracer.part in ("micro-batch", None)[:num_micro_steps]:
                tracer.phase = "first half"
                losses, router = train.forward_backward(
                    model, [batch], 1, aux_coef, args.router_z_loss_coef, args.tp
                )
                if tracer.part:
                    gradients = _storage_bytes(parameter.grad for parameter in model.parameters())
            tracer.part = "step"
            norm = clip_grad_norm_(model.parameters(), args.max_grad_norm, ep_enabled=args.ep > 1)
            with contextlib.suppress(DataDependentOutputException):
                train.read_step(losses, norm, router)
            tracer.phase = "update"
            optimizer.step()
            state = [value for values in optimizer.state.values() for value in values.values()]
            counts = Counter(
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
    names = {dist.group.WORLD.group_name: "all ranks"}
    for mesh in {parameter.device_mesh for parameter in model.parameters()}:
        names |= {mesh.get_group(axis).group_name: _AXES[axis] for axis in mesh.mesh_dim_names}
    return names


def _largest_gathered(model: Qwen3ForCausalLM) -> int:
    """Elements of the largest group of parameters that FSDP gathers at once."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return max(
        sum(parameter._orig_size.numel() for group in state._fsdp_param_groups for parameter in group.fsdp_params)
        for state in states
    )


def make_plan(config: Qwen3Config, args: TrainConfig, num_ranks: int) -> Plan:
    """Count what a run of `args` needs on num_ranks. Raises UserError for what the run would refuse."""
    import train

    train.check_flags(args, config)
    depth = config.num_hidden_layers
    if depth > 4 and len({config.is_moe_layer(layer) for layer in range(depth)}) == 1:
        # Not fewer: the last layers' weights and gradients are still on their way when the one before needs its own.
        three, four = (
            _count_step(dataclasses.replace(config, num_hidden_layers=layers), args, num_ranks) for layers in (3, 4)
        )
        counts = {key: three[key] + (depth - 3) * (four[key] - three[key]) for key in four}
    else:
        counts = dict(_count_step(config, args, num_ranks))
    peak = max(number for key, number in counts.items() if key[0] == "peak")
    state = counts["weights"] + counts["gradients"] + counts["optimizer"]
    keys = {key[1:3] for key in counts if key[0] == "collectives"}

    with torch.device("meta"):
        whole = Qwen3ForCausalLM(config)
    micro_batch_size, num_micro_steps = train.split_batch(args, num_ranks // args.tp)
    num_tokens = micro_batch_size * args.seq_len
    flops_per_token = whole.flops_per_token(args.seq_len)
    return Plan(
        num_ranks=num_ranks,
        num_parameters=whole.num_parameters(),
        num_active_parameters=whole.num_active_parameters(),
        weights=counts["weights"],
        gradients=counts["gradients"],
        optimizer=counts["optimizer"],
        working=peak - state,
        gathered_block=counts["gathered_block"],
        logits_chunk=4 * chunk_rows(num_tokens, config.vocab_size // args.tp) * config.vocab_size // args.tp,
        collectives={
            key: (counts["collectives", *key, "count"], counts["collectives", *key, "bytes"]) for key in sorted(keys)
        },
        rows_over_ideal=_rows_over_ideal(config, args, num_tokens // args.tp) if config.num_experts else None,
        micro_batch_size=micro_batch_size,
        num_micro_steps=num_micro_steps,
        flops_per_token=flops_per_token,
        flops_per_step=flops_per_token * args.global_batch_size * args.seq_len,
        checkpoint=4 * whole.num_parameters(),
        export=2 * whole.num_parameters(),
    )


def _rows_over_ideal(config: Qwen3Config, args: TrainConfig, num_tokens: int) -> float:
    """Slots for one source rank's tokens, over the choices of them that balanced routing sends to this rank."""
    num_here, k, block = config.num_experts // args.ep, config.num_experts_per_tok, moe.Experts(config).block
    capacity = None
    if args.moe_capacity is not None:
        capacity = moe.expert_capacity(num_tokens, k, config.num_experts, args.moe_capacity, block)
    return moe.num_slots(num_tokens, k, num_here, block, capacity) * args.ep / (num_tokens * k)


# ---------------------------------------------------------------------------------------------- what to do, and print


def nearest_fit(config: Qwen3Config, args: TrainConfig, plan: Plan) -> tuple[str, Plan] | None:
    """The first change that makes a plan fit, as flags to add, and the plan then; None where none was found.

    In this order: smaller micro-batches, recomputation, more tensor parallelism, more ranks.
    """
    ranks, least = plan.num_ranks, {"micro_batch_size": 1, "ac": "full"}
    changes: list[dict[str, Any]] = []
    if plan.state < TRAINIUM2_MEMORY:  # otherwise only ranks help
        sizes = [size for size in range(plan.micro_batch_size - 1, 0, -1) if plan.micro_batch_size % size == 0]
        changes += [{"micro_batch_size": size} for size in sizes]
        levels = ["none", "selective", "full"]
        changes += [{"ac": level} for level in levels[levels.index(args.ac) + 1 :]]
        changes += [least]
        kv_heads = config.num_key_value_heads
        changes += [{**least, "tp": tp} for tp in range(args.tp + 1, kv_heads + 1) if kv_heads % tp == 0]
    for factor in (2, 4, 8, 16, 32, 64):
        more = {"plan_ranks": factor * ranks, "micro_batch_size": plan.micro_batch_size}
        changes += [more, {**more, **least}]
    for change in changes:
        new_ranks = change.get("plan_ranks", ranks)
        tried = dataclasses.replace(args, **change)
        rows = (tried.micro_batch_size or plan.micro_batch_size) * (new_ranks // tried.tp)
        if args.global_batch_size % rows:
            change["global_batch_size"] = -(-args.global_batch_size // rows) * rows
            tried = dataclasses.replace(tried, **change)
        try:
            new = make_plan(config, tried, new_ranks)
        except UserError:  # a layout that cannot be
            continue
        if new.fits:
            changed = {key: value for key, value in change.items() if value != getattr(args, key)}
            return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in changed.items()), new
    return None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def describe(plan: Plan, config: Qwen3Config, args: TrainConfig, free_disk: int) -> list[str]:
    """The lines that --plan prints."""
    ranks = plan.num_ranks
    lines = [
        f"model      {config.model_type}, {format_count(plan.num_parameters)} parameters, "
        f"{format_count(plan.num_active_parameters)} in the matmuls of a token",
        f"layout     {ranks} ranks: dp_replicate {args.dp_replicate} x dp_shard "
        f"{ranks // args.tp // args.dp_replicate} x tp {args.tp}{f', ep {args.ep}' if config.num_experts else ''}; "
        f"recompute {args.ac}",
        f"step       {args.global_batch_size} rows = {format_count(args.global_batch_size * args.seq_len)} tokens: "
        f"{ranks // args.tp} data ranks x {plan.num_micro_steps} micro-batches x {plan.micro_batch_size} rows",
        f"FLOPs      {plan.flops_per_token / 1e9:,.1f} G a token, {plan.flops_per_step / 1e12:,.1f} T a step",
    ]
    if plan.rows_over_ideal is not None:
        lines += [f"experts    buffers have {plan.rows_over_ideal:.2f} times the rows that balanced routing fills"]
    lines += ["", f"{'memory':<28}{'a device':>14}{f'{ranks} devices':>16}"]
    for name in ("weights", "gradients", "optimizer"):
        number = getattr(plan, name)
        lines += [f"  {name:<26}{_gib(number):>14}{_gib(number * ranks):>16}"]
    lines += [f"  {'activations, buffers ~':<26}{_gib(plan.working):>14}{_gib(plan.working * ranks):>16}"]
    for name, number in (("gathered weights", plan.gathered_block), ("logits chunk", plan.logits_chunk)):
        lines += [f"    {'of it, ' + name:<24}{_gib(number):>14}"]
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines += [
        f"  {'sum ~':<26}{_gib(plan.memory):>14}{_gib(plan.memory * ranks):>16}",
        f"  {verdict} in the {_gib(TRAINIUM2_MEMORY)} of a Trainium2 logical core "
        f"({plan.memory / TRAINIUM2_MEMORY:.0%}); ~ estimate, the rest is exact",
        "",
        f"{'collectives a step':<28}{'count':>14}{'bytes in all':>16}{'mean':>12}",
    ]
    for (axis, operation), (count, num_bytes) in plan.collectives.items():
        name = f"{axis} {operation}"
        lines += [f"  {name:<26}{count:>14}{format_bytes(num_bytes):>16}{format_bytes(num_bytes / count):>12}"]
    enough = "enough" if plan.checkpoint + plan.export <= free_disk else "NOT ENOUGH"
    return [
        *lines,
        "",
        f"disk       checkpoint {format_bytes(plan.checkpoint)}, export {format_bytes(plan.export)}; free: "
        f"{format_bytes(free_disk)}, {enough}",
    ]


def print_plan(args: TrainConfig) -> None:
    """Print the plan of a run; under torchrun one process does."""
    import train

    if launch.RANK != 0:
        return
    folder, _ = train.find_model(args)
    config = Qwen3Config.from_pretrained(folder)
    plan = make_plan(config, args, args.plan_ranks or launch.WORLD_SIZE)
    out = Path(args.out or "runs").absolute()
    existing = next(parent for parent in (out, *out.parents) if parent.exists())
    print(f"plan       {folder}", *describe(plan, config, args, shutil.disk_usage(existing).free), sep="\n")
    if not plan.fits:
        found = nearest_fit(config, args, plan)
        if found:
            print(f"to fit     {found[0]}   ({_gib(found[1].memory)} a device)")
        else:
            print("to fit     nothing tried helps: micro-batches of one row, --ac full, more --tp, 64 times the ranks")
