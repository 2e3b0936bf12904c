"""Under torchrun: what evaluate.py does on each layout of LAYOUTS, with one model and 7 rows.

torchrun --nproc_per_node=4 tests/run_evaluate.py OUT     # rank R writes OUT/R.json: {layout: what it found}
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from qwen3_trn import Qwen3Config, checks, evaluate, launch
from qwen3_trn.data import PackedData, PackedSource
from qwen3_trn.device import Device
from qwen3_trn.parallel import build_mesh, build_model
from tests.caches import make_cache
from tests.common import TINY, tiny_config

SEQ_LEN, BATCH_SIZE, VOCAB_SIZE = 32, 2, 1024  # the vocabulary of TINY's tokenizer
MODEL = tiny_config(moe=True, vocab_size=VOCAB_SIZE, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
PROMPTS = [[5, 6, 7], list(range(100, 108))]
# name: (build_mesh's arguments, recompute, compute dtype, MoE capacity)
LAYOUTS = {
    "fsdp": ({}, "none", torch.float32, None),
    "hsdp, full recompute": ({"dp_replicate": 2}, "full", torch.float32, None),
    "tp": ({"tp": 2}, "none", torch.float32, None),
    "tp, ep, selective recompute": ({"tp": 2, "ep": 4}, "selective", torch.float32, None),
    "ep, capacity": ({"ep": 2}, "none", torch.float32, 8.0),  # room for all
    "bf16": ({}, "none", torch.bfloat16, None),
}


def make_documents() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Conversations of up to 32 tokens, and which of these are supervised: in each a few, in each another number."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCAB_SIZE, length) for length in (32, 31, 30, 20, 9, 28, 25, 17, 12, 4)]
    supervised = [rng.random(len(document)) < rng.random() for document in documents]
    for mask in supervised:
        mask[-1] = True
    return documents, supervised


def open_rows() -> PackedData:
    source = PackedSource(make_cache(*make_documents()), SEQ_LEN, seed=0, shuffle=False)
    assert source.rows_per_epoch == 7
    return PackedData([source], [1.0])


def init_weights(model) -> None:
    """As initialised, but for norms, which would all be one: larger logits, so that no two tokens are as likely."""
    model.init_weights(seed=1)
    with torch.no_grad():
        model.model.norm.weight.mul_(20)


def main() -> None:
    launch.init_process_group("gloo", 240)
    torch.set_num_threads(1)
    evaluate.NEW_TOKENS, evaluate.SAMPLE_LENGTHS = 6, 16
    data, tokenizer, device = open_rows(), AutoTokenizer.from_pretrained(TINY), Device()
    found = {}
    for name, (mesh, recompute, dtype, capacity) in LAYOUTS.items():
        tp = mesh.get("tp", 1)
        model = build_model(
            Qwen3Config.from_dict(MODEL), build_mesh(4, **mesh), device, dtype, recompute, moe_capacity=capacity
        )
        init_weights(model)
        shapes = []
        model.model.embed_tokens.register_forward_pre_hook(
            lambda module, inputs, shapes=shapes: shapes.append(list(inputs[0].shape))
        )
        parts = BATCH_SIZE, 4 // tp, launch.RANK // tp, tp
        loss = evaluate.evaluate(model, [data], *parts, device)
        samples = evaluate.sample_texts(model, tokenizer, PROMPTS, [], 3, tp, device)
        if capacity is None:
            checks.check_document_mask(model, BATCH_SIZE, SEQ_LEN, device, dtype)
        found[name] = {
            "loss": loss,
            "samples": samples,
            "shapes": shapes,
            "whole": [name for name, p in model.named_parameters() if not isinstance(p, DTensor)],
        }
    (Path(sys.argv[1]) / f"{launch.RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)
