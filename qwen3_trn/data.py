"""Text files to packed rows of tokens.

    python - <<END
    from pathlib import Path
    from qwen3_trn.data import PackedText, find_files, tokenize
    cache = tokenize(find_files(["sample"]), Path("assets/tiny"), Path("/tmp/qwen3_trn"))
    print(PackedText(cache, seq_len=64, seed=0).row(0))
    END

Files are tokenized once, into a folder of memory-mapped arrays that is named by a hash of the files and the tokenizer.
Every document ends with the end-of-text token. Then, in each epoch, with rows of T tokens:
- the documents are shuffled and their tokens concatenated; row r holds tokens [r*T, (r+1)*T) of that stream;
- a label is the next token of the same document, even where that token starts the next row; the last token of a
  document has no label. So every token but the first of each document is predicted exactly once;
- positions restart at 0 with each document and with each row: a cut piece is a document of its own;
- the rows are visited in shuffled order.
All this is a function of files, tokenizer, T, seed and position alone: any rank can ask for any row, and a run that
resumes needs to know nothing but its position.
"""

import functools
import glob
import hashlib
import json
import os
import re
import shutil
import uuid
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from qwen3_trn.errors import UserError
from qwen3_trn.folders import publish
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.model import PADDING_DOCUMENT

END_OF_TEXT = "<|endoftext|>"
SAMPLE = Path(__file__).parent.parent / "assets" / "tiny" / "sample.txt"

CACHE_FORMAT = 2  # raise it when the same files and tokenizer come to give another cache
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json")
PIECE_CHARS = 1 << 16  # a longer document is tokenized in pieces, which bounds memory and uses all cores
BATCH_CHARS = 1 << 22


def cache_folder() -> Path:
    """Where tokenized files are kept: $QWEN3_TRN_CACHE, or qwen3_trn in the user's cache folder."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("QWEN3_TRN_CACHE") or user_cache / "qwen3_trn")


# --- files to documents ---


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The .txt and .jsonl files that `patterns` name: files, globs, or `sample` for the bundled text.

    Globs are expanded in sorted order, and a file that is named twice is used once.
    Raises UserError for a name without a file, a folder, and any other kind of file.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = SAMPLE if pattern == "sample" else Path(pattern).expanduser()
        if path.is_dir():
            raise UserError(f"--data {pattern} is a folder; expected files or a glob, such as '{path}/*.txt'.")
        matches = [path] if path.exists() else map(Path, sorted(glob.glob(str(path), recursive=True)))
        matches = [match for match in matches if match.is_file()]
        if not matches:
            found = "no file matches this glob" if glob.has_magic(pattern) else "no such file"
            raise UserError(f"--data {pattern}: {found}; relative paths start from {Path.cwd()}.")
        files += matches
    if not files:
        raise UserError("--data is empty; expected .txt or .jsonl files, globs, or `sample`.")
    unique: dict[Path, Path] = {}
    for file in files:
        if file.suffix.lower() not in (".txt", ".jsonl"):
            raise UserError(f"{file}: cannot read {file.suffix!r} files; expected .txt, or .jsonl with a `text` field.")
        unique.setdefault(file.resolve(), file)
    return list(unique.values())


def _read_lines(file: Path, progress: tqdm) -> Iterator[tuple[int, str]]:
    """Each line's number, from 1, and its text with the line break."""
    offset = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                found = f"byte 0x{line[error.start]:02x} at offset {offset + error.start}"
                raise UserError(f"{file}:{number}: not UTF-8: {found}. Convert the file to UTF-8.") from error
            yield number, text
            offset += len(line)
            progress.update(len(line))
    if offset == 0:
        raise UserError(f"{file} is empty; expected text.")


def _read_txt(file: Path, progress: tqdm) -> Iterator[tuple[str, bool]]:
    """One document, or several, each ended by a line that holds only <|endoftext|>.

    Blank lines before a document, and line breaks after it, do not belong to it. A long document comes in pieces, cut
    before a line that starts with a letter or digit: Qwen's tokenizer has no token across such a cut, so the ids are
    those of the whole document.
    """
    lines: list[str] = []
    num_chars = 0
    for _, line in _read_lines(file, progress):
        if line.strip() == END_OF_TEXT:
            yield "".join(lines).rstrip("\r\n"), True
            lines, num_chars = [], 0
            continue
        if num_chars > PIECE_CHARS and line[0].isalnum():
            yield "".join(lines), False
            lines, num_chars = [], 0
        if lines or line.strip():
            lines.append(line)
            num_chars += len(line)
    yield "".join(lines).rstrip("\r\n"), True


