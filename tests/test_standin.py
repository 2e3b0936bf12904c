"""The real command line on a device called `neuron` that is none: tests/standin, which refuses what AWS's documents say
that the device lacks. Losses are compared with the CPU's."""

import ast
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch

from tests.common import REPO, TINY, in_process, records, run_python, succeeded
from tests.standin import limits
from tests.standin.neuron_standin import build

FLAGS = [
    "--dtype",
    "fp32",
    "--seq-len",
    "128",
    "--global-batch-size",
    "4",
    "--schedule",
    "constant",
    "--prompts",
    "Ben",
]
STEPS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """The bundled miniature, which has experts, and the same without them; both tie their embeddings."""
    dense = tmp_path_factory.mktemp("dense") / "model"
    shutil.copytree(TINY, dense)
    config = json.loads((dense / "config.json").read_text())
    config = {key: value for key, value in config.items() if "expert" not in key and key != "mlp_only_layers"}
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (dense / "config.json").write_text(json.dumps(config))
    return {"moe": TINY, "dense": dense}


@pytest.fixture(scope="module")
def token_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("token-cache")


@pytest.fixture(scope="module")
def cpu_records(models, token_cache, tmp_path_factory) -> Callable[[str], list[dict]]:
    """What the same flags give for a model on the CPU, where layout and compilation make no difference."""

    @functools.cache
    def run(kind: str) -> list[dict]:
        out = tmp_path_factory.mktemp("cpu") / kind
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QWEN3_TRN_CACHE", str(token_cache))
            return in_process(patch, out, "--model", models[kind], "--steps", STEPS, "--no-export", *FLAGS)

    return run


def train(standin, token_cache, out: Path, *flags, ranks: int = 0) -> list[dict]:
    """Run train.py on the stand-in; returns each rank's report, which must be free of refusals."""
    reports = out.with_name(f"{out.name}-report")
    shutil.rmtree(reports, ignore_errors=True)
    environment = standin | {"NEURON_STANDIN_REPORT": str(reports), "QWEN3_TRN_CACHE": str(token_cache)}
    command = ["train.py", "--out", out, "--log-every", 1, *FLAGS, *flags]
    text = succeeded(run_python(*command, ranks=ranks, **environment))
    assert "trn2, documented bf16 peak" in text and "NEURON_CC_FLAGS=--auto-cast=none" in text
    found = [json.loads((reports / f"rank_{rank}.json").read_text()) for rank in range(max(ranks, 1))]
    for rank, report in enumerate(found):
        assert report["refused"] == {}
        assert report["devices"] == [rank]
        assert report["launches"] > 1000
    return found


def assert_same_losses(ours: list[dict], theirs: list[dict]) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-3)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


def test_breaking_each_rule_is_refused(standin, tmp_path):
    process = run_python(REPO / "tests/standin/run_rules.py", **standin, NEURON_STANDIN_REPORT=str(tmp_path))
    found = json.loads(succeeded(process))
    assert sorted(found["broken"]) == found["rules"]  # none is left out
    accepted = [
        f"{case}: {message}"
        for rule, cases in found["broken"].items()
        for case, message in cases.items()
        if f"neuron stand-in: {rule}: " not in message
        # torch itself is faster here
        and not (rule == "host tensor" and "Expected all tensors to be on the same device" in message)
    ]
    assert accepted == []
    assert {case: message for case, message in found["kept"].items() if message != "ok"} == {}
    # The process left by os._exit, and its report is there.
    report = json.loads((tmp_path / "rank_0.json").read_text())
    assert set(report["refused"]) == set(found["rules"]) - {"host tensor", "fork"}  # a fork writes no report
    assert any("run_rules.py" in place and "int64_factory" in place for place in report["refused"]["64-bit tensor"])


