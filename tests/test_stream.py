"""Rows of a source that is tokenized in parts: python -m pytest tests/test_stream.py"""

import gzip
import itertools
import json
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from qwen3_trn import cache, encode, sources
from qwen3_trn.data import PackedData, PackedSource
from qwen3_trn.errors import UserError
from qwen3_trn.packing import Rows
from qwen3_trn.sources import find_sources, read_records
from qwen3_trn.stream import StreamedSource
from tests.common import TINY

SEQ_LEN = 32
STREAMS: list[StreamedSource] = []  # those that the test at hand has opened
TEXTS = [f"{'One day ' * (number % 5)}Mia lost hat number {number}." for number in range(120)]
CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"No {number}."}]}
    for number in range(80)
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(encode, "PART_BYTES", 1500)
    sources._load_hub.cache_clear()
    yield
    while STREAMS:  # their threads work in this folder
        STREAMS.pop()._thread.shutdown(cancel_futures=True)


def write_lines(name: str, records: list) -> str:
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    Path(name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    return name


def write_source(kind: str) -> str:
    """The same texts, or CHATS, in each kind of file; returns what to give --data."""
    records = CHATS if kind == "chat" else [{"text": text} for text in TEXTS]
    if kind == "txt":
        Path("a.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
        return "a.txt"
    if kind == "files":
        for index in range(3):
            write_lines(f"{index}.jsonl", records[index * 40 : (index + 1) * 40])
        return "?.jsonl"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), "a.parquet", row_group_size=7)
        return "a.parquet"
    if kind == "hub":
        Path("d").mkdir()
        write_lines("d/train.jsonl", records)
        return "hf:d"
    return write_lines("a.jsonl.gz" if kind == "gz" else "a.jsonl", records)


KINDS = ("txt", "jsonl", "files", "gz", "parquet", "hub", "chat")


def open_stream(data: str, cache_dir: str = "cache", seed: int = 0, **settings) -> StreamedSource:
    (source,) = find_sources([data])
    STREAMS.append(StreamedSource(source, TINY, Path(cache_dir), SEQ_LEN, seed, **settings))
    return STREAMS[-1]


def read_rows(source, positions) -> Rows:
    return Rows(*map(np.stack, zip(*map(source.row, positions), strict=True)))


def same(a: Rows, b: Rows) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# --- reading on ---


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_after_any_record(kind):
    for name in find_sources([write_source(kind)])[0].names:
        records = list(read_records(name, stream=True))
        for index in range(0, len(records), 3):
            rest = list(read_records(name, after=records[index].read, stream=True))
            assert [record[:2] for record in rest] == [record[:2] for record in records[index + 1 :]]


# --- rows ---


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_token_of_the_source_once(kind):
    data = write_source(kind)
    stream = open_stream(data)
    stream.row(10_000)  # in a later epoch
    assert len(stream._begins) > 3
    num_rows = stream._starts[-1]
    (source,) = find_sources([data])
    whole = cache.open_cache(cache.tokenize(source, TINY, Path("whole")))
    orders = []
    for epoch in range(3):
        rows = read_rows(stream, range(epoch * num_rows, (epoch + 1) * num_rows))
        assert sorted(rows.input_ids[rows.document_ids >= 0]) == sorted(whole.tokens)
        orders.append(rows.input_ids.tolist())
    assert orders[0] != orders[1] != orders[2]


def test_a_stream_of_one_part_is_the_source():
    data = write_lines("a.jsonl", [{"text": text} for text in TEXTS[:10]])
    (source,) = find_sources([data])
    packed = PackedSource(cache.open_cache(cache.tokenize(source, TINY, Path("whole"))), SEQ_LEN, seed=3)
    assert same(read_rows(open_stream(data, seed=3), range(40)), read_rows(packed, range(40)))


def test_a_part_ends_with_a_document(monkeypatch):
    """A document that comes in pieces is not cut by the end of a part, however long it is."""
    monkeypatch.setattr(sources, "PIECE_CHARS", 100)
    texts = ["".join(f"line {number} of {length}\n" for number in range(length)).strip() for length in (200, 2, 150, 3)]
    Path("a.txt").write_text("\n<|endoftext|>\n".join(texts))
    stream = open_stream("a.txt", pack=False)
    stream.row(10_000)
    rows = read_rows(stream, range(stream._starts[-1]))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    expected = [[*tokenizer(text).input_ids, tokenizer.pad_token_id] for text in texts]
    assert sorted(rows.input_ids[rows.document_ids >= 0]) == sorted(itertools.chain.from_iterable(expected))
    assert (rows.labels == -100).sum() - (rows.document_ids < 0).sum() == len(texts)  # only ends have no label


@pytest.mark.parametrize("kind", ["txt", "hub", "chat"])
def test_a_position_alone_decides_its_row(kind):
    """With the notes of the run before, without them, on another machine, and in any order."""
    data = write_source(kind)
    rows = read_rows(open_stream(data), range(200))
    assert same(read_rows(open_stream(data), range(150, 200)), Rows(*(array[150:] for array in rows)))
    assert same(read_rows(open_stream(data, "other"), range(150, 200)), Rows(*(array[150:] for array in rows)))
    order = np.random.default_rng(0).permutation(200)
    assert same(read_rows(open_stream(data), order.tolist()), Rows(*(array[order] for array in rows)))
    for num_ranks in (2, 4):
        ranks = [open_stream(data) for _ in range(num_ranks)]
        shared = [ranks[position % num_ranks].row(position) for position in range(200)]
        assert same(Rows(*map(np.stack, zip(*shared, strict=True))), rows)
    assert not same(read_rows(open_stream(data, seed=1), range(200)), rows)


