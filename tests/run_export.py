"""Checkpoints of random models, as train.py leaves them. Run by test_export.py:

torchrun --nproc_per_node=N tests/run_export.py MODELS RUNS

MODELS/NAME are folders with config.json and the files that go with it. RUNS/NAME gets the checkpoint, and the values
that it must hold in expected.safetensors.
"""

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from qwen3_trn import launch
from qwen3_trn.config import Qwen3Config, TrainConfig
from qwen3_trn.device import Device
from qwen3_trn.init import init_weights
from qwen3_trn.parallel import build_mesh, build_model
from tests.common import save_checkpoint


def main() -> None:
    launch.init_process_group("gloo", 240)
    models, runs = map(Path, sys.argv[1:])
    for folder in sorted(models.iterdir()):
        config = Qwen3Config.from_pretrained(folder)
        model = build_model(config, build_mesh(launch.WORLD_SIZE), Device(), torch.float32)
        parameters = dict(model.named_parameters())
        init_weights(parameters, std=0.1, seed=1)
        generator = torch.Generator().manual_seed(launch.RANK)
        for parameter in parameters.values():
            if parameter.dim() == 1:  # norms of ones and biases of zeros would hide a mix-up
                local = parameter.to_local().detach()
                local.add_(0.1 * torch.randn(local.shape, generator=generator))
        out = runs / folder.name
        state = {"step": 7, "position": 56, "tokens": 28672, "supervised_tokens": 28616, "skipped_steps": 0}
        state["settings"] = dataclasses.asdict(TrainConfig(init=str(folder), lr=1e-3))
        save_checkpoint(out, 7, model, state, companions=folder)
        expected = {name: parameter.full_tensor().detach() for name, parameter in parameters.items()}
        if launch.RANK == 0:
            save_file(expected, out / "expected.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)
