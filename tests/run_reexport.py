"""Under torchrun on 4 ranks: load a folder on each of LAYOUTS and save a checkpoint.

torchrun --nproc_per_node=4 tests/run_reexport.py FOLDER OUT     # writes OUT/{layout's number}/checkpoints/step_0
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from qwen3_trn import Qwen3Config, launch
from qwen3_trn.device import Device
from qwen3_trn.hf import load_hf
from qwen3_trn.parallel import build_mesh, build_model
from tests.common import save_checkpoint

LAYOUTS = [
    {},
    {"dp_replicate": 2},
    {"tp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "ep": 4},
    {"ep": 2},
    {"ep": 4},
    {"ep": 2, "dp_replicate": 2},
]


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    launch.init_process_group("gloo", 240)
    config = Qwen3Config.from_pretrained(folder)
    for number, layout in enumerate(LAYOUTS):
        if "ep" in layout and not config.num_experts:
            continue
        model = build_model(config, build_mesh(4, **layout), Device(), torch.float32)
        load_hf(folder, config, dict(model.named_parameters()))
        state = {"step": 0, "tokens": 0, "settings": {}}
        save_checkpoint(out / str(number), 0, model, state, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)
