"""Records to token ids, once: a folder of memory-mapped arrays, named by a hash of all that it depends on.

    python - <<END
    from pathlib import Path
    from qwen3_trn.cache import open_cache, tokenize
    from qwen3_trn.sources import find_sources
    (source,) = find_sources(["sample"])
    print(open_cache(tokenize(source, Path("assets/tiny"), Path("/tmp/qwen3_trn"))))
    END

A document is a text, ended by the end-of-text token, or a conversation as the chat template renders it. One process
calls `tokenize`, the others wait for it. Texts are tokenized by the threads of the tokenizer. Conversations are
rendered by Python, which computes in one thread only, so they are spread over processes.
"""

import collections
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from tqdm import tqdm

from qwen3_trn import chat
from qwen3_trn.chat import BadRecord
from qwen3_trn.errors import UserError
from qwen3_trn.folders import publish
from qwen3_trn.sources import (
    END_OF_TEXT,
    Record,
    Source,
    count_bytes,
    hash_contents,
    hash_stream,
    name_place,
    read_records,
)

Format = Literal["auto", "text", "chat"]
BadRecords = Literal["error", "skip"]

CACHE_FORMAT = 2  # raise it when the same files, tokenizer and settings come to give another cache
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)
BATCH_BYTES = {"text": 1 << 22, "chat": 1 << 18}
BYTES_A_WORKER = 1 << 24  # a process takes seconds to start; for less it does not pay
PART_BYTES = 1 << 28  # of a source that is tokenized while it is trained on
NUM_EXAMPLES = 5  # bad records that are shown


