"""The training data as the trainer sees it: rows of tokens, asked for by their position in one endless order.

    python -m qwen3_trn.data assets/tiny/sample.txt --model assets/tiny      # look at what a file becomes

    python - <<END
    from pathlib import Path
    from qwen3_trn.cache import open_cache, tokenize
    from qwen3_trn.data import PackedData, PackedSource
    from qwen3_trn.sources import find_sources
    (source,) = find_sources(["sample"])
    cache = open_cache(tokenize(source, Path("assets/tiny"), Path("/tmp/qwen3_trn")))
    print(PackedData([PackedSource(cache, seq_len=64, seed=0)], [1.0]).batch([0]))
    END

The way from --data to here: sources.py reads records, encode.py makes token ids of them (with chat.py for
conversations), cache.py keeps these in memory-mapped arrays, and packing.py says which pieces of them each row holds.
stream.py does all that part by part, for what is too large.

The order is a function of data, tokenizer, seed and settings alone. It has no state but the position: any rank can ask
for any row, and a run that resumes asks for the rows that come next. A row is copied out of the memory map in
microseconds, so there is nothing to prefetch and there are no worker processes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from qwen3_trn.cache import TokenCache
from qwen3_trn.chat import Long
from qwen3_trn.errors import UserError
from qwen3_trn.packing import Plan, Rows, build_row, plan_best_fit, plan_concatenated, plan_one_each

SCHEDULE_ROWS = 10_000  # the mix of several sources repeats after so many rows


class PackedSource:
    """The rows of one cache: epoch after epoch, each with every row once.

    The rows of texts are cut anew in each epoch, from another order of the documents. Conversations are packed once,
    and an epoch is another order of the same rows. Without `shuffle`, for evaluation, there is one epoch, in the
    cache's order; the rows after it are all padding, so that ranks can share any number of rows evenly.

    pack: several documents a row, else one. long: what happens to conversations of more than `seq_len` tokens: drop,
    truncate, or error. Raises UserError if conversations are too long, or all are.
    """

    def __init__(
        self,
        cache: TokenCache,
        seq_len: int,
        seed: int,
        pack: bool = True,
        long: Long = "drop",
        shuffle: bool = True,
    ):
        self.cache, self.seq_len, self.seed, self.shuffle = cache, seq_len, seed, shuffle
        self.is_chat = cache.supervised is not None
        self.max_token_id: int = cache.meta["max_token_id"]
        self.max_token_file: str = cache.meta["max_token_file"]
        self.fingerprint: dict[str, str] = cache.meta["fingerprint"] | name_settings(pack, long, self.is_chat)
        self.num_documents = len(cache.offsets) - 1
        documents = _choose_documents(cache, seq_len, long) if self.is_chat else np.arange(self.num_documents)
        self.num_dropped = self.num_documents - len(documents)
        self.num_truncated = int((np.diff(cache.offsets)[documents] > seq_len).sum()) if self.is_chat else 0
        self._fixed_plan: Plan | None = None
        if not pack:
            self._fixed_plan = plan_one_each(cache.offsets, documents, seq_len, cut=not self.is_chat)
        elif self.is_chat:
            self._fixed_plan = plan_best_fit(cache.offsets, documents[self._permute(len(documents), 0, 0)], seq_len)
        self._plan_epoch = functools.lru_cache(maxsize=2)(self._make_plan)
        first = self._plan_epoch(0)[0]
        self.rows_per_epoch = len(first.rows) - 1
        self.fill_rate = first.lengths.sum() / max(1, self.rows_per_epoch * seq_len)

    def row(self, position: int) -> Rows:
        """The row at position 0, 1, 2, ..., int32 [T]. Position p is in epoch p // rows_per_epoch."""
        if not self.shuffle:
            return build_row(self.cache, self._plan_epoch(0)[0], position, self.seq_len)
        epoch, index = divmod(position, self.rows_per_epoch)
        plan, order = self._plan_epoch(epoch)
        return build_row(self.cache, plan, order[index], self.seq_len)

    def _make_plan(self, epoch: int) -> tuple[Plan, np.ndarray]:
        """The epoch's plan, and the order in which its rows are visited."""
        order = self._permute(self.num_documents, epoch, 0)
        plan = self._fixed_plan or plan_concatenated(self.cache.offsets, order, self.seq_len)
        return plan, self._permute(len(plan.rows) - 1, epoch, 1)

    def describe(self) -> list[str]:
        """Lines for the console: what the source is, and what was left out of it."""
        meta, documents = self.cache.meta, "conversations" if self.is_chat else "documents"
        lines = [
            f"{meta['num_tokens']:,} tokens in {self.num_documents:,} {documents}: {self.rows_per_epoch:,} rows of "
            f"{self.seq_len} an epoch, {self.fill_rate:.1%} full"
        ]
        if meta["num_bad"]:
            lines.append(f"warning: {meta['num_bad']:,} bad records are left out, as {meta['bad_examples'][0]}")
        if self.num_truncated:
            lines.append(f"warning: {self.num_truncated:,} conversations are cut to {self.seq_len} tokens")
        if self.num_dropped:
            why = ", and have nothing to learn from in the first" if self.num_truncated else ""
            lines.append(
                f"warning: {self.num_dropped:,} conversations exceed {self.seq_len} tokens{why}; they are left out"
            )
        if meta["num_reasoning_dropped"]:
            lines.append(
                f"warning: the chat template dropped the reasoning of supervised turns in "
                f"{meta['num_reasoning_dropped']:,} conversations; --train-on last trains on turns that keep it"
            )
        return lines

    def _permute(self, size: int, *seeds: int) -> np.ndarray:
        return _permutation(size, self.seed, *seeds) if self.shuffle else np.arange(size)


