"""What several test files share: tiny configs, and a launcher for runs on several processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from qwen3_trn import evaluate, start
from qwen3_trn.checkpoint import Saver

REPO = Path(__file__).parent.parent
TINY = REPO / "assets" / "tiny"


def tiny_config(moe: bool = False, **changes) -> dict:
    """config.json of a 2-layer model in transformers 4's form; heads x head_dim != hidden, as in Qwen3-0.6B."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "torch_dtype": "float32",
    }
    if moe:
        config |= {
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
        }
    return config | changes


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def run_python(*arguments: str | Path, ranks: int = 0, cwd: Path = REPO, timeout: float = 240, **environment: str):
    """Run `python ARGUMENTS`, or `torchrun --nproc_per_node=ranks ARGUMENTS`; returns the completed process, text."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout)


def succeeded(process: subprocess.CompletedProcess) -> str:
    """The standard output of a process that must have exited with 0."""
    assert process.returncode == 0, f"exit code {process.returncode}\n{process.stdout}\n{process.stderr}"
    return process.stdout


def records(out: Path) -> list[dict]:
    """A run's metrics, a dict a logged step."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def in_process(monkeypatch, out: Path, *flags) -> list[dict]:
    """Run train.py's main in this process, as a world of one; returns the run's metrics."""
    import train

    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(out), "--log-every", "1", *map(str, flags)])
    for name, value in (("NEW_TOKENS", 8), ("SAMPLE_LENGTHS", 16)):  # samples would take half of the time
        monkeypatch.setattr(evaluate, name, min(value, getattr(evaluate, name)))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        train.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        while start._locks:  # which end with a process
            start._locks.pop().close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return records(out)


def save_checkpoint(out: Path, step: int, model, state: dict, companions: Path) -> None:
    """Save a model, with the state of an optimizer that has made no step, and wait until it is there. Collective."""
    saver = Saver(out, companions, keep=99)
    saver.save({"step": step} | state, model, torch.optim.AdamW(model.parameters()))
    saver.wait()