def cache_folder() -> Path:
    """Where tokenized files are kept: $QWEN3_TRN_CACHE, or qwen3_trn in the user's cache folder."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("QWEN3_TRN_CACHE") or user_cache / "qwen3_trn")


class Part(NamedTuple):
    """Where a part of a source begins: after so many files, and after so many lines or rows, and bytes, of the next."""

    files: int = 0
    lines: int = 0
    offset: int = 0


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
    source: Source, tokenizer_dir: Path, format: Format, train_on: chat.TrainOn, mask_empty_think: bool, stream: bool
) -> dict[str, str]:
    """The named facts that the tokens depend on: data and tokenizer as hashes, format text or chat, settings."""
    kind = _find_kind(source, format, stream)
    data = hash_stream(source.names) if stream else hash_contents(source.names)
    fingerprint = {"data": data, "tokenizer": _hash_tokenizer(tokenizer_dir), "format": kind}
    if kind == "chat":
        fingerprint |= {"train_on": train_on, "mask_empty_think": str(mask_empty_think)}
    if stream:
        fingerprint["part_bytes"] = str(PART_BYTES)
    return fingerprint


def tokenize(
    source: Source,
    tokenizer_dir: Path,
    cache_dir: Path,
    format: Format = "auto",
    train_on: chat.TrainOn = "assistant",
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
    return make_cache(source, fingerprint, tokenizer_dir, cache_dir, bad_records)


def make_cache(
    source: Source,
    fingerprint: dict[str, str],
    tokenizer_dir: Path,
    cache_dir: Path,
    bad_records: BadRecords,
    part: Part | None = None,
) -> Path:
    """The folder with the tokens of `source`, or of a part of it, by the settings in what `identify` returned.

    It holds the arrays of `TokenCache`, and meta.json with their counts and checksums; it appears only when complete.
    A process that finds another one at the same work waits for it. `part`: PART_BYTES of the source, from there on;
    meta.json says where the `next` part begins.
    """
    kind = fingerprint["format"]
    key = hashlib.sha256(json.dumps([CACHE_FORMAT, fingerprint, part]).encode()).hexdigest()[:32]
    cache, partial = cache_dir / key, cache_dir / f"partial-{key}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(cache_dir)
    with _lock(cache_dir, key, tell=part is None):
        if not _is_intact(cache):
            encode: Callable[[Sequence[Record]], Encoded] = functools.partial(_encode_texts, tokenizer_dir)
            if kind == "chat":
                train_on = cast(chat.TrainOn, fingerprint["train_on"])
                mask_empty_think = fingerprint["mask_empty_think"] == "True"
                encode = functools.partial(_encode_chats, tokenizer_dir, train_on, mask_empty_think)
            load_tokenizer(tokenizer_dir)
            partial.mkdir()
            try:
                meta = _write_arrays(source, kind, encode, partial, bad_records, part)
                files = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
                meta = {"kind": kind, "fingerprint": fingerprint, **meta, "files": files}
                (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
                publish(partial, cache)
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # no longer there after the rename
    meta = json.loads((cache / "meta.json").read_text())
    if bad_records == "error" and meta["num_bad"]:  # made by a run that skipped them
        raise UserError(_explain_bad(meta["bad_examples"][0]))
    return cache


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


@functools.cache
def load_tokenizer(folder: Path):
    """The tokenizer, loaded once a process. Raises UserError."""
    from transformers import AutoTokenizer  # here, because it takes seconds

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged file makes transformers raise
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {error!r}.") from error


@functools.cache
def _find_end_of_text(folder: Path) -> int:
    tokenizer = load_tokenizer(folder)
    end_of_text = tokenizer.get_vocab().get(END_OF_TEXT, tokenizer.eos_token_id)
    if end_of_text is None:
        raise UserError(f"the tokenizer in {folder} has neither {END_OF_TEXT} nor an eos_token to end documents with.")
    return end_of_text


# --- records to tokens ---


class Encoded(NamedTuple):
    """The documents that end in a batch of records."""

    tokens: np.ndarray  # int32 [N]
    ends: np.ndarray  # int64 [D]: where in `tokens` each document ends
    supervised: np.ndarray  # bool [N]
    bad: list[tuple[int, str]]  # number of a bad record, and what is wrong with it
    num_reasoning_dropped: int


def _find_kind(source: Source, format: Format, stream: bool) -> str:
    """Whether a source holds texts or conversations, which are packed differently: what its first good record is."""
    if format != "auto":
        return "text" if format == "text" else "chat"
    reason = "it holds no records"
    for name in source.names:
        for record in read_records(name, stream=stream):
            try:
                return "text" if _recognise(record) == "text" else "chat"
            except BadRecord as error:
                reason = f"{name_place(name, record.number)}: {error}"
    raise UserError(f"no record of {' '.join(source.names)} can be used; {reason}")


def _recognise(record: Record) -> chat.Format:
    if isinstance(record.content, BadRecord):
        raise record.content
    return chat.recognise(record.content)


def _encode_texts(tokenizer_dir: Path, records: Sequence[Record]) -> Encoded:
    """Texts of nothing but white space are left out."""
    tokenizer, end_of_text = load_tokenizer(tokenizer_dir), _find_end_of_text(tokenizer_dir)
    texts, is_end, bad = [], [], []
    for record in records:
        try:
            text = _read_text(record)
        except BadRecord as error:
            bad.append((record.number, str(error)))
            continue
        if text.strip():
            texts.append(text)
            is_end.append(record.is_end)
    ids = []
    if texts:  # the tokenizer refuses an empty list
        ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
    for document, ends in zip(ids, is_end, strict=True):
        if ends:
            document.append(end_of_text)
    tokens = np.fromiter(itertools.chain.from_iterable(ids), np.int32)
    ends = np.cumsum([len(document) for document in ids], dtype=np.int64)[np.array(is_end, bool)]
    return Encoded(tokens, ends, np.ones(len(tokens), bool), bad, 0)


def _read_text(record: Record) -> str:
    if isinstance(record.content, BadRecord):
        raise record.content
    text = record.content.get("text") if isinstance(record.content, dict) else None
    if not isinstance(text, str):
        found = json.dumps(record.content, ensure_ascii=False, default=str)[:80]
        raise BadRecord(f"expected an object with a string `text`, as the first record of its source; found {found}")
    if half := re.search("[\ud800-\udfff]", text):
        raise BadRecord(f"`text` holds {half[0]!a}, half a surrogate pair. Remove it.")
    return text


def _encode_chats(
    tokenizer_dir: Path, train_on: chat.TrainOn, mask_empty_think: bool, records: Sequence[Record]
) -> Encoded:
    numbers, chats, bad = [], [], []
    for record in records:
        try:
            format = _recognise(record)
            if format == "text":
                raise BadRecord("expected a conversation, as the first record of its source; found `text`.")
            chats.append(chat.to_chat(record.content, format))
            numbers.append(record.number)
        except BadRecord as error:
            bad.append((record.number, str(error)))
    good = []
    for number, rendered in zip(
        numbers, chat.render_batch(load_tokenizer(tokenizer_dir), chats, train_on, mask_empty_think), strict=True
    ):
        if isinstance(rendered, BadRecord):
            bad.append((number, str(rendered)))
        else:
            good.append(rendered)
    return Encoded(
        np.concatenate([np.empty(0, np.int32), *(conversation.input_ids for conversation in good)]),
        np.cumsum([len(conversation.input_ids) for conversation in good], dtype=np.int64),
        np.concatenate([np.empty(0, bool), *(conversation.supervised for conversation in good)]),
        sorted(bad),
        sum(conversation.reasoning_dropped for conversation in good),
    )


def _write_arrays(
    source: Source,
    kind: str,
    encode: Callable[[Sequence[Record]], Encoded],
    folder: Path,
    bad_records: str,
    part: Part | None,
) -> dict[str, Any]:
    """Write tokens.bin, offsets.bin and, of conversations, supervised.bin; returns what meta.json says of them."""
    num_tokens, num_documents, num_bad, num_reasoning_dropped = 0, 0, 0, 0
    max_token_id, max_token_file = -1, ""
    reasons: collections.Counter[str] = collections.Counter()
    examples: list[str] = []
    blank = set(source.names)
    num_bytes = PART_BYTES if part else sum(map(count_bytes, source.names))
    next_part: Part | None = None
    num_workers = min(len(os.sched_getaffinity(0)), num_bytes // BYTES_A_WORKER) if kind == "chat" else 1
    with (
        open(folder / "tokens.bin", "wb") as tokens,
        open(folder / "offsets.bin", "wb") as offsets,
        open(folder / "supervised.bin", "wb") if kind == "chat" else contextlib.nullcontext() as supervised,
        tqdm(total=num_bytes, unit="B", unit_scale=True, desc="Tokenizing", disable=True if part else None) as progress,
    ):
        np.zeros(1, np.int64).tofile(offsets)
        batches = _read_batches(source, BATCH_BYTES[kind], progress, part)
        for batch, encoded in _encode_all(encode, batches, num_workers):
            name, next_part = batch.name, batch.next
            for number, reason in encoded.bad:
                example = f"{name_place(name, number)}: {reason}"
                if bad_records == "error":
                    raise UserError(_explain_bad(example))
                num_bad += 1
                reasons[re.sub(r"\d+|'[^']*'|\"[^\"]*\"|`[^`]*`", "...", reason)[:120]] += 1
                examples += [example] * (len(examples) < NUM_EXAMPLES)
            encoded.tokens.tofile(tokens)
            (num_tokens + encoded.ends).tofile(offsets)
            if supervised:
                encoded.supervised.tofile(supervised)
            num_tokens += len(encoded.tokens)
            num_documents += len(encoded.ends)
            num_reasoning_dropped += encoded.num_reasoning_dropped
            if len(encoded.tokens):
                blank.discard(name)
                if encoded.tokens.max() > max_token_id:
                    max_token_id, max_token_file = int(encoded.tokens.max()), name
    if num_bad and not num_documents:
        raise UserError(f"all {num_bad} records of {' '.join(source.names)} are bad; the first is {examples[0]}")
    if blank and not num_bad and not part:
        raise UserError(f"{min(blank)} holds nothing but white space; expected text or conversations.")
    return {
        "next": next_part,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "max_token_id": max_token_id,
        "max_token_file": max_token_file,
        "num_reasoning_dropped": num_reasoning_dropped,
        "num_bad": num_bad,
        "bad_reasons": dict(reasons.most_common()),
        "bad_examples": examples,
    }


def _explain_bad(example: str) -> str:
    return f"{example} (--bad-records skip leaves such records out, and counts them.)"


class Batch(NamedTuple):
    name: str  # of the file
    records: list[Record]
    next: Part | None  # where the rest of the source begins; None: there is none


def _read_batches(source: Source, num_bytes: int, progress: tqdm, part: Part | None) -> Iterator[Batch]:
    """The records of the source, or of a part, in batches of about `num_bytes`, each of one file."""
    begin, size_of_part, is_end = part or Part(), 0, True
    for files, name in enumerate(source.names[begin.files :], start=begin.files):
        after = (begin.lines, begin.offset) if files == begin.files else (0, 0)
        records: list[Record] = []
        size, here = 0, Part(files, *after)
        for record in read_records(name, progress, after, stream=part is not None):
            if part and size_of_part >= PART_BYTES and is_end:
                yield Batch(name, records, here)
                return
            records.append(record)
            size += record.size
            size_of_part += record.size
            here, is_end = Part(files, *record.read), record.is_end
            if size > num_bytes:
                yield Batch(name, records, here)
                records, size = [], 0
        yield Batch(name, records, Part(files + 1) if files + 1 < len(source.names) else None)


def _encode_all(
    encode: Callable[[Sequence[Record]], Encoded], batches: Iterator[Batch], num_workers: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Encode the batches, in their order, in this process or on `num_workers` others."""
    if num_workers <= 1:
        for batch in batches:
            yield batch, encode(batch.records)
        return
    context = multiprocessing.get_context("spawn")  # a copy of this process would share its locks and devices
    with ProcessPoolExecutor(num_workers, context, _start_worker) as workers:
        try:
            waiting: collections.deque = collections.deque()
            for batch in batches:
                waiting.append((batch, workers.submit(encode, batch.records)))
                if len(waiting) > 2 * num_workers:
                    batch, future = waiting.popleft()
                    yield batch, future.result()
            for batch, future in waiting:
                yield batch, future.result()
        finally:
            workers.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Leave signals to the parent, and end with it, even where it is killed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers themselves fill the cores

    parent = multiprocessing.parent_process()
    assert parent is not None, "this is not a worker"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
