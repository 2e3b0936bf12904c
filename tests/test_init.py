"""Which part of a parameter a rank owns, and random weights that do not depend on it.

Ranks are played one after the other: a "fake" process group says which rank this is and moves no data.

pytest tests/test_init.py
"""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from qwen3_trn import init
from qwen3_trn.config import Qwen3Config
from qwen3_trn.init import init_weights, owned_part
from qwen3_trn.model import Qwen3ForCausalLM
from tests.common import tiny_config

STD = 0.02


@contextlib.contextmanager
def playing_rank(rank: int, world_size: int):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_of(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
    """This rank's part of a parameter, filled with NaN."""
    mesh = init_device_mesh("cpu", mesh_shape)
    local_shape, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    local = torch.full(local_shape, float("nan"))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def draw(shape: tuple[int, ...], name: str = "some.weight", seed: int = 0) -> Tensor:
    parameter = torch.full(shape, float("nan"))
    init_weights({name: parameter}, STD, seed)
    return parameter


# shape, mesh, placements: what FSDP, HSDP, tensor and expert parallelism do, even and uneven, and parts that are empty
LAYOUTS = {
    "fsdp": ((12, 5), (4,), (Shard(0),)),
    "fsdp, uneven": ((10, 5), (4,), (Shard(0),)),
    "fsdp, more ranks than rows": ((2, 3, 4), (4,), (Shard(0),)),
    "fsdp, several blocks of rows": ((2500, 2), (3,), (Shard(0),)),
    "fsdp, experts": ((6, 4, 3), (4,), (Shard(0),)),
    "fsdp, experts on dim 1": ((2, 8, 3), (4,), (Shard(1),)),
    "columns": ((5, 12), (4,), (Shard(1),)),
    "columns, uneven": ((5, 10), (4,), (Shard(1),)),
    "hsdp": ((10, 5), (2, 2), (Replicate(), Shard(0))),
    "rows and columns": ((7, 10), (2, 2), (Shard(0), Shard(1))),
    "experts and columns": ((6, 4, 5), (2, 2), (Shard(0), Shard(2))),
    "rows twice": ((11, 3), (2, 2), (Shard(0), Shard(0))),
    "several blocks of rows, columns": ((2100, 3), (2, 2), (Shard(1), Shard(0))),
    "norm": ((10,), (4,), (Shard(0),)),
    "replicated": ((10, 5), (4,), (Replicate(),)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_do_not_depend_on_the_layout_and_every_element_is_owned(layout):
    shape, mesh_shape, placements = LAYOUTS[layout]
    whole = draw(shape)
    covered = torch.zeros(shape, dtype=torch.int)
    for rank in range(math.prod(mesh_shape)):
        with playing_rank(rank, math.prod(mesh_shape)):
            parameter = shard_of(shape, mesh_shape, placements)
            local, owned = owned_part(parameter)
            # DTensor's own arithmetic is the oracle for the place.
            expected_shape, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, placements)
            assert tuple(local.shape) == expected_shape
            assert tuple(part.stop - part.start for part in owned) == expected_shape
            if local.numel():
                assert tuple(part.start for part in owned) == offset
            init_weights({"some.weight": parameter}, STD, seed=0)
            assert torch.equal(parameter.to_local(), whole[owned])
            covered[owned] += 1
    replicas = math.prod(size for size, place in zip(mesh_shape, placements, strict=True) if place.is_replicate())
    assert (covered == replicas).all()


def test_a_partial_sum_cannot_be_initialised():
    with playing_rank(0, 2), pytest.raises(NotImplementedError, match="cannot be initialised"):
        owned_part(shard_of((4, 4), (2,), (Partial(),)))


def test_only_the_blocks_that_a_rank_owns_are_drawn(monkeypatch):
    """128 experts or 151,936 rows are not drawn on each of 64 ranks."""
    drawn = []
    plain = torch.Tensor.normal_
    monkeypatch.setattr(
        torch.Tensor, "normal_", lambda self, *a, **kw: drawn.append(self.shape) or plain(self, *a, **kw)
    )
    for rank, shapes in ((0, [(1, 4, 3)] * 2), (2, [(1, 4, 3)] * 2)):
        with playing_rank(rank, 4):
            drawn.clear()
            init_weights({"experts.gate_proj": shard_of((8, 4, 3), (4,), (Shard(0),))}, STD, seed=0)
            assert drawn == shapes
    with playing_rank(3, 4):
        drawn.clear()
        init_weights({"embed.weight": shard_of((4000, 2), (4,), (Shard(0),))}, STD, seed=0)
        assert drawn == [(1024, 2), (928, 2)]  # rows 3000 to 4000 lie in the blocks from 2048 and from 3072


def test_the_draws_are_normal_with_the_given_deviation():
    """2.5 million draws; the bounds are 5 standard errors of each statistic."""
    values = draw((2500, 1000)).double() / STD
    n = values.numel()
    assert abs(values.mean()) < 5 / n**0.5
    assert abs(values.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert 4.5 < values.abs().max() < 6.5
    # Rows and columns do not repeat each other.
    centred = values - values.mean()
    assert abs((centred[:1024] * centred[1024:2048]).mean()) < 5 / (1024 * 1000) ** 0.5
    assert abs((centred[:, :-1] * centred[:, 1:]).mean()) < 5 / n**0.5


def test_no_two_blocks_names_or_seeds_share_their_values():
    """Two experts, two blocks of rows, two layers, two seeds: all different, and each reproducible."""
    experts = draw((4, 8, 8), "model.layers.0.mlp.experts.gate_proj")
    matrix = draw((2100, 8), "model.layers.0.mlp.gate_proj.weight")
    others = [
        *experts,
        *matrix[:2048].split(1024),
        draw((8, 8), "model.layers.1.self_attn.q_proj.weight"),
        draw((8, 8), "model.layers.2.self_attn.q_proj.weight"),
        draw((8, 8), "model.layers.2.self_attn.k_proj.weight"),
        draw((8, 8), "model.layers.2.self_attn.q_proj.weight", seed=1),
        draw((8, 8), "model.layers.2.self_attn.q_proj.weight", seed=-1),
    ]
    starts = [tuple(values.flatten()[:8].tolist()) for values in others]
    assert len(set(starts)) == len(starts)
    assert torch.equal(draw((4, 8, 8), "model.layers.0.mlp.experts.gate_proj"), experts)
    assert torch.equal(draw((8, 8), "a", seed=3), draw((8, 8), "a", seed=3))


def test_values_are_pinned():
    """A change of the draws would make every run with --init random another run: a decision, not an accident."""
    matrix = draw((4, 8), "model.layers.0.mlp.gate_proj.weight").flatten()[:4]
    expert = draw((2, 4, 8), "model.layers.0.mlp.experts.gate_proj")[1].flatten()[:4]
    assert torch.allclose(matrix, torch.tensor([-0.0374144, 0.0073478, 0.0274835, 0.0088204]), atol=1e-6)
    assert torch.allclose(expert, torch.tensor([0.0139803, -0.0213126, -0.0286176, -0.0018236]), atol=1e-6)


def test_the_global_generators_are_not_touched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draw((10, 10))
    assert torch.equal(torch.get_rng_state(), before)
    values = draw((10, 10))
    torch.manual_seed(6)
    assert torch.equal(draw((10, 10)), values)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_new_model_is_initialised_as_transformers_initialises(moe):
    raw = tiny_config(moe=moe, attention_bias=True, initializer_range=0.05, vocab_size=2000, hidden_size=64)
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(raw))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.requires_grad
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith(".bias"):
            assert (parameter == 0).all(), name
        else:
            standard_error = 0.05 / (2 * parameter.numel()) ** 0.5
            assert abs(parameter.std() - 0.05) < 5 * standard_error, name
            assert abs(parameter.mean()) < 5 * 2**0.5 * standard_error, name
    # No two parameters, and no two experts, start with the same values.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rows = [tuple(e.flatten()[:4].tolist()) for p in matrices for e in (p if p.dim() == 3 else [p])]
    assert len(set(rows)) == len(rows) == len(matrices) + (7 * 6 if moe else 0)


def test_the_seed_of_a_model_decides_its_values():
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(moe=True)))
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.init_weights(seed=1)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, first[name])}
    assert changed == {name for name in first if not name.endswith("norm.weight")}
    model.init_weights(seed=0)
    assert all(torch.equal(parameter, first[name]) for name, parameter in model.named_parameters())


