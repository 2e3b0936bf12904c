"""Shows what the trainer makes of data: counts, lengths, what is left out and why, and the first documents.

    python -m qwen3_trn.data my.jsonl --model path/to/Qwen3-0.6B --seq-len 2048

The tokens that are trained on are green on a terminal, and between «and» elsewhere.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import tyro

from qwen3_trn import hub, launch
from qwen3_trn.cache import BadRecords, TokenCache, cache_folder, open_cache, tokenize
from qwen3_trn.chat import Long, TrainOn
from qwen3_trn.data import PackedSource
from qwen3_trn.encode import Format, load_tokenizer
from qwen3_trn.sources import find_sources

SHOWN_TOKENS = 400  # of each document


def inspect_data(
    data: tyro.conf.Positional[tuple[str, ...]],
    /,
    model: str,
    seq_len: int = 512,
    format: Format = "auto",
    train_on: TrainOn = "assistant",
    mask_empty_think: bool = True,
    pack: bool = True,
    long: Long = "drop",
    bad_records: BadRecords = "skip",
    show: int = 3,
) -> None:
    """Show what the trainer makes of data.

    Args:
        data: Files, globs, hf:NAME, or `sample`; several with :WEIGHT. The other settings are those of train.py.
        model: A Hugging Face ID or a folder with the tokenizer.
        show: Documents to print.
    """
    tokenizer_dir = Path(model) if Path(model).is_dir() else hub.download(model, None, with_weights=False)[0]
    sources = find_sources(data)
    caches = [
        tokenize(source, tokenizer_dir, cache_folder(), format, train_on, mask_empty_think, bad_records)
        for source in sources
    ]
    for source, cache in zip(sources, caches, strict=True):
        part = PackedSource(open_cache(cache), seq_len, seed=0, pack=pack, long=long)
        meta = part.cache.meta
        print(f"\n{' '.join(source.names)}", *part.describe(), sep="\n")
        print(f"\ntokens      {'conversations' if part.is_chat else 'documents'}")
        print(*_draw_histogram(np.diff(part.cache.offsets)), sep="\n")
        if part.cache.supervised is not None:
            print(f"\n{part.cache.supervised.mean():.1%} of the tokens are supervised")
        if meta["num_bad"]:
            print(f"\n{meta['num_bad']} bad records")
            print(*(f"{count:10,}  {reason}" for reason, count in meta["bad_reasons"].items()), sep="\n")
            print("of which", *meta["bad_examples"], sep="\n  ")
        for document in range(min(show, meta["num_documents"])):
            text = _mark_supervised(part.cache, document, load_tokenizer(tokenizer_dir), sys.stdout.isatty())
            print(f"\n--- {document}\n{text}")


def _draw_histogram(lengths: np.ndarray) -> list[str]:
    """A line for each power of two: the range of lengths, how many there are, and a bar."""
    counts = np.bincount(np.log2(lengths).astype(int))
    bars = np.ceil(counts * 50 / counts.max()).astype(int)
    return [
        f"{2**power:>5}-{2 ** (power + 1) - 1:<5} {count:>9,}  {'#' * bar}"
        for power, (count, bar) in enumerate(zip(counts, bars, strict=True))
    ]


def _mark_supervised(cache: TokenCache, document: int, tokenizer, color: bool) -> str:
    """The document's first SHOWN_TOKENS tokens as text; of a conversation, with what is supervised marked."""
    begin, end = cache.offsets[document : document + 2]
    shown = slice(begin, min(end, begin + SHOWN_TOKENS))
    rest = f" [... {end - shown.stop:,} more tokens]" if shown.stop < end else ""
    if cache.supervised is None:
        return tokenizer.decode(cache.tokens[shown]) + rest
    on, off = ("\033[32m", "\033[0m") if color else ("«", "»")
    text = ""
    for supervised, run in itertools.groupby(
        zip(cache.tokens[shown].tolist(), cache.supervised[shown].tolist(), strict=True), key=lambda pair: pair[1]
    ):
        part = tokenizer.decode([token for token, _ in run])
        text += f"{on}{part}{off}" if supervised else part
    return text + rest


def main() -> None:
    launch.run(lambda: tyro.cli(inspect_data, prog="python -m qwen3_trn.data"))