def test_going_on_reads_no_part_before(monkeypatch):
    data = write_source("jsonl")
    expected = read_rows(open_stream(data), range(50, 54))
    opened = []

    def record_parts(*args, part):
        opened.append(part)
        return cache.make_cache(*args, part=part)

    monkeypatch.setattr("qwen3_trn.stream.make_cache", record_parts)
    stream = open_stream(data)
    assert same(read_rows(stream, range(50, 54)), expected)
    stream._thread.shutdown()
    first = stream._begins[np.searchsorted(stream._starts, 50, side="right") - 1]
    assert first.offset > 0 and min(opened) == first
    assert len(set(opened)) <= 3  # of rows 50 to 53, and one ahead


def test_disk_and_memory_hold_three_parts():
    stream = open_stream(write_source("jsonl"))
    for position in range(400):
        stream.row(position)
        if position % 10 == 0:
            stream._coming.result()
            assert len([path for path in Path("cache").iterdir() if path.is_dir()]) <= 3
    assert len(stream._begins) > 4 and stream._open.cache_info().currsize == 2


def test_ranks_that_read_at_once_see_the_same_rows():
    data = write_source("txt")
    expected = read_rows(open_stream(data, "other"), range(150))
    results: dict[int, Rows] = {}
    barrier = threading.Barrier(3)

    def run_rank(rank: int) -> None:
        stream = open_stream(data)
        rows = []
        for position in range(150):
            barrier.wait(timeout=30)  # as the gradients' all-reduce
            rows.append(stream.row(position))
        results[rank] = Rows(*map(np.stack, zip(*rows, strict=True)))

    ranks = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(results) == 3 and all(same(rows, expected) for rows in results.values())


def test_a_source_that_ends_with_a_part_of_nothing(monkeypatch):
    for data in (write_source("chat"), write_lines("b.jsonl", [{"text": "x" * 400} for _ in range(4)])):
        with open(data, "a") as file:
            file.write("\n" * 50)
        monkeypatch.setattr(encode, "PART_BYTES", 800)
        stream = open_stream(data)
        stream.row(1000)
        assert stream._all_known


def test_a_part_is_as_large_as_its_key_says(monkeypatch):
    """Parts that are made ahead, by a thread that may outlive its run, are found by others under that key."""
    data = write_source("jsonl")
    expected = read_rows(open_stream(data, "other"), range(150))
    stream = open_stream(data)
    monkeypatch.setattr(encode, "PART_BYTES", 800)
    assert same(read_rows(stream, range(150)), expected)


def test_streams_mix_with_other_sources():
    (source,) = find_sources([write_lines("chats.jsonl", CHATS[:20])])
    chats = PackedSource(cache.open_cache(cache.tokenize(source, TINY, Path("cache"))), SEQ_LEN, seed=0)
    stream = open_stream(write_source("txt"))
    packed = PackedData([stream, chats], [3, 1])
    assert packed.rows_per_epoch is None and packed.max_token_id > chats.max_token_id
    rows = packed.batch(range(80)).input_ids
    is_chat = [np.array_equal(row[:1], chats.cache.tokens[:1]) for row in rows]
    assert sum(is_chat) == 20
    assert np.array_equal(rows[~np.array(is_chat)], read_rows(open_stream("a.txt"), range(60)).input_ids)
    assert packed.describe()[0].startswith("a stream of 1 files")


def test_the_order_depends_on_the_data():
    fingerprints = []
    for text in ("a", "b", "bb"):
        data = write_lines("a.jsonl", [{"text": text}])
        fingerprints.append(open_stream(data).fingerprint)
    assert len({facts["data"] for facts in fingerprints}) == 3
    assert {name: value for name, value in fingerprints[0].items() if name not in ("data", "tokenizer")} == {
        "format": "text", "pack": "True", "part_bytes": "1500",
    }  # fmt: skip


# --- bad input ---


def test_a_bad_record_is_named_when_its_rows_are_asked_for():
    data = write_lines("a.jsonl", [*({"text": text} for text in TEXTS), {"txt": "x"}])
    stream = open_stream(data)
    stream.row(0)
    with pytest.raises(UserError, match=r"a\.jsonl:121: expected an object with a string `text`"):
        for position in itertools.count():
            stream.row(position)
    stream = open_stream(data, bad_records="skip")
    assert same(read_rows(stream, range(200)), read_rows(open_stream(write_source("jsonl"), "other"), range(200)))


@pytest.mark.parametrize(
    "lines, message", [(["\n"], "it holds no records"), (['{"text": " "}\n'] * 3, "holds nothing but white space")]
)
def test_a_stream_of_nothing(lines, message):
    Path("a.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match=message):
        open_stream("a.jsonl")


def test_a_part_of_a_dataset_cannot_be_streamed():
    write_source("hub")
    with pytest.raises(UserError, match=r"hf:d:train\[1:\] cannot be loaded: ValueError: Bad split"):
        open_stream("hf:d:train[1:]")
