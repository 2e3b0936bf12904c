"""Records to token ids, on all cores.

    python - <<END
    from pathlib import Path
    from qwen3_trn.encode import encode_source
    from qwen3_trn.sources import find_sources
    (source,) = find_sources(["sample"])
    print(next(encode_source(source, {"format": "text"}, Path("assets/tiny"))))
    END

A text becomes a document of its tokens and the end-of-text token, a conversation one as the chat template renders it.
Threads tokenize a batch each. Templates are Python's work, of which a process does one thing at a time.
"""

import collections
import functools
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
from tqdm import tqdm

from qwen3_trn import chat
from qwen3_trn.chat import BadRecord
from qwen3_trn.errors import UserError
from qwen3_trn.sources import END_OF_TEXT, Record, Source, count_bytes, name_place, read_records

Format = Literal["auto", "text", "chat"]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
)

BATCH_BYTES = 1 << 20  # of records; the tokenizer holds some 14 bytes for each
BYTES_A_WORKER = 1 << 24  # a process takes seconds to start; for less it does not pay
MIN_WORKERS = 5  # one process renders as fast as the tokenizer takes it on up to four cores
MAX_THREADS = 16  # what Python does to texts takes a sixteenth of the time
PART_BYTES = 1 << 28  # of a source that is tokenized while it is trained on


@functools.cache
def load_tokenizer(folder: Path):
    """The tokenizer, loaded once a process. Raises UserError."""
    from transformers import AutoTokenizer  # here, because it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged file makes transformers raise
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {error!r}.") from error
    tokenizer.backend_tokenizer.no_truncation()  # a tokenizer.json can ask for both
    tokenizer.backend_tokenizer.no_padding()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its own threads would wait for Python between batches
    return tokenizer


@functools.cache
def _find_end_of_text(folder: Path) -> int:
    tokenizer = load_tokenizer(folder)
    end_of_text = tokenizer.get_vocab().get(END_OF_TEXT, tokenizer.eos_token_id)
    if end_of_text is None:
        raise UserError(f"the tokenizer in {folder} has neither {END_OF_TEXT} nor an eos_token to end documents with.")
    return end_of_text


class Part(NamedTuple):
    """Where a part of a source begins: after so many files, and after so many lines or rows, and bytes, of the next."""

    files: int = 0
    lines: int = 0
    offset: int = 0


class Batch(NamedTuple):
    name: str  # of the file
    records: list[Record]
    next: Part | None  # where the rest of the source begins; None: there is none


class Encoded(NamedTuple):
    """The documents that end in a batch of records."""

    tokens: np.ndarray  # int32 [N]
    ends: np.ndarray  # int64 [D]: where in `tokens` each document ends
    supervised: np.ndarray  # bool [N]
    bad: list[tuple[int, str]]  # number of a bad record, and what is wrong with it
    num_reasoning_dropped: int


def find_kind(source: Source, format: Format, stream: bool) -> str:
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
    encode = tokenizer.backend_tokenizer.encode_batch_fast  # without offsets
    ids = [encoding.ids for encoding in encode(texts, add_special_tokens=False)]
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


def _read_batches(source: Source, progress: tqdm, part: Part | None, part_bytes: int) -> Iterator[Batch]:
    """The records of the source, or of `part_bytes` of it from `part` on, in batches, each of one file."""
    begin, size_of_part, is_end = part or Part(), 0, True
    for files, name in enumerate(source.names[begin.files :], start=begin.files):
        after = (begin.lines, begin.offset) if files == begin.files else (0, 0)
        records: list[Record] = []
        size, here = 0, Part(files, *after)
        for record in read_records(name, progress, after, stream=part is not None):
            if part and size_of_part >= part_bytes and is_end:
                yield Batch(name, records, here)
                return
            records.append(record)
            size += record.size
            size_of_part += record.size
            here, is_end = Part(files, *record.read), record.is_end
            if size > BATCH_BYTES:
                yield Batch(name, records, here)
                records, size = [], 0
        yield Batch(name, records, Part(files + 1) if files + 1 < len(source.names) else None)


def encode_source(
    source: Source, settings: Mapping[str, str], tokenizer_dir: Path, part: Part | None = None
) -> Generator[tuple[Batch, Encoded], None, None]:
    """The documents of a source, or those of a part of it from `part` on, in order, batch by batch.

    settings: "format", text or chat; for chat `render_batch`'s "train_on" and "mask_empty_think"; for a part its size,
    "part_bytes". Bad records come with the reason. Raises UserError for a file or a tokenizer that cannot be read.
    """
    kind = settings["format"]
    encode: Callable[[Sequence[Record]], Encoded] = functools.partial(_encode_texts, tokenizer_dir)
    if kind == "chat":
        train_on = cast(chat.TrainOn, settings["train_on"])
        encode = functools.partial(_encode_chats, tokenizer_dir, train_on, settings["mask_empty_think"] == "True")
    load_tokenizer(tokenizer_dir)  # its errors come first
    num_bytes = int(settings["part_bytes"]) if part else sum(map(count_bytes, source.names))
    num_cores = len(os.sched_getaffinity(0))
    num_workers = min(num_cores, num_bytes // BYTES_A_WORKER)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="Tokenizing", disable=True if part else None) as bar:
        batches = _read_batches(source, bar, part, num_bytes)
        if kind == "chat" and num_workers >= MIN_WORKERS:
            yield from _encode_in_processes(encode, batches, num_workers)
        else:
            num_threads = min(num_cores, MAX_THREADS)
            threads = ThreadPoolExecutor(num_threads)
            try:
                yield from _encode_ahead(encode, batches, threads, num_threads)
            finally:
                threads.shutdown(cancel_futures=True)  # of those that nobody will take, after an error


def _encode_ahead(
    encode: Callable[[Sequence[Record]], Encoded], batches: Iterator[Batch], workers: Executor, num_workers: int
) -> Generator[tuple[Batch, Encoded], None, None]:
    waiting: collections.deque = collections.deque()
    for batch in batches:
        # This starts processes, which inherit what is blocked: signals are left to the parent.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        waiting.append((batch, workers.submit(encode, batch.records)))
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        if len(waiting) > 2 * num_workers:
            batch, future = waiting.popleft()
            yield batch, future.result()
    for batch, future in waiting:
        yield batch, future.result()


def _encode_in_processes(
    encode: Callable[[Sequence[Record]], Encoded], batches: Iterator[Batch], num_workers: int
) -> Generator[tuple[Batch, Encoded], None, None]:
    context = multiprocessing.get_context("spawn")  # a copy of this process would share its locks and devices
    with ProcessPoolExecutor(num_workers, context, _start_worker) as workers:
        try:
            yield from _encode_ahead(encode, batches, workers, num_workers)
        except BaseException as error:
            # At once, for they only compute. The executor would wait for them: they do not take its SIGTERM.
            for worker in (workers._processes or {}).values():
                worker.kill()
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    "a process that tokenizes was killed, as the system does when memory runs out. Start again, with "
                    "fewer cores (taskset) for fewer such processes."
                ) from error
            raise


def _start_worker() -> None:
    """End with the parent, even where it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is not a worker"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
