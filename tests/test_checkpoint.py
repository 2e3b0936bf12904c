"""Checkpoints on disk: complete or not there, whatever is killed, full or damaged.

Runs that go on from them are in test_resume.py.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from export import export
from qwen3_trn import checkpoint
from qwen3_trn.checkpoint import SUMS_FILE, SaveError, find_checkpoint, find_damaged, list_checkpoints, remove_leftovers
from qwen3_trn.errors import UserError
from tests.common import REPO, in_process, records, run_python, succeeded
from tests.test_resume import RUN, assert_same_state, numbers, saved_tensors, straight  # noqa: F401

SAVING = [*RUN, "--save-every", 2]


def names(out) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with the checkpoints step_2, step_4 and step_6."""
    out = tmp_path_factory.mktemp("saved") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QWEN3_TRN_CACHE", str(tmp_path_factory.getbasetemp() / "token-cache"))
        in_process(patch, out, *SAVING, "--steps", 6)
    return out


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run", symlinks=True)


# ------------------------------------------------------------------------------------------------- what is there


def test_what_a_run_leaves(run):
    assert names(run) == ["latest", "step_2", "step_4", "step_6"]
    assert (run / "checkpoints" / "latest").resolve() == (run / "checkpoints" / "step_6").resolve()
    assert find_checkpoint(run) == run / "checkpoints" / "step_6"
    assert find_checkpoint(run / "checkpoints" / "step_2") == run / "checkpoints" / "step_2"
    for folder in list_checkpoints(run):
        assert find_damaged(folder) == []
        listed = {line.split("  ")[1] for line in (folder / SUMS_FILE).read_text().splitlines()}
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert listed == there - {SUMS_FILE}
        assert {"config.json", "tokenizer.json", "trainer.json", "state/.metadata"} < listed
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--quiet", SUMS_FILE], cwd=find_checkpoint(run), check=True)


def test_the_loop_says_how_long_it_was_held(run):
    held = {record["step"]: record["save_s"] for record in records(run)}
    assert held[1] == held[2] == held[4] == 0  # a save counts for the line after it
    assert held[3] > 0 and held[5] > 0


def test_what_was_saved_is_what_was_there_at_that_step(run, cache, tmp_path, monkeypatch):
    """Training goes on while the files are written, and must not change what is written."""
    write_data = checkpoint._Writer.write_data

    def slowly(self, plan, planner):
        time.sleep(1.0)
        return write_data(self, plan, planner)

    monkeypatch.setattr(checkpoint._Writer, "write_data", slowly)
    in_process(monkeypatch, tmp_path / "run", *SAVING, "--steps", 6)
    steps = [record["step"] for record in records(tmp_path / "run")]
    assert steps == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(list_checkpoints(tmp_path / "run"), list_checkpoints(run), strict=True):
        expected = saved_tensors(theirs)
        for name, tensor in saved_tensors(ours).items():
            assert tensor.equal(expected[name]), (ours.name, name)


def test_training_goes_on_while_a_checkpoint_is_written(cache, tmp_path, monkeypatch):
    """The writer of step 2 waits until step 3 has been computed: it would wait for ever if the loop waited for it."""
    write_data, seed_step = checkpoint._Writer.write_data, train.seed_step
    reached = []

    def wait_for_step_3(self, plan, planner):
        deadline = time.monotonic() + 30
        while 3 not in reached and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 3 in reached
        return write_data(self, plan, planner)

    monkeypatch.setattr(checkpoint._Writer, "write_data", wait_for_step_3)
    monkeypatch.setattr(
        train, "seed_step", lambda seed, step, rank: reached.append(step) or seed_step(seed, step, rank)
    )
    in_process(monkeypatch, tmp_path / "run", *SAVING, "--steps", 4)
    assert names(tmp_path / "run") == ["latest", "step_2", "step_4"]


