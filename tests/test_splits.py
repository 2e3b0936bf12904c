"""The loss, its gradients and their norm do not depend on ranks, FSDP, micro-batches or accumulation."""

import pytest
import torch

from qwen3_trn import Qwen3Config, Qwen3ForCausalLM
from tests.common import run_python, succeeded
from tests.run_splits import MODELS, make_rows

SPLITS = [(1, 8), (1, 4), (1, 2), (1, 1), (2, 4), (2, 2), (2, 1), (4, 2), (4, 1)]  # (ranks, micro-batch size)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{(model, ranks, micro-batch size): what run_splits.py saved}, and a plain model's answer under (model,)."""
    out = tmp_path_factory.mktemp("splits")
    found = {}
    for ranks in (1, 2, 4):
        succeeded(run_python("tests/run_splits.py", out, ranks=ranks))
    for path in out.glob("*.pt"):
        name, ranks, micro_batch_size = path.stem.rsplit("-", 2)
        found[name, int(ranks), int(micro_batch_size)] = torch.load(path)
    for name in ("dense", "moe"):
        model = Qwen3ForCausalLM(Qwen3Config.from_dict(MODELS[name][0]))
        model.init_weights(seed=1)
        model = model.double()  # the oracle: unsplit, without FSDP, in fp64
        summed, count = model.loss(**make_rows(model.config.vocab_size))
        (summed / count).backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        found[(name,)] = {
            "values": {"loss": (summed / count).item(), "grad_norm": norm.item()},
            "gradients": gradients,
        }
    return found


def assert_equal_steps(result: dict, reference: dict) -> None:
    for key in ("loss", "grad_norm"):
        assert result["values"][key] == pytest.approx(reference["values"][key], rel=1e-6), key
    assert result["gradients"].keys() == reference["gradients"].keys()
    for name, expected in reference["gradients"].items():
        error = (result["gradients"][name] - expected).abs().max()
        assert error <= 5e-6 * expected.abs().max(), f"{name}: {error / expected.abs().max():.1e}"


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("ranks, micro_batch_size", SPLITS)
def test_same_step_however_it_is_split(results, name, ranks, micro_batch_size):
    assert_equal_steps(results[name, ranks, micro_batch_size], results[(name,)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_auxiliary_losses_do_not_depend_on_ranks(results, ranks):
    reference, result = results["moe-aux", 1, 8], results["moe-aux", ranks, 8 // ranks]
    assert_equal_steps(result, reference)
    for key in ("aux_loss", "z_loss"):
        assert reference["values"][key] > 0
        assert result["values"][key] == pytest.approx(reference["values"][key], rel=1e-6), key
    for key in ("load_max_over_mean", "dead_experts", "router_entropy"):
        assert result["values"][key] == pytest.approx(reference["values"][key], rel=1e-6), key


def test_auxiliary_losses_change_the_router_and_only_when_asked(results):
    plain, auxiliary = results["moe", 1, 8], results["moe-aux", 1, 8]
    assert "aux_loss" not in plain["values"] and "z_loss" not in plain["values"]
    assert plain["values"]["loss"] == auxiliary["values"]["loss"]
    name = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(plain["gradients"][name], auxiliary["gradients"][name])
