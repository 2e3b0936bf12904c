"""A run that is stopped, killed or moved to other ranks goes on as if it had not been.

The oracle is the run that nothing interrupts: same losses and gradient norms, bit for bit on one layout.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import train
from qwen3_trn import checkpoint, launch
from qwen3_trn.checkpoint import find_checkpoint, find_damaged, list_checkpoints
from qwen3_trn.config import parse_args
from qwen3_trn.errors import UserError
from tests.common import REPO, TINY, in_process, records, run_python, succeeded

# 12 steps whose rate does not depend on --steps.
RUN = ["--seq-len", 32, "--global-batch-size", 4, "--schedule", "constant", "--warmup-steps", 0, "--lr", "1e-3"]
RUN += ["--no-export", "--keep", 3]


def numbers(out) -> list[tuple]:
    """What must be the same in two runs, a tuple a step."""
    keys = ("step", "loss", "grad_norm", "lr", "position", "tokens", "supervised_tokens", "skipped_steps")
    return [tuple(record[key] for key in keys) for record in records(out)]


def saved_tensors(folder) -> dict[str, torch.Tensor]:
    metadata = dcp.FileSystemReader(folder / "state").read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size) for name, entry in metadata.items()}
    dcp.load(tensors, checkpoint_id=folder / "state", no_dist=True)
    return tensors


def assert_same_state(out, other) -> None:
    ours, theirs = saved_tensors(find_checkpoint(out)), saved_tensors(find_checkpoint(other))
    assert ours.keys() == theirs.keys()
    assert {name.split(".")[0] for name in ours} == {"model", "exp_avg", "exp_avg_sq"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """12 steps that nothing interrupts, in one process."""
    out = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QWEN3_TRN_CACHE", str(tmp_path_factory.getbasetemp() / "token-cache"))
        in_process(patch, out, *RUN, "--steps", 12)
    return out


# ------------------------------------------------------------------------------------------------- the same run


def test_three_parts_equal_the_whole(straight, cache, tmp_path, monkeypatch):
    for steps in (4, 8, 12):
        in_process(monkeypatch, tmp_path / "run", *RUN, "--steps", steps, "--resume", "auto")
    assert numbers(tmp_path / "run") == numbers(straight)
    assert_same_state(tmp_path / "run", straight)


def test_a_cold_optimizer_is_another_run(straight, cache, tmp_path, monkeypatch):
    """The comparison above can fail: without AdamW's moments the next steps differ."""
    in_process(monkeypatch, tmp_path / "run", *RUN, "--steps", 4)
    load = checkpoint.load_checkpoint

    def load_weights_only(folder, model, optimizer, num_steps):
        load(folder, model, optimizer, num_steps)
        optimizer.state.clear()

    monkeypatch.setattr(checkpoint, "load_checkpoint", load_weights_only)
    in_process(monkeypatch, tmp_path / "run", *RUN, "--steps", 8, "--resume", "must")
    found, expected = numbers(tmp_path / "run"), numbers(straight)
    assert found[4] == expected[4]  # the weights are the same
    assert found[5][1] != expected[5][1]


