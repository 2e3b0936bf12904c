"""qwen3_trn.metrics: the console line, metrics.jsonl, TensorBoard, loss.png, config.toml, env.json.

pytest tests/test_metrics.py
"""

import json
import math
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qwen3_trn import metrics
from qwen3_trn.metrics import RunLog, format_bytes, format_count, write_run_files

DENSE = {
    "loss": 3.25,
    "grad_norm": 1.5,
    "tokens": 4096,
    "supervised_tokens": 4000,
    "lr": 3e-4,
    "tokens_per_s": 12_345.6,
    "mfu": 0.412,
    "peak_memory_bytes": 12_340_000_000,
    "step_time_s": 0.33,
    "position": 64,
}
MOE = {"load_max_over_mean": [1.5, 2.25], "dead_experts": [0.0, 0.25], "router_entropy": [2.0, 1.0], "aux_loss": 1.1}


def records_in(out: Path) -> list[dict]:
    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def scalars_in(out: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: clock[0] is the time in seconds."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def test_console_line_has_what_is_known(tmp_path, capsys, clock):
    log = RunLog(tmp_path, 1000)
    log.log(1, DENSE)
    clock[0] = 20.0
    log.log(11, DENSE | MOE)
    clock[0] = 30.0
    log.log(16, {"loss": math.nan, "mfu": None, "load_max_over_mean": []})
    lines = capsys.readouterr().out.splitlines()
    dense = "loss  3.2500  grad   1.500  lr 3.00e-04   12.3K tok/s  mfu 41.2%  mem  12.3 GB"
    assert lines[0] == f"step    1/1000  {dense}"  # no eta yet: the first step may have compiled
    assert lines[1] == f"step   11/1000  {dense}  load  2.25  dead 12.5%  eta 0:32:58"  # 989 steps at 2 s
    assert lines[2] == "step   16/1000  loss     nan  eta 0:32:48"
    log.close()


def test_metrics_jsonl_and_tensorboard(tmp_path):
    log = RunLog(tmp_path, 10)
    log.log(1, DENSE | MOE)
    log.log(2, {"loss": math.inf, "grad_norm": math.nan, "dead_experts": [math.nan, 0.5], "mfu": None})
    # Read before close: a run that is killed has lost nothing.
    assert records_in(tmp_path)[0] == {"step": 1} | DENSE | MOE
    assert records_in(tmp_path)[1] == {
        "step": 2,
        "loss": None,
        "grad_norm": None,
        "dead_experts": [None, 0.5],
        "mfu": None,
    }
    log.close()
    scalars = scalars_in(tmp_path)
    assert {key for key in DENSE if key not in scalars} == set()
    assert scalars["loss"] == [(1, 3.25), (2, math.inf)]
    assert scalars["mfu"] == [(1, pytest.approx(0.412))]
    assert [scalars[f"load_max_over_mean/{name}"][0][1] for name in ("min", "mean", "max")] == [1.5, 1.875, 2.25]


def test_a_resumed_run_has_every_step_once(tmp_path):
    killed = RunLog(tmp_path, 10)
    for step in range(1, 8):
        killed.log(step, {"loss": 1.0})
    killed.tensorboard.flush()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # the kill came in the middle of a line
    time.sleep(1.1)  # TensorBoard reads its files in the order of their names, which begin with the second
    resumed = RunLog(tmp_path, 10)
    for step in range(6, 9):
        resumed.log(step, {"loss": 2.0})
    resumed.close()
    expected = [(step, 1.0) for step in range(1, 6)] + [(step, 2.0) for step in range(6, 9)]
    assert [(record["step"], record["loss"]) for record in records_in(tmp_path)] == expected
    assert scalars_in(tmp_path)["loss"] == expected


def test_close_draws_loss_and_learning_rate(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig

    def keep_and_save(figure, *args, **kwargs):
        drawn.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep_and_save)
    out = tmp_path / "run $x_$"  # not to be read as mathematics
    out.mkdir()
    log = RunLog(out, 3)
    log.log(1, {"loss": 3.0, "lr": 0.1})
    log.log(2, {"loss": math.nan, "lr": 0.2})
    log.log(3, {"loss": 1.0, "lr": 0.3})
    log.close()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    loss_axes, lr_axes = drawn[0].axes
    assert loss_axes.get_title() == out.name
    assert loss_axes.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert str(loss_axes.lines[0].get_ydata().tolist()) == "[3.0, nan, 1.0]"
    assert lr_axes.lines[0].get_ydata().tolist() == [0.1, 0.2, 0.3]


def test_a_run_without_a_logged_step_closes(tmp_path):
    RunLog(tmp_path, 10).close()
    assert list(tmp_path.iterdir()) == []


def test_no_library_noise(tmp_path):
    code = "import sys; from qwen3_trn.metrics import RunLog; from pathlib import Path\n"
    code += "log = RunLog(Path(sys.argv[1]), 1); log.log(1, {'loss': 2.0, 'lr': 0.1}); log.close()"
    command = [sys.executable, "-W", "default", "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=metrics.CODE, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == "step 1/1  loss  2.0000  lr 1.00e-01\n"


numbers = st.integers() | st.floats(allow_nan=False) | st.booleans()
toml_values = st.text() | numbers | st.none() | st.lists(st.text() | numbers)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True), toml_values))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_config_toml_reads_back_as_written(tmp_path, monkeypatch, config):
    monkeypatch.setattr(metrics, "_git", lambda *arguments: None)  # a process an example is slow
    write_run_files(tmp_path, config, {})
    read = tomllib.loads((tmp_path / "config.toml").read_text(encoding="utf-8"))
    written = {key: value for key, value in config.items() if value is not None}
    assert read == written
    assert [type(value) for value in read.values()] == [type(value) for value in written.values()]


