"""The doctor: packages judged by their metadata alone, findings, exit codes, the report; and what goes with it.

That is the constraints files, and the script for the first run on Trainium.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from qwen3_trn import doctor
from qwen3_trn.device import Device
from qwen3_trn.doctor import Finding, Package
from qwen3_trn.errors import UserError
from tests.common import REPO, run_python, succeeded

# What PyPI's placeholders have as description, whatever their version.
WRONG = "WRONG PACKAGE. Please install the package from Neuron Repository - pip.repos.neuron.amazonaws.com\n"
TORCH = {"torch": "2.14.0", "torchtitan": "0.3.0"}
NEURON = TORCH | {"torch-neuronx": "2.14.3.0.17", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0"}


def install(site, name: str, version: str, description: str = "") -> None:
    """Make the metadata of an installed package, and nothing else of it."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n{description}"
    (folder / "METADATA").write_text(text)


def judge(versions: dict[str, str], python=(3, 12)) -> dict[str, Finding]:
    """The findings that are not ok, by package."""
    packages = {name: Package(version, is_placeholder=False) for name, version in versions.items()}
    return {f.what: f for f in doctor.check_packages(packages, python) if f.level != "ok"}


# -------------------------------------------------------------------------------------------------------- packages


def test_packages_are_found_by_metadata_and_placeholders_named(tmp_path, monkeypatch):
    """By version or by description; a package is never imported (these have no code)."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name, version in NEURON.items():
        install(tmp_path, name, version, "The real thing.")
    packages = doctor.find_packages()
    assert packages == {name: Package(version, False) for name, version in NEURON.items()}
    assert all(finding.level == "ok" for finding in doctor.check_packages(packages, (3, 12)))


@pytest.mark.parametrize("name", doctor.PLACEHOLDERS)
@pytest.mark.parametrize("known_by", ["version", "description"])
def test_placeholders(name, known_by, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for other, version in NEURON.items():
        if other != name:
            install(tmp_path, other, version)
    version = doctor.PLACEHOLDERS[name] if known_by == "version" else "99.0"
    install(tmp_path, name, version, WRONG if known_by == "description" else "")
    findings = doctor.check_packages(doctor.find_packages(), (3, 12))
    (bad,) = [finding for finding in findings if finding.level != "ok"]
    assert (bad.level, bad.what) == ("error", name)
    assert "placeholder" in bad.found and f"pip uninstall {name}" in bad.advice and doctor.AWS_INDEX in bad.advice


@pytest.mark.parametrize(
    ("changes", "what", "level", "text"),
    [
        ({"torch": "2.13.0+cpu"}, "torch-neuronx", "error", "2.14.3.0.17 beside torch 2.13.0+cpu"),
        ({"torch-neuronx": "2.13.3.0.9"}, "torch-neuronx", "error", "2.13.* goes with torch 2.13"),
        ({"torch-neuronx": "2.9.0.2.15.32035"}, "torch-neuronx", "error", "legacy"),
        ({"torch-xla": "2.9.0"}, "torch-xla", "error", "2.9 and older"),
        ({"neuronx-cc": "2.27.2878.0"}, "neuronx-cc", "warning", "documents 2.28 with SDK 2.33"),
        ({"nki": "0.6.0"}, "nki", "warning", "documents 0.7"),
        ({"nki": None}, "nki", "error", "not installed"),
        ({"neuronx-cc": None}, "neuronx-cc", "error", "neither installed nor on PATH"),
        ({"torchtitan": "0.2.2+neuron.1"}, "torchtitan", "error", "AWS's fork"),
    ],
)
def test_what_does_not_belong_together(changes, what, level, text):
    versions = {name: version for name, version in (NEURON | changes).items() if version}
    (bad,) = judge(versions).values()
    assert (bad.what, bad.level) == (what, level)
    assert text in f"{bad.found} {bad.advice}"


@pytest.mark.parametrize("versions", [TORCH, TORCH | {"torch": "2.13.0"}, NEURON, TORCH | {"torch-xla": "2.14"}])
def test_what_belongs_together(versions):
    assert judge(versions) == {}


def test_torch_and_python_bounds():
    assert judge(TORCH | {"torch": "2.12.1"})["torch"].level == "error"
    assert judge(TORCH | {"torch": "2.15.0"})["torch"].level == "warning"
    assert judge(TORCH, python=(3, 10))["Python"].level == "error"
    assert judge(TORCH, python=(3, 11)) == {}
    assert judge(NEURON, python=(3, 11))["Python"].level == "warning"
    assert judge(NEURON, python=(3, 15))["Python"].level == "warning"


# -------------------------------------------------------------------------------------------------- the machine


def test_environment_shows_what_matters_and_masks_secrets():
    findings = doctor.check_environment(
        {
            "NEURON_RT_VISIBLE_CORES": "0-3",
            "HF_TOKEN": "hf_private",
            "NEURON_API_KEY": "private",
            "HF_ENDPOINT": "https://user:private@hub.example/path",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "HOME": "/home/private",
            "MY_NEURON_X": "private",
        }
    )
    shown = {finding.what: finding.found for finding in findings}
    assert shown == {
        "NEURON_RT_VISIBLE_CORES": "0-3",
        "HF_TOKEN": "***",
        "NEURON_API_KEY": "***",
        "HF_ENDPOINT": "https://***@hub.example/path",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    assert "private" not in str(findings)
    assert [finding.what for finding in findings if finding.level == "warning"] == ["TORCH_DEVICE_BACKEND_AUTOLOAD"]


def test_driver(tmp_path, monkeypatch):
    """neuron-ls is run where it is, and its words are kept for the report."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (missing,) = doctor.check_driver(has_neuron=True)
    assert (missing.level, missing.found) == ("warning", "not loaded")
    assert doctor.check_driver(has_neuron=False) == []
    tool = tmp_path / "neuron-ls"
    tool.write_text("#!/bin/sh\necho instance-type: trn2.3xlarge; echo instance-id: i-0a\n")
    tool.chmod(0o755)
    (listed,) = doctor.check_driver(has_neuron=False)
    assert (listed.level, listed.details) == ("ok", "instance-type: trn2.3xlarge\ninstance-id: ***")
    tool.write_text("#!/bin/sh\necho no devices >&2\nexit 3\n")
    (failed,) = doctor.check_driver(has_neuron=False)
    assert (failed.level, failed.found, failed.advice) == ("warning", "exit code 3", "no devices")