def test_keep(cache, tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path / "run", *SAVING, "--save-every", 1, "--steps", 5, "--keep", 2)
    assert names(tmp_path / "run") == ["latest", "step_4", "step_5"]
    in_process(monkeypatch, tmp_path / "run", *SAVING, "--steps", 6, "--keep", 1, "--resume", "must")
    assert names(tmp_path / "run") == ["latest", "step_6"]


def test_an_old_checkpoint_stays_until_the_new_one_is_complete(cache, tmp_path, monkeypatch):
    publish = checkpoint.publish
    seen = []

    def look_and_publish(unfinished, folder):
        seen.append([path.name for path in list_checkpoints(tmp_path / "run")])
        publish(unfinished, folder)

    monkeypatch.setattr(checkpoint, "publish", look_and_publish)
    in_process(monkeypatch, tmp_path / "run", *SAVING, "--save-every", 1, "--steps", 4, "--keep", 1)
    assert seen == [[], ["step_1"], ["step_2"], ["step_3"]]


def test_leftovers_are_removed_at_the_next_start(copy, cache, monkeypatch, capsys):
    left = [copy / "checkpoints" / "step_8.unfinished", copy / "hf.unfinished-0a1b2c3d"]
    for folder in left:
        (folder / "state").mkdir(parents=True)
        (folder / "state" / "__0_0.distcp").write_bytes(b"half")
    (copy / "checkpoints" / "latest").unlink()
    (copy / "checkpoints" / "latest").symlink_to("step_4")  # the kill came before the link was moved
    in_process(monkeypatch, copy, *SAVING, "--steps", 6, "--resume", "auto")
    printed = capsys.readouterr().out
    assert all(f"removed    {folder}" in printed and not folder.exists() for folder in left)
    assert names(copy) == ["latest", "step_2", "step_4", "step_6"]
    assert (copy / "checkpoints" / "latest").resolve().name == "step_6"
    assert remove_leftovers(copy) == []


def test_a_run_without_a_complete_checkpoint_is_refused(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step_5.unfinished" / "state").mkdir(parents=True)
    for path in (tmp_path / "run", tmp_path / "nowhere", tmp_path / "run" / "checkpoints" / "step_5.unfinished"):
        with pytest.raises(UserError, match=f"{path} is neither a run with a complete checkpoint"):
            find_checkpoint(path)


# ------------------------------------------------------------------------------------------------- damage


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, truncate, os.remove])
@pytest.mark.parametrize("file", ["state/__0_0.distcp", "state/.metadata", "config.json", "trainer.json", SUMS_FILE])
def test_a_damaged_file_is_named_and_the_checkpoint_before_offered(file, damage, copy, cache, tmp_path, monkeypatch):
    damage(copy / "checkpoints" / "step_6" / file)
    with pytest.raises(UserError) as error:
        in_process(monkeypatch, copy, *SAVING, "--steps", 8, "--resume", "auto")
    message = str(error.value)
    assert f"{copy / 'checkpoints' / 'step_6'} is damaged: " in message and file in message
    before = copy / "checkpoints" / "step_4"
    assert f"The one before is {before}: to go on from it, move step_6 away and start again." in message
    assert names(copy) == ["latest", "step_2", "step_4", "step_6"]
    # The export does not ship it either.
    with pytest.raises(UserError):
        export(copy / "checkpoints" / "step_6", tmp_path / "out", train.torch.bfloat16, 10**9)
    assert not (tmp_path / "out").exists()


def test_the_tensors_are_gone(copy, cache, monkeypatch):
    """Also where the checkpoint is named from within its folder."""
    shutil.rmtree(copy / "checkpoints" / "step_6" / "state")
    with pytest.raises(UserError, match=r"step_6 is damaged: state/.*The one before is .*step_4: to go on"):
        in_process(monkeypatch, copy, *SAVING, "--steps", 8, "--resume", "auto")
    monkeypatch.chdir(copy / "checkpoints")
    with pytest.raises(UserError, match=r"step_6 is damaged: state/.*The one before is .*step_4: to go on"):
        checkpoint.verify_files(Path("step_6"))