@pytest.mark.parametrize(
    "value",
    ['say "hi"', "C:\\new\\table", "two\nlines\r\n\tand a tab", "\x00\x1f\x7f", "日本 🙂", 1e-5, 5e-324, math.inf],
)
def test_config_toml_difficult_values(tmp_path, value):
    write_run_files(tmp_path, {"value": value, "values": [value, value], "nothing": None}, {})
    read = tomllib.loads((tmp_path / "config.toml").read_text(encoding="utf-8"))
    assert read == {"value": value, "values": [value, value]}


def test_config_toml_takes_tuples_nan_and_broken_file_names(tmp_path):
    write_run_files(tmp_path, {"adam_betas": (0.9, 0.95), "nan": math.nan, "data": ["caf\udce9.txt"]}, {})
    read = tomllib.loads((tmp_path / "config.toml").read_text(encoding="utf-8"))
    assert read["adam_betas"] == [0.9, 0.95] and math.isnan(read["nan"]) and read["data"] == ["caf?.txt"]


def test_config_toml_refuses_what_it_cannot_hold(tmp_path):
    with pytest.raises(TypeError, match="a dict"):
        write_run_files(tmp_path, {"nested": {"a": 1}}, {})


def test_env_json(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", "runs/my run"])
    monkeypatch.setattr(metrics, "VERSIONS_OF", (*metrics.VERSIONS_OF, "no-such-package"))
    write_run_files(tmp_path, {}, {"device": "cpu", "world_size": 2})
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["command"] == "train.py --out 'runs/my run'"
    assert env["device"] == "cpu" and env["world_size"] == 2
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    for package in ("torch", "torchtitan", "transformers", "safetensors", "numpy"):
        assert re.match(r"\d+\.\d+", env[package])
    assert env["no-such-package"] is None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", env["date"])


def test_env_json_knows_the_commit_of_our_checkout_only(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        command = ["git", "-C", str(checkout), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit_and_dirty() -> tuple:
        write_run_files(tmp_path, {}, {})
        env = json.loads((tmp_path / "env.json").read_text())
        return env["git_commit"], env["git_dirty"]

    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.setattr(metrics, "CODE", checkout)
    assert commit_and_dirty() == (None, None)  # no repository
    git("init", "-q")
    (checkout / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    (checkout / "my.jsonl").touch()  # git does not track it
    assert commit_and_dirty() == (head, False)
    (checkout / "train.py").write_text("2")
    assert commit_and_dirty() == (head, True)
    (checkout / "site-packages").mkdir()
    monkeypatch.setattr(metrics, "CODE", checkout / "site-packages")
    assert commit_and_dirty() == (None, None)  # somebody's repository with us installed in it
    monkeypatch.setenv("PATH", "")
    assert commit_and_dirty() == (None, None)  # no git


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.0K"),
        (151_936, "151.9K"),
        (999_949, "999.9K"),
        (999_950, "1.0M"),
        (596_049_920, "596.0M"),
        (30_532_122_624, "30.5B"),
        (36e12, "36.0T"),
        (5e15, "5000.0T"),
    ],
)
def test_format_count(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (512, "512 B"), (1_200_000_000, "1.2 GB"), (999_960, "1.0 MB"), (3e12, "3.0 TB")]
)
def test_format_bytes(number, text):
    assert format_bytes(number) == text


def test_a_full_disk_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    log = RunLog(tmp_path, 3)
    log.log(1, {"loss": 1.0})

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log.tensorboard, "add_scalar", full)
        log.log(2, {"loss": 2.0})
    log.log(3, {"loss": 3.0})
    log.close()
    printed = capsys.readouterr().out
    assert f"warning: the metrics of step 2 cannot be written to {tmp_path}: [Errno 28] No space left" in printed
    assert "step 2/3" in printed and "step 3/3" in printed
