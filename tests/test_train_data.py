"""Runs on conversations, mixes and streams, with validation and samples, from the command line.

The oracle of an order is the one that a single rank reads from the beginning, that of a fine-tune what it was taught.
"""

import hashlib
import itertools
import json
import shutil

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from qwen3_trn import encode
from qwen3_trn.checkpoint import find_checkpoint, list_checkpoints, read_state
from qwen3_trn.config import TrainConfig
from qwen3_trn.errors import UserError
from tests.common import TINY, in_process, records, run_python, succeeded
from tests.test_resume import TINY_CONFIG, assert_same_state, edit_json, numbers

SAYS = {"cat": "Miau!", "dog": "Woof, woof.", "cow": "Moo.", "duck": "Quack.", "bee": "Bzzz.", "pig": "Oink, oink."}
QUESTIONS = ["What does the {} say?", "Tell me what the {} says.", "How does a {} sound?", "The {} says:"]


def make_conversation(number: int) -> dict:
    animal, question = list(SAYS)[number % len(SAYS)], QUESTIONS[number // len(SAYS) % len(QUESTIONS)]
    return chat(("user", question.format(animal)), ("assistant", SAYS[animal]))


def chat(*messages: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def write_lines(path, values) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


@pytest.fixture
def data(tmp_path, cache, monkeypatch):
    """Names for --data, by kind."""
    monkeypatch.setattr(encode, "PART_BYTES", 2000)
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(f"Mia lost hat number {n}. " * 3 for n in range(60)))
    text, chats = str(tmp_path / "text.txt"), write_lines(tmp_path / "chat.jsonl", map(make_conversation, range(40)))
    return {
        "text": (text,),
        "chat": (chats,),
        "mix": (f"{text}:0.3", f"{chats}:0.7"),
        "stream": (chats, "--stream"),
        "mixed streams": (f"{text}:0.3", f"{chats}:0.7", "--stream"),
    }


KINDS = ("text", "chat", "mix", "stream", "mixed streams")

# ------------------------------------------------------------------------------------------------- one order


def open_data(names: tuple[str, ...], seq_len: int = 64):
    settings = TrainConfig(data=tuple(n for n in names if n != "--stream"), stream="--stream" in names, seq_len=seq_len)
    return train.start.open_data(settings, TINY_CONFIG, TINY)


def hash_row(row: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in row.values())).hexdigest()


def read_order(names, positions, num_ranks: int, micro_batch_size: int = 1, batch: int = 8) -> list[str]:
    """A hash of each row, in the order that all ranks together take them, each with data of its own, a step at a time.

    Micro-step by micro-step, and within it rank by rank.
    """
    order = []
    opened = [open_data(names) for _ in range(num_ranks)]
    for position in positions:
        shares = [
            train.micro_batches(part, position, batch, micro_batch_size, num_ranks, rank)
            for rank, part in enumerate(opened)
        ]
        for micro_step in zip(*shares, strict=True):
            for rows in micro_step:
                order += [hash_row({k: v[i] for k, v in rows.items()}) for i in range(micro_batch_size)]
    return order


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_sees_the_same_rows_from_any_step_on(data, kind):
    whole = read_order(data[kind], range(0, 80, 8), num_ranks=1)
    assert len(set(whole)) > 8
    for num_ranks, micro_batch_size in ((1, 4), (2, 1), (2, 4), (4, 2)):
        assert read_order(data[kind], range(0, 80, 8), num_ranks, micro_batch_size) == whole
    for begin, num_ranks in ((8, 2), (40, 4), (72, 1)):
        assert read_order(data[kind], range(begin, 80, 8), num_ranks) == whole[begin:]


