"""Records to token ids: python -m pytest tests/test_cache.py"""

import fcntl
import gzip
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from qwen3_trn import cache, encode, sources
from qwen3_trn.cache import open_cache
from qwen3_trn.chat import recognise, render_batch, to_chat
from qwen3_trn.errors import UserError
from qwen3_trn.sources import find_sources, read_records
from tests.caches import read_documents
from tests.common import REPO, TINY


def tokenize(*names: str | Path, tokenizer_dir: Path = TINY, **settings) -> Path:
    """One source's cache, in the folder `cache` beside its first file."""
    (source,) = find_sources(list(map(str, names)))
    return cache.tokenize(source, tokenizer_dir, Path(names[0]).parent / "cache", **settings)


def caches_in(folder: Path) -> list[Path]:
    """All but the locks, which stay."""
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def write_jsonl(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat_record(*contents: str) -> dict:
    roles = itertools.cycle(["user", "assistant"])
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


def published_tokenizer_dir() -> Path:
    if not os.environ.get("QWEN3_TOKENIZER_DIR"):
        pytest.skip("set QWEN3_TOKENIZER_DIR to a folder with the tokenizer files of a released Qwen3")
    return Path(os.environ["QWEN3_TOKENIZER_DIR"])


# --- texts ---


def test_txt_documents_round_trip(tmp_path, tokenizer):
    (tmp_path / "one.txt").write_text("One day,\n\nMia lost her hat.\n")
    (tmp_path / "many.txt").write_text(
        "\n\n  A b\n c \n<|endoftext|>\n \n<|endoftext|>\n<|endoftext|>\n  d <|endoftext|> e"
    )
    made = tokenize(tmp_path / "one.txt", tmp_path / "many.txt")
    documents = read_documents(made)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    texts = ["One day,\n\nMia lost her hat.", "  A b\n c ", "  d <|endoftext|> e"]
    assert documents == [[*tokenizer(text).input_ids, end] for text in texts]
    assert [tokenizer.decode(document[:-1]) for document in documents] == texts
    assert documents[2].count(end) == 2  # spelled out within a line, it is a token like any other
    meta = open_cache(made).meta
    assert (meta["kind"], meta["num_documents"], meta["num_tokens"]) == ("text", 3, sum(map(len, documents)))


def test_jsonl_texts_are_kept_as_they_are(tmp_path, tokenizer):
    texts = ["\n one\n", "two <|endoftext|>\n<|endoftext|>\n", "漢字 🙂 \x00"]
    file = write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "text": text} for text in [*texts, " \n"]])
    assert [tokenizer.decode(document[:-1]) for document in read_documents(tokenize(file))] == texts


@pytest.mark.parametrize("folder", ["bundled", "published"])
def test_long_documents_in_pieces_keep_their_tokens(tmp_path, monkeypatch, folder):
    from transformers import AutoTokenizer

    tokenizer_dir = TINY if folder == "bundled" else published_tokenizer_dir()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    rng = np.random.default_rng(0)
    spaces = ["\n", "\n", "\r\n", "\r", " ", "  ", "\t", "\u3000"]
    others = ["a", "Mia", "é", "e\u0301", "\u0301", "7", "12", ".", "!?", "字", "'s"]
    documents = ["a" + "".join(rng.choice(spaces + others, size=80)) + "a" for _ in range(100)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents), newline="")
    monkeypatch.setattr(sources, "PIECE_CHARS", 10)
    monkeypatch.setattr(encode, "BATCH_BYTES", 50)
    assert len(list(read_records(str(tmp_path / "a.txt")))) > 2 * len(documents)
    made = tokenize(tmp_path / "a.txt", tokenizer_dir=tokenizer_dir)
    assert [document[:-1] for document in read_documents(made)] == tokenizer(documents).input_ids


def test_published_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(published_tokenizer_dir())
    texts = [
        "Hello, world!",
        "def f(x):\n    return x**2  # 12345",
        "Ünïcödé 漢字 🙂",
        "<|im_start|>user\nhi<|im_end|>",
    ]
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    made = tokenize(file, tokenizer_dir=published_tokenizer_dir())
    assert read_documents(made) == [[*tokenizer(text).input_ids, 151643] for text in texts]


