"""Records to token ids, once: a folder of memory-mapped arrays, named by a hash of all that it depends on.

    python - <<END
    from pathlib import Path
    from qwen3_trn.cache import open_cache, tokenize
    from qwen3_trn.sources import find_sources
    (source,) = find_sources(["sample"])
    print(open_cache(tokenize(source, Path("assets/tiny"), Path("/tmp/qwen3_trn"))))
    END

One process makes a folder, under a lock, while the others wait for it. The folder appears when it is complete, and is
checked before it is used again: a damaged one is made anew.
"""

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from qwen3_trn import encode
from qwen3_trn.chat import TrainOn
from qwen3_trn.encode import TOKENIZER_FILES, Batch, Encoded, Format, Part, encode_source, find_kind
from qwen3_trn.errors import UserError
from qwen3_trn.folders import publish
from qwen3_trn.sources import Source, hash_contents, hash_stream, name_place

BadRecords = Literal["error", "skip"]

CACHE_FORMAT = 2  # raise it when the same files, tokenizer and settings come to give another cache
NUM_EXAMPLES = 5  # bad records that are shown


def cache_folder() -> Path:
    """Where tokenized files are kept: $QWEN3_TRN_CACHE, or qwen3_trn in the user's cache folder."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("QWEN3_TRN_CACHE") or user_cache / "qwen3_trn")


class TokenCache(NamedTuple):
    """What `tokenize` made of a source."""

    tokens: np.ndarray  # int32 [num_tokens]
    offsets: np.ndarray  # int64 [num_documents + 1]: document d is tokens[offsets[d] : offsets[d + 1]]
    supervised: np.ndarray | None  # bool [num_tokens], of conversations: which tokens are targets. None: all of them
    meta: dict[str, Any]


def open_cache(folder: Path) -> TokenCache:
    """Map the arrays of a folder that `tokenize` returned; they take no memory until they are read."""
    meta = json.loads((folder / "meta.json").read_text())

    def map_array(name: str, dtype: type) -> np.ndarray:
        if not (folder / name).stat().st_size:  # the end of a source can be a part without documents
            return np.empty(0, dtype)
        return np.asarray(np.memmap(folder / name, dtype, "r"))  # a plain array is faster to index than a memmap

    supervised = map_array("supervised.bin", np.bool_) if meta["kind"] == "chat" else None
    return TokenCache(map_array("tokens.bin", np.int32), map_array("offsets.bin", np.int64), supervised, meta)


def identify(
    source: Source, tokenizer_dir: Path, format: Format, train_on: TrainOn, mask_empty_think: bool, stream: bool
) -> dict[str, str]:
    """The named facts that the tokens depend on: data and tokenizer as hashes, format text or chat, settings."""
    kind = find_kind(source, format, stream)
    data = hash_stream(source.names) if stream else hash_contents(source.names)
    fingerprint = {"data": data, "tokenizer": _hash_tokenizer(tokenizer_dir), "format": kind}
    if kind == "chat":
        fingerprint |= {"train_on": train_on, "mask_empty_think": str(mask_empty_think)}
    if stream:
        fingerprint["part_bytes"] = str(encode.PART_BYTES)
    return fingerprint


def tokenize(
    source: Source,
    tokenizer_dir: Path,
    cache_dir: Path,
    format: Format = "auto",
    train_on: TrainOn = "assistant",
    mask_empty_think: bool = True,
    bad_records: BadRecords = "error",
) -> Path:
    """The folder `cache_dir`/KEY with the tokens of `source`, made now unless there is an undamaged one.

    `format` auto goes by the first record. `train_on` and `mask_empty_think` are those of `chat.render_batch`. A
    special token that is spelled out in a text becomes that token. Raises UserError for a source or a tokenizer that
    cannot be read, and for the first bad record, unless these are to be skipped; then meta.json says how many they
    were, and why.
    """
    fingerprint = identify(source, tokenizer_dir, format, train_on, mask_empty_think, stream=False)
    return make_cache(source, fingerprint, tokenizer_dir, cache_dir, bad_records)[0]


def make_cache(
    source: Source,
    fingerprint: dict[str, str],
    tokenizer_dir: Path,
    cache_dir: Path,
    bad_records: BadRecords,
    part: Part | None = None,
) -> tuple[Path, TokenCache]:
    """The folder with the tokens of `source`, or of a part of it, by the settings in what `identify` returned.

    It holds the arrays of `TokenCache`, and meta.json with their counts and checksums; it appears only when complete.
    A process that finds another one at the same work waits for it. `part`: the fingerprint's part_bytes of the source,
    from there on; meta.json says where the `next` part begins.

    Returns the folder, and what it holds, mapped: that stays, even if another process removes the folder.
    """
    kind = fingerprint["format"]
    key = hashlib.sha256(json.dumps([CACHE_FORMAT, fingerprint, part]).encode()).hexdigest()[:32]
    cache, partial = cache_dir / key, cache_dir / f"partial-{key}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(cache_dir)
    with _lock(cache_dir, key, tell=part is None):
        if not _is_intact(cache):
            partial.mkdir()
            try:
                with contextlib.closing(encode_source(source, fingerprint, tokenizer_dir, part)) as batches:
                    meta = _write_arrays(batches, kind == "chat", partial, bad_records, is_part=part is not None)
                files = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
                meta = {"kind": kind, "fingerprint": fingerprint, **meta, "files": files}
                (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
                publish(partial, cache)
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # no longer there after the rename
        opened = open_cache(cache)
    if bad_records == "error" and opened.meta["num_bad"]:  # made by a run that skipped them
        raise UserError(_explain_bad(opened.meta["bad_examples"][0]))
    return cache, opened


# --- the folder ---


def remove_cache(cache: Path) -> None:
    """Remove a folder that `tokenize` returned, at once for those who look for it."""
    with _lock(cache.parent, cache.name, tell=False):
        if cache.exists():
            partial = cache.rename(cache.with_name(f"partial-{cache.name}"))
            shutil.rmtree(partial)


@contextlib.contextmanager
def _lock(cache_dir: Path, key: str, tell: bool) -> Iterator[None]:
    """Wait until no other process works on `key`. The kernel lets go of the lock when its process dies, however."""
    with open(cache_dir / f"{key}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if tell:
                print(f"waiting for another process that tokenizes the same data into {cache_dir}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(cache_dir: Path) -> None:
    """Remove the unfinished folders of processes that were killed: those whose lock nobody holds."""
    for partial in cache_dir.glob("partial-*"):
        lock = cache_dir / f"{partial.name.removeprefix('partial-')}.lock"
        with open(lock, "w") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if partial.exists():  # or it was just finished
                shutil.rmtree(partial)


def _is_intact(cache: Path) -> bool:
    """Whether the folder is there as it was written. A damaged one is removed, with a word about it."""
    if not cache.exists():
        return False
    try:
        files = json.loads((cache / "meta.json").read_text())["files"]
        damaged = [name for name in files if _checksum(cache / name) != files[name]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        damaged = [str(error)]
    if damaged:
        print(f"the token cache {cache} is damaged ({', '.join(damaged)}); it is made again", file=sys.stderr)
        shutil.rmtree(cache)
    return not damaged


def _checksum(path: Path) -> list[int]:
    """[size in bytes, CRC-32]"""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
        return [file.tell(), crc]


def _hash_tokenizer(folder: Path) -> str:
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not {"tokenizer.json", "vocab.json"} & {file.name for file in files}:
        raise UserError(f"{folder} holds no tokenizer; expected tokenizer.json and tokenizer_config.json.")
    key = hashlib.sha256()
    for file in files:
        key.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return key.hexdigest()


def _write_arrays(
    batches: Iterator[tuple[Batch, Encoded]], is_chat: bool, folder: Path, bad_records: BadRecords, is_part: bool
) -> dict[str, Any]:
    """Write tokens.bin, offsets.bin and, of conversations, supervised.bin; returns what meta.json says of them."""
    totals = dict.fromkeys(("num_tokens", "num_documents", "num_reasoning_dropped", "num_bad"), 0)
    reasons: collections.Counter[str] = collections.Counter()
    examples: list[str] = []
    num_tokens_of: collections.Counter[str] = collections.Counter()  # each file
    max_token_id, max_token_file, next_part = -1, "", None
    with (
        open(folder / "tokens.bin", "wb") as tokens,
        open(folder / "offsets.bin", "wb") as offsets,
        open(folder / "supervised.bin", "wb") if is_chat else contextlib.nullcontext() as supervised,
    ):
        np.zeros(1, np.int64).tofile(offsets)
        for (name, _, next_part), encoded in batches:  # noqa: B007 - the last one counts
            for number, reason in encoded.bad:
                example = f"{name_place(name, number)}: {reason}"
                if bad_records == "error":
                    raise UserError(_explain_bad(example))
                reasons[re.sub(r"\d+|'[^']*'|\"[^\"]*\"|`[^`]*`", "...", reason)[:120]] += 1
                examples += [example] * (len(examples) < NUM_EXAMPLES)
            encoded.tokens.tofile(tokens)
            (totals["num_tokens"] + encoded.ends).tofile(offsets)
            if supervised:
                encoded.supervised.tofile(supervised)
            totals["num_tokens"] += len(encoded.tokens)
            totals["num_documents"] += len(encoded.ends)
            totals["num_reasoning_dropped"] += encoded.num_reasoning_dropped
            totals["num_bad"] += len(encoded.bad)
            num_tokens_of[name] += len(encoded.tokens)
            if (largest := int(encoded.tokens.max(initial=-1))) > max_token_id:
                max_token_id, max_token_file = largest, name
    if examples and not totals["num_documents"]:
        raise UserError(f"all {totals['num_bad']} records are bad; the first is {examples[0]}")
    blank = [name for name, num_tokens in num_tokens_of.items() if not num_tokens]
    if blank and not examples and not is_part:
        raise UserError(f"{blank[0]} holds nothing but white space; expected text or conversations.")
    return totals | {
        "max_token_id": max_token_id,
        "max_token_file": max_token_file,
        "bad_reasons": dict(reasons.most_common()),
        "bad_examples": examples,
        "next": next_part,
    }


def _explain_bad(example: str) -> str:
    return f"{example} (--bad-records skip leaves such records out, and counts them.)"
