"""The order of rows: python -m pytest tests/test_data.py"""

import contextlib
import json
import logging
import re
import runpy
import unicodedata
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_trn import data, inspect_data
from qwen3_trn.cache import open_cache
from qwen3_trn.data import PackedData, PackedSource, Rows, make_schedule
from qwen3_trn.errors import UserError
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.model import PADDING_DOCUMENT
from tests.caches import make_cache, number_tokens, write_cache
from tests.common import REPO, TINY, run_python


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


def make_chats(lengths: list[int]):
    """Conversations of these lengths in which every token occurs once and all but the first are supervised."""
    return make_cache(number_tokens(lengths), [[False, *[True] * (length - 1)] for length in lengths])


def open_source(cache, seq_len: int, seed: int = 0, pack=True, long="drop", shuffle=True) -> PackedSource:
    return PackedSource(cache, seq_len, seed, pack, long, shuffle)


def read_rows(source, positions) -> Rows:
    return Rows(*map(np.stack, zip(*map(source.row, positions), strict=True)))


def epoch_rows(source: PackedSource, epoch: int) -> Rows:
    return read_rows(source, range(epoch * source.rows_per_epoch, (epoch + 1) * source.rows_per_epoch))


KINDS = {
    "text": (make_cache(number_tokens([7, 1, 20, 3, 3, 11, 8, 5])), True),
    "text, not packed": (make_cache(number_tokens([7, 1, 20, 3, 3, 11, 8, 5])), False),
    "chat": (make_chats([7, 2, 8, 3, 3, 6, 8, 5, 4, 4, 2, 7]), True),
    "chat, not packed": (make_chats([7, 2, 8, 3, 3, 6, 8, 5, 4, 4, 2, 7]), False),
}
kinds = pytest.mark.parametrize("cache, pack", KINDS.values(), ids=KINDS.keys())


# --- one source ---


@kinds
def test_every_token_is_read_and_predicted_once_an_epoch(cache, pack):
    source = open_source(cache, seq_len=8, seed=3, pack=pack)
    starts = set(cache.tokens[cache.offsets[:-1]])
    for epoch in range(3):
        rows = epoch_rows(source, epoch)
        assert sorted(rows.input_ids[rows.document_ids != PADDING_DOCUMENT]) == cache.tokens.tolist()
        assert sorted(rows.labels[rows.labels != IGNORE_INDEX]) == sorted(set(cache.tokens) - starts)


@kinds
def test_a_position_alone_decides_its_row(cache, pack):
    """Whatever was asked for before: any rank can take any rows, and a run can go on from any position."""
    source = open_source(cache, seq_len=8, seed=1, pack=pack)
    positions = list(range(5 * source.rows_per_epoch))  # more than two epochs
    rows = read_rows(source, positions)
    for position in reversed(positions):
        fresh = open_source(cache, seq_len=8, seed=1, pack=pack)
        for a, b, c in zip(rows, source.row(position), fresh.row(position), strict=True):
            assert np.array_equal(a[position], b) and np.array_equal(b, c)


@kinds
def test_epochs_and_seeds_differ_in_order(cache, pack):
    orders = set()
    for seed in range(3):
        source = open_source(cache, seq_len=8, seed=seed, pack=pack)
        orders |= {tuple(epoch_rows(source, epoch).input_ids[:, 0]) for epoch in range(3)}
    assert len(orders) == 9


def test_texts_are_cut_anew_in_each_epoch():
    source = open_source(make_cache(number_tokens([4] * 50)), seq_len=12)
    rows = [epoch_rows(source, epoch).input_ids.tolist() for epoch in range(3)]
    assert len({tuple(sorted(map(tuple, epoch))) for epoch in rows}) == 3


def test_only_one_row_of_an_epoch_of_texts_has_padding():
    source = open_source(make_cache(number_tokens([5, 9, 3, 8])), seq_len=7)
    for epoch in range(4):
        num_padding = (epoch_rows(source, epoch).document_ids == PADDING_DOCUMENT).sum(axis=1)
        assert sorted(num_padding) == [0, 0, 0, 3]