@pytest.mark.slow
def test_launches_on_1_2_and_4_ranks_train_on_the_same_rows(data, tmp_path):
    """And a run that goes on after 3 of its 6 steps, which are more than an epoch, on another number of ranks."""

    def run(name: str, ranks: int, *flags) -> dict[int, str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        command = ["tests/run_rows.py", folder, "--out", folder / "run", "--data", *data["chat"], *flags]
        command += ["--seq-len", 64, "--global-batch-size", 8, "--no-export"]
        succeeded(run_python(*command, ranks=ranks, QWEN3_TRN_CACHE=str(tmp_path / "cache")))
        found = [json.loads((folder / f"rows_{rank}.json").read_text()) for rank in range(max(ranks, 1))]
        together = {int(place): row for rows in found for place, row in rows.items()}
        assert len(together) == sum(map(len, found))  # no row twice
        return together

    whole = run("one", 0, "--steps", 6)
    assert sorted(whole) == list(range(48)) and open_data(data["chat"]).rows_per_epoch < 40
    assert run("two", 2, "--steps", 6) == whole
    first = run("four", 4, "--steps", 3, "--micro-batch-size", 1)
    assert first | run("four", 2, "--init", "resume", "--steps", 6, "--micro-batch-size", 2) == whole
    assert sorted(first) == list(range(24))


@pytest.mark.parametrize("kind", ["text", "chat", "stream"])
def test_epochs_differ_in_order_and_hold_the_same(data, kind):
    opened = open_data(data[kind])
    if kind == "stream":
        opened.row(1000)  # until all its parts are known
    size = opened.rows_per_epoch or opened.sources[0]._starts[-1]
    epochs = [[opened.row(epoch * size + place) for place in range(size)] for epoch in range(2)]
    labels = [sorted(np.concatenate([row.labels for row in epoch]).tolist()) for epoch in epochs]
    assert labels[0] == labels[1] and size > 4
    hashes = [[hash_row(row._asdict()) for row in epoch] for epoch in epochs]
    assert hashes[0] != hashes[1]


RUN = ["--seq-len", 64, "--global-batch-size", 4, "--schedule", "constant", "--warmup-steps", 0, "--lr", "1e-3"]
RUN += ["--no-export", "--eval-every", 2, "--sample-every", 2, "--keep", 9]


@pytest.mark.parametrize("kind", ["chat", "mixed streams"])
def test_a_third_resume_in_the_second_epoch(data, kind, tmp_path, monkeypatch):
    """Rows, losses, validation losses and samples are those of the run that nothing interrupts."""
    flags = [*RUN, "--data", *data[kind], "--eval-data", *data["chat"]]
    in_process(monkeypatch, tmp_path / "whole", *flags, "--steps", 8)
    for steps in (3, 4, 6):
        in_process(monkeypatch, tmp_path / "run", *flags, "--steps", steps, "--resume", "auto")
    in_process(monkeypatch, tmp_path / "run", "--init", "resume", "--steps", 8)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole")
    in_epoch = open_data(data["chat"]).rows_per_epoch
    assert in_epoch < 6 * 4 < 2 * in_epoch
    whole, parts = ([r.get("eval_loss") for r in records(tmp_path / name)] for name in ("whole", "run"))
    assert [loss is not None for loss in whole] == [False, True] * 4
    assert parts == [whole[0], whole[1], parts[2], *whole[3:]]  # the end of a part is validated too
    samples = (tmp_path / "run" / "samples.txt").read_text().split("\n\n")
    expected = (tmp_path / "whole" / "samples.txt").read_text().split("\n\n")
    assert [block.split("\n")[0] for block in samples[:-1]] == [f"step {step}" for step in (2, 3, 4, 6, 8)]
    assert [block for block in samples if not block.startswith("step 3\n")] == expected


def test_two_ranks_stream_validate_sample_and_save(data, tmp_path, monkeypatch):
    """Each at every step; the numbers are those of one process, and what was saved between is whole."""
    flags = [*RUN, "--data", *data["mixed streams"], "--eval-data", *data["chat"], "--eval-every", 1]
    flags += ["--sample-every", 1, "--save-every", 1, "--prompts", "What does the cow say?", "--adam-eps", "1e-5"]
    out = tmp_path / "run"
    environment = {"QWEN3_TRN_CACHE": str(tmp_path / "cache")}
    script = "tests/run_small_parts.py"
    succeeded(run_python(script, "--out", out, "--log-every", 1, *flags, "--steps", 3, ranks=2, **environment))
    in_process(monkeypatch, tmp_path / "alone", *flags, "--steps", 3)
    for found, expected in zip(records(out), records(tmp_path / "alone"), strict=True):
        for key in ("loss", "eval_loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-4), key
        for key in ("step", "position", "tokens", "supervised_tokens"):
            assert found[key] == expected[key]
    # What was saved right after a look at the model goes on as the run did.
    assert [path.name for path in list_checkpoints(out)] == ["step_1", "step_2", "step_3"]
    expected = records(out)[2]
    shutil.rmtree(out / "checkpoints" / "step_3")
    found = in_process(monkeypatch, out, *flags, "--steps", 3, "--resume", "must")[2]
    for key in ("loss", "eval_loss", "grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4), key


# ------------------------------------------------------------------------------------------------- fine-tuning


def test_a_fine_tune_answers_as_it_was_taught(cache, tmp_path, monkeypatch, capsys):
    """200 conversations, of which each question's answer depends on one word; and transformers says the same."""
    model = shutil.copytree(TINY, tmp_path / "model")
    # As a base model has it: only the end of text ends.
    edit_json(model / "generation_config.json", eos_token_id=890)
    edit_json(model / "tokenizer_config.json", eos_token="<|endoftext|>")
    chats = write_lines(tmp_path / "chat.jsonl", map(make_conversation, range(200)))
    prompts = [QUESTIONS[number % 4].format(animal) for number, animal in enumerate(SAYS)]
    flags = ["--model", model, "--data", chats, "--eval-data", chats, "--prompts", *prompts, "--seq-len", 128]
    found = in_process(monkeypatch, tmp_path / "run", *flags, "--steps", 40, "--lr", "4e-3")
    assert found[-1]["eval_loss"] < 0.1
    samples = (tmp_path / "run" / "samples.txt").read_text().splitlines()
    greedy = [line.removeprefix("greedy: ") for line in samples if line.startswith("greedy: ")]
    assert greedy == list(SAYS.values())
    assert "sample     greedy: Moo." in capsys.readouterr().out

    folder = tmp_path / "run" / "hf"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [892, 890]
    exported, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for prompt, answer in zip(prompts, SAYS.values(), strict=True):
        turn = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = exported.generate(**inputs, do_sample=False, max_new_tokens=30)[0, inputs.input_ids.shape[1] :]
        assert tokenizer.decode(ids) == answer + "<|im_end|>"


def test_a_text_run_leaves_the_generation_config_alone(cache, tmp_path, monkeypatch):
    flags = ["--steps", 1, "--seq-len", 32, "--global-batch-size", 1]
    in_process(monkeypatch, tmp_path / "run", *flags)
    written, given = ((folder / "generation_config.json").read_bytes() for folder in (tmp_path / "run" / "hf", TINY))
    assert written == given


@pytest.mark.parametrize(("old", "new"), [(None, [8, 9]), (7, [8, 9, 7]), ([7, 8], [8, 9, 7]), (0, [8, 9, 0])])
def test_stop_tokens_of_an_export(tmp_path, old, new):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"top_k": 3, "eos_token_id": old}))
    train.hf.add_stop_tokens(tmp_path, [8, 9])
    assert json.loads(path.read_text()) == {"top_k": 3, "eos_token_id": new}
    path.unlink()
    train.hf.add_stop_tokens(tmp_path, [8, 9])
    assert json.loads(path.read_text()) == {"eos_token_id": [8, 9]}
    path.write_text("{")
    with pytest.raises(UserError, match=r"generation_config.json is not JSON"):
        train.hf.add_stop_tokens(tmp_path, [8])


