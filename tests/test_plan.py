"""--plan: its numbers are those of real runs, and every recipe in configs/ fits the machine that it is for."""

import json
import re
import time

import pytest

from qwen3_trn import plan
from qwen3_trn.config import Qwen3Config, parse_args
from qwen3_trn.device import TRAINIUM2_MEMORY
from qwen3_trn.errors import UserError
from tests.common import REPO, run_python, succeeded, write_config
from tests.run_plan import CASES, LAYOUTS, MODELS, SHAPES, settings
from tests.test_sizes import PUBLISHED, published_config

OPERATIONS = {
    "all-gather": ("c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_"),
    "reduce-scatter": ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_tensor_coalesced_"),
    "all-reduce": ("c10d::allreduce_",),
}
RECIPES = sorted(path.name for path in (REPO / "configs").glob("*.toml"))
# name of a recipe -> size and ranks of its machine
RECIPE = re.compile(r"qwen3-(?P<size>[\w.-]+?)-(?P<machine>(?P<nodes>4x-)?trn2\.(?:3|48)xlarge)\.toml")
MOE_RECIPES = [name for name in RECIPES if re.search(r"-a\d+b-", name)]


def plan_of(case: str) -> plan.Plan:
    ranks, model, flags = CASES[case]
    return plan.make_plan(Qwen3Config.from_dict(MODELS[model]), settings(flags), ranks)


def plan_size(size: str, ranks: int, *flags: str, **changes) -> plan.Plan:
    config = Qwen3Config.from_dict(published_config(size) | changes)
    return plan.make_plan(config, parse_args(list(flags)), ranks)


def counts_by_operation(found: dict[str, int]) -> dict[str, int]:
    return {operation: sum(found.get(name, 0) for name in names) for operation, names in OPERATIONS.items()}


def assert_exact(case: str, found: dict) -> None:
    """State to the byte, collectives to the last one."""
    planned = plan_of(case)
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(planned, name) == found[name], name
    counts = dict.fromkeys(OPERATIONS, 0)
    for (_, operation), (count, _) in planned.collectives.items():
        counts[operation] += count
    assert counts == counts_by_operation(found["collectives"])


def run_real(out, ranks: int, cases: list[str]) -> dict[str, dict]:
    succeeded(run_python("tests/run_plan.py", out, *cases, ranks=ranks))
    return {case: json.loads((out / f"{case}.json").read_text()) for case in cases}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    cases = [case for case, (ranks, _, _) in LAYOUTS.items() if ranks == 2]
    return run_real(tmp_path_factory.mktemp("plan2"), 2, cases)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    cases = [case for case, (ranks, _, _) in LAYOUTS.items() if ranks == 4]
    return run_real(tmp_path_factory.mktemp("plan4"), 4, cases)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    cases = [case for case, (ranks, _, _) in SHAPES.items() if ranks == 1]
    return run_real(tmp_path_factory.mktemp("plan1"), 1, cases)


@pytest.mark.parametrize("case", [case for case in LAYOUTS if LAYOUTS[case][0] == 2])
def test_two_ranks_hold_and_send_what_is_planned(two_ranks, case):
    assert_exact(case, two_ranks[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in LAYOUTS if LAYOUTS[case][0] == 4])
def test_four_ranks_hold_and_send_what_is_planned(four_ranks, case):
    assert_exact(case, four_ranks[case])


def test_collectives_of_fsdp_and_of_a_tensor_parallel_block(two_ranks):
    # Embedding, head and 5 layers: gathered in forward, and again in backward but for the head, which is kept, and the
    # embedding, whose backward does not need it. Each of 4 micro-batches reduces all 7.
    planned = plan_of("odd-fsdp2").collectives
    assert planned["FSDP", "all-gather"][0] == 4 * (7 + 6)
    assert planned["FSDP", "reduce-scatter"][0] == 4 * 7
    # Two all-gathers and two reduce-scatters in each block's forward, none before q's and k's norm; then the
    # embedding's reduce-scatter and the head's all-gather. There are no FSDP collectives on one data rank.
    forward = counts_by_operation(two_ranks["odd-tp2"]["forward"])
    assert forward["all-gather"] == forward["reduce-scatter"] == 2 * 5 + 1


