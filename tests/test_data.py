"""The data path against slow, plain references: python -m pytest tests/test_data.py"""

import contextlib
import itertools
import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_trn import data
from qwen3_trn.data import PADDING_DOCUMENT, PackedText, find_files, tokenize
from qwen3_trn.errors import UserError
from qwen3_trn.loss import IGNORE_INDEX

ROOT = Path(__file__).parent.parent
TINY = ROOT / "assets" / "tiny"


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


def write_cache(folder: Path, documents: list[list[int]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.concatenate(documents).astype(np.int32).tofile(folder / "tokens.bin")
    offsets = np.cumsum([0] + [len(document) for document in documents])
    offsets.astype(np.int64).tofile(folder / "document_offsets.bin")
    meta = {
        "key": "test",
        "num_tokens": int(offsets[-1]),
        "num_documents": len(documents),
        "max_token_id": max(map(max, documents)),
        "max_token_file": "test.txt",
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def number_tokens(lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths in which every token id occurs once, from 1."""
    ends = np.cumsum(lengths)
    return [list(range(end - length + 1, end + 1)) for length, end in zip(lengths, ends.tolist(), strict=True)]


def read_cache(cache: Path) -> list[list[int]]:
    tokens = np.fromfile(cache / "tokens.bin", np.int32).tolist()
    offsets = np.fromfile(cache / "document_offsets.bin", np.int64).tolist()
    return [tokens[begin:end] for begin, end in itertools.pairwise(offsets)]


def epoch_rows(packed: PackedText, epoch: int) -> data.Rows:
    return packed.batch(range(epoch * packed.rows_per_epoch, (epoch + 1) * packed.rows_per_epoch))


# --- packing ---


def reference_rows(documents: list[list[int]], seq_len: int) -> list[list[tuple[int, int, int, int]]]:
    """Rows of (input id, label, position, document id), packed token by token in the given order of documents."""
    rows: list[list[tuple[int, int, int, int]]] = [[]]
    for document in documents:
        position, document_id = 0, (rows[-1][-1][3] + 1 if rows[-1] else 0)
        for index, token in enumerate(document):
            if len(rows[-1]) == seq_len:
                rows.append([])
                position, document_id = 0, 0
            label = document[index + 1] if index + 1 < len(document) else -100
            rows[-1].append((token, label, position, document_id))
            position += 1
    for padding in range(seq_len - len(rows[-1])):
        rows[-1].append((0, -100, padding, -1))
    return rows


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 12) | st.integers(1, 100), min_size=1, max_size=20),
    seq_len=st.integers(1, 20) | st.integers(1, 2000),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_rows_equal_the_reference(tmp_path_factory, lengths, seq_len, seed, epoch):
    documents = number_tokens(lengths)
    packed = PackedText(write_cache(tmp_path_factory.getbasetemp() / "reference", documents), seq_len, seed)
    document_order = data._permutation(len(documents), seed, epoch, 0)
    expected = reference_rows([documents[index] for index in document_order], seq_len)
    assert packed.rows_per_epoch == len(expected)

    row_order = data._permutation(len(expected), seed, epoch, 1)
    for index, expected_index in enumerate(row_order):
        row = packed.row(epoch * len(expected) + index)
        assert all(array.dtype == np.int32 and array.shape == (seq_len,) for array in row)
        assert np.array_equal(np.stack(row, axis=1), expected[expected_index])


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("lengths", [[1], [50], [1] * 40, [1, 30, 2, 1, 64, 3, 128, 5]])
def test_every_token_is_read_and_predicted_once_an_epoch(tmp_path, lengths, seq_len):
    documents = number_tokens(lengths)
    packed = PackedText(write_cache(tmp_path / "cache", documents), seq_len, seed=3)
    for epoch in range(3):
        rows = epoch_rows(packed, epoch)
        read = rows.input_ids[rows.document_ids != PADDING_DOCUMENT]
        assert sorted(read) == [token for document in documents for token in document]
        predicted = rows.labels[rows.labels != IGNORE_INDEX]
        assert sorted(predicted) == [token for document in documents for token in document[1:]]


def test_only_one_row_of_an_epoch_has_padding(tmp_path):
    packed = PackedText(write_cache(tmp_path / "cache", number_tokens([5, 9, 3, 8])), seq_len=7, seed=0)
    for epoch in range(4):
        num_padding = (epoch_rows(packed, epoch).document_ids == PADDING_DOCUMENT).sum(axis=1)
        assert sorted(num_padding) == [0, 0, 0, 3]


def test_epochs_and_seeds_differ_in_documents_and_rows(tmp_path):
    cache = write_cache(tmp_path / "cache", number_tokens([4] * 50))
    orders = set()
    for seed in range(3):
        packed = PackedText(cache, seq_len=4, seed=seed)  # one document a row
        orders |= {tuple(epoch_rows(packed, epoch).input_ids[:, 0]) for epoch in range(3)}
    assert len(orders) == 9
    orders = set()
    for seed in range(3):
        packed = PackedText(cache, seq_len=12, seed=seed)  # three documents a row, in shuffled order
        rows = [epoch_rows(packed, epoch).input_ids for epoch in range(3)]
        orders |= {tuple(sorted(map(tuple, epoch))) for epoch in rows}
        assert all(row_order.tolist() != sorted(row_order) for row_order in (packed._plan(e)[2] for e in range(3)))
    assert len(orders) == 9


def test_a_position_alone_decides_its_row(tmp_path):
    cache = write_cache(tmp_path / "cache", number_tokens([7, 1, 20, 3, 3, 11]))
    packed = PackedText(cache, seq_len=8, seed=1)
    positions = list(
        range(5 * packed.rows_per_epoch)
    )  # batches straddle epochs, and more than two epochs are asked for
    rows = packed.batch(positions)
    assert rows.input_ids.shape == (len(positions), 8) and rows.input_ids.dtype == np.int32
    for position in reversed(positions):
        for a, b, c in zip(rows, packed.row(position), PackedText(cache, 8, seed=1).row(position), strict=True):
            assert np.array_equal(a[position], b) and np.array_equal(b, c)


def test_the_order_never_changes():
    """A run must resume in the same order under another version of numpy, and of this code."""
    assert data._permutation(8, 0, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert data._permutation(8, 7, 2, 1).tolist() == [2, 1, 7, 6, 4, 0, 5, 3]


# --- files to documents to tokens ---


def test_txt_documents_round_trip(tmp_path, tokenizer):
    (tmp_path / "one.txt").write_text("One day,\n\nMia lost her hat.\n")
    (tmp_path / "many.txt").write_text(
        "\n\n  A b\n c \n<|endoftext|>\n \n<|endoftext|>\n<|endoftext|>\n  d <|endoftext|> e"
    )
    packed = PackedText(
        cache := tokenize([tmp_path / "one.txt", tmp_path / "many.txt"], TINY, tmp_path / "cache"), 8, 0
    )
    documents = read_cache(cache)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    texts = ["One day,\n\nMia lost her hat.", "  A b\n c ", "  d <|endoftext|> e"]
    assert documents == [[*tokenizer(text).input_ids, end] for text in texts]
    assert [tokenizer.decode(document[:-1]) for document in documents] == texts
    assert documents[2].count(end) == 2  # spelled out within a line, it is a token like any other
    assert packed.num_documents == 3
    assert packed.num_tokens == sum(map(len, documents))
    assert packed.key == cache.name


def test_jsonl_documents_are_kept_as_they_are(tmp_path, tokenizer):
    texts = ["\n one\n", "two <|endoftext|>\n<|endoftext|>\n", "漢字 🙂 \x00"]
    lines = [json.dumps({"id": 1, "text": text}) for text in [*texts, " \n"]]
    (tmp_path / "a.JSONL").write_text("\n\n".join(lines) + "\n")
    documents = read_cache(tokenize([tmp_path / "a.JSONL"], TINY, tmp_path / "cache"))
    assert [tokenizer.decode(document[:-1]) for document in documents] == texts


def test_windows_files(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n<|endoftext|>\r\nc\r\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "d"}\r\n')
    documents = read_cache(tokenize([tmp_path / "a.txt", tmp_path / "b.jsonl"], TINY, tmp_path / "cache"))
    assert [tokenizer.decode(document[:-1]) for document in documents] == ["a\r\nb", "c", "d"]


@pytest.mark.parametrize("folder", ["bundled", "published"])
def test_long_documents_in_pieces_keep_their_tokens(tmp_path, monkeypatch, folder):
    from transformers import AutoTokenizer

    tokenizer_dir = TINY if folder == "bundled" else published_tokenizer_dir()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    rng = np.random.default_rng(0)
    alphabet = [
        "\n",
        "\n",
        "\r\n",
        "\r",
        " ",
        "  ",
        "\t",
        "a",
        "Mia",
        "é",
        "e\u0301",
        "\u0301",
        "7",
        "12",
        ".",
        "!?",
        "字",
        "\u3000",
        "'s",
    ]
    documents = ["a" + "".join(rng.choice(alphabet, size=80)) + "a" for _ in range(100)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents), newline="")
    monkeypatch.setattr(data, "PIECE_CHARS", 10)
    monkeypatch.setattr(data, "BATCH_CHARS", 50)
    pieces = [piece for piece, _ in data._read_txt(tmp_path / "a.txt", data.tqdm(disable=True))]
    assert len(pieces) > 2 * len(documents)
    cache = tokenize([tmp_path / "a.txt"], tokenizer_dir, tmp_path / "cache")
    assert [document[:-1] for document in read_cache(cache)] == tokenizer(documents).input_ids


def test_two_sources_and_the_largest_token(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b <think>")
    packed = PackedText(tokenize([tmp_path / "a.txt", tmp_path / "b.txt"], TINY, tmp_path / "cache"), 4, 0)
    assert packed.num_documents == 2
    assert packed.max_token_id == tokenizer.convert_tokens_to_ids("<think>")
    assert packed.max_token_file == str(tmp_path / "b.txt")


def published_tokenizer_dir() -> Path:
    if "QWEN3_TOKENIZER_DIR" not in os.environ:
        pytest.skip("set QWEN3_TOKENIZER_DIR to a folder with the tokenizer files of a released Qwen3")
    return Path(os.environ["QWEN3_TOKENIZER_DIR"])


def test_published_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(published_tokenizer_dir())
    texts = [
        "Hello, world!",
        "def f(x):\n    return x**2  # 12345",
        "Ünïcödé 漢字 🙂",
        "<|im_start|>user\nhi<|im_end|>",
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    documents = read_cache(tokenize([tmp_path / "a.jsonl"], published_tokenizer_dir(), tmp_path / "cache"))
    assert documents == [[*tokenizer(text).input_ids, 151643] for text in texts]


# --- the cache ---


def test_cache_is_made_once_for_the_same_contents(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("One day")
    (tmp_path / "copy.txt").write_text("One day")
    shutil.copytree(TINY, tmp_path / "tokenizer")
    cache = tokenize([tmp_path / "a.txt"], TINY, tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in [cache, *cache.iterdir()]}
    monkeypatch.setattr(data, "_load_tokenizer", None)  # calling it would fail
    assert tokenize([tmp_path / "copy.txt"], tmp_path / "tokenizer", tmp_path / "cache") == cache
    assert before == {path: path.stat().st_mtime_ns for path in [cache, *cache.iterdir()]}
    assert list((tmp_path / "cache").iterdir()) == [cache]


def test_cache_is_made_again_when_anything_changes(tmp_path, monkeypatch):
    a, b, c = (tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl"))
    a.write_text('{"text": "A"}')
    b.write_text("B")
    c.write_text('{"text": "A"}')
    shutil.copytree(TINY, tmp_path / "tokenizer")

    def make(*files: Path) -> Path:
        return tokenize(files, tmp_path / "tokenizer", tmp_path / "cache")

    caches = [make(a), make(c), make(a, b), make(b, a)]
    b.write_text("C")
    caches.append(make(a, b))
    config = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<|im_end|>"}))
    caches.append(make(a))
    tokenizer = (tmp_path / "tokenizer" / "tokenizer.json").read_text()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(tokenizer + "\n")
    caches.append(make(a))
    monkeypatch.setattr(data, "CACHE_FORMAT", data.CACHE_FORMAT + 1)
    caches.append(make(a))
    assert len(set(caches)) == len(caches)


def test_failure_leaves_no_cache(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"bad \xff")
    with pytest.raises(UserError):
        tokenize([tmp_path / "a.txt", tmp_path / "b.txt"], TINY, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_losing_a_race_is_fine(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("One day")
    load_tokenizer = data._load_tokenizer

    def be_overtaken(folder):
        monkeypatch.setattr(data, "_load_tokenizer", load_tokenizer)
        tokenize([tmp_path / "a.txt"], TINY, tmp_path / "cache")
        return load_tokenizer(folder)

    monkeypatch.setattr(data, "_load_tokenizer", be_overtaken)
    cache = tokenize([tmp_path / "a.txt"], TINY, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [cache]
    assert len(read_cache(cache)) == 1


# --- bad input ---


def test_find_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c[1].txt", "d.jsonl", "blob"):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "folder.txt" / "e.txt").write_text("x")
    (tmp_path / "link.txt").symlink_to("blob")  # as in a Hugging Face cache
    assert find_files(["b.txt", "[ab].txt", str(tmp_path / "a.txt")]) == [Path("b.txt"), Path("a.txt")]
    assert find_files(["*.txt"]) == [Path(name) for name in ("a.txt", "b.txt", "c[1].txt", "link.txt")]
    assert find_files(["c[1].txt", "d.jsonl"]) == [Path("c[1].txt"), Path("d.jsonl")]
    assert find_files(["**/e.txt"]) == [Path("folder.txt/e.txt")]
    assert find_files(["sample"]) == [TINY / "sample.txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(["~/a.txt"]) == [tmp_path / "a.txt"]


@pytest.mark.parametrize(
    "patterns, message",
    [
        ([], "--data is empty; expected"),
        (["none.txt"], "--data none.txt: no such file; relative paths start from /"),
        (["*.jsonl"], "--data *.jsonl: no file matches this glob"),
        (["folder"], "--data folder is a folder; expected files or a glob, such as 'folder/*.txt'."),
        (["a.csv"], "a.csv: cannot read '.csv' files; expected .txt, or .jsonl with a `text` field."),
        (["a"], "a: cannot read '' files; expected"),
    ],
)
def test_bad_patterns(tmp_path, monkeypatch, patterns, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a").write_text("x")
    with pytest.raises(UserError, match=re.escape(message)):
        find_files(patterns)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"", "a.txt is empty; expected text."),
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.txt", b" \n\t\n<|endoftext|>\n", "a.txt holds nothing but white space; expected text."),
        ("a.jsonl", b'\n{"text": " "}\n', "a.jsonl holds nothing but white space"),
        ("a.txt", b"one\nt\xc3\xa9o \xff\n", "a.txt:2: not UTF-8: byte 0xff at offset 9. Convert"),
        ("a.txt", b"cut \xc3", "a.txt:1: not UTF-8: byte 0xc3 at offset 4."),
        ("a.txt", "utf-16".encode("utf-16"), "a.txt:1: not UTF-8: byte 0xff at offset 0."),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "a.jsonl:2: not UTF-8: byte 0xe9 at offset 24."),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl:3: not JSON: Expecting value (column 9); expected one"),
        ("a.jsonl", b'{"text": "a"}\n{"content": "b"}\n', "a.jsonl:2: expected an object with a string `text`; found"),
        ("a.jsonl", b'{"text": null}\n', 'a.jsonl:1: expected an object with a string `text`; found {"text": null}'),
        ("a.jsonl", b'["text"]\n', 'a.jsonl:1: expected an object with a string `text`; found ["text"]'),
        ("a.jsonl", b'{"text": "a\\ud83d b"}\n', "a.jsonl:1: `text` holds '\\ud83d', half a surrogate pair."),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        tokenize([tmp_path / name], TINY, tmp_path / "cache")


def test_bad_tokenizers(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    tokenizer = (TINY / "tokenizer.json").read_text()

    def try_tokenizer(files: dict[str, str]) -> Path:
        shutil.rmtree(tmp_path / "tokenizer", ignore_errors=True)
        (tmp_path / "tokenizer").mkdir()
        for name, content in files.items():
            (tmp_path / "tokenizer" / name).write_text(content)
        return tokenize([tmp_path / "a.txt"], tmp_path / "tokenizer", tmp_path / "cache")

    with pytest.raises(UserError, match=r"tokenizer holds no tokenizer; expected tokenizer\.json"):
        try_tokenizer({"tokenizer_config.json": json.dumps(config)})
    with pytest.raises(UserError, match="tokenizer cannot be loaded: JSONDecodeError"):
        try_tokenizer({"tokenizer_config.json": json.dumps(config), "tokenizer.json": tokenizer[:1000]})

    # Without <|endoftext|> documents end with the eos_token, and without that there is no end.
    tokenizer = tokenizer.replace("<|endoftext|>", "<|other|>")
    del config["added_tokens_decoder"], config["additional_special_tokens"], config["pad_token"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    cache = try_tokenizer({"tokenizer_config.json": json.dumps(config), "tokenizer.json": tokenizer})
    im_end = next(t["id"] for t in json.loads(tokenizer)["added_tokens"] if t["content"] == "<|im_end|>")
    assert read_cache(cache)[0][-1] == im_end
    del config["eos_token"]
    with pytest.raises(UserError, match=r"has neither <\|endoftext\|> nor an eos_token"):
        try_tokenizer({"tokenizer_config.json": json.dumps(config), "tokenizer.json": tokenizer})


# --- the bundled miniature ---


def test_tiny_is_what_its_program_makes(tmp_path):
    runpy.run_path(str(ROOT / "assets" / "make_tiny.py"))["write"](tmp_path)
    names = ["config.json", "generation_config.json", "sample.txt", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in TINY.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), name


def test_tiny_tokenizer(tokenizer, caplog):
    from transformers import AutoTokenizer

    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    with warnings.catch_warnings(), contextlib.closing(caplog.handler):
        warnings.simplefilter("error")
        assert AutoTokenizer.from_pretrained(TINY).is_fast
    logger.removeHandler(caplog.handler)
    assert caplog.records == []
    config = json.loads((TINY / "config.json").read_text())
    assert len(tokenizer) <= 1000 < config["vocab_size"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["bos_token_id"] == tokenizer.pad_token_id
    assert set(tokenizer.get_added_vocab()) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"}
    assert (
        tokenizer.decode(tokenizer("<think>a</think><|im_end|>").input_ids, skip_special_tokens=True)
        == "<think>a</think>"
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>assistant\n"
    assert chat == expected


@settings(deadline=None, max_examples=300)
@given(text=st.text())
def test_tiny_tokenizer_round_trips_any_text(tokenizer, text):
    text = unicodedata.normalize("NFC", text)  # as Qwen's tokenizer does
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_command_in_the_docstring_runs(tmp_path):
    command = re.search(r"    python - <<END\n(.*?)    END", data.__doc__, re.DOTALL)[1].replace(
        "/tmp/qwen3_trn", str(tmp_path)
    )
    code = re.sub("^    ", "", command, flags=re.MULTILINE)
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.startswith("Rows(input_ids=array([")