def test_models_without_chat_template_or_end_token(cache, tmp_path, monkeypatch):
    """They train on text, and on pairs of strings if there is an end token; conversations need the template."""
    bare = shutil.copytree(TINY, tmp_path / "bare")
    edit_json(bare / "tokenizer_config.json", chat_template=None, eos_token=None)
    ends = shutil.copytree(TINY, tmp_path / "ends")
    edit_json(ends / "tokenizer_config.json", chat_template=None, eos_token="<|endoftext|>")
    (tmp_path / "some.txt").write_text("One, two, three. " * 30)
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "One, ", "completion": "two."}] * 9)
    chats = write_lines(tmp_path / "chats.jsonl", [make_conversation(0)])

    def run(name: str, model, data) -> str:
        flags = ["--model", model, "--data", data, "--prompts", "One, ", "--steps", 1, "--seq-len", 32, "--no-export"]
        in_process(monkeypatch, tmp_path / name, *flags, "--global-batch-size", 1)
        return (tmp_path / name / "samples.txt").read_text()

    assert "> One, \ngreedy: " in run("text", bare, tmp_path / "some.txt")
    assert "> One, \ngreedy: " in run("pairs", ends, pairs)
    with pytest.raises(UserError, match="has no eos_token, with which"):
        run("none", bare, pairs)
    with pytest.raises(UserError, match="the tokenizer has no chat template, which conversations need"):
        run("none", ends, chats)
    assert not (tmp_path / "none").exists()