def test_stop_resume_export(standin, models, token_cache, cpu_records, tmp_path):
    """One rank, experts: half of the steps eager, then the rest compiled in a new process, and the verified export."""
    out = tmp_path / "run"
    (first,) = train(standin, token_cache, out, "--steps", STEPS // 2, "--compile", "off", "--no-export")
    assert first["compiled_graphs"] == 0
    (second,) = train(standin, token_cache, out, "--init", "resume", "--steps", STEPS, "--compile", "on", "--export")
    assert second["compiled_graphs"] > 0
    assert_same_losses(records(out), cpu_records("moe"))
    names = safetensors.safe_open(next((out / "hf").glob("*.safetensors")), "pt").keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names  # tied to the end


@pytest.mark.slow
def test_experts_on_two_ranks(standin, token_cache, cpu_records, tmp_path):
    """Expert parallelism, eager."""
    out = tmp_path / "run"
    flags = ["--ep", 2, "--steps", STEPS, "--compile", "off", "--no-export"]
    reports = train(standin, token_cache, out, *flags, ranks=2)
    assert_same_losses(records(out), cpu_records("moe"))
    for report in reports:
        assert report["communicators"] == [[0, 1]]
        assert_steady(report, STEPS)


def assert_steady(report: dict, steps: int) -> None:
    """A step reads the device once, and updates each group of parameters once."""
    reads = {place: count for place, count in report["host_reads"].items() if "read_step" in place}
    assert sum(reads.values()) == steps
    around = ("check_document_mask", "save", "sample_texts", "generate")
    assert [place for place in report["host_reads"] if place not in reads and not any(x in place for x in around)] == []
    assert len(report["optimizer_launches"]) in (2 * steps, 3 * steps)  # matrices, norms, and experts if there are


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize(
    ("kind", "ranks", "layout"),
    [
        ("dense", 0, []),
        ("dense", 2, []),
        ("dense", 2, ["--tp", 2]),
        ("moe", 0, ["--ac", "full"]),
        ("moe", 2, ["--dp-replicate", 2]),
        ("moe", 2, ["--tp", 2]),
        ("moe", 2, ["--tp", 2, "--ep", 2]),
        ("moe", 2, ["--ep", 2]),
    ],
)
def test_layouts(kind, ranks, layout, compiled, standin, models, token_cache, cpu_records, tmp_path):
    out = tmp_path / "run"
    flags = ["--model", models[kind], "--steps", STEPS, "--compile", compiled, "--no-export", *layout]
    for report in train(standin, token_cache, out, *flags, ranks=ranks):
        assert (report["compiled_graphs"] > 0) == (compiled == "on")
        assert_steady(report, STEPS)
    assert_same_losses(records(out), cpu_records(kind))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["on", "off"])
def test_shapes_do_not_change_after_step_2(compiled, standin, token_cache, tmp_path):
    """50 steps over packed documents, whose number, lengths and routing differ from row to row."""
    steps = 50
    flags = ["--steps", steps, "--compile", compiled, "--lr", 3e-3, "--no-export"]
    (report,) = train(standin, token_cache, tmp_path / "run", *flags)
    assert_steady(report, steps)
    launches = report["optimizer_launches"]
    warm, end = launches[2 * len(launches) // steps - 1], launches[-1]
    late = [signature for signature in report["signatures"] if warm < signature["launch"] <= end]
    assert late == []
    # Numbers are compiled in. What changed every step would have 50 values; different lines give the few there are.
    assert {signature: v for signature, v in report["changing_arguments"].items() if len(v) > 5} == {}


def test_other_torch_versions_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    with pytest.raises(RuntimeError, match=r"for torch 2\.13\.0; this is 2\.14\.0"):
        build.check_torch()


def test_nothing_in_the_package_knows_it():
    for file in [*REPO.glob("*.py"), *REPO.glob("qwen3_trn/**/*.py")]:
        text = file.read_text().lower()
        assert "standin" not in text and "stand-in" not in text, file


def test_each_limit_names_a_test_that_exists():
    for limit in limits.LIMITS:
        assert bool(limit.test) != bool(limit.why_not), limit.name
        if limit.test:
            file, name = limit.test.split("::")
            functions = [
                n.name for n in ast.walk(ast.parse((REPO / file).read_text())) if isinstance(n, ast.FunctionDef)
            ]
            assert name in functions, limit.test
