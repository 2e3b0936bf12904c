"""Token caches as `tokenize` makes them, of documents that a test gives."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qwen3_trn.cache import TokenCache, open_cache


def make_cache(documents: Sequence[Sequence[int]], supervised: Sequence[Sequence[bool]] | None = None) -> TokenCache:
    """In memory. With `supervised`, a mask for each document, they are conversations."""
    offsets = np.cumsum([0] + [len(document) for document in documents])
    meta = {
        "kind": "text" if supervised is None else "chat",
        "fingerprint": {"data": "test", "tokenizer": "test"},
        "num_tokens": int(offsets[-1]),
        "num_documents": len(documents),
        "max_token_id": max(map(max, documents)),
        "max_token_file": "test.txt",
        "num_reasoning_dropped": 0,
        "num_bad": 0,
        "bad_reasons": {},
        "bad_examples": [],
    }
    mask = None if supervised is None else np.concatenate([np.array(part, bool) for part in supervised])
    return TokenCache(np.concatenate(documents).astype(np.int32), offsets.astype(np.int64), mask, meta)


def write_cache(folder: Path, cache: TokenCache) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    cache.tokens.tofile(folder / "tokens.bin")
    cache.offsets.tofile(folder / "offsets.bin")
    if cache.supervised is not None:
        cache.supervised.tofile(folder / "supervised.bin")
    (folder / "meta.json").write_text(json.dumps(cache.meta))
    return folder


def number_tokens(lengths: Sequence[int]) -> list[list[int]]:
    """Documents of these lengths in which every token id occurs once, from 1."""
    ends = np.cumsum(lengths)
    return [list(range(end - length + 1, end + 1)) for length, end in zip(lengths, ends.tolist(), strict=True)]


def read_documents(folder: Path) -> list[list[int]]:
    cache = open_cache(folder)
    return [cache.tokens[begin:end].tolist() for begin, end in itertools.pairwise(cache.offsets.tolist())]
