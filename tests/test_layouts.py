"""Every parallel layout gives one process's loss, gradients, norm and weights; what cannot be split is refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from qwen3_trn import Qwen3Config, Qwen3ForCausalLM
from qwen3_trn.errors import UserError
from qwen3_trn.parallel import build_mesh, check_layout
from tests.common import run_python, succeeded, tiny_config
from tests.run_layouts import CASES, MODELS, forced_routing, randomise, run_steps

COMPILED = [name for name, case in CASES.items() if "compile_backend" in case[3]]
ON_4_RANKS = [name for name, case in CASES.items() if case[0] == 4]
DEFAULT = [name for name in CASES if name not in COMPILED + ON_4_RANKS]
DEFAULT += ["dense-tp2-hsdp", "moe-ep2-hsdp", "moe-tp2-ep2-fsdp2", "few-tp2-fsdp2"]
MORE_ON_4_RANKS = [name for name in ON_4_RANKS if name not in DEFAULT]


@pytest.fixture(scope="module")
def references():
    """The same steps by a plain model in one process, without FSDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for name, raw in MODELS.items():
        model = Qwen3ForCausalLM(Qwen3Config.from_dict(raw))
        randomise(model)
        with forced_routing(name):
            found[name] = run_steps(model)
    dist.destroy_process_group()
    return found


def run_cases(names: list[str], out) -> dict[str, dict]:
    """One torchrun for each number of ranks."""
    for ranks in sorted({CASES[name][0] for name in names}):
        cases = [name for name in names if CASES[name][0] == ranks]
        succeeded(run_python("tests/run_layouts.py", out, *cases, ranks=ranks, timeout=580))
    return {path.stem: torch.load(path) for path in out.glob("*.pt")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_cases(DEFAULT, tmp_path_factory.mktemp("layouts"))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(tensor.abs().max() for tensor in expected.values())
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max()
        assert error <= max(1e-5 * tensor.abs().max(), 1e-7 * largest), f"{name}: {error / tensor.abs().max():.1e}"


def assert_same_steps(result: dict, reference: dict) -> None:
    assert_close(result["gradients"], reference["gradients"])
    assert_close(result["weights"], reference["weights"])
    for step, (found, expected) in enumerate(zip(result["steps"], reference["steps"], strict=True)):
        assert found.keys() == expected.keys()
        # Three steps of SGD, then three of AdamW, which magnifies rounding in everything but the loss.
        for key in expected if step < 4 else ["loss"]:
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("case", DEFAULT)
def test_layout_gives_one_processs_numbers(results, references, case):
    assert_same_steps(results[case], references[CASES[case][1]])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cases", [COMPILED, MORE_ON_4_RANKS], ids=["compiled", "on 4 ranks"])
def test_more_layouts_give_one_processs_numbers(references, tmp_path, cases):
    results = run_cases(cases, tmp_path)
    assert sorted(results) == sorted(cases)
    for case, result in results.items():
        assert_same_steps(result, references[CASES[case][1]])


def test_forced_routing_leaves_experts_without_gradient(references):
    """The cases above would prove little if the routing had not been what they are about."""
    for name, used in (("one", [3]), ("one-rank", [0, 1])):
        gradient = references[name]["gradients"]["model.layers.0.mlp.experts.down_proj"]
        assert [e for e in range(8) if gradient[e].abs().max() > 0] == used
        assert references[name]["steps"][0]["dead_experts"] == [1 - len(used) / 8] * 2


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "world_size, degrees, message",
    [
        (4, {"tp": 3}, r"--tp 3 is not the number of ranks, 4: --dp-replicate x --tp must be one of \[1, 2, 4\]"),
        (8, {"dp_shard": 2, "tp": 2}, r"is not the number of ranks, 8: --dp-shard 4 would fit"),
        (8, {"ep": 3}, r"--ep 3 does not fit.*Possible: \[1, 2, 4, 8\]"),
        (8, {"tp": 4, "ep": 2}, r"--ep 2 does not fit.*Possible: \[1, 4, 8\]"),
        (8, {"dp_replicate": 4, "ep": 4}, r"--ep 4 does not fit.*Possible: \[1, 2\]"),
    ],
)
def test_degrees_that_do_not_multiply_to_the_ranks(world_size, degrees, message):
    with pytest.raises(UserError, match=message):
        build_mesh(world_size, **degrees)


@pytest.mark.parametrize(
    "config, degrees, message",
    [
        (
            tiny_config(),
            {"tp": 4},
            r"--tp 4 does not fit: it must divide num_key_value_heads \(2\). Possible: \[1, 2\]",
        ),
        (tiny_config(), {"tp": 2}, r"--tp 2 does not fit: it must divide vocab_size \(131\)"),
        (tiny_config(vocab_size=128, intermediate_size=45), {"tp": 2}, r"it must divide intermediate_size \(45\)"),
        (tiny_config(vocab_size=128), {"tp": 2, "seq_len": 33}, r"it must divide --seq-len \(33\)"),
        (tiny_config(), {"ep": 2}, "--ep 2 is for models with experts"),
        (
            tiny_config(moe=True, num_experts=6),
            {"ep": 4},
            r"it must divide num_experts \(6\). Possible: \[1, 2, 3, 6\]",
        ),
        (
            tiny_config(moe=True, vocab_size=128, moe_intermediate_size=15),
            {"tp": 2},
            r"without --ep it must divide moe_intermediate_size \(15\)",
        ),
        (tiny_config(moe=True), {"dp_shard": 9}, r"9 ranks share the 8 experts.*moe_intermediate_size \(24 a rank\)"),
        (tiny_config(moe=True, num_experts=2), {"dp_shard": 10, "ep": 2}, r"10 ranks share the 2 experts"),
    ],
)
def test_models_that_cannot_be_split(config, degrees, message):
    settings = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "ep": 1, "seq_len": 32} | degrees
    seq_len = settings.pop("seq_len")
    with pytest.raises(UserError, match=message):
        check_layout(Qwen3Config.from_dict(config), SimpleNamespace(**settings), seq_len)