def test_a_checkpoint_keeps_its_name(copy, cache, monkeypatch):
    """Else a run would go on from one step and export another."""
    (copy / "checkpoints" / "step_6").rename(copy / "checkpoints" / "step_60")
    with pytest.raises(UserError, match="step_60 holds step 6: it was renamed"):
        in_process(monkeypatch, copy, *SAVING, "--steps", 8, "--resume", "auto")


def test_what_else_is_in_the_folder(copy, cache, monkeypatch):
    (copy / "checkpoints" / "step_7").write_text("a file")
    (copy / "checkpoints" / "step_9.unfinished").write_text("another")
    in_process(monkeypatch, copy, *SAVING, "--steps", 8, "--resume", "auto", "--keep", 1)
    assert names(copy) == ["latest", "step_7", "step_8"]


def test_the_offered_way_works(copy, straight, cache, tmp_path, monkeypatch):  # noqa: F811
    flip(copy / "checkpoints" / "step_6" / "state" / "__0_0.distcp")
    (copy / "checkpoints" / "step_6").rename(tmp_path / "damaged")
    in_process(monkeypatch, copy, *SAVING, "--steps", 12, "--resume", "auto")
    assert numbers(copy) == numbers(straight)
    assert_same_state(copy, straight)


def test_no_older_checkpoint(copy, cache, monkeypatch):
    for step in (2, 4):
        shutil.rmtree(copy / "checkpoints" / f"step_{step}")
    flip(copy / "checkpoints" / "step_6" / "state" / "__0_0.distcp")
    with pytest.raises(UserError, match="There is no older checkpoint in"):
        in_process(monkeypatch, copy, *SAVING, "--steps", 8, "--resume", "auto")


# ------------------------------------------------------------------------------------------------- full disks


def test_what_cannot_be_written(copy, cache, monkeypatch, capsys):
    """stop: the run ends. continue: it is said, and the next save is tried."""
    write_data = checkpoint._Writer.write_data

    def full(self, plan, planner):
        if "step_10" in str(self.path):
            raise OSError(28, "No space left on device")
        return write_data(self, plan, planner)

    monkeypatch.setattr(checkpoint._Writer, "write_data", full)
    flags = [*SAVING, "--resume", "auto"]
    with pytest.raises(SaveError, match=r"step_10 could not be written: rank 0: .*No space left.* are free there"):
        in_process(monkeypatch, copy, *flags, "--steps", 40)
    assert names(copy) == ["latest", "step_4", "step_6", "step_8"]
    assert (copy / "checkpoints" / "latest").resolve().name == "step_8"
    in_process(monkeypatch, copy, *flags, "--steps", 14, "--on-save-error", "continue")
    assert "step_10 could not be written" in capsys.readouterr().out
    assert names(copy) == ["latest", "step_12", "step_14", "step_8"]
    # The last one must succeed: without it the run is lost.
    shutil.rmtree(copy / "checkpoints" / "step_14"), shutil.rmtree(copy / "checkpoints" / "step_12")
    with pytest.raises(SaveError, match="step_10 could not be written"):
        in_process(monkeypatch, copy, *flags, "--steps", 10, "--on-save-error", "continue")


