"""From a config to a model that is spread over the ranks. Read `build_model`: it is the order of application.

    dims = build_mesh(world_size=4, tp=2)
    model = build_model(config, dims, device, torch.bfloat16)      # uninitialised: load or init the weights next

Mesh axes, outermost first: dp_replicate, dp_shard (together the data ranks), tp; world size is their product. Expert
parallelism multiplies nothing: its groups are `ep` consecutive ranks among dp_shard x tp. Gradients are plain sums over
ranks; train.py divides by the number of supervised tokens of the whole step.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from qwen3_trn.config import Qwen3Config
from qwen3_trn.device import Device
from qwen3_trn.errors import UserError
from qwen3_trn.model import Qwen3ForCausalLM
from qwen3_trn.moe import Experts
from qwen3_trn.titan import ParallelDims, apply_fsdp_to_decoder, force_sum_reduction


def build_mesh(world_size: int, dp_replicate: int = 1, dp_shard: int = -1, tp: int = 1, ep: int = 1) -> ParallelDims:
    """The mesh of `world_size` ranks. dp_shard -1 takes what the others leave. Raises UserError if it does not fit."""
    others = dp_replicate * tp
    if dp_shard == -1 and world_size % others == 0:
        dp_shard = world_size // others
    if dp_replicate * dp_shard * tp != world_size:
        if world_size % others:
            advice = f"--dp-replicate x --tp must be one of {_divisors(world_size)}."
        else:
            advice = f"--dp-shard {world_size // others} would fit, and is what leaving it away means."
        raise UserError(
            f"--dp-replicate {dp_replicate} x --dp-shard {dp_shard} x --tp {tp} is not the number of ranks, "
            f"{world_size}: {advice}"
        )
    fitting = [d for d in _divisors(dp_shard * tp) if d == 1 or d % tp == 0]
    if ep not in fitting:
        raise UserError(
            f"--ep {ep} does not fit: it must divide dp_shard x tp = {dp_shard} x {tp} and be 1 or a multiple of tp. "
            f"Possible: {fitting}."
        )
    dims = ParallelDims(
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=1,
        tp=tp,
        pp=1,
        ep=ep,
        world_size=world_size,
        spmd_backend="partial_dtensor",  # the only one that is right on more than one rank with torch 2.13
    )
    dims.build_mesh()
    return dims


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def check_layout(config: Qwen3Config, dims: ParallelDims, seq_len: int) -> None:
    """Raises UserError, with the values that would work, when the model cannot be split as the mesh asks."""

    def refuse(flag: str, degree: int, why: str, sizes: list[int]) -> None:
        fitting = [d for d in _divisors(sizes[0]) if all(size % d == 0 for size in sizes)]
        if degree not in fitting:
            raise UserError(f"{flag} {degree} does not fit: {why}. Possible: {fitting}.")

    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    refuse("--tp", dims.tp, f"it must divide num_key_value_heads ({kv_heads})", [kv_heads, heads])
    refuse("--tp", dims.tp, f"it must divide --seq-len ({seq_len})", [seq_len])
    refuse("--tp", dims.tp, f"it must divide vocab_size ({config.vocab_size})", [config.vocab_size])
    num_dense_layers = sum(not config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))
    if num_dense_layers:
        size = config.intermediate_size
        refuse("--tp", dims.tp, f"it must divide intermediate_size ({size})", [size])
    if dims.ep > 1 and not config.num_experts:
        raise UserError(f"--ep {dims.ep} is for models with experts; this one is dense. Leave --ep away.")
    if not config.num_experts:
        return
    refuse("--ep", dims.ep, f"it must divide num_experts ({config.num_experts})", [config.num_experts])
    intermediate = config.moe_intermediate_size
    if dims.ep == 1:
        refuse("--tp", dims.tp, f"without --ep it must divide moe_intermediate_size ({intermediate})", [intermediate])
        intermediate //= dims.tp
    # More ranks than experts: torchtitan shards the experts' second dim, which FSDP2 wants even.
    shards = dims.dp_shard * dims.tp // dims.ep if dims.ep > 1 else dims.dp_shard
    if shards * dims.ep > config.num_experts:
        for what, size in (("moe_intermediate_size", intermediate), ("hidden_size", config.hidden_size)):
            if size % shards:
                raise UserError(
                    f"{shards * dims.ep} ranks share the {config.num_experts} experts, so each expert is split over "
                    f"{shards} ranks; but {what} ({size} a rank) is not a multiple of that. Use fewer ranks, more "
                    f"--dp-replicate, or more --ep."
                )


def build_model(
    config: Qwen3Config,
    dims: ParallelDims,
    device: Device,
    compute_dtype: torch.dtype,
    recompute: str = "none",
    compile_backend: str | None = None,
    moe_capacity: float | None = None,
    equal_groups: bool = False,
    mask_documents: bool = True,
    allocate: bool = True,
) -> Qwen3ForCausalLM:
    """A sharded model with fp32 weights, allocated but not initialised, that computes in `compute_dtype`.

    Built on the meta device, so that no rank ever holds the whole; there it stays without `allocate`, for the plan.
    Gradients are reduced in fp32. moe_capacity, equal_groups: of `Experts`; mask_documents: of `Qwen3Model`.
    """
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.model.mask_documents = mask_documents
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        experts.block, experts.capacity, experts.equal_groups = device.expert_block, moe_capacity, equal_groups
    if dims.tp_enabled:
        apply_tensor_parallel(model, dims.get_mesh("tp"))
    slice_experts(model, dims)
    for layer in model.model.layers:
        layer.forward = wrap_forward(layer.forward, recompute, compile_backend)
    if compile_backend:
        # Each a graph of its own, beside the layers': the embedding, the final norm, the head with its loss.
        for end in (model.model.embed_tokens, model.model.norm, model.lm_head):
            end.forward = wrap_forward(end.forward, "none", compile_backend)  # type: ignore[method-assign]
    apply_fsdp(model, dims, compute_dtype)
    if allocate:
        model.materialize(device.torch_device)
    return model


def apply_tensor_parallel(model: Qwen3ForCausalLM, mesh: DeviceMesh) -> None:
    """Megatron's tensor parallelism with sequence parallelism (arXiv 1909.08053, 2205.05198).

    Between the blocks each rank has its part of the sequence, as a plain tensor. Every parameter becomes a DTensor on
    the mesh, those of the norms and of the router too: each rank computes their gradient from its heads or tokens
    alone, and DTensor sums them.
    """
    sequence = Shard(1)
    plan: dict[str, ParallelStyle] = {"model.norm": SequenceParallel(use_local_output=True)}
    for i, layer in enumerate(model.model.layers):
        name = f"model.layers.{i}"
        plan |= {
            f"{name}.input_layernorm": SequenceParallel(use_local_output=True),
            f"{name}.post_attention_layernorm": SequenceParallel(use_local_output=True),
            f"{name}.self_attn": PrepareModuleInput(
                input_layouts=(sequence, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
            ),
            f"{name}.self_attn.q_proj": ColwiseParallel(),
            f"{name}.self_attn.k_proj": ColwiseParallel(),
            f"{name}.self_attn.v_proj": ColwiseParallel(),
            # [B, T, heads, D]: what is split is the heads.
            f"{name}.self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            f"{name}.self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            f"{name}.self_attn.o_proj": RowwiseParallel(output_layouts=sequence),
        }
        if layer.moe_enabled:
            # Experts take local tokens and exchange them themselves; `valid` is cut to match.
            plan |= {
                f"{name}.mlp": PrepareModuleInput(
                    input_layouts=(sequence, Replicate()),
                    desired_input_layouts=(sequence, sequence),
                    use_local_output=True,
                ),
                f"{name}.mlp.gate": SequenceParallel(sequence_dim=0, use_local_output=True),
            }
        else:
            plan |= {
                f"{name}.mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),)),
                f"{name}.mlp.gate_proj": ColwiseParallel(),
                f"{name}.mlp.up_proj": ColwiseParallel(),
                f"{name}.mlp.down_proj": RowwiseParallel(output_layouts=sequence),
            }
    parallelize_module(model, mesh, plan)
    # Embedding and head work on their rows of the vocabulary themselves: DTensor's embedding writes through a boolean
    # mask, whose size the host must know, and would gather the logits, which loss.py never holds.
    for module in (model.model.embed_tokens, model.lm_head):
        shard_parameter(module, "weight", mesh, Shard(0))
        module.group = mesh.get_group()
    model.tie_weights()


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Shard) -> None:
    """Replace a parameter by a DTensor that is cut over the mesh."""
    sharded = distribute_tensor(getattr(module, name), mesh, [placement])
    setattr(module, name, nn.Parameter(sharded))


def slice_experts(model: Qwen3ForCausalLM, dims: ParallelDims) -> None:
    """Give each rank of an ep group whole experts, or without ep each tp rank a part of every expert's I."""
    axis, placements = None, {}
    if dims.ep > 1:
        axis, placements = "ep", {"gate_proj": Shard(0), "up_proj": Shard(0), "down_proj": Shard(0)}
    elif dims.tp_enabled:
        axis, placements = "tp", {"gate_proj": Shard(1), "up_proj": Shard(1), "down_proj": Shard(2)}
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        if axis is not None:
            experts.group = dims.get_mesh(axis).get_group()
        for name, placement in placements.items():
            shard_parameter(experts, name, dims.get_mesh(axis), placement)


