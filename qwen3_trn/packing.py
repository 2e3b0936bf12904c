"""Documents to rows of T tokens: which pieces each row holds, from their lengths alone, and the row's arrays.

    python - <<END
    import numpy as np
    from qwen3_trn.packing import plan_best_fit
    print(plan_best_fit(np.array([0, 5, 9, 12, 20]), np.arange(4), seq_len=8))
    END

- Texts are concatenated and cut every T tokens. A piece of a document is a document of its own to the model.
- Conversations are never cut: each goes into the row that it fills best.
- Without packing each row holds one document, or a piece of T tokens of it.
A label is the next token of the same document if that is supervised, even where it starts the next row. So every token
but the first of each document is predicted exactly once.
"""

import bisect
import itertools
from typing import NamedTuple

import numpy as np

from qwen3_trn.cache import TokenCache
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.model import PADDING_DOCUMENT

LOOK_AHEAD = 1000  # conversations among which the one that fits best is chosen


class Plan(NamedTuple):
    """Row r holds the pieces rows[r] to rows[r + 1] - 1, one after the other. P pieces, R rows."""

    begins: np.ndarray  # int64 [P]: where in the cache's tokens a piece begins
    lengths: np.ndarray  # int64 [P]
    rows: np.ndarray  # int64 [R + 1]


class Rows(NamedTuple):
    """int32 arrays, [T] for one row or [B, T] for several."""

    input_ids: np.ndarray  # 0 at padding
    labels: np.ndarray  # already shifted: the token after input_ids[t], or IGNORE_INDEX
    positions: np.ndarray  # from 0 in each piece of a document; padding is a piece of its own
    document_ids: np.ndarray  # 0, 1, 2, ... in each row; PADDING_DOCUMENT at padding


def plan_concatenated(offsets: np.ndarray, order: np.ndarray, seq_len: int) -> Plan:
    """The documents in this order, concatenated and cut every `seq_len` tokens; only the last row can be shorter.

    offsets: int64 [D + 1], as in `TokenCache`. order: the documents, a permutation of 0 to D - 1.
    """
    starts = np.concatenate([[0], np.cumsum(np.diff(offsets)[order])])  # of the documents in the concatenation
    cuts = np.arange(0, starts[-1], seq_len)
    pieces = np.union1d(starts[:-1], cuts)
    documents = np.searchsorted(starts, pieces, side="right") - 1
    return Plan(
        begins=offsets[order[documents]] + pieces - starts[documents],
        lengths=np.diff(pieces, append=starts[-1]),
        rows=np.searchsorted(pieces, np.append(cuts, starts[-1])),
    )


def plan_best_fit(offsets: np.ndarray, documents: np.ndarray, seq_len: int) -> Plan:
    """Each of `documents`, cut to `seq_len` tokens, whole in some row.

    A row takes the longest of the next LOOK_AHEAD documents, then the longest that fits in the room that is left, until
    none fits. So two rows that follow each other hold more than `seq_len` tokens: rows are more than half full on
    average, and in practice nearly full.
    """
    lengths = np.minimum(np.diff(offsets)[documents], seq_len)
    # A document as one number, which sorts by length: length * D + its place in `documents`.
    num_documents = len(documents)
    coming = iter((lengths * num_documents + np.arange(num_documents)).tolist())
    pool = sorted(itertools.islice(coming, LOOK_AHEAD))
    order: list[int] = []
    rows: list[int] = []
    while pool:
        rows.append(len(order))
        room = seq_len
        while num_fitting := bisect.bisect_left(pool, (room + 1) * num_documents):
            length, place = divmod(pool.pop(num_fitting - 1), num_documents)
            order.append(place)
            room -= length
            if (key := next(coming, None)) is not None:
                bisect.insort(pool, key)
    return Plan(offsets[documents[order]], lengths[order], np.array([*rows, len(order)]))


def plan_one_each(offsets: np.ndarray, documents: np.ndarray, seq_len: int, cut: bool) -> Plan:
    """A row for each document; with `cut` a row for each `seq_len` tokens of it, else its first ones."""
    lengths = np.diff(offsets)[documents]
    num_pieces = -(-lengths // seq_len) if cut else np.ones_like(lengths)
    rows = np.arange(num_pieces.sum() + 1)
    owner = np.repeat(np.arange(len(documents)), num_pieces)
    skipped = (rows[:-1] - (np.cumsum(num_pieces) - num_pieces)[owner]) * seq_len
    return Plan(offsets[documents[owner]] + skipped, np.minimum(lengths[owner] - skipped, seq_len), rows)


def build_row(cache: TokenCache, plan: Plan, row: int, seq_len: int) -> Rows:
    """Row number `row` of the plan, int32 [T]. A row past the last one is all padding."""
    pieces = slice(*plan.rows[row : row + 2]) if row < len(plan.rows) - 1 else slice(0, 0)
    begins, lengths = plan.begins[pieces], plan.lengths[pieces]
    document_ids = np.repeat(np.arange(len(lengths)), lengths)
    num_tokens = len(document_ids)
    positions = np.arange(num_tokens) - (np.cumsum(lengths) - lengths)[document_ids]
    source = begins[document_ids] + positions

    # A piece's last token has a label only if its document goes on.
    ends = begins + lengths
    has_next = cache.offsets[np.searchsorted(cache.offsets, ends)] != ends
    is_labelled = (positions + 1 < lengths[document_ids]) | has_next[document_ids]
    targets = source[is_labelled] + 1
    labels = cache.tokens[targets]
    if cache.supervised is not None:
        labels = np.where(cache.supervised[targets], labels, IGNORE_INDEX)

    padded = Rows(
        input_ids=np.zeros(seq_len, np.int32),
        labels=np.full(seq_len, IGNORE_INDEX, np.int32),
        positions=np.arange(-num_tokens, seq_len - num_tokens, dtype=np.int32),
        document_ids=np.full(seq_len, PADDING_DOCUMENT, np.int32),
    )
    padded.input_ids[:num_tokens] = cache.tokens[source]
    padded.labels[:num_tokens][is_labelled] = labels
    padded.positions[:num_tokens] = positions
    padded.document_ids[:num_tokens] = document_ids
    return padded