def test_conversations_share_rows_by_the_seed():
    cache = make_chats([3] * 40)
    rows = [sorted(epoch_rows(open_source(cache, 6, seed), 0).input_ids.tolist()) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_the_order_never_changes():
    """A run must resume in the same order under another version of numpy, and of this code."""
    assert data._permutation(8, 0, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert data._permutation(8, 7, 2, 1).tolist() == [2, 1, 7, 6, 4, 0, 5, 3]
    source = open_source(KINDS["chat"][0], seq_len=8, seed=5)
    assert epoch_rows(source, 1).input_ids[:, 0].tolist() == FIRST_TOKENS_OF_CHATS
    source = open_source(KINDS["text"][0], seq_len=8, seed=5)
    assert epoch_rows(source, 1).input_ids[:, 0].tolist() == FIRST_TOKENS_OF_TEXTS


FIRST_TOKENS_OF_CHATS = [21, 1, 30, 38, 10, 47, 53, 24]
FIRST_TOKENS_OF_TEXTS = [30, 37, 49, 21, 54, 1, 45, 13]


# --- evaluation ---


@kinds
def test_evaluation_reads_each_row_once_in_the_order_of_the_data(cache, pack):
    source = open_source(cache, seq_len=8, pack=pack, shuffle=False)
    rows = epoch_rows(source, 0)
    read = rows.input_ids[rows.document_ids != PADDING_DOCUMENT].tolist()
    assert sorted(read) == cache.tokens.tolist()
    if cache.supervised is None or not pack:  # packed conversations are not in the order of the data
        assert read == cache.tokens.tolist()
    assert np.array_equal(rows.input_ids, epoch_rows(open_source(cache, 8, 9, pack, "drop", False), 0).input_ids)


@pytest.mark.parametrize("num_ranks, micro_batch_size", [(1, 1), (1, 4), (2, 2), (4, 1), (4, 3)])
def test_seven_evaluation_rows_are_neither_lost_nor_read_twice(num_ranks, micro_batch_size):
    """Ranks that take equal numbers of rows get padding past the end."""
    source = open_source(cache := make_cache(number_tokens([50, 3, 1])), seq_len=8, shuffle=False)
    assert source.rows_per_epoch == 7
    at_once = num_ranks * micro_batch_size
    read = []
    for first in range(0, source.rows_per_epoch, at_once):
        for rank in range(num_ranks):
            start = first + rank * micro_batch_size
            rows = read_rows(source, range(start, start + micro_batch_size))
            read += rows.input_ids[rows.document_ids != PADDING_DOCUMENT].tolist()
            assert (rows.labels[rows.document_ids == PADDING_DOCUMENT] == IGNORE_INDEX).all()
    assert sorted(read) == cache.tokens.tolist()


# --- long conversations ---


def test_long_conversations_are_dropped_truncated_or_an_error():
    masks = [
        [False] + [True] * 3,
        [False] * 6 + [True] * 3,
        [False] * 4 + [True] * 3,
        [False, True],
        [False] * 5 + [True],
    ]
    cache = make_cache(documents := number_tokens(list(map(len, masks))), masks)  # of 4, 9, 7, 2 and 6 tokens

    def read(long: str) -> tuple[list, int, int]:
        source = open_source(cache, seq_len=5, pack=False, long=long, shuffle=False)
        rows = epoch_rows(source, 0)
        kept = [row[mask != PADDING_DOCUMENT].tolist() for row, mask in zip(rows[0], rows[3], strict=True)]
        return kept, source.num_dropped, source.num_truncated

    assert read("drop") == ([documents[0], documents[3]], 3, 0)
    # The second has nothing to learn from in its first 5 tokens and the one after them; the last one just has.
    assert read("truncate") == ([documents[0], documents[2][:5], documents[3], documents[4][:5]], 1, 2)
    with pytest.raises(UserError, match="3 of 5 conversations are longer than --seq-len 5; the longest has 9 tokens"):
        read("error")


@pytest.mark.parametrize(
    ("long", "message"),
    [
        ("drop", r"than --seq-len 4; the shortest has 6 tokens\. Raise --seq-len, or say --long truncate\."),
        ("truncate", r"is cut has nothing to learn from; the shortest has 6 tokens\. Raise --seq-len\."),
    ],
)
def test_all_conversations_too_long(long, message):
    cache = make_cache(number_tokens([6, 8]), [[False] * 5 + [True], [False] * 7 + [True]])
    with pytest.raises(UserError, match=message):
        open_source(cache, seq_len=4, long=long)


def test_fill_rate_is_the_share_of_tokens_that_are_not_padding():
    for cache, pack in KINDS.values():
        source = open_source(cache, seq_len=9, pack=pack)
        rows = epoch_rows(source, 1)
        assert source.fill_rate == pytest.approx((rows.document_ids != PADDING_DOCUMENT).mean())


# --- several sources ---


@settings(deadline=None, max_examples=50)
@given(weights=st.lists(st.floats(0.01, 10), min_size=2, max_size=5))
def test_every_stretch_of_the_schedule_keeps_the_weights(weights):
    schedule = np.tile(make_schedule(weights), 2)
    shares = np.array(weights) / sum(weights)
    for index, share in enumerate(shares):
        so_far = np.cumsum(schedule == index)
        expected = share * np.arange(1, len(schedule) + 1)
        assert np.abs(so_far - expected).max() <= len(weights) + 2


def test_sources_mix_by_weight_and_repeat_in_their_own_epochs(tmp_path):
    texts, chats = make_cache(number_tokens([40])), make_chats([8] * 7)
    chats = chats._replace(tokens=chats.tokens + 1000)
    folders = [write_cache(tmp_path / "a", texts), write_cache(tmp_path / "b", chats)]
    packed = PackedData([open_source(open_cache(folder), 8, seed=2) for folder in folders], [1, 3])
    assert packed.rows_per_epoch == 5 + 7
    num_rows = 25_000  # beyond the schedule's period
    rows = packed.batch(range(num_rows)).input_ids
    is_chat = rows[:, 0] > 1000
    assert is_chat.sum() == pytest.approx(0.75 * num_rows, abs=3)
    # Each source's rows, in their order, are those it has when it is alone.
    for mask, cache in ((is_chat, chats), (~is_chat, texts)):
        alone = read_rows(open_source(cache, 8, seed=2), range(mask.sum())).input_ids
        assert np.array_equal(rows[mask], alone)
    order = np.random.default_rng(0).permutation(num_rows)[:500]
    assert np.array_equal(packed.batch(order.tolist()).input_ids, rows[order])


def test_packed_data_of_one_source_is_that_source():
    cache = make_cache(number_tokens([7, 1, 20, 3, 3, 11]))
    packed, source = PackedData([open_source(cache, 8, seed=1)], [0.3]), open_source(cache, 8, seed=1)
    batch = packed.batch(range(3, 20))
    assert all(array.dtype == np.int32 and array.shape == (17, 8) for array in batch)
    assert all(np.array_equal(a, b) for a, b in zip(batch, read_rows(source, range(3, 20)), strict=True))
    assert packed.rows_per_epoch == source.rows_per_epoch == 6
    assert (packed.max_token_id, packed.max_token_file) == (45, "test.txt")


def test_the_fingerprint_names_what_the_order_depends_on():
    text, chats = make_cache([[1, 2]]), make_chats([3])
    chats = chats._replace(meta=chats.meta | {"fingerprint": {"data": "b", "tokenizer": "test", "train_on": "last"}})
    one = PackedData([open_source(text, 8)], [0.5])
    assert one.fingerprint == {"data": "test", "tokenizer": "test", "pack": "True", "weights": "1"}
    two = PackedData([open_source(text, 8), open_source(chats, 8, pack=False, long="truncate")], [0.7, 0.3])
    assert two.fingerprint == {
        "data": "test, b",
        "tokenizer": "test, test",
        "pack": "True, False",
        "train_on": "-, last",
        "long": "-, truncate",
        "weights": "0.7, 0.3",
    }


# --- what the trainer sees ---

RECORDS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Mia {'lost ' * number}a hat."}]}
    for number in range(30)
]


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    monkeypatch.setenv("QWEN3_TRN_CACHE", str(tmp_path / "cache"))
    lines = [*map(json.dumps, RECORDS), "not JSON", json.dumps({"messages": []})]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "text.txt").write_text("One day\n<|endoftext|>\nMia lost her hat.\n")
    return tmp_path