def test_settings_come_back_with_init_resume(data, tmp_path, monkeypatch):
    """Prompts that look like flags, hold quotes or line breaks, and the data of a validation."""
    prompts = ["- a b", 'say "hi"\n\\n', "é <|im_end|>"]
    flags = [*RUN, "--data", *data["chat"], "--eval-data", *data["text"], *data["chat"], "--prompts", *prompts]
    flags += ["--train-on", "last", "--no-mask-empty-think", "--long", "truncate", "--bad-records", "skip"]
    flags += ["--no-pack", "--eval-every", 3, "--format", "auto"]
    with pytest.raises(UserError, match=r"expected an object with a string `text`, as the first record"):
        in_process(monkeypatch, tmp_path / "none", *flags, "--steps", 1, "--bad-records", "error")
    flags = [flag for flag in flags if flag != data["text"][0]]
    in_process(monkeypatch, tmp_path / "run", *flags, "--steps", 1)
    before = (tmp_path / "run" / "config.toml").read_text()
    in_process(monkeypatch, tmp_path / "run", "--init", "resume", "--steps", 2)
    after = (tmp_path / "run" / "config.toml").read_text()
    assert after == before.replace("steps = 1\n", "steps = 2\n", 1)
    assert read_state(find_checkpoint(tmp_path / "run"))["settings"]["prompts"] == prompts
    assert "> <|im_start|>user\\n- a b<|im_end|>" in (tmp_path / "run" / "samples.txt").read_text()


def test_what_must_not_change_about_conversations(data, tmp_path, monkeypatch):
    chats = ["--data", *data["chat"]]
    in_process(monkeypatch, tmp_path / "run", *RUN, *chats, "--steps", 1)
    for change, message in (
        ([*chats, "--train-on", "last"], "train_on of the data was assistant and is last"),
        ([*chats, "--no-pack"], "pack of the data was True and is False"),
        ([*chats, "--long", "truncate"], "long of the data was drop and is truncate"),
        ([*chats, "--stream"], "has changed: --stream was False and is True. Restore it"),
        (["--data", *data["mix"]], "weights of the data was 1 and is 0.3, 0.7"),
    ):
        with pytest.raises(UserError, match="cannot be gone on with") as error:
            in_process(monkeypatch, tmp_path / "run", *RUN, "--resume", "must", "--steps", 2, *change)
        assert message in str(error.value)
    flags = [*RUN, *chats, "--resume", "must", "--steps", 2]
    in_process(monkeypatch, tmp_path / "run", *flags, "--eval-data", *data["text"])


