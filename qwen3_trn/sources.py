"""What --data names, to records: files, globs, `sample`, datasets of the Hugging Face Hub, with or without weights.

    python - <<END
    from qwen3_trn.sources import find_sources, read_records
    for source in find_sources(["assets/tiny/*.txt:0.7", "sample:0.3"]):
        print(source, next(read_records(source.names[0])))
    END

A record is an object: a line of .jsonl, a row of .parquet or of a dataset, or a document of .txt as {"text": ...}.
"""

import bisect
import collections
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from qwen3_trn.chat import BadRecord
from qwen3_trn.errors import UserError

END_OF_TEXT = "<|endoftext|>"
SAMPLE = Path(__file__).parent.parent / "assets" / "tiny" / "sample.txt"
HUB = "hf:"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
PIECE_CHARS = 1 << 16  # a longer document of .txt comes in pieces, which bounds memory and uses all cores
ROWS_AT_ONCE = 256


class Source(NamedTuple):
    """Records that are shuffled together. Several sources are mixed by their weights."""

    names: tuple[str, ...]  # of files, or one hf:NAME
    weight: float


class Record(NamedTuple):
    number: int  # a line's, from 1, or a row's, from 0
    content: Any  # an object such as {"text": ...}, or the BadRecord that says why there is none
    size: int  # about how many bytes
    read: tuple[int, int]  # lines or rows, and bytes, of the file that are read when this record is
    is_end: bool = True  # False: the document goes on in the next record


# --- names ---


def find_sources(data: Sequence[str]) -> list[Source]:
    """The sources that `data`, the values of --data, names: one, or one for each value if they have weights.

    A value is a file, a glob, `sample`, or hf:NAME, and may end with :WEIGHT. Raises UserError.
    """
    entries = [_split_weight(entry) for entry in data]
    if all(weight is None for _, weight in entries):
        return [Source(find_files([name for name, _ in entries]), 1.0)]
    without = [name for name, weight in entries if weight is None]
    if without:
        raise UserError(f"{without[0]} has no weight and others have one; write {without[0]}:0.5, or none.")
    return [Source(find_files([name]), weight) for name, weight in entries if weight is not None]


def _split_weight(entry: str) -> tuple[str, float | None]:
    match = re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", entry)
    if match is None or Path(entry).exists():
        return entry, None
    if float(match[2]) == 0:
        raise UserError(f"{entry}: the weight is 0; expected more. To leave a source out, remove it.")
    return match[1], float(match[2])


def find_files(patterns: Sequence[str]) -> tuple[str, ...]:
    """The files that `patterns` name: files, globs, or `sample` for the bundled text. hf:NAME is passed on.

    Globs are expanded in sorted order, and a file that is named twice is used once.
    Raises UserError for a name without a file, a folder, and a kind of file that cannot be read.
    """
    if not patterns:
        raise UserError(f"no data is named; expected {', '.join(SUFFIXES)} files, globs, hf:NAME, or `sample`.")
    unique: dict[str, str] = {}
    for pattern in patterns:
        if pattern.startswith(HUB):
            unique.setdefault(pattern, pattern)
            continue
        path = SAMPLE if pattern == "sample" else Path(pattern).expanduser()
        if path.is_dir():
            raise UserError(
                f"{pattern} is a folder; expected files or a glob, such as '{path}/*.txt'. A folder that is "
                f"laid out as a dataset is named {HUB}{pattern}."
            )
        matches = [path] if path.exists() else map(Path, sorted(glob.glob(str(path), recursive=True)))
        matches = [match for match in matches if match.is_file()]
        if not matches:
            found = "no file matches this glob" if glob.has_magic(pattern) else "no such file"
            raise UserError(f"{pattern}: {found}; relative paths start from {Path.cwd()}.")
        for file in matches:
            if not str(file).lower().endswith(SUFFIXES):
                raise UserError(f"{file}: cannot read such files; expected {', '.join(SUFFIXES)}.")
            unique.setdefault(str(file.resolve()), str(file))
    return tuple(unique.values())


