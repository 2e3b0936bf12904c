"""Under torchrun: a few steps on each layout of tests/test_layouts.py that has this many ranks.

torchrun --nproc_per_node=4 tests/run_layouts.py OUT     # rank 0 writes OUT/{case}.pt
"""

import contextlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from qwen3_trn import Qwen3Config, Qwen3ForCausalLM, launch, moe
from qwen3_trn.device import Device
from qwen3_trn.init import init_weights
from qwen3_trn.parallel import build_mesh, build_model, check_layout
from qwen3_trn.titan import ParallelDims, clip_grad_norm_
from tests.common import tiny_config
from train import forward_backward, read_step

NUM_ROWS, SEQ_LEN = 4, 32
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128, "head_dim": 8}
MODELS = {
    "dense": tiny_config(**HEADS),
    "tied": tiny_config(**HEADS, tie_word_embeddings=True, attention_bias=True),
    "moe": tiny_config(moe=True, **HEADS),
    # Fewer experts than ranks: torchtitan's fallback shards their second dim.
    "few": tiny_config(moe=True, **HEADS, num_experts=2, num_experts_per_tok=1),
}
# Routing that the weights would not give, by expert ids for every token: all to one expert, all to one rank's experts.
FORCED = {"one": [3], "one-rank": [0, 1]}
MODELS |= {name: tiny_config(moe=True, **HEADS, num_experts_per_tok=len(ids)) for name, ids in FORCED.items()}

# name: (ranks, model, mesh, build_model's other arguments)
CASES = {
    "dense-fsdp2": (2, "dense", {}, {}),
    "dense-fsdp4": (4, "dense", {}, {}),
    "dense-hsdp": (4, "dense", {"dp_replicate": 2}, {}),
    "dense-tp2": (2, "dense", {"tp": 2}, {}),
    "dense-tp4": (4, "dense", {"tp": 4}, {}),
    "dense-tp2-fsdp2": (4, "dense", {"tp": 2}, {}),
    "dense-tp2-hsdp": (4, "dense", {"tp": 2, "dp_replicate": 2}, {}),
    "tied-fsdp2": (2, "tied", {}, {}),
    "tied-tp2": (2, "tied", {"tp": 2}, {}),
    "tied-tp2-fsdp2": (4, "tied", {"tp": 2}, {}),
    "moe-fsdp2": (2, "moe", {}, {}),
    "moe-fsdp4": (4, "moe", {}, {}),
    "moe-hsdp": (4, "moe", {"dp_replicate": 2}, {}),
    "moe-ep2": (2, "moe", {"ep": 2}, {}),
    "moe-ep4": (4, "moe", {"ep": 4}, {}),
    "moe-ep2-fsdp4": (4, "moe", {"ep": 2}, {}),
    "moe-ep2-hsdp": (4, "moe", {"ep": 2, "dp_replicate": 2}, {}),
    "moe-tp2": (2, "moe", {"tp": 2}, {}),
    "moe-tp2-fsdp2": (4, "moe", {"tp": 2}, {}),
    "moe-tp2-ep2": (2, "moe", {"tp": 2, "ep": 2}, {}),
    "moe-tp2-ep2-fsdp2": (4, "moe", {"tp": 2, "ep": 2}, {}),
    "moe-tp2-ep4": (4, "moe", {"tp": 2, "ep": 4}, {}),
    "few-fsdp4": (4, "few", {}, {}),
    "few-ep2-fsdp4": (4, "few", {"ep": 2}, {}),
    "few-tp2-fsdp2": (4, "few", {"tp": 2}, {}),
    "one-ep2": (2, "one", {"ep": 2}, {}),
    "one-ep4": (4, "one", {"ep": 4}, {}),
    "one-tp2": (2, "one", {"tp": 2}, {}),
    "one-rank-ep2": (2, "one-rank", {"ep": 2}, {}),
    "one-rank-ep2-fsdp4": (4, "one-rank", {"ep": 2}, {}),
    "one-rank-tp2-ep2": (2, "one-rank", {"tp": 2, "ep": 2}, {}),
    "dense-full": (2, "dense", {}, {"recompute": "full"}),
    "dense-selective": (2, "dense", {}, {"recompute": "selective"}),
    "moe-ep2-full": (2, "moe", {"ep": 2}, {"recompute": "full"}),
    "moe-ep2-selective": (2, "moe", {"ep": 2}, {"recompute": "selective"}),
    "moe-tp2-full": (2, "moe", {"tp": 2}, {"recompute": "full"}),
    "moe-tp2-selective": (2, "moe", {"tp": 2}, {"recompute": "selective"}),
    "dense-compile": (2, "dense", {}, {"compile_backend": "inductor"}),
    "tied-tp2-compile": (2, "tied", {"tp": 2}, {"compile_backend": "inductor"}),
    "moe-ep2-compile": (2, "moe", {"ep": 2}, {"compile_backend": "inductor"}),
    "moe-tp2-compile": (2, "moe", {"tp": 2}, {"compile_backend": "inductor"}),
    "dense-compile-full": (2, "dense", {}, {"compile_backend": "inductor", "recompute": "full"}),
    "dense-compile-selective": (2, "dense", {}, {"compile_backend": "inductor", "recompute": "selective"}),
}