def limited(*command, file_bytes: int, **options) -> subprocess.CompletedProcess:
    """Run a command that cannot write files larger than this, as if the disk were full."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    options = {"capture_output": True, "text": True, "env": environment, "cwd": REPO, "timeout": 120} | options
    return subprocess.run(list(map(str, command)), preexec_fn=limit, **options)


def test_a_full_disk_on_two_ranks(copy, cache):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ["train.py", "--out", copy, *SAVING, "--resume", "auto", "--log-every", 1, "--steps", 5000]
    process = limited(*torchrun, *flags, file_bytes=2_000_000)
    assert process.returncode == 1
    assert process.stderr.count("error: ") - process.stderr.count("error: <N/A>") == 1, process.stderr
    assert "step_8 could not be written: rank 0: OSError(27, 'File too large'); rank 1: OSError(27" in process.stderr
    assert process.stderr.count("SaveError: ") == 2  # in torchrun's closing report, each rank's
    assert f'File "{REPO}' not in process.stderr  # no traceback of ours
    assert records(copy)[-1]["step"] < 20  # within steps, not at the end
    assert names(copy) == ["latest", "step_2", "step_4", "step_6"]
    assert find_damaged(find_checkpoint(copy)) == []


# ------------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("write_data", "step_2"),  # a rank has written its file, the others wait
        pytest.param("copy_companions", "step_2", marks=pytest.mark.slow),  # all have written
        pytest.param("publish", "step_2", marks=pytest.mark.slow),  # all is there but the name
        pytest.param("_point_latest", "step_4", marks=pytest.mark.slow),  # the name is there, `latest` is not
        pytest.param("rmtree", "step_4", marks=pytest.mark.slow),  # half of an old checkpoint is gone
    ],
)
def test_kill_in_the_middle_of_a_save(where, expected, straight, cache, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    flags = ["--out", out, *SAVING, "--log-every", 1, "--steps", 12, "--keep", 1]
    process = run_python("tests/run_killed.py", where, "step_4", *flags)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert list_checkpoints(out)[-1].name == expected
    printed = succeeded(run_python("train.py", *flags, "--resume", "auto"))
    assert re.search(rf"weights +{out}/checkpoints/{expected}\n", printed)
    assert numbers(out) == numbers(straight)
    assert_same_state(out, straight)
    assert names(out) == ["latest", "step_12"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_at_random_moments(straight, cache, tmp_path):  # noqa: F811
    """With --save-every 1, most of the time a checkpoint is being written, published or removed."""
    out = tmp_path / "run"
    random_numbers = random.Random(0)
    flags = ["--out", out, *RUN, "--keep", 2, "--save-every", 1, "--log-every", 1, "--steps", 400, "--resume", "auto"]
    command = list(map(str, [sys.executable, "train.py", *flags]))
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    newest = 0
    for _ in range(20):
        with (tmp_path / "printed").open("w") as printed:
            process = subprocess.Popen(command, cwd=REPO, env=environment, stdout=printed, stderr=printed)
            if random_numbers.random() < 0.2:
                time.sleep(random_numbers.uniform(0, 4))  # while it starts
            else:
                while "step " not in (tmp_path / "printed").read_text() and process.poll() is None:
                    time.sleep(0.02)
                time.sleep(random_numbers.uniform(0, 1.5))
            process.kill()
            assert process.wait() == -signal.SIGKILL, (tmp_path / "printed").read_text()
        text = (tmp_path / "printed").read_text()
        if weights := re.search(r"weights +(.*)\n", text):
            assert weights[1] == (f"{out}/checkpoints/step_{newest}" if newest else "random, seed 0")
        complete = [int(path.name.removeprefix("step_")) for path in list_checkpoints(out)]
        announced = [int(step) for step in re.findall(r"checkpoint .*/step_(\d+): ", text)]
        assert not announced or complete[-1] >= announced[-1]
        assert (complete[-1] if complete else 0) >= newest
        newest = complete[-1] if complete else 0
        assert len(complete) >= min(2, newest)
        assert all(find_damaged(path) == [] for path in list_checkpoints(out))
    assert newest > 20
    # All those parts are the run that nothing interrupted.
    for found, expected in zip(numbers(out), numbers(straight), strict=False):
        assert found == expected
    steps = [record["step"] for record in records(out)]
    assert steps == list(range(1, len(steps) + 1))
    finish = [*flags[:-4], "--steps", newest + 2, "--resume", "must"]
    succeeded(run_python("train.py", *finish))
    whole = tmp_path / "whole"
    succeeded(run_python("train.py", "--out", whole, *RUN, "--log-every", 1, "--steps", newest + 2))
    assert numbers(out) == numbers(whole)
    assert_same_state(out, whole)
    assert json.loads((out / "checkpoints" / "latest" / "trainer.json").read_text())["step"] == newest + 2