def name_place(name: str, number: int) -> str:
    """Where a record is, for messages: FILE:LINE, or FILE and the row."""
    return f"{name}:{number}" if ".jsonl" in Path(name).name.lower() else f"{name}, row {number}"


@functools.cache
def _load_hub(name: str, stream: bool = False):
    """The dataset that hf:NAME[:SPLIT] names; NAME is USER/NAME, USER/NAME/CONFIG, or a local folder.

    A `datasets.Dataset`; with `stream` the builder, and a `datasets.IterableDataset` that downloads while it is read.
    """
    import datasets  # here, because it takes a second

    path, _, split = name.removeprefix(HUB).partition(":")
    config = None
    if not Path(path).is_dir():
        path, config = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:]) or None
    try:
        if stream:
            builder = datasets.load_dataset_builder(path, config)
            return builder, builder.as_streaming_dataset(split or "train")
        return datasets.load_dataset(path, config, split=split or "train")
    except Exception as error:  # datasets, its readers and the network raise a dozen kinds
        raise UserError(
            f"{name} cannot be loaded: {type(error).__name__}: {error} Expected {HUB}USER/NAME[/CONFIG][:SPLIT] "
            f"of the Hub, or {HUB}FOLDER[:SPLIT]; the split is train unless it is named."
        ) from error


def count_bytes(name: str) -> int:
    """The size of a file, or of a dataset's tables: the total for `read_records`'s progress."""
    return _load_hub(name).data.nbytes if name.startswith(HUB) else os.stat(name).st_size