def make_rows(vocab_size: int) -> dict[str, torch.Tensor]:
    """4 packed rows of two documents, a third of the labels ignored, the last row half padding."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_ROWS, SEQ_LEN)
    input_ids = torch.randint(0, vocab_size, shape, generator=generator)
    labels = torch.randint(0, vocab_size, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 1 / 3] = -100
    document_ids = (torch.arange(SEQ_LEN) >= 13).long().repeat(NUM_ROWS, 1)
    document_ids[-1, 16:] = -1
    labels[-1, 16:] = -100
    positions = torch.cat((torch.arange(13), torch.arange(SEQ_LEN - 13))).repeat(NUM_ROWS, 1)
    return {"input_ids": input_ids, "labels": labels, "positions": positions, "document_ids": document_ids}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_steps(model: Qwen3ForCausalLM, dims: ParallelDims | None = None) -> dict:
    """First-step loss, gradients and norm; the weights after 3 SGD steps; then the losses of 3 AdamW steps."""
    batch = dims.get_optional_mesh("batch") if dims else None
    data_rank, num_data_ranks = (batch.get_local_rank(), batch.size()) if batch else (0, 1)
    tp, ep = (dims.tp, dims.ep) if dims else (1, 1)
    rows = {k: v.chunk(num_data_ranks)[data_rank] for k, v in make_rows(model.config.vocab_size).items()}
    num_supervised = int((make_rows(model.config.vocab_size)["labels"] != -100).sum())
    coefs = {"aux_coef": 0.1, "z_coef": 0.01} if model.config.num_experts else {}
    result: dict = {"steps": []}
    # An epsilon above rounding: AdamW makes a full step of a gradient that is nothing but rounding.
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.5), adamw):
        for _ in range(3):
            losses, router = forward_backward(model, [rows], num_supervised, **coefs, tp=tp)
            norm = clip_grad_norm_(model.parameters(), float("inf"), ep_enabled=ep > 1)
            result["steps"].append(read_step(losses, norm, router))
            if "gradients" not in result:
                result["gradients"] = {name: full(p.grad) for name, p in model.named_parameters()}
                if tp > 1:
                    assert_replicas_agree(model, dims)
            optimizer.step()
            optimizer.zero_grad()
        if "weights" not in result:
            result["weights"] = {name: full(p) for name, p in model.named_parameters()}
    return result


def assert_replicas_agree(model: Qwen3ForCausalLM, dims: ParallelDims) -> None:
    """What all tp ranks hold (every norm, the router) must have one gradient on all of them, bit for bit."""
    num_checked = 0
    for name, parameter in model.named_parameters():
        mesh = parameter.device_mesh
        if "tp" in mesh.mesh_dim_names and parameter.placements[mesh.mesh_dim_names.index("tp")].is_replicate():
            mine = parameter.grad.to_local().contiguous()
            theirs = [torch.empty_like(mine) for _ in range(dims.tp)]
            dist.all_gather(theirs, mine, group=dims.get_mesh("tp").get_group())
            assert all(torch.equal(mine, other) for other in theirs), f"{name}: tp ranks disagree"
            num_checked += 1
    assert num_checked >= 9  # 4 norms in each of 2 layers and the last one, at least


@contextlib.contextmanager
def forced_routing(model_name: str):
    """Inside, every token of the models in FORCED goes to the given experts, with the weights that they have."""
    original = moe.route

    def route(logits, k, norm_topk_prob):
        ids = torch.tensor(FORCED[model_name], dtype=torch.int32).expand(logits.shape[0], k)
        return logits.softmax(-1).gather(1, ids), ids

    if model_name in FORCED:
        moe.route = route
    yield
    moe.route = original


def randomise(model: Qwen3ForCausalLM) -> None:
    """Weights that make gradients of every parameter large and routing clear; the same on every layout."""
    init_weights(dict(model.named_parameters()), std=0.3, seed=1)


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    launch.init_process_group("gloo", 60)
    torch.set_num_threads(1)
    for name, (ranks, model_name, mesh, options) in CASES.items():
        if ranks != launch.WORLD_SIZE or (names and name not in names):
            continue
        started = time.perf_counter()
        dims = build_mesh(ranks, **mesh)
        config = Qwen3Config.from_dict(MODELS[model_name])
        check_layout(config, dims, SEQ_LEN)
        model = build_model(config, dims, Device(), torch.float32, **options)
        randomise(model)
        with forced_routing(model_name):
            result = run_steps(model, dims)
        if launch.RANK == 0:
            torch.save(result, out / f"{name}.pt")
            print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