def wrap_forward(forward: Callable, recompute: str, compile_backend: str | None) -> Callable:
    """A module's forward with activation checkpointing ("none", "full", "selective") and compilation.

    "full" keeps only the block's input. It goes around the compiled block, so that the compiled graphs stay those of
    the plain block. "selective" also keeps what matmuls and attention return; its choice is made inside the graph.
    """
    if recompute == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _save_matmuls_and_attention)
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    if compile_backend:
        forward = torch.compile(forward, backend=compile_backend, dynamic=False, fullgraph=True)
    if recompute == "full":
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    return forward


_KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "qwen3_trn::moe_experts",
    "qwen3_trn::nki_moe_experts",
    "qwen3_trn::nkilib_moe_experts",
    "qwen3_trn::nkilib_attention",
}


def _save_matmuls_and_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply_fsdp(model: Qwen3ForCausalLM, dims: ParallelDims, compute_dtype: torch.dtype) -> None:
    """FSDP2 over the data ranks; HSDP where they are replicated; the experts' own axes under expert parallelism."""
    replicate = ["dp_replicate"] if dims.dp_replicate_enabled else []
    apply_fsdp_to_decoder(
        model,
        dims.get_mesh([*replicate, "fsdp"]),
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        ep_degree=dims.ep,
        edp_mesh=dims.get_mesh([*replicate, "efsdp"]) if dims.ep > 1 else None,
    )
    force_sum_reduction(model)
    # FSDP gathers weights around `forward`; a method that is called instead of it must be named.
    register_fsdp_forward_method(model, "loss")
    register_fsdp_forward_method(model, "loss_terms")


def reshard(model: nn.Module) -> None:
    """Give back the weights that FSDP keeps gathered after a forward: the root's, until a backward comes.

    After a forward without one this must be called, or what reads the parameters next finds whole tensors, which are
    not those that the optimizer knows.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
