"""--plan: its numbers are those of real runs, and every recipe in configs/ fits the machine that it is for."""

import functools
import json
import re
import time

import pytest

from qwen3_trn import plan
from qwen3_trn.config import Qwen3Config, parse_args
from qwen3_trn.device import TRAINIUM2_MEMORY
from qwen3_trn.dry_run import count_step
from qwen3_trn.errors import UserError
from tests.common import REPO, run_python, succeeded, write_config
from tests.run_plan import CASES, LAYOUTS, MODELS, SHAPES, settings
from tests.test_sizes import PUBLISHED, published_config

OPERATIONS = {
    "all-gather": ("c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_"),
    "reduce-scatter": ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_tensor_coalesced_"),
    "all-reduce": ("c10d::allreduce_",),
}
TWO_RANKS = ["tied-fsdp2", "moe-ep2", "moe-tp2", "moe-tp2-ep2", "odd-fsdp2", "odd-tp2", "odd-moe-ep2"]
OTHER_LAYOUTS = [case for case in LAYOUTS if case not in TWO_RANKS]
THREE_SHAPES = ["small-none-1", "small-full-accumulate", "small-moe-selective-1"]
OTHER_SHAPES = [case for case in SHAPES if case not in THREE_SHAPES]
RECIPES = sorted(path.name for path in (REPO / "configs").glob("*.toml"))
# name of a recipe -> size and ranks of its machine
RECIPE = re.compile(r"qwen3-(?P<size>[\w.-]+?)-(?P<machine>(?P<nodes>4x-)?trn2\.(?:3|48)xlarge)\.toml")
FAST_RECIPES = [name for name in RECIPES if name.endswith("trn2.3xlarge.toml")]


@functools.cache
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


def run_all(make_folder, cases: list[str]) -> dict[str, dict]:
    found = {}
    for ranks in {CASES[case][0] for case in cases}:
        found |= run_real(make_folder(f"plan{ranks}"), ranks, [case for case in cases if CASES[case][0] == ranks])
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp, TWO_RANKS)


@pytest.fixture(scope="module")
def other_layouts(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp, OTHER_LAYOUTS)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp, THREE_SHAPES)