def test_disks(tmp_path, monkeypatch):
    monkeypatch.setenv("QWEN3_TRN_CACHE", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "neff"))
    found = {finding.what: finding for finding in doctor.check_disks()}
    assert (
        str(tmp_path / "not") in found["token cache"].found and str(tmp_path / "neff") in found["compiled graphs"].found
    )
    monkeypatch.setattr(doctor, "LOW_DISK", 10**18)
    monkeypatch.setattr(doctor, "LOW_SHARED_MEMORY", 10**18)
    assert {finding.level for finding in doctor.check_disks()} == {"warning"}
    (tmp_path / "file").touch()
    monkeypatch.setenv("QWEN3_TRN_CACHE", str(tmp_path / "file" / "cache"))
    found = {finding.what: finding for finding in doctor.check_disks()}
    assert found["token cache"].level == "error"


def refuse(*arguments, **keywords):
    raise NotImplementedError("Could not run 'aten::op' with arguments from this backend.\nSecond line.")


@pytest.mark.parametrize(
    ("path", "owner", "name", "level"),
    [
        ("fused attention", torch.nn.functional, "scaled_dot_product_attention", "warning"),
        ("grouped matmul", torch, "_grouped_mm", "warning"),
        ("fused AdamW", torch.optim, "AdamW", "error"),
        ("all-to-all", torch.distributed, "all_to_all_single", "ok"),
        ("deterministic mode", torch.nn.functional, "embedding", "ok"),
        ("torch.compile", torch, "compile", "warning"),
    ],
)
def test_a_path_that_does_not_exist_is_a_no_with_the_reason(path, owner, name, level, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # fast; the real one runs below
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *arguments: None)  # there is no group here
    assert {finding.found[:3] for finding in doctor.check_paths(Device())} == {"yes"}
    monkeypatch.setattr(owner, name, refuse)
    found = {finding.what: finding for finding in doctor.check_paths(Device())}
    assert found[path].level == level
    assert found[path].found == "no: NotImplementedError: Could not run 'aten::op' with arguments from this backend."
    assert "Traceback" in found[path].details
    others = [finding.what for finding in found.values() if finding.found.startswith("no") and finding.what != path]
    assert others == (["foreach AdamW"] if name == "AdamW" else [])


