"""Rows of a source that is too large to be tokenized before the run: parts of it are, while the run goes on.

    python - <<END
    from pathlib import Path
    from qwen3_trn.sources import find_sources
    from qwen3_trn.stream import StreamedSource
    (source,) = find_sources(["sample"])
    stream = StreamedSource(source, Path("assets/tiny"), Path("/tmp/qwen3_trn"), seq_len=64, seed=0)
    print(stream.row(100))
    END

A part is PART_BYTES of the source. It is tokenized, packed and shuffled as a whole source would be. The order of rows
is that of the parts, one after the other, and after the last the next epoch. So it is a function of source, tokenizer,
seed and settings, as that of any other source, and the same for any number of ranks.

A process that needs a part makes it, while the others wait; a thread makes the next part ahead of time. Parts that are
done are removed. Where each part begins and how many rows it has is noted beside the caches, so that a run that resumes
goes on at once. Where there is no such note, as on another machine, the source is tokenized again up to the position.
"""

import bisect
import functools
import hashlib
import json
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from qwen3_trn.cache import BadRecords, identify, make_cache, remove_cache
from qwen3_trn.chat import Long, TrainOn
from qwen3_trn.data import PackedSource, name_settings
from qwen3_trn.encode import Format, Part, load_tokenizer
from qwen3_trn.errors import UserError
from qwen3_trn.packing import Rows
from qwen3_trn.sources import Source


class StreamedSource:
    """The rows of a source of any size, epoch after epoch. How many an epoch has is known when it is over.

    `pack` and `long` are those of `PackedSource`, the settings after them those of `tokenize`. Raises UserError where
    these do: for the first part at once, for another one when its rows are asked for.
    """

    rows_per_epoch = None

    def __init__(
        self,
        source: Source,
        tokenizer_dir: Path,
        cache_dir: Path,
        seq_len: int,
        seed: int,
        pack: bool = True,
        long: Long = "drop",
        format: Format = "auto",
        train_on: TrainOn = "assistant",
        mask_empty_think: bool = True,
        bad_records: BadRecords = "error",
    ):
        facts = identify(source, tokenizer_dir, format, train_on, mask_empty_think, stream=True)
        self.fingerprint = facts | name_settings(pack, long, facts["format"] == "chat")
        self.max_token_id: int = max(load_tokenizer(tokenizer_dir).get_vocab().values())  # of what may come
        self.max_token_file = f"the vocabulary of {tokenizer_dir}"
        self._names, self._cache_dir, self._facts = source.names, cache_dir, [self.fingerprint, seq_len, seed]
        self._tokenize = functools.partial(make_cache, source, facts, tokenizer_dir, cache_dir, bad_records)
        self._pack = functools.partial(PackedSource, seq_len=seq_len, seed=seed, pack=pack, long=long)
        # Where each part begins that is known, and how many rows come before it. As long as not all are known, the last
        # begin is that of a part whose number of rows is not.
        self._begins = [Part()]
        self._starts = [0]
        self._all_known = False
        self._opened: list[Path] = []
        self._coming: Future | None = None
        self._thread = ThreadPoolExecutor(1)
        self._open = functools.lru_cache(maxsize=2)(self._open_part)
        self._learn_next_part()

    def row(self, position: int) -> Rows:
        """The row at position 0, 1, 2, ..., int32 [T]."""
        while not self._all_known and position >= self._starts[-1]:
            self._learn_next_part()
        epoch, index = divmod(position, self._starts[-1]) if self._all_known else (0, position)
        part = bisect.bisect_right(self._starts, index) - 1
        num_rows = self._starts[part + 1] - self._starts[part]
        return self._open(self._begins[part]).row(epoch * num_rows + index - self._starts[part])

    def describe(self) -> list[str]:
        """A line for the console."""
        return [
            f"a stream of {len(self._names)} files or datasets, tokenized in parts of "
            f"{int(self.fingerprint['part_bytes']) / 1e6:.0f} MB; the first has {self._starts[1]:,} rows"
        ]

    def _learn_next_part(self) -> None:
        """Find out how many rows the last known part has, and where the next one begins. Both are noted in a file."""
        begin = self._begins[-1]
        name = hashlib.sha256(json.dumps([self._facts, begin]).encode()).hexdigest()[:32]
        note = self._cache_dir / f"{name}.part.json"
        if not note.exists():
            packed = self._open(begin)
            unfinished = note.with_suffix(f".{uuid.uuid4().hex}")
            unfinished.write_text(json.dumps([packed.rows_per_epoch, packed.cache.meta["next"]]))
            unfinished.replace(note)
        num_rows, next_part = json.loads(note.read_text())
        self._starts.append(self._starts[-1] + num_rows)
        if next_part:
            self._begins.append(Part(*next_part))
        elif self._starts[-1]:
            self._all_known = True
        else:
            raise UserError(f"{' '.join(self._names)} holds nothing but white space; expected text or conversations.")

    def _open_part(self, begin: Part) -> PackedSource:
        if self._coming:
            self._coming.result()  # whatever that part was: another run may have removed it since
        folder, cache = self._tokenize(part=begin)
        packed = self._pack(cache)
        self._opened.append(folder)
        if len(self._opened) > 2:
            done = self._opened.pop(0)
            if done not in self._opened:
                remove_cache(done)
        self._coming = self._thread.submit(self._tokenize, part=Part(*(packed.cache.meta["next"] or ())))
        return packed
