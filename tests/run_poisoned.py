"""train.py whose loss is nan on rank 1, or whose gradient of one parameter is infinite there. Run by test_resume.py:

torchrun --nproc_per_node=2 tests/run_poisoned.py loss|gradient --flags of train.py
"""

import sys

import torch

import train
from qwen3_trn import launch
from qwen3_trn.init import local_tensor

what = sys.argv.pop(1)
forward_backward = train.forward_backward


def poisoned(model, *arguments):
    losses, stats = forward_backward(model, *arguments)
    if launch.RANK == 1 and what == "loss":
        losses["loss"] = losses["loss"] * torch.nan
    elif launch.RANK == 1:
        local_tensor(model.model.layers[1].self_attn.k_proj.weight.grad)[0] = torch.inf
    return losses, stats


train.forward_backward = poisoned
launch.run(train.main)
