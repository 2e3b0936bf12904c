"""Looking at a model while it trains: validation loss, samples from fixed prompts, a test of the document mask.

    loss = evaluate(model, sources, batch_size=8, num_ranks=1, rank=0, tp=1, device=Device())

Every rank calls these functions, and runs the model equally often and on the same shapes.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from qwen3_trn.data import PackedData, PackedSource
from qwen3_trn.device import Device
from qwen3_trn.encode import END_OF_TEXT, load_tokenizer
from qwen3_trn.errors import UserError
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.model import PADDING_DOCUMENT, Qwen3ForCausalLM

NEW_TOKENS = 64  # of a sample
TEMPERATURE = 0.7


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM,
    sources: Sequence[PackedSource],
    batch_size: int,
    num_ranks: int,
    rank: int,
    tp: int,
    device: Device,
) -> float:
    """The mean cross-entropy of all supervised tokens in `sources`, which do not shuffle.

    num_ranks, rank: of the data ranks, each of which takes every num_ranks-th batch; tp ranks share a batch. The last
    batches are filled up with rows of padding, which have no label.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for source in sources:
        for first in range(0, source.rows_per_epoch, batch_size * num_ranks):
            begin = first + rank * batch_size
            rows = [source.row(position) for position in range(begin, begin + batch_size)]
            batch = {name: np.stack([getattr(row, name) for row in rows]) for name in rows[0]._fields}
            loss, count = model.loss(**device.put(batch))
            sums += torch.stack([loss, count]).cpu()
    dist.all_reduce(sums)  # on the host
    loss, count = (sums / tp).tolist()
    return loss / count


@torch.no_grad()
def check_document_mask(
    model: Qwen3ForCausalLM, data: PackedData, batch_size: int, device: Device, dtype: torch.dtype
) -> None:
    """Raises UserError if a document's loss moves when another one in its row changes.

    Run on the first rows of the data, by the attention that training takes. Says nothing where no row of the first
    batch holds two documents.
    """
    batch = data.batch(range(batch_size))._asdict()
    last = batch["document_ids"].max(axis=1)  # a row's documents are numbered in order
    (candidates,) = np.nonzero(last > 0)
    if not len(candidates):
        return
    row = candidates[0]
    later = np.zeros_like(batch["labels"], dtype=bool)
    later[row] = batch["document_ids"][row] == last[row]
    batch["labels"] = np.where(later, batch["labels"], IGNORE_INDEX)
    if (batch["labels"] == IGNORE_INDEX).all():
        return
    earlier = np.zeros_like(later)
    earlier[row] = (batch["document_ids"][row] != last[row]) & (batch["document_ids"][row] != PADDING_DOCUMENT)
    changed = batch | {
        "input_ids": np.where(earlier, (batch["input_ids"] + 1) % model.config.vocab_size, batch["input_ids"])
    }
    before, after = (model.loss(**device.put(rows))[0].item() for rows in (batch, changed))
    # Rounding differs where experts get other tokens beside the same ones.
    if not abs(after - before) <= (1e-5 if dtype == torch.float32 else 1e-2) * abs(before):
        raise UserError(
            f"documents in one row see each other: the loss of one went from {before} to {after} when the others "
            "changed. The attention that was chosen does not mask documents; use --no-pack."
        )


def read_prompts(prompts: Sequence[str], tokenizer_dir: Path, is_chat: bool) -> list[list[int]]:
    """Token ids of the prompts: texts, or files with one prompt a line. In a chat each is a user's turn."""
    texts = []
    for prompt in prompts:
        is_file = len(prompt) < 1000 and Path(prompt).is_file()
        texts += Path(prompt).read_text(encoding="utf-8").splitlines() if is_file else [prompt]
    texts = [text for text in texts if text.strip()]
    if prompts and not texts:
        raise UserError("--prompts holds no text.")
    tokenizer = load_tokenizer(tokenizer_dir)
    if is_chat:
        turns = [[{"role": "user", "content": text}] for text in texts]
        return [tokenizer.apply_chat_template(turn, add_generation_prompt=True).input_ids for turn in turns]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def find_stop_tokens(tokenizer_dir: Path, is_chat: bool) -> list[int]:
    """Ids of the tokens that end an answer: the end of text, the tokenizer's own, and in a chat the end of a turn."""
    tokenizer = load_tokenizer(tokenizer_dir)
    vocabulary = tokenizer.get_vocab()
    names = [*(["<|im_end|>"] if is_chat else []), tokenizer.eos_token, END_OF_TEXT]
    return list(dict.fromkeys(vocabulary[name] for name in names if name in vocabulary))


def sample_texts(
    model: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    tokenizer_dir: Path,
    stop_tokens: Sequence[int],
    seed: int,
    device: Device,
) -> list[str]:
    """How the model goes on from each prompt: one line for the prompt, one for each of a greedy and a sampled answer.

    All ranks draw the same numbers. A forward costs the same whatever the answer's length, and each rank must run as
    many as the others: so answers are cut at their stop token when all are there.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    length = -(-(max(map(len, prompts)) + NEW_TOKENS) // NEW_TOKENS) * NEW_TOKENS  # one shape for all prompts
    lines = []
    for prompt in prompts:
        lines.append(f"> {_show(tokenizer.decode(prompt))}")
        ids = device.put({"ids": np.array([prompt])})["ids"]
        for name, temperature in (("greedy", 0.0), (f"sampled at {TEMPERATURE}", TEMPERATURE)):
            torch.manual_seed(seed)
            answer = model.generate(ids, length - len(prompt), temperature)[0, len(prompt) :].tolist()
            end = next((i for i, token in enumerate(answer) if token in stop_tokens), len(answer))
            lines.append(f"{name}: {_show(tokenizer.decode(answer[:end]))}")
    return lines


def _show(text: str) -> str:
    return text.replace("\n", "\\n")