@pytest.mark.parametrize("case", [case for case in SHAPES if SHAPES[case][0] == 1])
def test_working_memory_is_the_allocators_peak(one_rank, case):
    """Beside weights, gradients and optimizer state, of which the profile sees only the gradients come and go."""
    found, planned = one_rank[case], plan_of(case)
    assert planned.working == pytest.approx(found["peak"] - found["gradients"], rel=0.02)


def test_recomputation_and_smaller_micro_batches_save_memory():
    for model in ("small", "small-moe"):
        none, selective, full = (plan_of(f"{model}-{ac}-1").working for ac in ("none", "selective", "full"))
        assert none > 1.3 * selective > 1.3 * full
        assert plan_of(f"{model}-none-accumulate").working < 0.8 * none


@pytest.mark.parametrize(
    "size, ranks, flags",
    [
        ("0.6B", 4, ["--global-batch-size=16", "--micro-batch-size=2"]),
        ("8B", 8, ["--global-batch-size=16", "--ac=selective", "--tp=4"]),
        pytest.param("30B-A3B", 64, ["--global-batch-size=32", "--ac=full", "--tp=4", "--ep=4"], marks=pytest.mark.slow),
    ],
)
def test_two_depths_give_what_counting_every_layer_gives(size, ranks, flags):
    config = Qwen3Config.from_dict(published_config(size) | {"num_hidden_layers": 9})
    args = parse_args(flags)
    planned, whole = plan.make_plan(config, args, ranks), plan._count_step(config, args, ranks)
    assert planned.memory == max(number for key, number in whole.items() if key[0] == "peak")
    assert planned.state == whole["weights"] + whole["gradients"] + whole["optimizer"]
    for key, (count, num_bytes) in planned.collectives.items():
        assert (count, num_bytes) == (whole["collectives", *key, "count"], whole["collectives", *key, "bytes"])


def test_experts_buffers_against_balanced_routing():
    raw = {"num_hidden_layers": 2}
    flags = ["--global-batch-size=8", "--seq-len=512"]
    assert plan_size("30B-A3B", 4, *flags, **raw).rows_over_ideal == 1
    # Every rank of a group has room for the case that all tokens choose its experts.
    assert plan_size("30B-A3B", 4, *flags, "--ep=4", **raw).rows_over_ideal == 4
    bounded = plan_size("30B-A3B", 4, *flags, "--ep=4", "--moe-capacity=1.5", **raw)
    assert bounded.rows_over_ideal == pytest.approx(1.5, abs=0.01)
    assert bounded.working < plan_size("30B-A3B", 4, *flags, "--ep=4", **raw).working
    assert plan_size("0.6B", 1, *flags, **raw).rows_over_ideal is None


def test_what_does_not_fit_gets_the_nearest_change_that_does(tmp_path):
    folder = write_config(tmp_path / "Qwen3-4B", published_config("4B"))
    flags = ["train.py", "--plan", "--model", folder, "--seq-len", "2048", "--out", tmp_path / "none" / "yet"]
    printed = succeeded(run_python(*flags, "--plan-ranks", "4", "--global-batch-size", "32"))
    assert "DOES NOT FIT in the 24.00 GiB of a Trainium2 logical core" in printed
    change = re.search(r"^to fit     (--.*?)   \((.*) GiB a device\)$", printed, re.MULTILINE)
    assert change and float(change[2]) <= 24
    assert "--ac full" in change[1]
    printed = succeeded(run_python(*flags, "--plan-ranks", "4", "--global-batch-size", "32", *change[1].split()))
    assert "  fits in the 24.00 GiB" in printed and "to fit" not in printed
    assert "disk       checkpoint 16.1 GB, export 8.0 GB" in printed
    # 16 bytes a parameter of state: one rank cannot hold it, whatever the micro-batch.
    printed = succeeded(run_python(*flags, "--plan-ranks", "1", "--global-batch-size", "4"))
    assert re.search(r"^to fit     .*--plan-ranks [48]", printed, re.MULTILINE)
    assert not (tmp_path / "none").exists()