def test_bf16_weights_are_the_rounded_fp32_ones():
    parameter = torch.full((30, 4), float("nan"), dtype=torch.bfloat16)
    init_weights({"some.weight": parameter}, STD, seed=0)
    assert torch.equal(parameter, draw((30, 4)).bfloat16())


# --------------------------------------------------------------------------------------------------------- tied weights


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model,
        lambda model: model.to(torch.bfloat16),
        lambda model: model.materialize("cpu") or model,
        lambda model: model.to_empty(device="meta").materialize("cpu") or model,
    ],
    ids=["new", "to bf16", "materialize", "to meta and materialize"],
)
def test_a_tied_head_is_one_parameter_whatever_happens_to_the_model(move):
    model = move(Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(tie_word_embeddings=True))))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    assert model.num_parameters() == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    model.init_weights(seed=0)
    ids = torch.zeros(1, 3, dtype=torch.long)
    summed, _ = model.loss(ids, ids)
    summed.backward()
    # Both uses of the one parameter add to its gradient: the head reaches every row, the embedding row 0.
    assert (model.model.embed_tokens.weight.grad.abs().amax(1) > 0).all()


def test_materialize_ties_again_what_to_empty_has_parted():
    """A device whose `.to` makes new parameters (PrivateUse1) parts them; here by hand."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(tie_word_embeddings=True)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    model.materialize("cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_untied_head_is_a_parameter_of_its_own():
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config()))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert "lm_head.weight" in dict(model.named_parameters())


def test_a_model_on_meta_holds_no_memory():
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(moe=True)))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.buffers()) == []
    assert init._BLOCK_ROWS == 1024  # the block that the values of every published random model depend on