def test_inspection(mixed, capsys):
    inspect_data.inspect_data((f"{mixed}/chats.jsonl:3", f"{mixed}/text.txt:1"), model=str(TINY), seq_len=32, show=1)
    shown = capsys.readouterr().out
    assert re.search(r"tokens in 30 conversations: \d+ rows of 32 an epoch, 85\.9% full", shown)
    assert "warning: 2 bad records are left out, as " in shown
    assert re.search(r"warning: \d+ conversations exceed 32 tokens; they are left out", shown)
    assert re.search(r"   16-31 +\d+  #+\n", shown)
    assert re.search(r"\d+\.\d% of the tokens are supervised", shown)
    assert "chats.jsonl:31: not JSON: Expecting value (column 1)" in shown
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Mia a hat.<|im_end|>»\n" in shown
    assert shown.count("--- 0") == 2 and "One day<|endoftext|>" in shown  # not the last: nothing is marked in texts
    assert "\033" not in shown


def test_supervised_tokens_are_green_on_a_terminal(tokenizer):
    cache = make_cache(
        [tokenizer("Mia lost").input_ids], [[False, *[True] * (len(tokenizer("Mia lost").input_ids) - 1)]]
    )
    first, rest = tokenizer.decode(cache.tokens[:1]), tokenizer.decode(cache.tokens[1:])
    assert inspect_data._mark_supervised(cache, 0, tokenizer, color=True) == f"{first}\033[32m{rest}\033[0m"
    assert inspect_data._mark_supervised(cache, 0, tokenizer, color=False) == f"{first}«{rest}»"


def test_histogram_counts_every_length_once():
    lines = inspect_data._draw_histogram(np.array([1, 2, 3, 4, 7, 8]))
    assert [line.split()[:2] for line in lines] == [["1-1", "1"], ["2-3", "2"], ["4-7", "2"], ["8-15", "1"]]


def test_the_inspection_command(mixed):
    command = ["-m", "qwen3_trn.data", mixed / "chats.jsonl", "--model", TINY]
    failed = run_python(*command, "--bad-records", "error", QWEN3_TRN_CACHE=str(mixed / "cache"))
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ") and "chats.jsonl:31: not JSON" in failed.stderr


# --- the bundled miniature ---


def test_tiny_is_what_its_program_makes(tmp_path):
    runpy.run_path(str(REPO / "assets" / "make_tiny.py"))["write"](tmp_path)
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