def signal_at(monkeypatch, step: int, number: int) -> None:
    """Send this process a signal while it computes `step`."""
    seed_step = train.seed_step

    def seed_and_signal(seed, current, rank):
        if current == step:
            os.kill(os.getpid(), number)
        seed_step(seed, current, rank)

    monkeypatch.setattr(train, "seed_step", seed_and_signal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_init_resume_goes_on(number, cache, tmp_path, monkeypatch, capfd):
    """The rate of a cosine depends on --steps, so the settings must come from the run's folder; so must --data."""
    (tmp_path / "some.txt").write_text("One, two, three. " * 300)
    flags = ["--data", tmp_path / "some.txt", "--seq-len", 32, "--global-batch-size", 4, "--steps", 9, "--seed", 3]
    flags += ["--no-export", "--warmup-steps", 2]
    in_process(monkeypatch, tmp_path / "whole", *flags)
    with monkeypatch.context() as patch:
        signal_at(patch, 4, number)
        found = in_process(patch, tmp_path / "run", *flags)
    printed, warned = capfd.readouterr()
    assert found[-1]["step"] == 4
    assert f"{signal.Signals(number).name}: stopping after this step" in warned
    assert "stopped    after step 4 of 9" in printed
    assert f"python train.py --init resume --out {tmp_path / 'run'}" in printed
    assert "sample     " not in printed.split("stopping")[1] and not (tmp_path / "run" / "hf").exists()
    in_process(monkeypatch, tmp_path / "run", "--init", "resume")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole")
    settings = [(tmp_path / run / "config.toml").read_text() for run in ("run", "whole")]
    assert settings[0] == settings[1]


def test_a_signal_during_the_last_save_ends_the_run_after_it(cache, tmp_path, monkeypatch, capfd):
    """The sample and the export, which can take long, are left to the run that goes on."""
    save = checkpoint.Saver.save

    def signal_and_save(self, state, model, optimizer):
        os.kill(os.getpid(), signal.SIGTERM)
        save(self, state, model, optimizer)

    flags = [flag for flag in RUN if flag != "--no-export"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Saver, "save", signal_and_save)
        in_process(patch, tmp_path / "run", *flags, "--steps", 2)
    printed = capfd.readouterr().out
    assert "stopped    after step 2 of 2. To go on from step_2: " in printed and "sample     " not in printed
    assert not (tmp_path / "run" / "hf").exists()
    in_process(monkeypatch, tmp_path / "run", "--init", "resume", "--export")
    assert "sample     " in capfd.readouterr().out
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


def test_what_is_given_to_init_resume_wins(cache, tmp_path, monkeypatch):
    """Over the run's own config.toml, also what --config gives; and what followed from it before follows it now."""
    out, mine = tmp_path / "run", tmp_path / "my.toml"
    in_process(monkeypatch, out, *RUN, "--steps", 2, "--seed", 5)
    mine.write_text("lr = 0.5\nweight_decay = 0.25\n")
    resume = ["--init", "resume", "--out", str(out)]
    args = parse_args([*resume, "--config", str(mine)])
    assert (args.lr, args.weight_decay, args.seed, args.steps, args.seq_len) == (0.5, 0.25, 5, 2, 32)
    args = parse_args([*resume, "--epochs", "3", "--lr=1e-5"])
    assert (args.epochs, args.steps, args.lr, args.min_lr, args.warmup_steps) == (3, None, 1e-5, None, None)
    args = parse_args([*resume, "--steps", "1"])
    assert (args.steps, args.min_lr, args.warmup_steps, args.seed) == (1, 1e-4, None, 5)


def test_epoch_boundaries_and_batches_that_straddle_them(cache, tmp_path, monkeypatch):
    """11 rows an epoch, 4 a step: the epochs end inside steps 3, 6 and 9. Stop before, in and after each."""
    (tmp_path / "some.txt").write_text("a b c d e f g h " * 40)
    flags = [*RUN, "--data", tmp_path / "some.txt"]
    in_process(monkeypatch, tmp_path / "whole", *flags, "--steps", 9)
    for steps in (2, 3, 9):
        in_process(monkeypatch, tmp_path / "run", *flags, "--steps", steps, "--resume", "auto")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    state = checkpoint.read_state(find_checkpoint(tmp_path / "run"))
    assert state["position"] == 36
    data = train.start.open_data(train.TrainConfig(data=(str(tmp_path / "some.txt"),), seq_len=32), TINY_CONFIG, TINY)
    assert data.rows_per_epoch == 11


TINY_CONFIG = train.Qwen3Config.from_pretrained(TINY)


def test_random_numbers_are_those_of_the_step(cache, tmp_path, monkeypatch):
    """A model that draws numbers, as with dropout, draws the same after a resume."""
    loss_terms = train.Qwen3ForCausalLM.loss_terms

    def noisy(self, *arguments, **inputs):
        terms = loss_terms(self, *arguments, **inputs)
        return terms._replace(cross_entropy=terms.cross_entropy * torch.rand(()))

    monkeypatch.setattr(train.Qwen3ForCausalLM, "loss_terms", noisy)
    in_process(monkeypatch, tmp_path / "whole", *RUN, "--steps", 6)
    for steps in (2, 6):
        in_process(monkeypatch, tmp_path / "run", *RUN, "--steps", steps, "--resume", "auto")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_rate_steps_and_batch_may_change(straight, cache, tmp_path, monkeypatch):
    """The position counts rows, so another batch size goes on with the next row."""
    in_process(monkeypatch, tmp_path / "run", *RUN, "--steps", 4)
    changed = [*RUN, "--resume", "must", "--lr", "5e-4"]
    found = in_process(monkeypatch, tmp_path / "run", *changed, "--steps", 6, "--global-batch-size", 2)
    assert [record["position"] for record in found] == [4, 8, 12, 16, 18, 20]
    assert [record["lr"] for record in found][-2:] == [5e-4, 5e-4]
    # Of 0.004 x 8,185 rows = 33, 20 are done: 3 steps of 4 rows are left.
    found = in_process(monkeypatch, tmp_path / "run", *changed, "--epochs", "0.004")
    assert [record["position"] for record in found][-3:] == [24, 28, 32] and len(found) == 9


def test_the_export_is_that_of_the_last_step(cache, tmp_path, monkeypatch, capsys):
    """A run that goes on after its end replaces its own export, which stays until the new one is verified."""
    flags = [flag for flag in RUN if flag != "--no-export"]
    for steps in (1, 2):
        in_process(monkeypatch, tmp_path / "run", *flags, "--steps", steps, "--resume", "auto")
        assert f"for {steps} steps" in (tmp_path / "run" / "hf" / "README.md").read_text()
    assert [path.name for path in (tmp_path / "run").glob("hf*")] == ["hf"]
    monkeypatch.setattr("export.verify_values", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        in_process(monkeypatch, tmp_path / "run", *flags, "--steps", 3, "--resume", "auto")
    assert "for 2 steps" in (tmp_path / "run" / "hf" / "README.md").read_text()
    assert [path.name for path in (tmp_path / "run").glob("hf*")] == ["hf"]


# ------------------------------------------------------------------------------------------------- which run


def test_never_auto_must(cache, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    with pytest.raises(UserError, match="holds no complete checkpoint to resume from"):
        in_process(monkeypatch, out, *RUN, "--steps", 1, "--resume", "must")
    assert not out.exists()
    in_process(monkeypatch, out, *RUN, "--steps", 1, "--resume", "auto")
    before = numbers(out)
    with pytest.raises(UserError, match=r"already holds a run, up to step_1\. --resume auto goes on with it"):
        in_process(monkeypatch, out, *RUN, "--steps", 2)
    assert numbers(out) == before
    capsys.readouterr()
    # A finished run has nothing left to do but its export.
    in_process(monkeypatch, out, *RUN, "--steps", 1, "--resume", "auto")
    assert "checkpoint " not in capsys.readouterr().out
    assert numbers(out) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(cache, tmp_path, monkeypatch):
    out = tmp_path / "run"
    in_process(monkeypatch, out, *RUN, "--steps", 2)
    (out / "checkpoints").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="already holds a run, without a checkpoint"):
        in_process(monkeypatch, out, *RUN, "--steps", 2)
    before = numbers(out)
    in_process(monkeypatch, out, *RUN, "--steps", 2, "--resume", "auto")
    assert numbers(out) == before


@pytest.mark.parametrize("flags", [["--init", "resume"], ["--resume", "auto"], ["--resume", "must"]])
def test_resume_needs_out(flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    with pytest.raises(UserError, match=f"{flags[0]} {flags[1]} needs --out"):
        train.main()


def test_init_resume_without_a_run(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds no run"):
        in_process(monkeypatch, tmp_path / "nowhere", "--init", "resume")


def edit_json(path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_must_not_change(random_folder, cache, tmp_path, monkeypatch):
    out, data, model = tmp_path / "run", tmp_path / "a.txt", tmp_path / "model"
    data.write_text("One, two, three. " * 300)
    model.mkdir()
    for path in TINY.iterdir():
        if path.is_file():
            (model / path.name).write_bytes(path.read_bytes())
    flags = [*RUN, "--model", model]
    in_process(monkeypatch, out, *flags, "--steps", 2, "--data", data)
    before = numbers(out)

    def refused(*changes, message, data=data):
        with pytest.raises(UserError, match="cannot be gone on with") as error:
            in_process(monkeypatch, out, *flags, "--resume", "auto", "--steps", 3, "--data", data, *changes)
        assert message in str(error.value)
        assert numbers(out) == before

    refused("--seed", 1, message="--seed was 0 and is 1")
    refused("--seq-len", 16, message="--seq-len was 32 and is 16")
    other = tmp_path / "b.txt"
    other.write_text("Four, five, six. " * 300)
    refused(data=other, message=f"--data was {data} and is {other}")
    edit_json(model / "config.json", rope_theta=10.0)
    refused(message="the model's config.json is another than that in")
    edit_json(model / "config.json", rope_theta=json.loads((TINY / "config.json").read_text())["rope_theta"])
    edit_json(model / "tokenizer_config.json", model_max_length=77)
    refused(message="the tokenizer is another than that in")
    (model / "tokenizer_config.json").write_bytes((TINY / "tokenizer_config.json").read_bytes())
    # The same contents under another name are the same data.
    data.rename(tmp_path / "c.txt")
    in_process(monkeypatch, out, *flags, "--resume", "auto", "--steps", 3, "--data", tmp_path / "c.txt")


def test_the_model_of_a_checkpoint_needs_no_hub(tmp_path, monkeypatch):
    """A model from the hub is not asked for again; another name is refused."""
    folder = tmp_path / "checkpoints" / "step_1"
    folder.mkdir(parents=True)
    (folder / "trainer.json").write_text(json.dumps({"step": 1, "model": ["org/tiny", None], "commit": "abc"}))
    args = train.TrainConfig(init="hub", model="org/tiny", out=str(tmp_path), resume="auto")
    assert train.start.find_model(args, folder) == (folder, "abc")
    args = train.TrainConfig(init="hub", model="org/other", revision="v2", out=str(tmp_path), resume="auto")
    with pytest.raises(UserError, match=r"trained from \['org/tiny', None\].*flags name \['org/other', 'v2'\]"):
        train.start.find_model(args, folder)


def test_a_model_that_only_the_checkpoint_has(cache, tmp_path, monkeypatch):
    """As after --init hub without the hub. The checkpoint that the run went on from goes; the model stays."""
    model = shutil.copytree(TINY, tmp_path / "model")
    flags = [*RUN, "--model", model, "--save-every", 1, "--keep", 1]
    in_process(monkeypatch, tmp_path / "run", *flags, "--steps", 2)
    shutil.rmtree(model)
    in_process(monkeypatch, tmp_path / "run", *flags, "--steps", 5, "--resume", "must")
    (last,) = list_checkpoints(tmp_path / "run")
    assert last.name == "step_5" and find_damaged(last) == []
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (last / name).read_bytes() == (TINY / name).read_bytes()


def test_one_run_a_folder(cache, tmp_path, monkeypatch):
    out = tmp_path / "run"
    in_process(monkeypatch, out, *RUN, "--steps", 1)
    holder = subprocess.Popen([sys.executable, "-c", HOLD.format(path=out / ".lock")], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match="another process is training in"):
        in_process(monkeypatch, out, *RUN, "--steps", 2, "--resume", "auto")
    holder.kill()
    holder.wait()
    in_process(monkeypatch, out, *RUN, "--steps", 2, "--resume", "auto")


HOLD = "import fcntl, time; f = open('{path}', 'w'); fcntl.flock(f, 2); print('held', flush=True); time.sleep(60)"


# ------------------------------------------------------------------------------------------------- stopping


def test_max_minutes(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "_STARTED", time.monotonic())
    seed_step = train.seed_step

    def slow(seed, step, rank):
        if step == 3:
            monkeypatch.setattr(launch.time, "monotonic", lambda: launch._STARTED + 61)
        seed_step(seed, step, rank)

    monkeypatch.setattr(train, "seed_step", slow)
    found = in_process(monkeypatch, tmp_path / "run", *RUN, "--steps", 50, "--max-minutes", 1)
    assert len(found) == 3
    assert "stopping   after step 3: --max-minutes" in capsys.readouterr().out
    assert find_checkpoint(tmp_path / "run").name == "step_3"


def test_stopped_before_the_first_step(cache, tmp_path, monkeypatch, capsys):
    with pytest.raises(FileNotFoundError):  # no metrics
        in_process(monkeypatch, tmp_path / "run", *RUN, "--steps", 5, "--max-minutes", "1e-9")
    assert "stopped    after step 0 of 5. There is no checkpoint yet." in capsys.readouterr().out


def poison(monkeypatch, steps, what: str) -> None:
    """Make the loss, or the gradient of the last norm's weight, nan in these steps."""
    state = {"step": 0}
    seed_step, forward_backward = train.seed_step, train.forward_backward

    def seed(seed, step, rank):
        state["step"] = step
        seed_step(seed, step, rank)

    def poisoned(model, *arguments):
        losses, stats = forward_backward(model, *arguments)
        if state["step"] in steps and what == "loss":
            losses["loss"] = losses["loss"] * torch.nan
        elif state["step"] in steps:
            model.model.norm.weight.grad.mul_(torch.nan)
        return losses, stats

    monkeypatch.setattr(train, "seed_step", seed)
    monkeypatch.setattr(train, "forward_backward", poisoned)


def test_bad_steps_stop_the_run_and_name_the_culprit(cache, tmp_path, monkeypatch, capsys):
    flags = [*RUN, "--steps", 20, "--save-every", 2, "--max-bad-steps", 3]
    with monkeypatch.context() as patch:
        poison(patch, {3, 5, 6, 7}, "gradient")
        with pytest.raises(UserError) as error:
            in_process(patch, tmp_path / "run", *flags)
    message = str(error.value)
    assert "up to step 7, 3 steps in a row had a loss or gradient that is not finite" in message
    assert "the loss is finite on every rank" in message
    assert "not finite in 1 parameters, the first of them model.norm.weight" in message
    assert "To go on from step_6" in message
    assert "step 7 has loss" in capsys.readouterr().out
    # A resumed run goes on counting: step 6 was the second in a row.
    with monkeypatch.context() as patch:
        poison(patch, {7}, "loss")
        with pytest.raises(UserError, match=r"up to step 7, 3 steps in a row.*the loss itself is not finite on rank 0"):
            in_process(patch, tmp_path / "run", *flags, "--resume", "must")
    # And what was not applied left no trace.
    in_process(monkeypatch, tmp_path / "run", *flags, "--resume", "must", "--steps", 8)
    state = checkpoint.read_state(find_checkpoint(tmp_path / "run"))
    assert (state["skipped_steps"], state["bad_steps_in_a_row"]) == (3, 0)


def test_a_fault_that_does_not_come_back_is_not_blamed_on_the_data(cache, tmp_path, monkeypatch):
    read_step = train.read_step
    monkeypatch.setattr(train, "read_step", lambda *parts: read_step(*parts) | {"loss": float("nan")})
    with pytest.raises(UserError, match="Computed again it was finite, so look for a fault of the machine"):
        in_process(monkeypatch, tmp_path / "run", *RUN, "--steps", 5, "--max-bad-steps", 2)


# ------------------------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("loss", "the loss itself is not finite on rank 1; gradients are not finite in 0 parameters"),
        pytest.param(
            "gradient",
            "the loss is finite on every rank; gradients are not finite in 1 parameters, the first of them "
            "model.layers.1.self_attn.k_proj.weight",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_rank_or_the_parameter_is_named(what, message, tmp_path):
    flags = [*RUN, "--out", tmp_path / "run", "--max-bad-steps", 2, "--steps", 9]
    environment = {"QWEN3_TRN_CACHE": str(tmp_path / "cache")}
    process = run_python("tests/run_poisoned.py", what, *flags, ranks=2, **environment)
    assert process.returncode == 1
    assert "error: up to step 2, 2 steps in a row had a loss or gradient that is not finite" in process.stderr
    assert message in process.stderr
    assert "There is no checkpoint yet." in process.stderr


def start_run(out, *flags, ranks: int = 2, torchrun=(), **environment) -> subprocess.Popen:
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *torchrun]
    command = [*launcher, REPO / "train.py", "--out", out, "--log-every", "1", *flags]
    variables = {**os.environ, "PYTHONPATH": str(REPO), "QWEN3_TRN_CACHE": str(out.parent / "cache"), **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(list(map(str, command)), env=variables, cwd=REPO, **pipes)


def wait_for_steps(process: subprocess.Popen, out, count: int) -> None:
    """Until the run has logged so many steps."""
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(process: subprocess.Popen) -> list[int]:
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def test_torchrun_passes_a_signal_on_and_every_rank_saves(straight, tmp_path):
    out = tmp_path / "run"
    process = start_run(out, *RUN, "--steps", 5000, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="77")
    wait_for_steps(process, out, 3)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 1  # torchrun's, for a run that was told to stop
    assert "SIGTERM: stopping after this step; torchrun kills what still runs in 77 s" in printed
    last = list_checkpoints(out)[-1]
    assert f"To go on from {last.name}: torchrun --nproc_per_node=2 train.py --init resume --out {out}" in printed
    assert "FAILED" not in printed  # every rank has left with 0
    assert find_damaged(last) == []
    # Two ranks went 4 steps and more as one process does.
    for found, expected in zip(records(out)[:12], records(straight), strict=False):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_a_second_signal_exits_at_once(tmp_path):
    out = tmp_path / "run"
    process = start_run(out, *RUN, "--steps", 5000, ranks=0, PYTHONPATH=f"{SLOW_SAVE}:{REPO}")
    wait_for_steps(process, out, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(2)  # it now saves, for a minute
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=10)[0]
    assert process.returncode == 128 + signal.SIGINT, printed
    assert list_checkpoints(out) == []


SLOW_SAVE = REPO / "tests" / "slow_save"  # its sitecustomize.py makes a save take a minute


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_takes_the_others_down(number, tmp_path):
    """Killed: at once. Hanging: after --dist-timeout, and torchrun's time for a process to end."""
    out = tmp_path / "run"
    flags = [*RUN, "--steps", 5000, "--dist-timeout", 5]
    process = start_run(out, *flags, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3")
    wait_for_steps(process, out, 2)
    ranks = children(process)
    os.kill(ranks[1], number)
    try:
        printed = process.communicate(timeout=45)[0]
    finally:
        os.kill(ranks[1], signal.SIGKILL) if number == signal.SIGSTOP and process.poll() is None else None
    assert process.returncode == 1
    assert "train.py FAILED" in printed
    assert ("Signal 9 (SIGKILL)" if number == signal.SIGKILL else "Timed out waiting 5000ms") in printed


@pytest.mark.slow
def test_torchruns_restarts_go_on_from_the_last_checkpoint(straight, tmp_path):
    out = tmp_path / "run"
    flags = [*RUN, "--steps", 12, "--save-every", 1, "--resume", "auto"]
    process = start_run(out, *flags, torchrun=["--max-restarts=2"])
    for count in (3, 7):
        wait_for_steps(process, out, count)
        ranks = children(process)
        os.kill(ranks[1], signal.SIGKILL)
        while set(children(process)) & set(ranks):
            time.sleep(0.05)
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0, printed
    assert printed.count("weights    random") == 1
    assert printed.count(f"weights    {out}/checkpoints/step_") == 2
    for found, expected in zip(records(out), records(straight), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)


@pytest.mark.slow
def test_every_layout_goes_on_with_every_others_checkpoint(straight, tmp_path):
    """4 ranks -> 2 -> 1 -> 4: FSDP, tensor parallel, alone, expert parallel. Losses to rounding."""
    out = tmp_path / "run"
    parts = [(4, ["--dp-replicate", 2]), (2, ["--tp", 2]), (0, []), (4, ["--tp", 2, "--ep", 4])]
    for number, (ranks, layout) in enumerate(parts, start=1):
        flags = [*RUN, "--steps", 3 * number, "--resume", "auto", "--adam-eps", "1e-5", *layout]
        environment = {"QWEN3_TRN_CACHE": str(tmp_path / "cache")}
        succeeded(run_python("train.py", "--out", out, "--log-every", 1, *flags, ranks=ranks, **environment))
    expected = tmp_path / "alone"
    flags = [*RUN, "--steps", 12, "--adam-eps", "1e-5"]
    succeeded(run_python("train.py", "--out", expected, "--log-every", 1, *flags, **environment))
    for found, wanted in zip(records(out), records(expected), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], abs=2e-5), found["step"]
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3), found["step"]
        for key in ("step", "position", "tokens", "supervised_tokens", "lr"):
            assert found[key] == wanted[key]
    ours, theirs = saved_tensors(find_checkpoint(out)), saved_tensors(find_checkpoint(expected))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=1e-2)