def _read_jsonl(file: Path, progress: tqdm) -> Iterator[tuple[str, bool]]:
    """The `text` of the JSON object on each line, as it is. Blank lines are skipped."""
    for number, line in _read_lines(file, progress):
        if not line.strip():
            continue
        try:
            record = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise UserError(
                f"{file}:{number}: not JSON: {error.msg} (column {error.colno}); expected one object a line."
            ) from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f"{file}:{number}: expected an object with a string `text`; found {line.strip()[:80]}")
        if half := re.search("[\ud800-\udfff]", text):
            raise UserError(f"{file}:{number}: `text` holds {half[0]!a}, half a surrogate pair. Remove it.")
        yield text, True


def _read_batches(file: Path, progress: tqdm) -> Iterator[list[tuple[str, bool]]]:
    """Batches of (text, whether a document ends with it). Documents of nothing but white space are skipped."""
    read = _read_jsonl if file.suffix.lower() == ".jsonl" else _read_txt
    batch: list[tuple[str, bool]] = []
    num_chars, is_blank = 0, True
    for text, ends_document in read(file, progress):
        if not text.strip():
            continue
        is_blank = False
        batch.append((text, ends_document))
        num_chars += len(text)
        if num_chars > BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if is_blank:
        raise UserError(f"{file} holds nothing but white space; expected text.")
    if batch:
        yield batch


# --- documents to a cache of tokens ---


def tokenize(files: Sequence[Path], tokenizer_dir: Path, cache_dir: Path) -> Path:
    """The folder `cache_dir`/KEY with the tokens of `files`, made now unless these contents already have one.

    It holds tokens.bin, int32 [num_tokens]; document_offsets.bin, int64 [num_documents + 1]; and meta.json. It appears
    only when complete. A special token that is spelled out in a text becomes that token.
    Raises UserError for files or a tokenizer that cannot be read. One process calls this; the others wait for it.
    """
    fingerprint = {"data": _hash_files(files, by_name=False), "tokenizer": _hash_tokenizer(tokenizer_dir)}
    key = hashlib.sha256(json.dumps([CACHE_FORMAT, fingerprint]).encode()).hexdigest()[:32]
    cache = cache_dir / key
    if cache.exists():
        return cache
    tokenizer, end_of_text = _load_tokenizer(tokenizer_dir)
    partial = cache_dir / f"partial-{key}-{uuid.uuid4().hex}"
    partial.mkdir(parents=True)
    try:
        meta = {"fingerprint": fingerprint, **_write_tokens(files, tokenizer, end_of_text, partial)}
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        try:
            publish(partial, cache)
        except OSError:
            if not cache.exists():  # if it does, another process was first, with the same contents
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # no longer there after the rename
    return cache


def _hash_tokenizer(folder: Path) -> str:
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not {"tokenizer.json", "vocab.json"} & {file.name for file in files}:
        raise UserError(f"{folder} holds no tokenizer; expected tokenizer.json and tokenizer_config.json.")
    return _hash_files(files, by_name=True)


