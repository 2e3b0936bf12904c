"""The command line: the newcomer's run, fine-tuning a folder, and one clear error for each bad input."""

import itertools
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from qwen3_trn import Qwen3Config, Qwen3ForCausalLM
from qwen3_trn.config import TrainConfig
from qwen3_trn.errors import UserError
from tests.common import REPO, TINY, in_process, records, run_python, succeeded

# ------------------------------------------------------------------------------------------------- runs that succeed


@pytest.fixture(scope="session")
def newcomer(tmp_path_factory):
    """The README's command, for 60 steps: (working folder, run's folder, process)."""
    where = tmp_path_factory.mktemp("newcomer")
    process = run_python(
        REPO / "train.py", "--steps", 60, "--lr", "2e-3", ranks=2, cwd=where, QWEN3_TRN_CACHE=str(where / "cache")
    )
    succeeded(process)
    return where, where / "runs" / "tiny-1", process


def test_newcomer_sees_it_learn(newcomer):
    _, out, process = newcomer
    found = records(out)
    vocab_size = Qwen3Config.from_pretrained(TINY).vocab_size
    assert found[0]["loss"] == pytest.approx(math.log(vocab_size), abs=0.3)
    assert found[-1]["loss"] < math.log(vocab_size) / 2
    assert [record["step"] for record in found] == [1, 10, 20, 30, 40, 50, 60]
    assert "sample     greedy: " in process.stdout and "sample     sampled at 0.7: " in process.stdout
    assert sum(record["data_s"] for record in found) < 0.02 * 60 * found[1]["step_time_s"]  # it never waits for data
    assert "missing 0, unexpected 0" in process.stdout


def test_newcomer_sees_no_noise(newcomer):
    """Standard error holds torchrun's own notice about OMP_NUM_THREADS at most."""
    _, _, process = newcomer
    torchruns_own = ("torch/distributed/run.py", "*****", "OMP_NUM_THREADS")
    noise = [line for line in process.stderr.splitlines() if line and not any(own in line for own in torchruns_own)]
    assert noise == []
    assert "warning" not in process.stdout.lower()


def test_run_folder_is_complete(newcomer):
    _, out, _ = newcomer
    expected = "config.toml env.json metrics.jsonl loss.png tensorboard samples.txt checkpoints/latest hf/config.json"
    for name in [*expected.split(), "checkpoints/step_60/trainer.json", "hf/tokenizer.json", "hf/README.md"]:
        assert (out / name).exists(), name
    keys = "loss grad_norm lr tokens supervised_tokens tokens_per_s mfu peak_memory_bytes step_time_s position"
    last = records(out)[-1]
    for key in [*keys.split(), "load_max_over_mean", "dead_experts", "router_entropy"]:
        assert key in last, key
    assert last["position"] == 60 * 8
    assert 0 <= last["position"] * 512 - last["tokens"] < 512  # only the epoch's last row has padding
    assert (out / "checkpoints" / "latest").resolve().name == "step_60"


