"""The one door to torchtitan (pinned 0.3.0): every import from it, and the fixes that it needs.

    from qwen3_trn.titan import ParallelDims, apply_fsdp_to_decoder, clip_grad_norm_

Import this before anything else of torchtitan. Neither triton nor an accelerator is needed.
"""

import logging

import torch

# Registers the "fake" process-group backend, which ParallelDims gives to mesh axes of size 1.
import torch.testing._internal.distributed.fake_pg
from torch._utils import _get_available_device_type
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils as titan_utils

# torchtitan takes the device type once, at import, and supposes CUDA where there is no accelerator.
if _get_available_device_type() is None:
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.tools.logging import logger

# Its progress lines ("Building device mesh with ...") say nothing that the trainer does not print.
logger.setLevel(logging.WARNING)
# DTensor says at length that reducing a norm over two mesh axes takes two all-reduces, of one number each.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

__all__ = ["ParallelDims", "apply_fsdp_to_decoder", "clip_grad_norm_", "force_sum_reduction"]


def force_sum_reduction(model: torch.nn.Module) -> None:
    """Make FSDP reduce gradients by SUM.

    apply_fsdp_to_decoder sets a gradient divide factor of 1, for which FSDP2 asks the backend for PREMUL_SUM. Only
    NCCL has that.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
