"""Under torchrun: one step's loss, gradient norm and gradients, for several ways to split the same 8 rows.

torchrun --nproc_per_node=2 tests/run_splits.py OUT     # rank 0 writes OUT/{model}-{ranks}-{micro batch size}.pt
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from qwen3_trn import Qwen3Config, launch
from qwen3_trn.device import Device
from qwen3_trn.parallel import build_mesh, build_model
from qwen3_trn.titan import clip_grad_norm_
from tests.common import tiny_config
from train import forward_backward, read_step

NUM_ROWS, SEQ_LEN = 8, 128
MODELS = {
    "dense": (tiny_config(tie_word_embeddings=True), {}),
    "moe": (tiny_config(moe=True), {}),
    # One micro-step: the auxiliary losses are means over micro-steps, so accumulation changes them, and ranks must not.
    "moe-aux": (tiny_config(moe=True, num_experts=8), {"aux_coef": 0.1, "z_coef": 0.01}),
}


def make_rows(vocab_size: int) -> dict[str, torch.Tensor]:
    """8 packed rows of two documents; row i has between 3 and 120 supervised tokens, and the last row has padding."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_ROWS, SEQ_LEN)
    labels = torch.randint(0, vocab_size, shape, generator=generator)
    for row, supervised in enumerate([3, 120, 10, 37, 64, 5, 99, 71]):
        labels[row, torch.randperm(120, generator=generator)[supervised:]] = -100
        labels[row, 120:] = -100
    document_ids = (torch.arange(SEQ_LEN) >= 50).long().repeat(NUM_ROWS, 1)
    document_ids[-1, 120:] = -1
    positions = torch.cat((torch.arange(50), torch.arange(SEQ_LEN - 50))).repeat(NUM_ROWS, 1)
    input_ids = torch.randint(0, vocab_size, shape, generator=generator)
    return {"input_ids": input_ids, "labels": labels, "positions": positions, "document_ids": document_ids}


def one_step(model, micro_batch_size: int, coefs: dict[str, float]) -> dict:
    rows = make_rows(model.config.vocab_size)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    firsts = range(rank * micro_batch_size, NUM_ROWS, micro_batch_size * num_ranks)
    batches = [{name: t[first : first + micro_batch_size] for name, t in rows.items()} for first in firsts]
    num_supervised = int((rows["labels"] != -100).sum())
    losses, router = forward_backward(model, batches, num_supervised, **coefs)
    grad_norm = clip_grad_norm_(model.parameters(), float("inf"))
    values = read_step(losses, grad_norm, router)
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return {"values": values, "gradients": gradients}


def main() -> None:
    out = Path(sys.argv[1])
    launch.init_process_group("gloo", 240)
    torch.set_num_threads(1)
    num_ranks = dist.get_world_size()
    dims = build_mesh(num_ranks)
    for name, (raw, coefs) in MODELS.items():
        config = Qwen3Config.from_dict(raw)
        model = build_model(config, dims, Device(), torch.float32)
        model.init_weights(seed=1)
        splits = [NUM_ROWS // num_ranks] if coefs else [8, 4, 2, 1]
        for micro_batch_size in splits:
            if micro_batch_size * num_ranks <= NUM_ROWS:
                result = one_step(model, micro_batch_size, coefs)
                if dist.get_rank() == 0:
                    torch.save(result, out / f"{name}-{num_ranks}-{micro_batch_size}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)