def _hash_files(files: Sequence[Path], by_name: bool) -> str:
    """Of their contents, and their names or only their kinds."""
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as content:
            name = file.name if by_name else file.suffix.lower()
            digest.update(f"{name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _load_tokenizer(folder: Path):
    """The tokenizer, and the id of its end-of-text token."""
    from transformers import AutoTokenizer  # here, because it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged file makes transformers raise
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {error!r}.") from error
    end_of_text = tokenizer.get_vocab().get(END_OF_TEXT, tokenizer.eos_token_id)
    if end_of_text is None:
        raise UserError(f"the tokenizer in {folder} has neither {END_OF_TEXT} nor an eos_token to end documents with.")
    return tokenizer, end_of_text


def _write_tokens(files: Sequence[Path], tokenizer, end_of_text: int, folder: Path) -> dict[str, Any]:
    """Write tokens.bin and document_offsets.bin; returns their counts and the largest token id."""
    offsets = array("q", [0])
    num_tokens, max_token_id, max_token_file = 0, -1, ""
    num_bytes = sum(file.stat().st_size for file in files)
    with (
        open(folder / "tokens.bin", "wb") as output,
        tqdm(total=num_bytes, unit="B", unit_scale=True, desc="Tokenizing", disable=None) as progress,
    ):
        for file in files:
            for batch in _read_batches(file, progress):
                texts = [text for text, _ in batch]
                encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
                for ids, (_, ends_document) in zip(encoded.input_ids, batch, strict=True):
                    if ends_document:
                        ids.append(end_of_text)
                    num_tokens += len(ids)
                    if ends_document:
                        offsets.append(num_tokens)
                tokens = np.fromiter(chain.from_iterable(encoded.input_ids), np.int32)
                tokens.tofile(output)
                if tokens.max() > max_token_id:
                    max_token_id, max_token_file = int(tokens.max()), str(file)
    (folder / "document_offsets.bin").write_bytes(offsets.tobytes())
    return {
        "num_tokens": num_tokens,
        "num_documents": len(offsets) - 1,
        "max_token_id": max_token_id,
        "max_token_file": max_token_file,
    }


# --- tokens to packed rows ---


class Rows(NamedTuple):
    """int32 arrays, [T] for one row or [B, T] for several."""

    input_ids: np.ndarray  # 0 at padding
    labels: np.ndarray  # already shifted: the token after input_ids[t], or IGNORE_INDEX
    positions: np.ndarray  # from 0 in each piece of a document; padding is a piece of its own
    document_ids: np.ndarray  # 0, 1, 2, ... in each row; PADDING_DOCUMENT at padding


class PackedText:
    """The rows of a cache that `tokenize` made, in an endless order of shuffled epochs. Rules: the file's docstring.

    Only an epoch's last row, in the order before the shuffle, can hold padding.
    """

    def __init__(self, cache: Path, seq_len: int, seed: int):
        meta = json.loads((cache / "meta.json").read_text())
        self.fingerprint: dict[str, str] = meta["fingerprint"]  # of all that decides the rows, beside seq_len and seed
        self.num_tokens: int = meta["num_tokens"]
        self.num_documents: int = meta["num_documents"]
        self.max_token_id: int = meta["max_token_id"]
        self.max_token_file: str = meta["max_token_file"]  # the file that holds max_token_id
        self.seq_len = seq_len
        self.seed = seed
        self.rows_per_epoch = -(-self.num_tokens // seq_len)
        self.tokens = np.memmap(cache / "tokens.bin", np.int32, "r", shape=(self.num_tokens,))
        self._offsets = np.fromfile(cache / "document_offsets.bin", np.int64)
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

    def batch(self, positions: Sequence[int]) -> Rows:
        """The rows at these global positions, int32 [B, T]."""
        return Rows(*map(np.stack, zip(*map(self.row, positions), strict=True)))

    def row(self, position: int) -> Rows:
        """The row at global position 0, 1, 2, ..., int32 [T]. Position p is in epoch p // rows_per_epoch."""
        epoch, index = divmod(position, self.rows_per_epoch)
        document_order, starts, row_order = self._plan(epoch)
        begin = row_order[index] * self.seq_len
        end = min(begin + self.seq_len, self.num_tokens)

        # The row holds tokens begin to end - 1 of the epoch's stream, from the stream's documents first to last - 1.
        first = np.searchsorted(starts, begin, side="right") - 1
        last = np.searchsorted(starts, end, side="left")
        starts, stops = starts[first:last], starts[first + 1 : last + 1]
        stream = np.arange(begin, end)
        document_ids = np.searchsorted(starts, stream, side="right") - 1
        shifts = self._offsets[document_order[first:last]] - starts  # from the stream to the cache
        source = stream + shifts[document_ids]

        is_last = stream + 1 == stops[document_ids]
        length = end - begin
        row = Rows(
            input_ids=np.zeros(self.seq_len, np.int32),
            labels=np.full(self.seq_len, IGNORE_INDEX, np.int32),
            positions=np.arange(-length, self.seq_len - length, dtype=np.int32),
            document_ids=np.full(self.seq_len, PADDING_DOCUMENT, np.int32),
        )
        row.input_ids[:length] = self.tokens[source]
        row.labels[:length] = np.where(is_last, IGNORE_INDEX, self.tokens[source + ~is_last])
        row.positions[:length] = stream - np.maximum(starts, begin)[document_ids]
        row.document_ids[:length] = document_ids
        return row

    def _make_plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The epoch's order of documents, where each starts in the stream (and the stream's end), the order of rows."""
        document_order = _permutation(self.num_documents, self.seed, epoch, 0)
        lengths = np.diff(self._offsets)[document_order]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        return document_order, starts, _permutation(self.rows_per_epoch, self.seed, epoch, 1)


def _permutation(size: int, *seeds: int) -> np.ndarray:
    """By sorting raw random bits, which numpy keeps from version to version (it does not promise that for shuffle)."""
    return np.argsort(np.random.PCG64(seeds).random_raw(size), kind="stable")