def test_speed_is_a_share_of_the_peak_and_a_wrong_product_is_an_error(monkeypatch):
    check = partial(doctor.check_speed, Device(), seconds=0.1)
    (measured,) = check()
    assert measured.level == "ok" and re.search(r"TFLOP/s, \d+% of .* \(measured: 1024 x 1024 matmul", measured.found)
    monkeypatch.setattr(Device, "peak_flops", lambda self, dtype: (1e11, "documented"))
    monkeypatch.setattr(doctor, "LOW_SHARE_OF_PEAK", 1e3)
    (slow,) = check()
    assert slow.level == "warning" and "of 0.1 (documented)" in slow.found
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: a)
    (wrong,) = check()
    assert wrong.level == "error" and "ones times ones is not" in wrong.found


# -------------------------------------------------------------------------------------------------- all together


@pytest.mark.parametrize(("report", "words"), [("", "is a folder"), ("none/report.json", "the folder does not exist")])
def test_a_report_that_cannot_be_written_is_told_first(report, words, tmp_path):
    with pytest.raises(UserError, match=words):
        doctor.examine(str(tmp_path / report))


def test_exit_code_and_report(tmp_path, capsys):
    good, bad = Finding("warning", "disk", "full", "tidy up"), Finding("error", "matmul", "wrong", "", "the traceback")
    report = tmp_path / "report.json"
    assert doctor.conclude([[good], [good]], str(report)) == 0
    out = capsys.readouterr().out
    assert out == "training would work\n"  # rank 0's were printed as they were found
    assert doctor.conclude([[good], [good, bad]], str(report)) == 1
    out = capsys.readouterr().out
    assert "matmul, rank 1" in out and out.endswith("\ntraining would not work: 1 errors\n")
    written = json.loads(report.read_text())
    assert written["findings_by_rank"][1][1]["details"] == "the traceback"
    assert f"torch=={torch.__version__}" in written["packages"]


def test_a_check_that_crashes_is_an_error_and_not_the_end():
    (finding,) = doctor._attempt("matmul", refuse)
    assert (finding.level, finding.what) == ("error", "matmul")
    assert finding.found.startswith("NotImplementedError: Could not run") and "Second line." in finding.details


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_print_once_and_agree(tmp_path):
    """The real thing, on a CPU: every path exists there."""
    report = tmp_path / "report.json"
    process = run_python("-m", "qwen3_trn.doctor", "--report", report, ranks=2, HF_TOKEN="hf_private")
    printed = succeeded(process)
    lines = printed.splitlines()
    assert lines[-1] == "training would work"
    assert [line.split()[1] for line in lines].count("all-reduce") == 1
    assert not [line for line in lines if line.startswith("error")]
    for path in ("fused attention", "grouped matmul", "fused AdamW", "all-to-all", "torch.compile"):
        assert re.search(f"^ok +{path} +yes: ", printed, re.MULTILINE), path
    written = json.loads(report.read_text())
    assert len(written["findings_by_rank"]) == 2
    assert "hf_private" not in report.read_text() and "hf_private" not in printed