def test_a_tokenizer_that_pads_and_cuts_is_told_not_to(tmp_path, tokenizer):
    from tokenizers import Tokenizer

    folder = shutil.copytree(TINY, tmp_path / "tokenizer")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    texts = ["One day", "Mia lost her hat, and then she found it."]
    made = tokenize(write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts]), tokenizer_dir=folder)
    assert [document[:-1] for document in read_documents(made)] == tokenizer(texts).input_ids


def test_the_largest_token_and_its_file(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b <think>")
    meta = open_cache(tokenize(tmp_path / "a.txt", tmp_path / "b.txt")).meta
    assert meta["max_token_id"] == tokenizer.convert_tokens_to_ids("<think>")
    assert meta["max_token_file"] == str(tmp_path / "b.txt")


# --- conversations ---

CHATS = [chat_record("Hi", f"One day {number}, Mia lost her hat.", "More?", "No." * number) for number in range(1, 30)]


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_conversations_are_what_chat_renders(tmp_path, monkeypatch, tokenizer, train_on):
    monkeypatch.setattr(encode, "BATCH_BYTES", 300)
    made = open_cache(tokenize(write_jsonl(tmp_path / "a.jsonl", CHATS), train_on=train_on))
    chats = [to_chat(record, recognise(record)) for record in CHATS]
    expected = render_batch(tokenizer, chats, train_on)
    assert made.tokens.tolist() == np.concatenate([chat.input_ids for chat in expected]).tolist()
    assert made.supervised.tolist() == np.concatenate([chat.supervised for chat in expected]).tolist()
    assert np.diff(made.offsets).tolist() == [len(chat.input_ids) for chat in expected]
    assert (made.meta["kind"], made.meta["num_documents"]) == ("chat", len(CHATS))


def test_worker_processes_make_the_same_cache(tmp_path, monkeypatch):
    good = write_jsonl(tmp_path / "good.jsonl", CHATS)
    bad = write_jsonl(tmp_path / "bad.jsonl", [*CHATS, chat_record("no answer"), *CHATS, chat_record("again")])
    monkeypatch.setattr(encode, "BATCH_BYTES", 1000)
    one = tokenize(good, bad, bad_records="skip")
    monkeypatch.setattr(encode, "BYTES_A_WORKER", bad.stat().st_size // 2)
    monkeypatch.setattr(encode, "MIN_WORKERS", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    sizes = []
    start = encode.ProcessPoolExecutor
    monkeypatch.setattr(
        encode, "ProcessPoolExecutor", lambda number, *args: sizes.append(number) or start(number, *args)
    )
    before = {path.name: path.read_bytes() for path in one.iterdir()}
    shutil.rmtree(one)
    assert {path.name: path.read_bytes() for path in tokenize(good, bad, bad_records="skip").iterdir()} == before
    assert sizes == [2]


def test_workers_end_with_their_parent(tmp_path):
    """Workers ignore SIGTERM, as a parent that is told to stop still needs them; when it is killed they end."""
    code = (
        "import os, time\nfrom qwen3_trn.encode import Batch, _encode_in_processes\n"
        "def get_process(records):\n"
        "    return os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    for _, process in _encode_in_processes(get_process, iter([Batch('', [], None)]), 1):\n"
        "        print(process, flush=True)\n"
        "        time.sleep(100)\n"
    )
    (tmp_path / "parent.py").write_text(code)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    worker = int(parent.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker, number)
    time.sleep(0.5)
    assert is_running(worker)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)


def wait_or_return_or_die(records) -> None:
    if records == ["wait"]:
        time.sleep(100)
    elif records == ["die"]:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_ends_the_others():
    # Python's pool looks at a worker that it has just started only after the next result: hence the one that returns.
    batches = iter([encode.Batch("", [what], None) for what in ("wait", "return", "die")])
    started = time.monotonic()
    with pytest.raises(UserError, match="a process that tokenizes was killed, as the system does when memory runs out"):
        list(encode._encode_in_processes(wait_or_return_or_die, batches, 2))
    assert time.monotonic() - started < 90, "the one that waits was not ended"


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- the kind of a source ---


def test_the_first_record_that_can_be_read_says_what_a_source_holds(tmp_path):
    both = {"text": "a text", **chat_record("a", "b")}
    file = write_jsonl(tmp_path / "a.jsonl", [both])
    assert open_cache(tokenize(file)).meta["kind"] == "chat"
    assert open_cache(tokenize(file, format="chat")).meta["kind"] == "chat"
    assert open_cache(tokenize(file, format="text")).meta["kind"] == "text"
    (tmp_path / "b.jsonl").write_text('not JSON\n{"text": "a"}\n')
    assert open_cache(tokenize(tmp_path / "b.jsonl", bad_records="skip")).meta["kind"] == "text"


# --- the cache ---


def test_cache_is_made_once_for_the_same_contents(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("One day")
    (tmp_path / "copy.txt").write_text("One day")
    shutil.copytree(TINY, tmp_path / "tokenizer")
    made = tokenize(tmp_path / "a.txt")
    before = {path: path.stat().st_mtime_ns for path in [made, *made.iterdir()]}
    monkeypatch.setattr(encode, "load_tokenizer", None)  # calling it would fail
    assert tokenize(tmp_path / "copy.txt", tokenizer_dir=tmp_path / "tokenizer") == made
    assert before == {path: path.stat().st_mtime_ns for path in [made, *made.iterdir()]}
    assert caches_in(tmp_path / "cache") == [made]


def test_cache_is_made_again_when_anything_changes(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text('{"text": "A"}')
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "c.jsonl").write_text('{"text": "A"}')
    chats = write_jsonl(tmp_path / "d.jsonl", CHATS)
    folder = tmp_path / "tokenizer"
    shutil.copytree(TINY, folder)

    def make(*names: str, **settings) -> Path:
        encode.load_tokenizer.cache_clear()
        return tokenize(*(tmp_path / name for name in names), tokenizer_dir=folder, **settings)

    made = [make("a.txt"), make("c.jsonl"), make("a.txt", "b.txt"), make("b.txt", "a.txt")]
    made += [make(chats.name), make(chats.name, train_on="last"), make(chats.name, mask_empty_think=False)]
    (tmp_path / "b.txt").write_text("C")
    made.append(make("a.txt", "b.txt"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<|im_end|>"}))
    made.append(make("a.txt"))
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    made.append(make("a.txt"))
    (folder / "chat_template.jinja").write_text(config["chat_template"] + "\n")
    made.append(make(chats.name))
    monkeypatch.setattr(cache, "CACHE_FORMAT", cache.CACHE_FORMAT + 1)
    made.append(make("a.txt"))
    assert len(set(made)) == len(made)
    assert make("a.txt", train_on="last") == made[-1]  # that says nothing about texts


def test_failure_leaves_no_cache(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"bad \xff")
    with pytest.raises(UserError):
        tokenize(tmp_path / "a.txt", tmp_path / "b.txt")
    assert caches_in(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", ["cut tokens", "flipped bit", "missing file", "cut meta", "empty folder"])
def test_a_damaged_cache_is_made_again(tmp_path, capfd, damage):
    file = write_jsonl(tmp_path / "a.jsonl", CHATS)
    made = tokenize(file)
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    if damage == "cut tokens":
        os.truncate(made / "tokens.bin", len(before["tokens.bin"]) - 4)
    elif damage == "flipped bit":
        broken = bytearray(before["supervised.bin"])
        broken[7] ^= 1
        (made / "supervised.bin").write_bytes(broken)
    elif damage == "missing file":
        (made / "offsets.bin").unlink()
    elif damage == "cut meta":
        os.truncate(made / "meta.json", 50)
    else:
        shutil.rmtree(made)
        made.mkdir()
    assert tokenize(file) == made
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before
    assert f"the token cache {made} is damaged" in capfd.readouterr().err
    tokenize(file)
    assert capfd.readouterr().err == ""


def test_leftovers_of_killed_runs_go_and_those_of_live_ones_stay(tmp_path):
    folder = tmp_path / "cache"
    for name in ("partial-dead", "partial-live"):
        (folder / name).mkdir(parents=True)
        (folder / name / "tokens.bin").write_text("x")
    with open(folder / "live.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "a.txt").write_text("x")
        made = tokenize(tmp_path / "a.txt")
        assert sorted(caches_in(folder)) == sorted([made, folder / "partial-live"])


def test_a_folder_that_is_finished_while_leftovers_are_looked_for(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    gone = tmp_path / "cache" / "partial-finished"
    monkeypatch.setattr(Path, "glob", lambda *_: [gone])
    made = tokenize(tmp_path / "a.txt")
    assert caches_in(tmp_path / "cache") == [made]


def test_a_killed_run_is_finished_by_the_next(tmp_path):
    """A run that is killed while it tokenizes leaves an unfinished folder, which the next one replaces."""
    (tmp_path / "a.txt").write_text("One day\n" * 1000)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom qwen3_trn import cache, encode, sources\n"
        "cache._checksum = lambda path: os.kill(os.getpid(), 9)\n"
        "(source,) = sources.find_sources([sys.argv[1]])\n"
        "cache.tokenize(source, Path(sys.argv[2]), Path(sys.argv[3]))\n"
    )
    arguments = [sys.executable, "-c", code, tmp_path / "a.txt", TINY, tmp_path / "cache"]
    killed = subprocess.run(arguments, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    (partial,) = caches_in(tmp_path / "cache")
    assert partial.name.startswith("partial-") and (partial / "tokens.bin").stat().st_size > 0
    made = tokenize(tmp_path / "a.txt")
    assert caches_in(tmp_path / "cache") == [made]
    assert len(read_documents(made)) == 1


def test_two_runs_share_the_work(tmp_path, capfd, monkeypatch):
    """The second one waits for the first, says so, and finds the cache made."""
    (tmp_path / "a.txt").write_text("One day")
    write_arrays = cache._write_arrays
    second: list = []

    def write_slowly(*args, **settings):
        thread = threading.Thread(target=lambda: second.append(tokenize(tmp_path / "a.txt")))
        thread.start()
        while "waiting for another process" not in capfd.readouterr().err:
            time.sleep(0.01)
        assert thread.is_alive() and not second
        second.append(thread)
        return write_arrays(*args, **settings)

    monkeypatch.setattr(cache, "_write_arrays", write_slowly)
    made = tokenize(tmp_path / "a.txt")
    second[0].join(timeout=60)
    assert second[1:] == [made]
    assert caches_in(tmp_path / "cache") == [made]


# --- bad input ---


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"", "a.txt is empty; expected text or conversations."),
        ("a.txt", b" \n\t\n<|endoftext|>\n", "a.txt holds nothing but white space; expected text or conversations."),
        ("a.jsonl", b'\n{"text": " "}\n', "a.jsonl holds nothing but white space"),
        ("a.jsonl", b"\n\n", "a.jsonl can be used; it holds no records"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "a.jsonl:2: not UTF-8: byte 11 of the line is 0xe9."),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl:3: not JSON: Expecting value (column 9); expected one"),
        ("a.jsonl", b'{"text": "a"}\n{"content": "b"}\n', "a.jsonl:2: expected an object with a string `text`, as"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', 'a.jsonl:2: expected an object with a string `text`'),
        ("a.jsonl", b'{"text": 1}\n', 'first record of its source; found {"text": 1}'),
        ("a.jsonl", b'["text"]\n', "a.jsonl can be used; "),
        ("a.jsonl", b'{"content": "b"}\n', "a.jsonl:1: a record with the keys ['content']; expected `messages`, "),
        ("a.jsonl", b'{"text": "a\\ud83d b"}\n', "a.jsonl:1: `text` holds '\\ud83d', half a surrogate pair."),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n', "a.jsonl:1: no assistant message"),
        ("a.jsonl", b'{"messages": [{"role": "boss", "content": "a"}]}\n', "a.jsonl:1: message 1 has the role 'boss'"),
        ("a.jsonl", json.dumps(CHATS[0]).encode() + b'\n{"text": "a"}\n', "a.jsonl:2: expected a conversation, as the"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text": "b"}\n')[:-9], "a.jsonl.gz cannot be read to its end"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        tokenize(tmp_path / name)
    assert not (tmp_path / "cache").exists() or caches_in(tmp_path / "cache") == []


def test_bad_records_are_left_out_and_counted(tmp_path, tokenizer):
    records = [CHATS[0], chat_record("a"), {"text": "b"}, CHATS[1], chat_record("c"), chat_record("d")]
    file = write_jsonl(tmp_path / "a.jsonl", records)
    with pytest.raises(UserError, match=r"a\.jsonl:2: no assistant message; .* \(--bad-records skip leaves"):
        tokenize(file)
    made = open_cache(tokenize(file, bad_records="skip"))
    assert (made.meta["num_documents"], made.meta["num_bad"]) == (2, 4)
    assert list(made.meta["bad_reasons"].values()) == [3, 1]
    assert [example.partition(": ")[0] for example in made.meta["bad_examples"]] == [
        f"{file}:{n}" for n in (2, 3, 5, 6)
    ]
    with pytest.raises(UserError, match=r"a\.jsonl:2: no assistant message"):  # though the cache is there now
        tokenize(file)
    with pytest.raises(UserError, match=r"all 2 records are bad; the first is .*b\.jsonl:1: no assistant"):
        tokenize(write_jsonl(tmp_path / "b.jsonl", [chat_record("a"), chat_record("b")]), bad_records="skip")


def test_bad_tokenizers(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    chats = write_jsonl(tmp_path / "b.jsonl", CHATS)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    tokenizer = (TINY / "tokenizer.json").read_text()

    def try_tokenizer(files: dict[str, str], data: Path = tmp_path / "a.txt") -> Path:
        shutil.rmtree(tmp_path / "tokenizer", ignore_errors=True)
        (tmp_path / "tokenizer").mkdir()
        for name, content in files.items():
            (tmp_path / "tokenizer" / name).write_text(content)
        encode.load_tokenizer.cache_clear()
        encode._find_end_of_text.cache_clear()
        return tokenize(data, tokenizer_dir=tmp_path / "tokenizer")

    with pytest.raises(UserError, match=r"tokenizer holds no tokenizer; expected tokenizer\.json"):
        try_tokenizer({"tokenizer_config.json": json.dumps(config)})
    with pytest.raises(UserError, match="tokenizer cannot be loaded: JSONDecodeError"):
        try_tokenizer({"tokenizer_config.json": json.dumps(config), "tokenizer.json": tokenizer[:1000]})
    raising = config | {"chat_template": "{{ raise_exception('no such thing') }}"}
    with pytest.raises(UserError, match=r"b\.jsonl:1: the chat template cannot render .*no such thing"):
        try_tokenizer({"tokenizer_config.json": json.dumps(raising), "tokenizer.json": tokenizer}, chats)

    # Without <|endoftext|> documents end with the eos_token, and without that there is no end.
    tokenizer = tokenizer.replace("<|endoftext|>", "<|other|>")
    del config["added_tokens_decoder"], config["additional_special_tokens"], config["pad_token"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    made = try_tokenizer({"tokenizer_config.json": json.dumps(config), "tokenizer.json": tokenizer})
    im_end = next(t["id"] for t in json.loads(tokenizer)["added_tokens"] if t["content"] == "<|im_end|>")
    assert read_documents(made)[0][-1] == im_end
    del config["eos_token"]
    with pytest.raises(UserError, match=r"has neither <\|endoftext\|> nor an eos_token"):
        try_tokenizer({"tokenizer_config.json": json.dumps(config), "tokenizer.json": tokenizer})
