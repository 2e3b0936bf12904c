"""Break every rule of the stand-in once, and do what they allow; prints {case: message, or "ok"} as JSON.

PYTHONPATH=.:tests/standin python tests/standin/run_rules.py

A process of its own, because a process cannot forget its device. Each case is a function that is named for it.
"""

import gc
import json
import os
import types
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from neuron_standin import build, device, rules

from qwen3_trn import Qwen3Config, Qwen3ForCausalLM
from tests.common import tiny_config

BROKEN: dict[str, list[Callable]] = {}  # rule: cases that break it
KEPT: list[Callable] = []


def breaks(rule: str) -> Callable:
    def add(case: Callable) -> Callable:
        BROKEN.setdefault(rule, []).append(case)
        return case

    return add


def on_neuron(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="neuron")


def int64_on_neuron() -> torch.Tensor:
    """An index result, the only int64 tensor that there is."""
    return on_neuron(2, 4).topk(2).indices


def group(*ranks: int, is_default: bool = False):
    """A process group that takes itself for these ranks, of which this process is all that there is."""
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    return build.load().wrap_backend(gloo, list(ranks), is_default)


# ------------------------------------------------------------------------------------------------------------- dtypes


@breaks("64-bit tensor")
def int64_factory():
    torch.zeros(2, dtype=torch.int64, device="neuron")


@breaks("64-bit tensor")
def float64_factory():
    torch.ones(2, dtype=torch.float64, device="neuron")


@breaks("64-bit tensor")
def int64_arange():
    torch.arange(4, device="neuron")


@breaks("64-bit tensor")
def int64_from_host():
    torch.ones(2, dtype=torch.int64).to("neuron")


@breaks("64-bit tensor")
def int64_to_host():
    int64_on_neuron().cpu()


@breaks("64-bit tensor")
def int64_to_float():
    int64_on_neuron().float()


@breaks("64-bit tensor")
def int64_arithmetic():
    int64_on_neuron() + 1


@breaks("64-bit tensor")
def int64_sum_of_bool():
    on_neuron(2, dtype=torch.bool).sum()


@breaks("64-bit tensor")
def int64_argmax():
    on_neuron(2, 4).argmax(-1)


@breaks("64-bit tensor")
def int64_searchsorted():
    torch.searchsorted(on_neuron(4), on_neuron(2))


@breaks("64-bit tensor")
def int64_gather():
    on_neuron(2, 4).gather(1, int64_on_neuron())


@breaks("64-bit tensor")
def int64_scatter():
    on_neuron(2, 4).scatter_(1, int64_on_neuron(), 0.0)


@breaks("64-bit tensor")
def int64_embedding():
    torch.nn.functional.embedding(int64_on_neuron(), on_neuron(4, 2))


@breaks("64-bit tensor")
def int64_collective():
    group(0, 1)._allgather_base(int64_on_neuron(), int64_on_neuron())


@breaks("64-bit tensor")
def complex_numbers():
    torch.polar(on_neuron(2), on_neuron(2))


# ------------------------------------------------------------------------------------------------------------- shapes


@breaks("data-dependent shape")
def nonzero():
    on_neuron(4).nonzero()


@breaks("data-dependent shape")
def masked_select():
    on_neuron(4).masked_select(on_neuron(4, dtype=torch.bool))


@breaks("data-dependent shape")
def mask_as_index():
    on_neuron(4)[on_neuron(4, dtype=torch.bool)]


@breaks("data-dependent shape")
def assignment_to_mask():
    on_neuron(4)[on_neuron(4, dtype=torch.bool)] = 0.0


@breaks("data-dependent shape")
def unique():
    on_neuron(4, dtype=torch.int32).unique()


@breaks("data-dependent shape")
def bincount():
    on_neuron(4, dtype=torch.int32).bincount()


@breaks("dynamic shape")
def compile_with_dynamic_shapes():
    torch.compile(lambda x: x + 1, backend="neuron", dynamic=True)(on_neuron(5, 3))


@breaks("dynamic shape")
def compile_for_a_second_size():
    """Without dynamic=False torch compiles the second size of an argument for all sizes."""
    double = torch.compile(lambda x: x * 2, backend="neuron")
    double(on_neuron(5))
    double(on_neuron(6))


# ------------------------------------------------------------------------------------------------------------- others


@breaks("host tensor")
def host_tensor():
    on_neuron(2) + torch.ones(2)


