"""Plans and rows against slow, plain references: python -m pytest tests/test_packing.py"""

import itertools
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_trn import packing
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.model import PADDING_DOCUMENT
from qwen3_trn.packing import Plan, build_row, plan_best_fit, plan_concatenated, plan_one_each
from tests.caches import make_cache, number_tokens
from tests.common import REPO

LENGTHS = st.lists(st.integers(1, 12) | st.integers(1, 100), min_size=1, max_size=20)
SEQ_LEN = st.integers(1, 20) | st.integers(1, 2000)


def build_rows(cache, plan: Plan, seq_len: int) -> packing.Rows:
    rows = [build_row(cache, plan, row, seq_len) for row in range(len(plan.rows) - 1)]
    assert all(array.dtype == np.int32 and array.shape == (seq_len,) for row in rows for array in row)
    return packing.Rows(*map(np.stack, zip(*rows, strict=True)))


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths])


# --- rows of texts ---


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
@given(lengths=LENGTHS, seq_len=SEQ_LEN, order=st.randoms(use_true_random=False))
def test_concatenated_rows_equal_the_reference(lengths, seq_len, order):
    documents = number_tokens(lengths)
    order = order.sample(range(len(documents)), len(documents))
    cache = make_cache(documents)
    rows = build_rows(cache, plan_concatenated(cache.offsets, np.array(order), seq_len), seq_len)
    assert np.array_equal(np.stack(rows, axis=-1), reference_rows([documents[index] for index in order], seq_len))


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS, seq_len=SEQ_LEN)
def test_unpacked_text_rows_equal_the_reference_of_each_document(lengths, seq_len):
    cache = make_cache(documents := number_tokens(lengths))
    rows = build_rows(cache, plan_one_each(cache.offsets, np.arange(len(lengths)), seq_len, cut=True), seq_len)
    expected = itertools.chain.from_iterable(reference_rows([document], seq_len) for document in documents)
    assert np.array_equal(np.stack(rows, axis=-1), list(expected))


def test_a_row_past_the_last_is_padding():
    cache = make_cache([[1, 2, 3]])
    row = build_row(cache, plan_concatenated(cache.offsets, np.arange(1), 4), 1, 4)
    assert (row.document_ids == PADDING_DOCUMENT).all() and (row.labels == IGNORE_INDEX).all()
    assert row.positions.tolist() == [0, 1, 2, 3]


# --- rows of conversations ---


def test_only_supervised_tokens_are_labels():
    """Token t's label is token t + 1 if that one is supervised, at the edges of a conversation too."""
    cache = make_cache([[1, 2, 3, 4], [5, 6, 7]], [[True, False, True, True], [False, True, False]])
    plan = plan_best_fit(cache.offsets, np.arange(2), seq_len=9)
    (row,) = zip(*build_rows(cache, plan, 9), strict=True)
    none = IGNORE_INDEX
    assert row[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0]
    assert row[1].tolist() == [none, 3, 4, none, 6, none, none, none, none]
    assert row[2].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert row[3].tolist() == [0, 0, 0, 0, 1, 1, 1, PADDING_DOCUMENT, PADDING_DOCUMENT]


@pytest.mark.parametrize("plan", [plan_best_fit, lambda *args: plan_one_each(*args, cut=False)])
def test_a_truncated_conversation_keeps_its_first_tokens(plan):
    cache = make_cache([[1, 2, 3, 4, 5]], [[False, True, True, True, True]])
    rows = build_rows(cache, plan(cache.offsets, np.arange(1), 3), 3)
    assert rows.input_ids.tolist() == [[1, 2, 3]]
    assert rows.labels.tolist() == [[2, 3, 4]]  # 4 is known, so it can be predicted


@settings(deadline=None, max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    seq_len=st.integers(40, 100),
    look_ahead=st.integers(1, 70),
    data=st.data(),
)
def test_conversations_are_whole_and_rows_never_overfull(lengths, seq_len, look_ahead, data):
    documents = np.array(data.draw(st.permutations(range(len(lengths)))))
    documents = documents[: data.draw(st.integers(1, len(documents)))]  # the others were dropped
    offsets = offsets_of(lengths)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(packing, "LOOK_AHEAD", look_ahead)
        plan = plan_best_fit(offsets, documents, seq_len)
    assert sorted(plan.begins) == sorted(offsets[documents])  # each once
    assert [lengths[index] for index in np.searchsorted(offsets, plan.begins)] == plan.lengths.tolist()  # and whole
    filled = np.add.reduceat(plan.lengths, plan.rows[:-1])
    assert plan.rows[0] == 0 and plan.rows[-1] == len(documents) and (np.diff(plan.rows) > 0).all()
    assert filled.max() <= seq_len
    assert (filled[1:] + filled[:-1] > seq_len).all()  # what the docstring promises


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), longest=st.sampled_from([64, 256, 512]))
def test_fill_rate_of_random_lengths(seed, longest):
    """At least 97% for 5,000 conversations of uniformly random length up to 512 tokens, in rows of 512."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, 5000)
    plan = plan_best_fit(offsets_of(lengths.tolist()), np.arange(5000), 512)
    assert lengths.sum() / (512 * (len(plan.rows) - 1)) >= 0.97


def test_a_million_conversations_are_planned_in_seconds():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 1_000_000).astype(int), 5, 2048)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    started = time.process_time()
    plan = plan_best_fit(offsets, np.arange(len(lengths)), 2048)
    assert time.process_time() - started < 20  # 1 to 2 on the machine where this was written
    assert lengths.sum() / (2048 * (len(plan.rows) - 1)) >= 0.99


def test_one_row_each():
    offsets, documents = offsets_of([3, 8, 1]), np.array([2, 0, 1])
    plan = plan_one_each(offsets, documents, seq_len=4, cut=True)
    assert plan.begins.tolist() == [11, 0, 3, 7]
    assert plan.lengths.tolist() == [1, 3, 4, 4]
    assert plan.rows.tolist() == [0, 1, 2, 3, 4]
    plan = plan_one_each(offsets, documents, seq_len=4, cut=False)
    assert plan.begins.tolist() == [11, 0, 3]
    assert plan.lengths.tolist() == [1, 3, 4]


@pytest.mark.parametrize("name", ["packing", "sources", "encode", "cache", "data", "stream"])
def test_the_commands_in_the_docstrings_run(tmp_path, monkeypatch, name):
    module = __import__(f"qwen3_trn.{name}", fromlist=[name])
    command = re.search(r"    python - <<END\n(.*?)    END", module.__doc__, re.DOTALL)[1]
    code = re.sub("^    ", "", command, flags=re.MULTILINE).replace("/tmp/qwen3_trn", str(tmp_path))
    monkeypatch.chdir(REPO)
    exec(code, {})
