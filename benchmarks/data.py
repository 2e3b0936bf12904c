"""Speed of tokenizing and packing against the tokenizer alone, and memory over a file of gigabytes.

    python benchmarks/data.py --tokenizer path/to/Qwen3-0.6B
    python benchmarks/data.py --tokenizer path/to/Qwen3-0.6B --speed-mb 40 --memory-mb 0      # 0 leaves a part out

Speed: passages of Python's own library become a .jsonl of texts and one of conversations, of 1 and of 4 turns. Ours is
all from the files to the first batch of packed rows; the other is the tokenizer's `encode_batch`, alone, on the same
texts in memory (of conversations: as the chat template renders them). Both use all cores, in turns. Checked: ours
reaches at least 0.7 times the other's speed.

Memory: a text file of --memory-mb is tokenized, and all its rows are read, while a thread samples this process's
anonymous memory (RssAnon in /proc/self/status; the memory-mapped cache is not part of it). Checked: the most in any
later tenth of the file is at most 200 MB above the most in the second tenth.
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from qwen3_trn import sources
from qwen3_trn.cache import open_cache, tokenize
from qwen3_trn.data import PackedData, PackedSource
from qwen3_trn.encode import load_tokenizer
from qwen3_trn.sources import find_sources

MIN_RATIO = 0.7
MAX_GROWTH = 200e6
SEQ_LEN = 2048
BATCH = 8


def make_passages(num_bytes: float, passage_bytes: int) -> list[str]:
    """Passages of about `passage_bytes` characters, cut at random from the source of Python's library."""
    library = "\n".join(path.read_text(errors="ignore") for path in sorted(Path(tempfile.__file__).parent.glob("*.py")))
    rng = random.Random(0)
    passages = []
    while num_bytes > 0:
        start = rng.randrange(len(library) - passage_bytes)
        passages.append(library[start : start + rng.randrange(passage_bytes // 2, passage_bytes * 3 // 2)])
        num_bytes -= len(passages[-1])
    return passages


def make_chats(num_bytes: float, num_turns: int) -> list[dict]:
    passages = iter(make_passages(num_bytes, 600))
    pairs = list(zip(passages, passages, strict=False))
    messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    groups = [messages[first : first + num_turns] for first in range(0, len(messages), num_turns)]
    return [{"messages": list(itertools.chain.from_iterable(group))} for group in groups]


def measure_speed(name: str, records: list[dict], tokenizer_dir: Path, folder: Path) -> bool:
    file = folder / f"{name.replace(' ', '-')}.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = load_tokenizer(tokenizer_dir)
    texts = [
        record["text"] if "text" in record else tokenizer.apply_chat_template(record["messages"], tokenize=False)
        for record in records
    ]
    num_bytes = sum(len(text.encode()) for text in texts)
    seconds: dict[str, list[float]] = {"ours": [], "encode_batch": []}
    for attempt in range(3):
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        started = time.perf_counter()
        for first in range(0, len(texts), 1000):
            tokenizer.backend_tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False)
        seconds["encode_batch"].append(time.perf_counter() - started)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as loading the tokenizer has left it
        started = time.perf_counter()
        (source,) = find_sources([str(file)])
        cache = tokenize(source, tokenizer_dir, folder / f"cache-{name}-{attempt}")
        PackedData([PackedSource(open_cache(cache), SEQ_LEN, seed=0)], [1.0]).batch(range(BATCH))
        seconds["ours"].append(time.perf_counter() - started)
    ours, alone = (num_bytes / 1e6 / min(seconds[who]) for who in ("ours", "encode_batch"))
    ratio = ours / alone
    print(
        f"{name}: {num_bytes / 1e6:.1f} MB in {len(records)} records: ours {ours:.2f} MB/s, encode_batch alone "
        f"{alone:.2f} MB/s: ratio {ratio:.2f} (at least {MIN_RATIO})",
        flush=True,
    )
    return ratio >= MIN_RATIO


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def measure_memory(num_bytes: float, tokenizer_dir: Path, folder: Path) -> bool:
    file = folder / "large.txt"
    passages = make_passages(min(num_bytes, 50e6), 4000)
    rng = random.Random(1)
    with open(file, "w") as output:
        while output.tell() < num_bytes:
            rng.shuffle(passages)
            output.writelines(f"{passage}\n{sources.END_OF_TEXT}\n" for passage in passages[: len(passages) // 10])
    del passages
    progress, most, at_work = [0.0], {"tokenizing": [0] * 10, "reading": [0] * 10}, ["tokenizing"]

    def watch() -> None:
        while at_work:
            tenths = most[at_work[0]]
            tenth = min(9, int(progress[0] * 10))
            tenths[tenth] = max(tenths[tenth], anonymous_bytes())
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    size, read_lines = file.stat().st_size, sources._read_lines

    def follow_lines(*args):
        for number, line, done in read_lines(*args):
            progress[0] = done / size
            yield number, line, done

    sources._read_lines = follow_lines
    started = time.perf_counter()
    (source,) = find_sources([str(file)])
    cache = tokenize(source, tokenizer_dir, folder / "cache-large")
    tokenized = time.perf_counter()
    source = PackedSource(open_cache(cache), SEQ_LEN, seed=0)
    data = PackedData([source], [1.0])
    progress[0], at_work[0] = 0.0, "reading"
    reading = time.perf_counter()
    for first in range(0, data.rows_per_epoch, BATCH):
        data.batch(range(first, min(first + BATCH, data.rows_per_epoch)))
        progress[0] = first / data.rows_per_epoch
    read = time.perf_counter() - reading
    at_work.clear()
    watcher.join()
    print(
        f"memory over {size / 1e9:.2f} GB, {len(source.cache.tokens) / 1e6:.0f} M tokens: tokenized in "
        f"{tokenized - started:.0f} s; {data.rows_per_epoch} rows of {SEQ_LEN} read in {read:.0f} s, "
        f"{read / data.rows_per_epoch * 1e6:.0f} us a row"
    )
    good = True
    for name, tenths in most.items():
        growth = max(tenths[2:]) - tenths[1]
        good &= growth <= MAX_GROWTH
        print(
            f"  {name}: RssAnon {', '.join(f'{tenth / 1e6:.0f}' for tenth in tenths)} MB, at most, in each tenth; "
            f"grows by {growth / 1e6:.0f} MB (at most {MAX_GROWTH / 1e6:.0f})"
        )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with Qwen3's tokenizer")
    parser.add_argument("--speed-mb", type=float, default=40)
    parser.add_argument("--memory-mb", type=float, default=2000)
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.speed_mb:
            texts = [{"text": text} for text in make_passages(args.speed_mb * 1e6, 4000)]
            good &= measure_speed("texts", texts, args.tokenizer, folder)
            for num_turns in (1, 4):
                chats = make_chats(args.speed_mb * 1e6, num_turns)
                good &= measure_speed(f"chats of {num_turns}", chats, args.tokenizer, folder)
        if args.memory_mb:
            good &= measure_memory(args.memory_mb * 1e6, args.tokenizer, folder)
    sys.exit(0 if good else "one of the bounds does not hold")


if __name__ == "__main__":
    main()