@breaks("host tensor")
def host_weight():
    torch.nn.functional.linear(on_neuron(2, 2), torch.ones(2, 2))


@breaks("memory format")
def channels_last():
    on_neuron(2, 3, 4, 5).to(memory_format=torch.channels_last)


@breaks("memory format")
def channels_last_factory():
    torch.empty(2, 3, 4, 5, device="neuron", memory_format=torch.channels_last)


@breaks("random numbers")
def randn():
    torch.randn(2, device="neuron")


@breaks("random numbers")
def normal():
    on_neuron(2).normal_()


@breaks("random numbers")
def multinomial():
    on_neuron(4).multinomial(1)


@breaks("random numbers")
def dropout():
    torch.nn.functional.dropout(on_neuron(4))


@breaks("random numbers")
def generator():
    torch.Generator(device="neuron")


@breaks("random numbers")
def linear_made_on_the_device():
    torch.nn.Linear(2, 2, device="neuron")


# ----------------------------------------------------------------------------------------------------- grouped matmul


def grouped_mm(rows: int, ends: list[int], **options) -> torch.Tensor:
    a, b = on_neuron(rows, 16, dtype=torch.bfloat16), on_neuron(len(ends), 16, 16, dtype=torch.bfloat16)
    return torch._grouped_mm(a, b, offs=torch.tensor(ends, dtype=torch.int32).to("neuron"), **options)


@breaks("grouped matmul")
def rows_not_of_128():
    grouped_mm(192, [128, 128])


@breaks("grouped matmul")
def offsets_not_of_128():
    grouped_mm(256, [64, 256])


@breaks("grouped matmul")
def offsets_not_sorted():
    grouped_mm(256, [256, 128])


@breaks("grouped matmul")
def offsets_past_the_end():
    grouped_mm(256, [128, 384])


@breaks("grouped matmul")
def batched_instead_of_offsets():
    torch._grouped_mm(on_neuron(2, 128, 16, dtype=torch.bfloat16), on_neuron(2, 16, 16, dtype=torch.bfloat16))


@breaks("grouped matmul")
def other_result_dtype():
    grouped_mm(256, [128, 256], out_dtype=torch.bfloat16)


# -------------------------------------------------------------------------------------------------------- distributed


@breaks("process group after device")
def process_group_after_device():
    on_neuron(2)
    dist.init_process_group("neuron", store=dist.HashStore(), rank=0, world_size=1)


@breaks("fork")
def use_in_a_fork():
    on_neuron(2)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            on_neuron(2)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    if message := os.read(read, 10_000).decode():
        raise RuntimeError(message)


@breaks("communicators")
def seventeenth_communicator():
    for last in range(1, 18):
        options = types.SimpleNamespace(store=dist.HashStore(), group_rank=0, group_size=1)
        options.global_ranks_in_group, options.timeout = [0, last], timedelta(seconds=10)
        device.make_process_group(options, None)


@breaks("all-to-all group")
def all_to_all_of_two():
    group(0, 1).alltoall_base(on_neuron(4), on_neuron(4), [], [])


@breaks("all-to-all group")
def all_to_all_of_strided_ranks():
    group(0, 2, 4, 6).alltoall_base(on_neuron(4), on_neuron(4), [], [])


@breaks("all-to-all group")
def all_to_all_that_begins_between():
    group(2, 3, 4, 5).alltoall_base(on_neuron(4), on_neuron(4), [], [])


@breaks("all-to-all splits")
def all_to_all_with_uneven_splits():
    group(0, 1, 2, 3).alltoall_base(on_neuron(8), on_neuron(8), [1, 3, 2, 2], [1, 3, 2, 2])


@breaks("all-to-all splits")
def all_to_all_of_uneven_chunks():
    chunks = [on_neuron(1), on_neuron(2), on_neuron(1), on_neuron(1)]
    group(0, 1, 2, 3).alltoall(chunks, chunks)


@breaks("collective layout")
def transposed_in_a_collective():
    group(0, 1).allreduce([on_neuron(2, 3).T])


@breaks("collective layout")
def empty_in_a_collective():
    group(0, 1).allreduce([on_neuron(0)])


@breaks("collective kind")
def send():
    group(0, 1).send([on_neuron(2)], 1, 0)


@breaks("collective kind")
def receive():
    group(0, 1).recv([on_neuron(2)], 1, 0)


@breaks("collective kind")
def barrier_of_a_part():
    group(0, 1).barrier()


