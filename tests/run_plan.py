"""Under torchrun: what one step of each case with this many ranks really holds, allocates and sends.

torchrun --nproc_per_node=2 tests/run_plan.py OUT [CASE ...]     # rank 0 writes OUT/{case}.json

Bytes of weights, gradients and optimizer state are those of the storages of this rank's tensors. The peak is of
PyTorch's CPU allocator, and collectives are operations that ran, both from the profiler's record.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.profiler import ProfilerActivity, profile

from qwen3_trn import Qwen3Config, launch
from qwen3_trn.config import TrainConfig, parse_args
from qwen3_trn.device import TRAINIUM2, Device
from qwen3_trn.init import init_weights, local_tensor
from qwen3_trn.moe import Experts
from qwen3_trn.parallel import build_mesh, build_model
from qwen3_trn.start import split_batch
from qwen3_trn.titan import clip_grad_norm_
from tests import run_layouts
from tests.common import tiny_config
from train import agree, build_optimizer, forward_backward, read_step

# Odd sizes, which FSDP pads on every number of ranks; depths at which the plan extends a line.
ODD = {"num_hidden_layers": 5, "hidden_size": 36, "intermediate_size": 52, "vocab_size": 132}
SMALL = {
    **{"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
}
MODELS = run_layouts.MODELS | {
    "odd": tiny_config(**ODD),
    "odd-moe": tiny_config(moe=True, **ODD, num_experts=6),
    "mixed": tiny_config(moe=True, num_hidden_layers=4, decoder_sparse_step=2),
    "small": tiny_config(**SMALL),
    "small-moe": tiny_config(moe=True, **SMALL, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128),
}
LAYOUTS = {
    name: (ranks, model, [f"--{flag.replace('_', '-')}={value}" for flag, value in mesh.items()])
    for name, (ranks, model, mesh, options) in run_layouts.CASES.items()
    if not options and model in ("dense", "tied", "moe", "few")
} | {
    "odd-fsdp2": (2, "odd", ["--global-batch-size=8", "--micro-batch-size=1"]),
    "odd-fsdp4": (4, "odd", []),
    "odd-tp2": (2, "odd", ["--tp=2", "--ac=full"]),
    "odd-tp2-fsdp2": (4, "odd", ["--tp=2", "--ac=selective"]),
    "odd-moe-fsdp4": (4, "odd-moe", ["--router-aux-loss-coef=0.01", "--global-batch-size=8", "--micro-batch-size=1"]),
    "odd-moe-ep2": (2, "odd-moe", ["--ep=2", "--ac=full"]),
    "mixed-ep2-fsdp4": (4, "mixed", ["--ep=2"]),
}
SHAPES = {
    f"{model}-{ac}{suffix}": (ranks, model, [f"--ac={ac}", "--seq-len=512", *flags])
    for suffix, ranks, flags in (
        ("-1", 1, ["--global-batch-size=2"]),
        ("-accumulate", 1, ["--global-batch-size=2", "--micro-batch-size=1"]),
        ("-tp2", 2, ["--global-batch-size=2", "--tp=2"]),
    )
    for model in ("small", "small-moe")
    for ac in ("none", "selective", "full")
}
CASES = {name: (ranks, model, ["--seq-len=32", *flags]) for name, (ranks, model, flags) in LAYOUTS.items()} | SHAPES


def settings(flags: list[str]) -> TrainConfig:
    return parse_args(["--global-batch-size=4", "--dtype=fp32", "--compile=off", *flags])


def storage_bytes(tensors) -> int:
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def peak_allocated(events: list) -> int:
    """Largest sum of what was allocated and not yet freed since the profile began."""
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def count_collectives(events: list) -> dict[str, int]:
    """FSDP's and torch.distributed's calls are operations of c10d, those inside the model of _c10d_functional."""
    names = [event.name() for event in events]
    return dict(Counter(name for name in names if name.startswith(("c10d::", "_c10d_functional::"))))


def measure(raw: dict, flags: list[str]) -> dict:
    args, config, ranks = settings(flags), Qwen3Config.from_dict(raw), launch.WORLD_SIZE
    dims = build_mesh(ranks, args.dp_replicate, args.dp_shard, args.tp, args.ep)
    model = build_model(config, dims, Device("cpu"), torch.float32, args.ac)
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        experts.block = TRAINIUM2.expert_block  # the device that is planned for
    init_weights(dict(model.named_parameters()), std=0.02, seed=1)
    optimizer = build_optimizer(model, args)
    micro_batch_size, num_micro_steps = split_batch(args, ranks // args.tp)
    generator = torch.Generator().manual_seed(launch.RANK // args.tp)
    shape = (micro_batch_size, args.seq_len)
    ids = torch.randint(config.vocab_size, shape, generator=generator)
    positions = torch.arange(args.seq_len).expand(shape).clone()
    batch = {"input_ids": ids, "labels": ids, "positions": positions, "document_ids": torch.zeros_like(ids)}
    rows = [{name: tensor.numpy() for name, tensor in batch.items()}] * num_micro_steps
    found: dict = {}

    def step() -> None:
        num_supervised = agree(rows, args.tp, False, False)[1]
        losses, router = forward_backward(
            model, [batch] * num_micro_steps, num_supervised, args.router_aux_loss_coef, tp=args.tp
        )
        norm = clip_grad_norm_(model.parameters(), args.max_grad_norm, ep_enabled=args.ep > 1)
        read_step(losses, norm, router)
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values()]
        found.update(
            weights=storage_bytes(model.parameters()),
            gradients=storage_bytes(parameter.grad for parameter in model.parameters()),
            optimizer=storage_bytes(state),
        )
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    found["peak"] = peak_allocated(events)
    found["collectives"] = count_collectives(events)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        model.loss_terms(**batch)
    found["forward"] = count_collectives(profiler.profiler.kineto_results.events())
    return found


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    launch.init_process_group("gloo", 60)
    torch.set_num_threads(1)
    for name, (ranks, model, flags) in CASES.items():
        if ranks == launch.WORLD_SIZE and (not names or name in names):
            # What DTensor remembers of the last case's mesh can spare this one an all-reduce.
            _clear_fast_path_sharding_prop_cache()
            _clear_python_sharding_prop_cache()
            found = measure(MODELS[model], flags)
            if launch.RANK == 0:
                (out / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)