class PackedData:
    """The rows of one source, or of several in a fixed mix. Every row comes from one source.

    sources: each a `PackedSource` or a `stream.StreamedSource`. weights: the share of the rows that each gives.
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float]):
        self.sources = sources
        sizes = [source.rows_per_epoch for source in sources]
        self.rows_per_epoch: int | None = None if None in sizes else sum(sizes)  # None: a stream is among them
        largest = max(sources, key=lambda source: source.max_token_id)
        self.max_token_id: int = largest.max_token_id
        self.max_token_file: str = largest.max_token_file  # the file that holds max_token_id
        # Named facts that the order of rows depends on, beside seq_len and seed. A run that resumes compares them.
        names = {name: None for source in sources for name in source.fingerprint}
        self.fingerprint: dict[str, str] = {
            name: ", ".join(source.fingerprint.get(name, "-") for source in sources) for name in names
        }
        self.fingerprint["weights"] = ", ".join(f"{weight / sum(weights):g}" for weight in weights)

        self._schedule = make_schedule(weights)
        self._counts = np.bincount(self._schedule)
        self._turns = np.empty_like(self._schedule)  # the how-manieth row of its source each of the schedule's is
        for index, count in enumerate(self._counts):
            self._turns[self._schedule == index] = np.arange(count)

    def batch(self, positions: Sequence[int]) -> Rows:
        """The rows at these global positions, int32 [B, T]."""
        return Rows(*map(np.stack, zip(*map(self.row, positions), strict=True)))

    def row(self, position: int) -> Rows:
        """The row at global position 0, 1, 2, ..., int32 [T]."""
        period, index = divmod(position, len(self._schedule))
        source = self._schedule[index]
        return self.sources[source].row(int(period * self._counts[source] + self._turns[index]))

    def describe(self) -> list[str]:
        """Lines for the console: what the data is, and what was left out of it."""
        return [line for source in self.sources for line in source.describe()]


def name_settings(pack: bool, long: Long, is_chat: bool) -> dict[str, str]:
    """The settings that the order of a source's rows depends on, for its fingerprint; `long` is about conversations."""
    return {"pack": str(pack)} | ({"long": long} if is_chat else {})


def make_schedule(weights: Sequence[float]) -> np.ndarray:
    """The source of each row, int64 [about SCHEDULE_ROWS], the rows of each source evenly spread."""
    shares = np.array(weights) / np.sum(weights)
    counts = np.maximum(1, np.round(shares * SCHEDULE_ROWS)).astype(int) if len(weights) > 1 else np.ones(1, int)
    sources = np.repeat(np.arange(len(weights)), counts)
    times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return sources[np.argsort(times, kind="stable")]


def _choose_documents(cache: TokenCache, seq_len: int, long: Long) -> np.ndarray:
    """The conversations that are trained on, int64. Those of more than `seq_len` tokens are treated as `long` says."""
    lengths = np.diff(cache.offsets)
    too_long = np.flatnonzero(lengths > seq_len)
    if long == "error" and len(too_long):
        raise UserError(
            f"{len(too_long)} of {len(lengths)} conversations are longer than --seq-len {seq_len}; the longest has "
            f"{lengths.max()} tokens. Raise --seq-len, or say --long drop or --long truncate."
        )
    dropped = too_long
    if long == "truncate":
        assert cache.supervised is not None
        begins = cache.offsets[too_long]
        dropped = too_long[[not cache.supervised[b + 1 : b + 1 + seq_len].any() for b in begins]]
    documents = np.setdiff1d(np.arange(len(lengths)), dropped)
    if len(lengths) and not len(documents):
        cut = ", and what is left of each when it is cut has nothing to learn from" if long == "truncate" else ""
        raise UserError(
            f"all {len(lengths)} conversations are longer than --seq-len {seq_len}{cut}; the shortest has "
            f"{lengths.min()} tokens. Raise --seq-len{', or say --long truncate' if long == 'drop' else ''}."
        )
    return documents


def _permutation(size: int, *seeds: int) -> np.ndarray:
    """By sorting raw random bits, which numpy keeps from version to version (it does not promise that for shuffle)."""
    return np.argsort(np.random.PCG64(seeds).random_raw(size), kind="stable")


if __name__ == "__main__":
    from qwen3_trn.inspect_data import main

    main()