def test_an_error_is_exit_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_all", lambda: iter([Finding("error", "nki", "not installed", "install it")]))
    with pytest.raises(SystemExit) as stop:
        doctor.examine()
    assert stop.value.code == 1
    printed = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in printed] == [
        "error nki not installed",
        "install it",
        "training would not work: 1 errors",
    ]
    with pytest.raises(UserError, match="the folder does not exist"):
        doctor.examine(report=str(tmp_path / "nowhere" / "report.json"))


# ---------------------------------------------------------------------------------------------------- constraints


def test_constraints_files_are_in_step():
    """constraints-neuron.txt is constraints.txt without torch, what only torch needs, and numpy."""

    def pins(name: str) -> list[str]:
        return [line for line in (REPO / name).read_text().splitlines() if not line.startswith("#")]

    all_pins, kept = pins("constraints.txt"), pins("constraints-neuron.txt")
    names = "torch filelock fsspec Jinja2 MarkupSafe mpmath networkx numpy sympy typing_extensions"
    left_out = set(names.split())
    assert kept == [pin for pin in all_pins if pin.split("==")[0] not in left_out]
    assert len(kept) == len(all_pins) - len(left_out)


def test_the_placeholders_do_not_meet_the_neuron_extra():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["optional-dependencies"]["neuron"]]
    assert [requirement.name for requirement in needed] == ["torch-neuronx", "neuronx-cc", "nki"]
    for requirement in needed:
        assert not requirement.specifier.contains(doctor.PLACEHOLDERS[requirement.name])
        assert requirement.specifier.contains(NEURON[requirement.name])


# ------------------------------------------------------------------------------------------------- the first run


def run_first(out: Path, timeout: float, **environment: str) -> subprocess.CompletedProcess:
    """Run the script with two ranks, on what torch sees here: a CPU."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [REPO / "scripts" / "first_run_on_trainium.sh", out],
        env={**os.environ, "PATH": path, "RANKS": "2", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_first_run_goes_on_when_steps_fail_and_then_fails(tmp_path):
    """No step has the time it needs: all are tried, all are said to have failed, and the exit code is 1."""
    process = run_first(tmp_path / "first", timeout=120, STEP_SECONDS="0.1")
    assert process.returncode == 1
    names = ["doctor", *(f"{kind}-{how}" for kind in ("dense", "moe") for how in ("eager", "compiled", "cpu"))]
    assert re.findall("^=== (.*?): ", process.stdout, re.MULTILINE) == names
    assert process.stdout.count("FAILED with exit code 124") == 7
    assert "not so: dense-cpu, dense-eager, dense-compiled, moe-cpu, moe-eager, moe-compiled" in process.stdout
    assert "8 steps failed" in process.stdout
    assert (tmp_path / "first" / "report.txt").read_text() == process.stdout

    process = run_first(tmp_path / "first", timeout=60)
    assert process.returncode == 1 and "exists; name another folder" in process.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_first_run_to_its_end(tmp_path):
    process = run_first(tmp_path / "first", timeout=1100)
    assert process.returncode == 0, process.stdout
    report = (tmp_path / "first" / "report.txt").read_text()
    assert report == process.stdout
    assert report.count("\nok, ") == 7 and "training would work\n" in report
    assert len(re.findall("^step 5/5 ", report, re.MULTILINE)) == 6
    lines = re.findall("^(?:dense|moe) .* off by (.*), gradient norm by (.*)%; .* tokens/s", report, re.MULTILINE)
    assert len(lines) == 6
    assert all(float(loss) <= 1e-4 and float(norm) <= 0.01 for loss, norm in lines)  # all of it ran on the CPU in fp32
    assert "none reported" in report and "all steps worked" in report
    assert json.loads((tmp_path / "first" / "doctor.json").read_text())["findings_by_rank"]
