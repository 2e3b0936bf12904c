"""Load a MoE of 1 billion parameters (2 GB in bf16) on 2 ranks: bytes that each reads, and time.

    pip install -e '.[dev]' -c constraints.txt
    python benchmarks/load_2gb.py --folder /tmp/moe-2gb                 # --tiny: seconds, a toy

The folder is made once, with random weights (or is benchmarks/export_2gb.py's `exported`). The files are read once, so
that all that follows finds them in the page cache. Timed: a plain read of the files; torchrun's two ranks, each reading
its half into fp32 shards; transformers' `from_pretrained`, all of it into fp32, in one process with as many threads as
the two ranks have together. Printed, and checked:

- each rank asks the files for as many values as it owns, so each value is read once;
- the pages of the files that a rank touches are no more than its part of them + 10% + 4 MB (the kernel maps pages in
  groups).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from export_2gb import CONFIG, TINY

from qwen3_trn import Qwen3Config, Qwen3ForCausalLM, launch
from qwen3_trn.device import Device
from qwen3_trn.hf import HFFolder
from qwen3_trn.init import owned_part
from qwen3_trn.parallel import build_mesh, build_model


def read_plainly(folder: Path) -> tuple[int, float]:
    """(bytes, seconds) of reading all weight files into one buffer of 16 MB."""
    started, total, buffer = time.perf_counter(), 0, bytearray(2**24)
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total, time.perf_counter() - started


def touched_bytes() -> int:
    """Pages of mapped weight files that this process has touched, in bytes; by /proc/self/smaps."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):  # the first line of a mapping, which ends in the file's name
            counts = line.endswith(".safetensors")
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def run_rank(folder: Path) -> None:
    """One rank, under torchrun: load as train.py does, counting what the files are asked for."""
    launch.init_process_group("gloo", 600)
    Device("cpu").start(launch.LOCAL_RANK, launch.LOCAL_WORLD_SIZE)
    config = Qwen3Config.from_pretrained(folder)
    started = time.perf_counter()
    model = build_model(config, build_mesh(launch.WORLD_SIZE), Device("cpu"), torch.float32)
    parameters = dict(model.named_parameters())
    source = HFFolder(folder)
    source.check(config, {name: parameter.shape for name, parameter in parameters.items()})
    asked = 0
    for name, parameter in parameters.items():
        for _, target, tensor in source.parts(name, parameter):
            target.copy_(tensor)
            asked += tensor.nbytes
    report = {
        "rank": launch.RANK,
        "seconds": time.perf_counter() - started,
        "asked_bytes": asked,
        "touched_bytes": touched_bytes(),
        "owned_values": sum(owned_part(parameter)[0].numel() for parameter in parameters.values()),
    }
    print("REPORT " + json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the 2 GB model is, or is to be made")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same form, in seconds: that the script runs")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args.folder)
        return
    if not args.folder.exists():
        Qwen3ForCausalLM(Qwen3Config.from_dict(TINY if args.tiny else CONFIG)).save_pretrained(args.folder)
    read_plainly(args.folder)
    total, plain = read_plainly(args.folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    lines = subprocess.run(
        [*command, __file__, *sys.argv[1:]], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    reports = [json.loads(line.removeprefix("REPORT ")) for line in lines if line.startswith("REPORT ")]

    from transformers import AutoModelForCausalLM

    Device("cpu").start(local_rank=0, local_world_size=1)
    started = time.perf_counter()
    AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    theirs = time.perf_counter() - started
    ours = max(report["seconds"] for report in reports)
    good = len(reports) == 2
    for report in sorted(reports, key=lambda report: report["rank"]):
        owned = 2 * report["owned_values"]  # bytes in bf16
        good &= report["asked_bytes"] == owned and report["touched_bytes"] < 1.1 * owned + 4e6
        print(
            f"rank {report['rank']}: owns {owned / 1e6:.1f} MB of the files, asked for "
            f"{report['asked_bytes'] / 1e6:.1f}, touched {report['touched_bytes'] / 1e6:.1f}"
        )
    print(
        f"{total / 1e6:.1f} MB, in the page cache: plain read {plain:.2f} s; 2 ranks {ours:.2f} s, {ours / plain:.1f} "
        f"times; transformers {theirs:.2f} s, {theirs / plain:.1f} times"
    )
    sys.exit(None if good else "a rank read more, or less, than it owns")


if __name__ == "__main__":
    main()
