"""Load a model of exactly Qwen3-0.6B's shape on 2 ranks: memory of each rank, time, and the first loss.

    pip install -e '.[dev]' -c constraints.txt
    python benchmarks/load_0_6b.py --folder /tmp/qwen3-0.6b-random

transformers makes the folder once (random weights, bf16, tied, about 1.2 GB). Then torchrun starts two ranks, each of
which reads its half into fp32 shards while a thread samples its anonymous memory (RssAnon in /proc/self/status), and
computes the loss of one batch. transformers computes the same loss in fp32 in this process. Printed, and checked:

- each rank's largest RssAnon up to the end of loading stays below its own fp32 shard plus 600 MB;
- the first loss equals transformers' within 1e-3.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
ALLOWED_BESIDE_SHARD = 600e6
TOLERANCE = 1e-3


def make_folder(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**CONFIG, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, dtype="bfloat16")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and labels, [1, 256]; labels are the next tokens."""
    ids = torch.randint(0, CONFIG["vocab_size"], (1, 257), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def resident_bytes(kind: str, process: int | str = "self") -> int:
    """A process's resident memory of a kind (RssAnon, RssFile); 0 when it has ended."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    return 0


def run_rank(folder: Path) -> None:
    """One rank, under torchrun: load, report memory, compute the loss."""
    from qwen3_trn import Qwen3Config, launch
    from qwen3_trn.device import Device
    from qwen3_trn.hf import load_hf
    from qwen3_trn.init import owned_part
    from qwen3_trn.parallel import build_mesh, build_model

    peak, loading = [resident_bytes("RssAnon")], True

    def watch() -> None:
        while loading:
            peak[0] = max(peak[0], resident_bytes("RssAnon"))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    launch.init_process_group("gloo", 600)
    Device("cpu").start(launch.LOCAL_RANK, launch.LOCAL_WORLD_SIZE)
    started = time.perf_counter()
    config = Qwen3Config.from_pretrained(folder)
    model = build_model(config, build_mesh(launch.WORLD_SIZE), Device("cpu"), torch.float32)
    load_hf(folder, config, dict(model.named_parameters()))
    seconds = time.perf_counter() - started
    loading = False
    watcher.join()
    shard = sum(owned_part(parameter)[0].nbytes for parameter in model.parameters())
    input_ids, labels = make_batch()
    with torch.no_grad():
        summed, count = model.loss(input_ids, labels)
    report = {
        "rank": launch.RANK,
        "shard_bytes": shard,
        "peak_rss_anon_bytes": peak[0],
        "seconds": seconds,
        "loss": (summed / count).item(),
    }
    print("REPORT " + json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the 1.2 GB model is, or is to be made")
    folder = parser.parse_args().folder
    if "RANK" in os.environ:
        run_rank(folder)
        return
    if not (folder / "model.safetensors").is_file():
        make_folder(folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    lines = subprocess.run(
        [*command, __file__, "--folder", str(folder)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    reports = [json.loads(line.removeprefix("REPORT ")) for line in lines if line.startswith("REPORT ")]

    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    input_ids, labels = make_batch()
    with torch.no_grad():
        logits = reference(input_ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    good = len(reports) == 2
    for report in sorted(reports, key=lambda report: report["rank"]):
        beside = report["peak_rss_anon_bytes"] - report["shard_bytes"]
        difference = abs(report["loss"] - expected)
        good &= beside < ALLOWED_BESIDE_SHARD and difference < TOLERANCE
        print(
            f"rank {report['rank']}: fp32 shard {report['shard_bytes'] / 1e6:.0f} MB, peak RssAnon "
            f"{report['peak_rss_anon_bytes'] / 1e6:.0f} MB, so {beside / 1e6:.0f} MB beside it (allowed: 600); "
            f"loaded in {report['seconds']:.1f} s; first loss {report['loss']:.6f}, transformers' {expected:.6f}"
        )
    sys.exit(0 if good else "one of the two bounds does not hold")


if __name__ == "__main__":
    main()
