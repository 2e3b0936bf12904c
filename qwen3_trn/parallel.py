"""From a config to a model that is spread over the ranks: mesh, meta device, FSDP2, memory. In that order.

    dims = build_mesh(world_size=dist.get_world_size())
    model = build_model(config, dims, device, torch.bfloat16)      # uninitialised: load or init the weights next

Gradients are plain sums over ranks; train.py divides by the number of supervised tokens of the whole step.
"""

import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from qwen3_trn.config import Qwen3Config
from qwen3_trn.device import Device
from qwen3_trn.errors import UserError
from qwen3_trn.model import Qwen3ForCausalLM
from qwen3_trn.titan import ParallelDims, apply_fsdp_to_decoder, force_sum_reduction


def build_mesh(world_size: int) -> ParallelDims:
    """All ranks on one FSDP axis."""
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=world_size,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=world_size,
        spmd_backend="partial_dtensor",  # the only one that is right on more than one rank with torch 2.13
    )
    dims.build_mesh()
    return dims


def check_layout(config: Qwen3Config, dims: ParallelDims) -> None:
    """Raises UserError when a weight cannot be split as the mesh asks."""
    ranks = dims.get_mesh("fsdp").size()
    if ranks > config.num_experts > 0:
        # More ranks than experts: torchtitan shards the experts' second dim, which FSDP2 wants even.
        for key in ("moe_intermediate_size", "hidden_size"):
            if getattr(config, key) % ranks:
                raise UserError(
                    f"{ranks} ranks are more than the {config.num_experts} experts, so each expert is split over all "
                    f"ranks; but {key} {getattr(config, key)} is not a multiple of {ranks}. Use a number of ranks that "
                    f"divides it, or at most {config.num_experts}."
                )


def build_model(
    config: Qwen3Config, dims: ParallelDims, device: Device, compute_dtype: torch.dtype
) -> Qwen3ForCausalLM:
    """A sharded model with fp32 weights, allocated but not initialised, that computes in `compute_dtype`.

    Built on the meta device, so that no rank ever holds the whole. Gradients are reduced in fp32.
    """
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    apply_fsdp_to_decoder(
        model,
        dims.get_mesh("fsdp"),
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        pp_enabled=False,
    )
    force_sum_reduction(model)
    # FSDP gathers weights around `forward`; a method that is called instead of it must be named.
    register_fsdp_forward_method(model, "loss")
    register_fsdp_forward_method(model, "loss_terms")
    model.materialize(device.torch_device)
    return model