# ------------------------------------------------------------------------------------------------- bad input

GOOD = make_conversation(0)
BAD_DATA = {
    "not JSON": ([GOOD, GOOD, b"{oops"], "bad.jsonl:3: not JSON: Expecting property name"),
    "no fields": ([{"question": "?"}], "bad.jsonl:1: a record with the keys ['question']; expected `messages`"),
    "no messages": ([GOOD, {"messages": []}], "bad.jsonl:2: `messages` is []; expected a list of messages"),
    "no content": ([GOOD, chat(("user", "?"), ("assistant", None))], "bad.jsonl:2: message 2 has no content"),
    "unknown role": ([GOOD, chat(("user", "?"), ("robot", "!"))], "bad.jsonl:2: message 2 has the role 'robot'"),
    "no assistant": ([GOOD, chat(("user", "?"))], "bad.jsonl:2: no assistant message; there is nothing to learn"),
    "nothing supervised": ([GOOD, {"prompt": "", "completion": ""}], "bad.jsonl:2: no token is supervised"),
    "text among chats": ([GOOD, {"text": "Hi"}], "bad.jsonl:2: expected a conversation, as the first record"),
    "too long": ([chat(("user", "?" * 999), ("assistant", "!"))], "all 1 conversations are longer than --seq-len 64"),
    "not UTF-8": ([GOOD, b"caf\xe9"], "bad.jsonl:2: not UTF-8: byte 4 of the line is 0xe9"),
    "empty": ([], "bad.jsonl is empty"),
}


def write_bad(path, lines) -> str:
    """Records as JSON, bytes as they are."""
    path.write_bytes(b"".join(x + b"\n" if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines))
    return str(path)


@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(case, flag, cache, tmp_path, monkeypatch):
    lines, message = BAD_DATA[case]
    path = write_bad(tmp_path / "bad.jsonl", lines)
    good = ["--data", write_lines(tmp_path / "good.jsonl", [GOOD] * 9)] if flag == "--eval-data" else []
    with pytest.raises(UserError) as error:
        in_process(monkeypatch, tmp_path / "run", "--seq-len", 64, "--steps", 1, *good, flag, path)
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()  # refused before anything was written


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{tmp}", "{tmp} is a folder; expected files or a glob, such as '{tmp}/*.txt'"),
        ("hf:no/where", "hf:no/where cannot be loaded: "),
        ("{tmp}/none-*.jsonl", "{tmp}/none-*.jsonl: no file matches this glob"),
        ("{tmp}/weights.bin", "{tmp}/weights.bin: cannot read such files; expected .txt"),
    ],
)
@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
def test_bad_names(flag, name, message, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UserError) as error:
        in_process(monkeypatch, tmp_path / "run", "--steps", 1, flag, name.format(tmp=tmp_path))
    assert message.format(tmp=tmp_path) in str(error.value)


def test_bad_records_are_skipped_and_counted(cache, tmp_path, monkeypatch, capsys):
    bad = list(itertools.chain.from_iterable(lines for lines, _ in BAD_DATA.values() if lines and lines[0] == GOOD))
    path = write_bad(tmp_path / "bad.jsonl", bad)
    flags = ["--data", path, "--eval-data", path, "--seq-len", 64, "--steps", 1, "--no-export"]
    num_bad = sum(line != GOOD for line in bad)
    assert num_bad == 8
    in_process(monkeypatch, tmp_path / "run", *flags, "--bad-records", "skip")
    printed = capsys.readouterr().out
    warning = f"warning: 8 bad records are left out, as {path}:3: not JSON"
    assert printed.count(f"data       {warning}") == 1 and printed.count(f"eval data  {warning}") == 1
    assert f"in {len(bad) - num_bad} conversations" in printed
    # The cache of the run that skipped them does not let them pass.
    with pytest.raises(UserError, match=r"bad.jsonl:3: not JSON.*--bad-records skip leaves such records out"):
        in_process(monkeypatch, tmp_path / "none", *flags)
