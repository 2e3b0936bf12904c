"""Export a MoE of 1 billion parameters (2 GB in bf16) with 200 MB shards: memory, and time beside `cp`.

    pip install -e '.[dev]' -c constraints.txt
    python benchmarks/export_2gb.py --folder /tmp/export-2gb            # needs 9 GB of disk; --tiny: seconds, a toy

Two ranks write a training checkpoint of random weights (4 GB, fp32). `python export.py` runs as a process of its own,
whose anonymous memory (RssAnon in /proc/PID/status) is sampled every 5 ms; then `cp` copies the folder that it wrote.
Both are timed until the files are on disk, with their sources in the page cache. Printed, and checked:

- the export's largest RssAnon, verification included, stays below 1.2 x the largest file + one decoder layer in fp32 +
  600 MB.

A checkpoint is read in the pieces in which ranks wrote it: one that a single process wrote takes another half of its
largest tensor (300 MB here, of the embedding).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from load_0_6b import resident_bytes

from qwen3_trn import checkpoint, launch
from qwen3_trn.config import Qwen3Config
from qwen3_trn.device import Device
from qwen3_trn.model import parameter_shapes
from qwen3_trn.parallel import build_mesh, build_model

REPO = Path(__file__).parent.parent
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}
TINY = CONFIG | {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 64}
ALLOWED_BESIDE = 600e6


def write_checkpoint(run: Path) -> None:
    """One rank, under torchrun: the checkpoint that training leaves in a run's folder, with random weights."""
    launch.init_process_group("gloo", 600)
    config = Qwen3Config.from_pretrained(run)
    model = build_model(config, build_mesh(launch.WORLD_SIZE), Device("cpu"), torch.float32)
    model.init_weights(seed=0)
    state = {"step": 1, "tokens": 0, "settings": {}}
    # Without AdamW's moments, which an export does not read: they would take three times the memory and disk.
    checkpoint.training_tensors = lambda model, optimizer: {"model": dict(model.named_parameters())}
    saver = checkpoint.Saver(run, companions=run, keep=1)
    saver.save(state, model, torch.optim.AdamW(model.parameters()))
    saver.wait()
    dist.destroy_process_group()


def run_export(run: Path, folder: Path, *options: str) -> tuple[int, float]:
    """(largest RssAnon in bytes, seconds) of export.py in a process of its own."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, REPO / "export.py", run, folder, *options])
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident_bytes("RssAnon", process.pid))
        time.sleep(0.005)
    if process.returncode:
        sys.exit(process.returncode)
    return peak, time.perf_counter() - started


def copy(source: Path, target: Path) -> float:
    """Seconds that `cp` takes until the copy is on disk."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="to work in: the checkpoint stays there, 4 GB")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same form, in seconds: that the script runs")
    args = parser.parse_args()
    run, exported, copied = (args.folder / name for name in ("run", "exported", "copied"))
    if "RANK" in os.environ:
        write_checkpoint(run)
        return
    if not run.exists():
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(TINY if args.tiny else CONFIG))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        subprocess.run([*command, __file__, *sys.argv[1:]], check=True)
    shapes = parameter_shapes(Qwen3Config.from_pretrained(run))
    layer = 4 * sum(shape.numel() for name, shape in shapes.items() if name.startswith("model.layers.0."))
    good = True
    for experts in ("fused", "per-expert"):
        for folder in (exported, copied):
            shutil.rmtree(folder, ignore_errors=True)
        peak, seconds = run_export(run, exported, "--max-shard-size", "200MB", "--experts", experts)
        cp_seconds = copy(exported, copied)
        files = [path.stat().st_size for path in exported.iterdir()]
        bound = 1.2 * max(files) + layer + ALLOWED_BESIDE
        good &= peak < bound
        print(
            f"{experts}: {sum(files) / 1e6:.0f} MB in {len(files)} files, the largest of {max(files) / 1e6:.0f} MB; a "
            f"layer in fp32 {layer / 1e6:.0f} MB; peak RssAnon {peak / 1e6:.0f} MB (allowed: {bound / 1e6:.0f}); "
            f"{seconds:.1f} s, cp and sync {cp_seconds:.1f} s: {seconds / cp_seconds:.1f} times",
            flush=True,
        )
    sys.exit(None if good else "the bound on memory does not hold")


if __name__ == "__main__":
    main()
