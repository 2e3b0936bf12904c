"""Names to records: python -m pytest tests/test_sources.py"""

import gzip
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from qwen3_trn import sources
from qwen3_trn.chat import BadRecord
from qwen3_trn.errors import UserError
from qwen3_trn.sources import Source, count_bytes, find_files, find_sources, hash_contents, name_place, read_records
from tests.common import TINY


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder, with a cache of datasets of its own."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    sources._load_hub.cache_clear()
    return tmp_path


def contents(name: str) -> list:
    return [record.content for record in read_records(name)]


def write_zstd(path: Path, content: bytes) -> None:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    path.write_bytes(sink.getvalue().to_pybytes())


# --- names ---


def test_find_files(folder, monkeypatch):
    for name in ("b.txt", "a.txt", "c[1].txt", "d.jsonl", "e.jsonl.gz", "f.jsonl.zst", "g.parquet", "blob"):
        (folder / name).write_text("x")
    (folder / "folder.txt").mkdir()
    (folder / "folder.txt" / "e.txt").write_text("x")
    (folder / "link.txt").symlink_to("blob")  # as in a Hugging Face cache
    assert find_files(["b.txt", "[ab].txt", str(folder / "a.txt")]) == ("b.txt", "a.txt")
    assert find_files(["*.txt"]) == ("a.txt", "b.txt", "c[1].txt", "link.txt")
    assert find_files(["c[1].txt", "d.jsonl", "e*", "*.zst", "g.parquet"]) == (
        *("c[1].txt", "d.jsonl", "e.jsonl.gz", "f.jsonl.zst", "g.parquet"),
    )
    assert find_files(["**/e.txt"]) == ("folder.txt/e.txt",)
    assert find_files(["sample", "hf:a/b", "hf:a/b"]) == (str(TINY / "sample.txt"), "hf:a/b")
    monkeypatch.setenv("HOME", str(folder))
    assert find_files(["~/a.txt"]) == (str(folder / "a.txt"),)


def test_weights(folder):
    for name in ("a.txt", "b.txt", "c.txt:1"):
        (folder / name).write_text("x")
    assert find_sources(["a.txt", "*.txt"]) == [Source(("a.txt", "b.txt"), 1.0)]
    assert find_sources(["a.txt:0.7", "b.txt:.3", "hf:x/y:train:2", "*.txt:1."]) == [
        Source(("a.txt",), 0.7),
        Source(("b.txt",), 0.3),
        Source(("hf:x/y:train",), 2.0),
        Source(("a.txt", "b.txt"), 1.0),
    ]
    (folder / "d.txt:2").write_text("x")
    with pytest.raises(UserError, match=r"d\.txt:2: cannot read such files"):  # a name, not a weight: it exists
        find_sources(["d.txt:2"])


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "no data is named; expected .txt, "),
        (["none.txt"], "none.txt: no such file; relative paths start from /"),
        (["*.jsonl"], "*.jsonl: no file matches this glob"),
        (["folder"], "folder is a folder; expected files or a glob, such as 'folder/*.txt'."),
        (["folder"], "is named hf:folder."),
        (["a.csv"], "a.csv: cannot read such files; expected .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet."),
        (["a"], "a: cannot read such files; expected"),
        (["a.txt:0.5", "b.txt"], "b.txt has no weight and others have one; write b.txt:0.5, or none."),
        (["a.txt:0"], "a.txt:0: the weight is 0; expected more."),
        (["a.txt:-1"], "a.txt:-1: no such file"),
    ],
)
def test_bad_names(folder, data, message):
    (folder / "folder").mkdir()
    for name in ("a.csv", "a", "a.txt", "b.txt"):
        (folder / name).write_text("x")
    with pytest.raises(UserError, match=re.escape(message)):
        find_sources(data)


# --- records ---