@pytest.fixture(scope="module")
def other_shapes(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp, OTHER_SHAPES)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_hold_and_send_what_is_planned(two_ranks, case):
    assert_exact(case, two_ranks[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_other_layouts_hold_and_send_what_is_planned(other_layouts, case):
    assert_exact(case, other_layouts[case])


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


def assert_working_memory(case: str, found: dict, tolerance: float) -> None:
    """Beside weights and optimizer state, which a profile of one step does not see; gradients come and go in it."""
    assert plan_of(case).working == pytest.approx(found["peak"] - found["gradients"], rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", THREE_SHAPES)
def test_working_memory_is_the_allocators_peak(one_rank, case):
    assert_working_memory(case, one_rank[case], 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHER_SHAPES)
def test_working_memory_of_other_shapes(other_shapes, case):
    """On two ranks gloo has buffers of its own. Under full recomputation they are as large as all the rest here."""
    ranks, _, flags = SHAPES[case]
    if ranks == 2 and "--ac=full" in flags:
        assert plan_of(case).working < other_shapes[case]["peak"] - other_shapes[case]["gradients"]
    else:
        assert_working_memory(case, other_shapes[case], 0.02 if ranks == 1 else 0.15)


def test_recomputation_and_smaller_micro_batches_save_memory():
    none, selective, full = (plan_of(f"small-{ac}-1").working for ac in ("none", "selective", "full"))
    assert none > 1.3 * selective > 1.3 * full
    assert plan_of("small-none-accumulate").working < 0.8 * none


@pytest.mark.parametrize(
    "size, ranks, flags",
    [
        ("8B", 8, ["--global-batch-size=16", "--ac=selective", "--compile=off", "--tp=4"]),
        pytest.param(
            "30B-A3B", 64, ["--global-batch-size=32", "--ac=full", "--tp=4", "--ep=4"], marks=pytest.mark.slow
        ),
    ],
)
def test_two_depths_give_what_counting_every_layer_gives(size, ranks, flags):
    config = Qwen3Config.from_dict(published_config(size) | {"num_hidden_layers": 9})
    args = parse_args(flags)
    planned, whole = plan.make_plan(config, args, ranks), count_step(config, args, ranks)
    assert planned.memory == max(number for key, number in whole.items() if key[0] == "peak")
    assert planned.state == whole["weights"] + whole["gradients"] + whole["optimizer"]
    for key, (count, num_bytes) in planned.collectives.items():
        assert (count, num_bytes) == (whole["collectives", *key, "count"], whole["collectives", *key, "bytes"])


def test_experts_buffers_against_balanced_routing():
    raw = {"num_hidden_layers": 2}
    flags = ["--global-batch-size=8", "--seq-len=4096"]
    # 8,192 tokens choose 8 experts each; each of 128 experts may need 127 rows more to fill its last block of 128.
    assert plan_size("30B-A3B", 4, *flags, **raw).rows_over_ideal == (8192 * 8 + 128 * 127) / (8192 * 8)
    # Every rank of a group has room for the case that all tokens choose its experts, a quarter of them.
    whole_blocks = -(-(8192 * 8 + 32 * 127) // 128) * 128
    assert plan_size("30B-A3B", 4, *flags, "--ep=4", **raw).rows_over_ideal == whole_blocks / (8192 * 8 / 4)
    bounded = plan_size("30B-A3B", 4, *flags, "--ep=4", "--moe-capacity=1.5", **raw)
    assert bounded.rows_over_ideal == 1.5
    assert bounded.working < plan_size("30B-A3B", 4, *flags, "--ep=4", **raw).working
    assert plan_size("0.6B", 1, *flags, **raw).rows_over_ideal is None


def print_plan(capsys, *flags: str) -> str:
    plan.print_plan(parse_args(["--plan", *flags]))
    return capsys.readouterr().out


def test_what_does_not_fit_gets_the_nearest_change_that_does(tmp_path, capsys):
    folder = write_config(tmp_path / "Qwen3-0.6B", published_config("0.6B"))
    flags = ["--plan-ranks=4", "--model", str(folder), "--seq-len=4096", "--global-batch-size=16"]
    flags += ["--out", str(tmp_path / "none" / "yet")]
    printed = print_plan(capsys, *flags)
    assert "DOES NOT FIT in the 24.00 GiB of a Trainium2 logical core" in printed
    assert "disk       up to 3 checkpoints of 7.2 GB, export 1.2 GB" in printed
    assert re.search(r"^to fit     --micro-batch-size 2   \((\d+\.\d+) GiB a device\)$", printed, re.MULTILINE)
    printed = print_plan(capsys, *flags, "--micro-batch-size=2")
    assert "  fits in the 24.00 GiB" in printed and "to fit" not in printed
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "ranks, flags, change",
    [
        # A row alone is too much: recompute.
        (4, ["--seq-len=4096", "--global-batch-size=4"], "--ac full"),
        # 16 bytes of state a parameter, 60 GiB: no micro-batch helps.
        pytest.param(1, ["--global-batch-size=4"], "--plan-ranks 4", marks=pytest.mark.slow),
        # An explicit --dp-shard gives way when the ranks change.
        pytest.param(
            1, ["--global-batch-size=4", "--dp-shard=1"], "--plan-ranks 4 --dp-shard -1", marks=pytest.mark.slow
        ),
    ],
)
def test_nearest_change_of_4b(ranks, flags, change):
    config, args = Qwen3Config.from_dict(published_config("4B")), parse_args(["--plan", *flags])
    found = plan.nearest_fit(config, args, plan.make_plan(config, args, ranks))
    assert found is not None and found[1].fits
    assert sorted(found[0].split()) == sorted(change.split())


def test_one_process_prints_under_torchrun():
    process = run_python("train.py", "--plan", "--global-batch-size", "8", ranks=2)
    assert succeeded(process).count("memory  ") == 1
    assert "layout     2 ranks" in process.stdout


def test_refuses_what_the_run_would_refuse(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"--tp 16 does not fit: it must divide num_key_value_heads \(8\)"):
        plan_size("0.6B", 16, "--tp=16", "--global-batch-size=16")
    with pytest.raises(UserError, match="not a multiple of 16 data ranks"):
        plan_size("0.6B", 16, "--global-batch-size=8")
    with pytest.raises(UserError, match="max_position_embeddings"):
        plan_size("0.6B", 1, "--seq-len=65536")
    with pytest.raises(UserError, match="add --compile off"):
        plan_size("0.6B", 1, "--ac=selective")
    with pytest.raises(UserError, match="add --plan"):
        parse_args(["--plan-ranks=4"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=r"HF_HUB_OFFLINE is set, and Qwen/Qwen3-0.6B \(revision main\) is not complete"
    ):
        plan.print_plan(parse_args(["--plan", "--init=hub"]))


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


@pytest.mark.parametrize("name", FAST_RECIPES)
def test_recipe_fits(name, tmp_path):
    check_recipe(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FAST_RECIPES])
def test_other_recipe_fits(name, tmp_path):
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