@breaks("reduction")
def premultiplied_sum():
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(0.5)
    group(0, 1).allreduce([on_neuron(2)], options)


# ------------------------------------------------------------------------------------------------- what must be right


def kept(case: Callable) -> Callable:
    KEPT.append(case)
    return case


@kept
def computes_like_the_cpu():
    x = torch.linspace(-1, 1, 24).view(4, 6)
    index = torch.tensor([2, 0, 2], dtype=torch.int32)

    def compute(x, index):
        best = x.topk(2).indices.int()
        rows = x.index_select(0, index)
        yield from (best, x.gather(1, best), rows, x[index], rows @ x.T, x.T.contiguous().cumsum(0))
        yield torch.zeros_like(x).index_add_(0, index, rows).softmax(-1)
        yield from torch._foreach_mul([x, rows], 2.0)
        yield torch.where(x > 0, x, 0).sum(dim=0)
        x = x.clone()
        x[1:3].mul_(3)
        yield x

    for ours, theirs in zip(compute(x.to("neuron"), index.to("neuron")), compute(x, index), strict=True):
        assert ours.device.type == "neuron"
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0)


@kept
def grouped_matmul_in_blocks():
    result = grouped_mm(384, [128, 128]).cpu()  # the second group is empty, and rows after it are undefined
    assert torch.equal(result[:128], torch.full((128, 16), 16, dtype=torch.bfloat16))


@kept
def collectives():
    t = on_neuron(8)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group(0, 1).allreduce([t], options).wait()
    group(4, 5, 6, 7).alltoall_base(torch.empty_like(t), t, [], []).wait()
    group(0, 1, is_default=True).barrier().wait()


@kept
def compiles_static_shapes():
    torch.compiler.reset()
    f = torch.compile(lambda x: (x * 2).sum(), backend="neuron", dynamic=False, fullgraph=True)
    for size in (3, 4):
        x = on_neuron(size).requires_grad_()
        f(x).backward()
        assert x.grad.tolist() == [2.0] * size


@kept
def tied_weights_stay_tied():
    config = Qwen3Config.from_dict(tiny_config(tie_word_embeddings=True))
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.materialize("neuron")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.device.type == "neuron"
    moved = Qwen3ForCausalLM(config).to("neuron")  # which unties them, as on every device that is not built in
    assert moved.lm_head.weight is not moved.model.embed_tokens.weight


@kept
def random_state_round_trip():
    torch.manual_seed(7)
    assert torch.neuron.initial_seed() == 7
    state = torch.neuron.get_rng_state()
    assert state.shape == (16,) and state.device.type == "cpu"
    torch.neuron.manual_seed(8)
    assert not torch.equal(torch.neuron.get_rng_state(), state)
    torch.neuron.set_rng_state(state)
    assert torch.equal(torch.neuron.get_rng_state(), state)


@kept
def memory_comes_back():
    gc.collect()
    before = torch.accelerator.memory_allocated()
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config())).to("neuron")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.arange(32, dtype=torch.int32).view(2, 16).to("neuron")
    model.loss(ids, ids)[0].backward()
    optimizer.step()
    assert torch.accelerator.memory_allocated() - before > 3 * 4 * model.num_parameters()  # with gradients and moments
    assert torch.accelerator.max_memory_allocated() >= torch.accelerator.memory_allocated()
    del model, optimizer, ids
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


@kept
def what_is_documented():
    properties = torch.neuron.get_device_properties(0)
    assert (properties.name, properties.total_memory) == ("trn2", 24 * 2**30)
    torch.neuron.clear_op_tracking()
    on_neuron(2) * 2
    assert "aten::mul" in torch.neuron.get_executed_ops() and torch.neuron.get_fallback_ops() == []
    assert not hasattr(torch.neuron, "get_device_name")
    assert torch.accelerator.current_accelerator().type == "neuron" and torch.accelerator.device_count() == 8


@kept
def lenient_only_reports():
    rules.strict = False
    assert torch.ones(2, dtype=torch.int64, device="neuron").cpu().tolist() == [1, 1]
    rules.strict = True


def run(case: Callable) -> str:
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


if __name__ == "__main__":
    found = {
        "rules": sorted(rules.RULES),
        "broken": {rule: {case.__name__: run(case) for case in cases} for rule, cases in BROKEN.items()},
        "kept": {case.__name__: run(case) for case in KEPT},
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # as the trainer does; the report must be written all the same