def hash_contents(names: Sequence[str]) -> str:
    """A hash of the files' kinds and bytes, not of their names; of a dataset, the bytes of its tables on disk."""
    key = hashlib.sha256()
    for name in names:
        if name.startswith(HUB):
            dataset = _load_hub(name)
            files = [file["filename"] for file in dataset.cache_files]
            kind = f"{dataset.num_rows} rows of {dataset.split}"  # a split such as train[:10%] is a part of the tables
        else:
            files, kind = [name], next(suffix for suffix in SUFFIXES if name.lower().endswith(suffix))
        for file in files:
            with open(file, "rb") as content:
                key.update(f"{kind} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return key.hexdigest()


def hash_stream(names: Sequence[str]) -> str:
    """A hash for what is too large to be read first: the sizes, first and last bytes of files; a dataset's version."""
    key = hashlib.sha256()
    for name in names:
        if name.startswith(HUB):
            builder, _ = _load_hub(name, stream=True)
            key.update(f"{name} {builder.config_id} {builder.hash}\n".encode())
        else:
            size = os.stat(name).st_size
            with open(name, "rb") as file:
                ends = file.read(1 << 20), file.seek(max(0, size - (1 << 20))), file.read()
            key.update(f"{size} {hashlib.sha256(repr(ends).encode()).hexdigest()}\n".encode())
    return key.hexdigest()


# --- records ---


def read_records(
    name: str, progress: tqdm | None = None, after: tuple[int, int] = (0, 0), stream: bool = False
) -> Iterator[Record]:
    """The records of a file or dataset, in order. A .jsonl line that holds none gives a BadRecord as content.

    `progress` is moved on by the bytes that are read. `after`, the `read` of a record, goes on after it: at once in a
    plain file or .parquet, else by reading up to it. `stream` reads a dataset without downloading it first.
    Raises UserError for a file that cannot be read on.
    """
    progress = progress if progress is not None else tqdm(disable=True)
    if name.startswith(HUB):
        yield from _read_hub(name, progress, after, stream)
    elif name.lower().endswith(".parquet"):
        yield from _read_parquet(name, progress, after)
    elif name.lower().endswith(".txt"):
        yield from _read_txt(name, progress, after)
    else:
        yield from _read_jsonl(name, progress, after)


def _read_lines(name: str, progress: tqdm, after: tuple[int, int]) -> Iterator[tuple[int, bytes, int]]:
    """Each line's number, from 1; its bytes with the line break, without a byte order mark; the file's bytes so far."""
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(Path(name).suffix.lower())
    if os.stat(name).st_size == 0:
        raise UserError(f"{name} is empty; expected text or conversations.")
    with open(name, "rb") as file:
        lines = io.BufferedReader(pyarrow.input_stream(file, compression=compression)) if compression else file
        num_skipped, done = after
        try:
            if compression:
                collections.deque(itertools.islice(lines, num_skipped), maxlen=0)
                done = file.tell()
            else:
                file.seek(done)
            for number, line in enumerate(lines, start=num_skipped + 1):
                progress.update(file.tell() - done)
                done = file.tell()
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, done
        except OSError as error:
            raise UserError(f"{name} cannot be read to its end: {error}. Compress or copy it again.") from error


def _read_txt(name: str, progress: tqdm, after: tuple[int, int]) -> Iterator[Record]:
    """One document, or several, each ended by a line that holds only <|endoftext|>.

    Blank lines before a document, and line breaks after it, do not belong to it. A long document comes in pieces, cut
    before a line that starts with a letter or digit: Qwen's tokenizer has no token across such a cut, so the ids are
    those of the whole document.
    """
    lines: list[str] = []
    number, num_chars, offset = 0, 0, 0

    def join(is_end: bool) -> Record:
        text = "".join(lines)
        return Record(number, {"text": text.rstrip("\r\n") if is_end else text}, num_chars, (number, offset), is_end)

    for number, raw, offset in _read_lines(name, progress, after):  # noqa: B007 - join uses offset
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            found = f"byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"
            raise UserError(f"{name}:{number}: not UTF-8: {found}. Convert the file to UTF-8.") from error
        if line.strip() == END_OF_TEXT:
            yield join(is_end=True)
            lines, num_chars = [], 0
            continue
        if num_chars > PIECE_CHARS and line[0].isalnum():
            yield join(is_end=False)
            lines, num_chars = [], 0
        if lines or line.strip():
            lines.append(line)
            num_chars += len(line)
    yield join(is_end=True)


def _read_jsonl(name: str, progress: tqdm, after: tuple[int, int]) -> Iterator[Record]:
    """The JSON value on each line. Blank lines are skipped."""
    for number, line, offset in _read_lines(name, progress, after):
        if not line.strip():
            continue
        try:
            content = json.loads(line.decode().rstrip())
        except UnicodeDecodeError as error:
            content = BadRecord(f"not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}.")
        except json.JSONDecodeError as error:
            content = BadRecord(f"not JSON: {error.msg} (column {error.colno}); expected one object a line.")
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            content = BadRecord(f"not readable JSON: {error}.")
        yield Record(number, content, len(line), (number, offset))


def _read_parquet(name: str, progress: tqdm, after: tuple[int, int]) -> Iterator[Record]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    first = 0
    try:
        with ParquetFile(name) as file:
            bytes_a_row = os.stat(name).st_size / max(1, file.metadata.num_rows)
            group_sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            num_groups = bisect.bisect_right(list(itertools.accumulate(group_sizes)), after[0])  # that are skipped
            first = sum(group_sizes[:num_groups])
            for batch in file.iter_batches(ROWS_AT_ONCE, list(range(num_groups, file.num_row_groups))):
                size = batch.nbytes // max(1, batch.num_rows)
                for number, row in enumerate(batch.to_pylist(), start=first):
                    if number >= after[0]:
                        yield Record(number, row, size, (number + 1, 0))
                first += batch.num_rows
                progress.update(round(bytes_a_row * batch.num_rows))
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: a string in rows {first} to {first + ROWS_AT_ONCE - 1} is not UTF-8.") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{name} cannot be read as parquet: {error}. Copy it again.") from error


def _read_hub(name: str, progress: tqdm, after: tuple[int, int], stream: bool) -> Iterator[Record]:
    if stream:
        _, dataset = _load_hub(name, stream=True)
        for number, row in enumerate(dataset.skip(after[0]), start=after[0]):
            size = len(str(row))
            progress.update(size)
            yield Record(number, row, size, (number + 1, 0))
        return
    dataset = _load_hub(name)
    size = dataset.data.nbytes // max(1, dataset.num_rows)
    for number, row in enumerate(dataset):
        progress.update(size)
        yield Record(number, row, size, (number + 1, 0))