def test_export_opens_in_transformers(newcomer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, out, _ = newcomer
    model, info = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    ids = tokenizer("Noah and Jack", return_tensors="pt").input_ids
    ours = Qwen3ForCausalLM.from_pretrained(out / "hf")
    torch.testing.assert_close(model(ids).logits, ours(ids), atol=1e-4, rtol=0)


def test_same_command_twice_and_resolved_config_repeats_it(newcomer):
    where, _, _ = newcomer
    environment = {"cwd": where, "QWEN3_TRN_CACHE": str(where / "cache")}
    flags = ["--steps", 2, "--log-every", 1, "--no-export"]
    succeeded(run_python(REPO / "train.py", *flags, **environment))
    assert records(where / "runs" / "tiny-2")
    config = where / "runs" / "tiny-2" / "config.toml"
    succeeded(run_python(REPO / "train.py", "--config", config, "--out", where / "again", **environment))
    first, again = records(where / "runs" / "tiny-2"), records(where / "again")
    assert [record["loss"] for record in first] == [record["loss"] for record in again]
    assert not (where / "again" / "hf").exists()


def test_every_way_to_split_from_the_command_line(newcomer):
    """2 ranks that share heads, sequence, vocabulary and experts start from the loss of 2 that share only the data."""
    where, out, _ = newcomer
    flags = ["--tp", 2, "--ep", 2, "--ac", "selective", "--moe-capacity", "1.5", "--steps", 2, "--log-every", 1]
    split = where / "split"
    environment = {"cwd": where, "QWEN3_TRN_CACHE": str(where / "cache")}
    printed = succeeded(run_python(REPO / "train.py", *flags, "--out", split, ranks=2, **environment))
    assert "tp 2, ep 2; recompute selective, compile off" in printed
    assert records(split)[0]["loss"] == pytest.approx(records(out)[0]["loss"], abs=0.01)
    # Both ranks see the same rows: tokens are counted once.
    assert records(split)[-1]["tokens"] == 2 * 8 * 512
    assert "dropped" in printed and records(split)[-1]["dropped_choices"] > 0
    assert "missing 0, unexpected 0" in printed


def test_fine_tunes_a_folder_from_its_own_loss(newcomer, cache, tmp_path, monkeypatch):
    """A run's export goes on where the run ended, and passes the check for random weights."""
    _, out, _ = newcomer
    found = in_process(monkeypatch, tmp_path / "run", "--init", out / "hf", "--steps", 2, "--no-export")
    assert found[0]["loss"] == pytest.approx(records(out)[-1]["loss"], abs=0.3)
    assert found[0]["lr"] <= 1e-5


def test_random_weights_do_not_pass_for_published_ones(random_folder, cache, tmp_path, monkeypatch):
    flags = ["--init", random_folder, "--steps", 1, "--no-export"]
    with pytest.raises(UserError, match=r"first loss is 6\.\d+, and ln\(vocabulary\) is 6\.93.*look random"):
        in_process(monkeypatch, tmp_path / "run", *flags)
    assert in_process(monkeypatch, tmp_path / "run", *flags, "--no-load-check")


def test_weights_that_are_not_finite_are_not_called_random(random_folder, cache, tmp_path, monkeypatch):
    folder = shutil.copytree(random_folder, tmp_path / "model")
    edit_weights(lambda tensors: tensors["model.norm.weight"].fill_(math.nan))(folder)
    with pytest.raises(UserError, match="the first loss is nan: the loaded weights hold values that are not finite"):
        in_process(monkeypatch, tmp_path / "run", "--init", folder, "--steps", 1)


def test_data_without_supervised_tokens_is_skipped_and_said(cache, tmp_path, monkeypatch, capsys):
    """Rows of one token: those that hold an end of text have no label, and nothing turns into nan."""
    (tmp_path / "short.txt").write_text("a")
    flags = ["--data", tmp_path / "short.txt", "--seq-len", 1, "--global-batch-size", 1, "--steps", 8]
    (tmp_path / "eval.txt").write_text("Mia has a ball.")
    flags += ["--eval-data", tmp_path / "eval.txt", "--eval-every", 1, "--save-every", 1, "--keep", 8]
    found = in_process(monkeypatch, tmp_path / "run", *flags)
    printed = capsys.readouterr().out
    assert "has no supervised token; it is skipped" in printed
    losses = [record["loss"] for record in found if "loss" in record]
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    for step in range(1, 9):  # what is due after a step is due after one that is skipped
        state = json.loads((tmp_path / "run" / "checkpoints" / f"step_{step}" / "trainer.json").read_text())
        assert found[step - 1]["step"] == step and found[step - 1]["eval_loss"] > 0
    assert state["skipped_steps"] == printed.count("is skipped") == 4


def test_a_step_that_is_not_finite_is_not_applied(cache, tmp_path, monkeypatch, capsys):
    original = train.forward_backward

    def poisoned(model, *arguments):
        result = original(model, *arguments)
        model.model.norm.weight.grad.mul_(math.nan)
        return result

    monkeypatch.setattr(train, "forward_backward", poisoned)
    in_process(monkeypatch, tmp_path / "run", "--steps", 2, "--seq-len", 64, "--dtype", "fp32")
    assert "it is not applied (2 skipped so far)" in capsys.readouterr().out
    exported = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert torch.equal(exported["model.norm.weight"], torch.ones(128, dtype=torch.bfloat16))


def test_bf16_compute_keeps_fp32_weights(cache, tmp_path, monkeypatch):
    flags = ["--steps", 3, "--seq-len", 64, "--global-batch-size", 2, "--no-export"]
    half = in_process(monkeypatch, tmp_path / "bf16", *flags, "--dtype", "bf16")
    full = in_process(monkeypatch, tmp_path / "fp32", *flags)
    assert half[0]["loss"] == pytest.approx(full[0]["loss"], abs=0.02)
    assert half[0]["loss"] != full[0]["loss"]


# ------------------------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_learning_rate(schedule):
    settings = TrainConfig(steps=100, warmup_steps=10, lr=1.0, min_lr=0.1, schedule=schedule)
    rates = [train.learning_rate(step, settings) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    if schedule == "wsd":
        assert rates[79] == 1.0 > rates[80]
        assert rates[89] == pytest.approx(0.55)
    if schedule == "cosine":
        assert rates[54] == pytest.approx(0.55)  # half way from step 10 to step 100


def test_decay_is_for_matrices_only():
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(TINY))
    experts, matrices, rest = train.build_optimizer(model, TrainConfig(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in (experts, matrices, rest)] == [0.3, 0.3, 0.0]
    assert all(p.dim() == 1 for p in rest["params"]) and all(p.dim() == 2 for p in matrices["params"])
    assert all(p.dim() == 3 for p in experts["params"])
    assert len({p for group in (experts, matrices, rest) for p in group["params"]}) == len(list(model.parameters()))


# ------------------------------------------------------------------------------------------------- bad input


def edit_config(**changes):
    def edit(folder):
        raw = json.loads((folder / "config.json").read_text())
        raw.update(changes)
        (folder / "config.json").write_text(json.dumps({key: v for key, v in raw.items() if v != "REMOVE"}))

    return edit


def edit_weights(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BAD_MODELS = {
    "missing key": (edit_config(head_dim="REMOVE"), 'the key "head_dim" is missing'),
    "model type": (edit_config(model_type="llama"), "model_type is 'llama'"),
    "rope type": (edit_config(rope_scaling={"rope_type": "longrope", "factor": 2}), "rope_type is 'longrope'"),
    "missing tensor": (edit_weights(lambda t: t.pop("model.norm.weight")), "missing 1: model.norm.weight"),
    "extra tensor": (edit_weights(lambda t: t.update(extra=torch.ones(1))), "unexpected 1: extra"),
    "shape": (
        edit_weights(lambda t: t.update({"model.norm.weight": torch.ones(3)})),
        "mis-shaped 1: model.norm.weight",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "does not exist"),
    "truncated": (truncate, "not a whole safetensors file"),
    "untied, no head": (edit_config(tie_word_embeddings=False), "tie_word_embeddings false, but there is no lm_head"),
    "tied, other head": (
        edit_weights(lambda t: t.update({"lm_head.weight": torch.zeros(1024, 128)})),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "both layouts": (
        edit_weights(lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.ones(8, 128, 128)})),
        "holds the experts twice",
    ),
    "quantized": (edit_config(quantization_config={"quant_method": "fp8"}), "quantized weights cannot be trained"),
    "foreign tokenizer": (edit_config(vocab_size=500), "mis-shaped"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_model_folder(case, random_folder, cache, tmp_path, monkeypatch):
    damage, message = BAD_MODELS[case]
    folder = shutil.copytree(random_folder, tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError) as error:
        in_process(monkeypatch, tmp_path / "run", "--init", folder)
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()  # refused before anything was written


BAD_FLAGS = {
    "data not found": (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
    "empty data": (["--data", "{tmp}/empty.txt"], "empty.txt is empty"),
    "not UTF-8": (["--data", "{tmp}/latin.txt"], "latin.txt:1: not UTF-8"),
    "sequence too long": (["--seq-len", "4096"], "--seq-len 4096 is more than the model's max_position_embeddings"),
    "batch": (["--global-batch-size", "6", "--micro-batch-size", "4"], "--global-batch-size 6 is not a multiple of"),
    "micro batch": (["--global-batch-size", "2", "--micro-batch-size", "4"], "--global-batch-size 2 is not a multiple"),
    "min lr": (["--lr", "1e-4", "--min-lr", "1"], "--min-lr 1 is above --lr 0.0001"),
    "warm-up": (["--steps", "5", "--warmup-steps", "6"], "--warmup-steps 6 is more than the run's 5 steps"),
    "seed": (["--seed", "-1"], "--seed is -1; expected 0 or more"),
    "init": (["--init", "nowhere"], "--init is 'nowhere'"),
    "two models": (["--init", "{tmp}", "--model", "x"], "remove --model x"),
    "vocabulary": (["--model", "{tmp}/small"], "is beyond the model's vocabulary of 300 rows"),
    "no config": (["--model", "{tmp}"], "no config.json"),
    "steps and epochs": (["--steps", "1", "--epochs", "1"], "--steps and --epochs are both given"),
    "zero": (["--steps", "0"], "--steps is 0; expected more than 0"),
    "aux loss of a dense model": (["--model", "{tmp}/dense", "--router-aux-loss-coef", "0.1"], "this one is dense"),
    "layout": (["--tp", "2"], "--tp 2 is not the number of ranks, 1"),
    "experts of a dense model": (
        ["--model", "{tmp}/dense", "--moe-capacity", "1"],
        "--moe-capacity needs a model with",
    ),
    "no tokenizer": (["--model", "{tmp}/bare"], "tokenizer"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(case, cache, tmp_path, monkeypatch):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    for name, changes in (
        ("small", {"vocab_size": 300}),
        ("dense", {"model_type": "qwen3"}),
        ("bare", {}),
    ):
        shutil.copytree(TINY, tmp_path / name)
        edit_config(**changes)(tmp_path / name)
    for path in (tmp_path / "bare").glob("tokenizer*"):
        path.unlink()
    flags, message = BAD_FLAGS[case]
    with pytest.raises(UserError) as error:
        in_process(monkeypatch, tmp_path / "run", *[flag.format(tmp=tmp_path) for flag in flags])
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_out_that_holds_a_run_is_refused(cache, tmp_path, monkeypatch):
    flags = ["--steps", 1, "--seq-len", 16, "--global-batch-size", 1, "--no-export"]
    before = in_process(monkeypatch, tmp_path / "run", *flags)
    with pytest.raises(UserError, match="already holds a run"):
        in_process(monkeypatch, tmp_path / "run", *flags)
    assert records(tmp_path / "run") == before


def test_errors_are_told_once_and_every_rank_fails(tmp_path):
    """Under torchrun: no traceback of ours, one message, exit code 1; and the nearest flag for a wrong one."""
    shutil.copytree(TINY, tmp_path / "model")
    edit_config(model_type="llama")(tmp_path / "model")
    process = run_python("train.py", "--model", tmp_path / "model", ranks=2, timeout=60)
    assert process.returncode == 1
    assert process.stderr.count("error: ") - process.stderr.count("error: <N/A>") == 1
    assert "model_type is 'llama'" in process.stderr
    assert f'File "{REPO}' not in process.stderr  # torchrun's closing report has a traceback, but none of ours

    process = run_python("train.py", "--globl-batch-size", "3", ranks=2, timeout=60)
    assert process.returncode == 1
    assert process.stderr.count("Unrecognized options:") == 1
    assert "--global-batch-size" in process.stderr


def test_unknown_flag_exits_with_2_and_help_with_0():
    assert run_python("train.py", "--stepz", "3").returncode == 2
    process = run_python("train.py", "--help")
    assert process.returncode == 0
    for name in TrainConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in process.stdout


def test_what_the_file_system_refuses_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    process = run_python("train.py", "--out", tmp_path / "file", QWEN3_TRN_CACHE=str(tmp_path / "cache"))
    assert process.returncode == 1
    assert process.stderr.strip().splitlines() == [f"error: [Errno 17] File exists: '{tmp_path / 'file'}'"]