def test_one_process_prints_under_torchrun():
    process = run_python("train.py", "--plan", "--global-batch-size", "8", ranks=2)
    assert succeeded(process).count("memory  ") == 1
    assert "layout     2 ranks" in process.stdout


def test_refuses_what_the_run_would_refuse(tmp_path):
    with pytest.raises(UserError, match=r"--tp 16 does not fit: it must divide num_key_value_heads \(8\)"):
        plan_size("0.6B", 16, "--tp=16", "--global-batch-size=16")
    with pytest.raises(UserError, match="not a multiple of 16 data ranks"):
        plan_size("0.6B", 16, "--global-batch-size=8")
    with pytest.raises(UserError, match="max_position_embeddings"):
        plan_size("0.6B", 1, "--seq-len=65536")
    with pytest.raises(UserError, match="add --plan"):
        parse_args(["--plan-ranks=4"])
    process = run_python("train.py", "--plan", "--init", "hub", HF_HOME=str(tmp_path))
    assert process.returncode == 1
    assert "HF_HUB_OFFLINE is set, and Qwen/Qwen3-0.6B (revision main) is not complete" in process.stderr


def check_recipe(name: str, tmp_path) -> plan.Plan:
    """It fits, and needs what its comment says, by the published architecture of the model that it names."""
    match = RECIPE.fullmatch(name)
    size = next(size for size in PUBLISHED if size.lower() == match["size"])
    ranks = {"trn2.3xlarge": 4, "trn2.48xlarge": 64, "4x-trn2.48xlarge": 256}[match["machine"]]
    text = (REPO / "configs" / name).read_text()
    args = parse_args(["--config", str(REPO / "configs" / name)])
    assert (args.init, args.model) == ("hub", f"Qwen/Qwen3-{size}")
    assert args.seq_len % 512 == 0
    folder = write_config(tmp_path, published_config(size))
    # A flag wins over the file.
    args = parse_args(["--config", str(REPO / "configs" / name), "--model", str(folder)])
    planned = plan.make_plan(Qwen3Config.from_pretrained(args.model), args, ranks)
    assert planned.fits
    assert planned.memory < 0.9 * TRAINIUM2_MEMORY  # room for what the estimate does not see
    claim = re.search(r"--plan-ranks (\d+)` says: ([\d.]+) GiB a device, ([\d.]+) of them", text)
    assert int(claim[1]) == ranks
    assert float(claim[2]) == pytest.approx(planned.memory / 2**30, abs=0.06)
    assert float(claim[3]) == pytest.approx(planned.state / 2**30, abs=0.06)
    claim = re.search(r"checkpoint ([\d.]+) GB, export ([\d.]+) GB", text)
    assert float(claim[1]) == pytest.approx(planned.checkpoint / 1e9, abs=0.06)
    assert float(claim[2]) == pytest.approx(planned.export / 1e9, abs=0.06)
    return planned


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in MOE_RECIPES])
def test_dense_recipe_fits(name, tmp_path):
    check_recipe(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE_RECIPES)
def test_moe_recipe_fits(name, tmp_path):
    check_recipe(name, tmp_path)


def test_there_is_a_recipe_for_every_published_size():
    sizes = {RECIPE.fullmatch(name)["size"] for name in RECIPES}
    assert sizes == {size.lower() for size in PUBLISHED}


@pytest.mark.slow
def test_235b_on_1024_ranks_takes_less_than_a_minute():
    started = time.perf_counter()
    flags = ["--tp=4", "--ep=16", "--ac=full", "--global-batch-size=256", "--seq-len=4096"]
    planned = plan_size("235B-A22B", 1024, *flags)
    assert time.perf_counter() - started < 60
    # Weights, gradients and two moments, fp32, of all parameters; what is not cut (norms, the router) adds a little.
    assert planned.state * 1024 == pytest.approx(16 * planned.num_parameters, rel=0.01)
    assert planned.fits