RECORDS = [
    {"text": "One day"},
    {"text": "漢字 🙂\n", "other": 1},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]},
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "hf:d"])
def test_every_kind_of_file_gives_the_same_records(folder, name):
    if name.endswith(".gz"):  # of several members, as parallel compressors write
        (folder / name).write_bytes(b"".join(map(gzip.compress, LINES.splitlines(keepends=True))))
    elif name.endswith(".zst"):
        write_zstd(folder / name, LINES)
    elif name in ("a.parquet", "hf:d"):
        (folder / "d").mkdir()
        path = folder / (name if name == "a.parquet" else "d/train.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS, SCHEMA), path)
    else:
        (folder / name).write_bytes(LINES)
    found = [without_nulls(content) for content in contents(name)]
    assert found == RECORDS
    numbers = [record.number for record in read_records(name)]
    assert numbers == ([1, 2, 3] if ".json" in name.lower() else [0, 1, 2])
    progress = sources.tqdm(total=count_bytes(name), disable=False, file=open(folder / "log", "w"))  # noqa: SIM115
    list(read_records(name, progress))
    assert progress.n == pytest.approx(count_bytes(name), abs=3)


SCHEMA = pyarrow.schema(
    {
        "text": pyarrow.string(),
        "other": pyarrow.int64(),
        "messages": pyarrow.list_(
            pyarrow.struct({key: pyarrow.string() for key in ("role", "content", "reasoning_content")})
        ),
    }
)


def without_nulls(value):
    """Tables have a value in every column, null where the record had none."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def test_txt_documents(folder):
    (folder / "a.txt").write_text("\n\n  A b\n c \n<|endoftext|>\n \n<|endoftext|>\n<|endoftext|>\n  d <|endoftext|> e")
    assert [content["text"] for content in contents("a.txt") if content["text"]] == [
        "  A b\n c ",
        "  d <|endoftext|> e",
    ]


def test_windows_files(folder):
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n<|endoftext|>\r\nc\r\n")
    (folder / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "d"}\r\n\r\n{"text": "e"}\r\n')
    assert contents("a.txt") == [{"text": "a\r\nb"}, {"text": "c"}]
    assert contents("b.jsonl") == [{"text": "d"}, {"text": "e"}]


def test_long_txt_documents_come_in_pieces(folder, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARS", 10)
    document = "".join(f"line {number}\n" for number in range(20))
    (folder / "a.txt").write_text(f"{document}<|endoftext|>\nshort")
    records = list(read_records("a.txt"))
    assert len(records) > 5
    assert [record.is_end for record in records] == [False] * (len(records) - 2) + [True, True]
    assert "".join(record.content["text"] for record in records[:-1]) == document.rstrip()
    assert records[-1].content == {"text": "short"}


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"text": "a"}\n{"text": "\xe9"}\n', "a.jsonl:2: not UTF-8: byte 11 of the line is 0xe9."),
        (b'{"text": "a"}\n\n{"text": \n', "a.jsonl:3: not JSON: Expecting value (column 9); expected one object"),
        (b"[" * 100_000, "a.jsonl:1: not readable JSON: maximum recursion depth exceeded"),
        (b'{"text": ' + b"1" * 5000 + b"}", "a.jsonl:1: not readable JSON: Exceeds the limit (4300 digits)"),
    ],
)  # fmt: skip
def test_a_bad_line_is_a_bad_record(folder, content, message):
    (folder / "a.jsonl").write_bytes(content + b'\n{"text": "z"}\n')
    *_, bad, last = read_records("a.jsonl")
    assert isinstance(bad.content, BadRecord)
    assert f"{name_place('a.jsonl', bad.number)}: {bad.content}".startswith(message)
    assert last.content == {"text": "z"}  # the lines after it are read


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"", "a.txt is empty; expected text or conversations."),
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl.gz", b"", "a.jsonl.gz is empty"),
        ("a.txt", b"one\nt\xc3\xa9o \xff\n", "a.txt:2: not UTF-8: byte 6 of the line is 0xff. Convert"),
        ("a.txt", b"cut \xc3", "a.txt:1: not UTF-8: byte 5 of the line is 0xc3."),
        ("a.txt", "utf-16".encode("utf-16"), "a.txt:1: not UTF-8: byte 1 of the line is 0xff."),
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], "a.jsonl.gz cannot be read to its end: Truncated"),
        ("a.jsonl.gz", LINES, "a.jsonl.gz cannot be read to its end: zlib inflate failed"),
        ("a.jsonl.zst", LINES, "a.jsonl.zst cannot be read to its end: "),
        ("a.parquet", LINES, "a.parquet cannot be read as parquet: "),
        ("a.parquet", b"", "a.parquet cannot be read as parquet: "),
    ],
)
def test_files_that_cannot_be_read(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        list(read_records(name))


def test_parquet_text_that_is_not_utf8(folder):
    table = pyarrow.table({"text": pyarrow.array([b"a", b"\xff"])}).cast(pyarrow.schema({"text": pyarrow.binary()}))
    column = table["text"].chunk(0)
    broken = pyarrow.StringArray.from_buffers(2, *column.buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), folder / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: a string in rows 0 to 255 is not UTF-8"):
        list(read_records("a.parquet"))


# --- datasets ---


@pytest.fixture
def dataset(folder):
    (folder / "d").mkdir()
    for split, texts in {"train": "abc", "test": "xy"}.items():
        (folder / "d" / f"{split}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return folder / "d"


def test_dataset_splits(dataset):
    read = {name: [content["text"] for content in contents(name)] for name in ("hf:d", "hf:d:test", "hf:d:train[1:]")}
    assert read == {"hf:d": ["a", "b", "c"], "hf:d:test": ["x", "y"], "hf:d:train[1:]": ["b", "c"]}
    assert len({hash_contents([name]) for name in read}) == 3


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "hf:nobody/nothing",
            "hf:nobody/nothing cannot be loaded: ConnectionError: Couldn't reach 'nobody/nothing' on the Hub",
        ),
        ("hf:nobody/nothing", "Expected hf:USER/NAME[/CONFIG][:SPLIT]"),
        (
            "hf:d:validation",
            'hf:d:validation cannot be loaded: ValueError: Unknown split "validation". Should be one of',
        ),
        ("hf:e", "hf:e cannot be loaded: EmptyDatasetError: "),
    ],
)
def test_bad_datasets(dataset, name, message):
    (dataset.parent / "e").mkdir()
    with pytest.raises(UserError, match=re.escape(message)):
        list(read_records(name))


# --- contents ---


def test_hash_depends_on_contents_and_kind_alone(folder):
    (folder / "a.txt").write_text('{"text": "A"}')
    (folder / "copy.txt").write_text('{"text": "A"}')
    (folder / "a.jsonl").write_text('{"text": "A"}')
    (folder / "b.txt").write_text("B")
    assert hash_contents(["a.txt"]) == hash_contents(["copy.txt"])
    different = [["a.txt"], ["a.jsonl"], ["b.txt"], ["a.txt", "b.txt"], ["b.txt", "a.txt"]]
    assert len({hash_contents(names) for names in different}) == len(different)
