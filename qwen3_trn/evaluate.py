"""Looking at a model while it trains: validation loss, samples from fixed prompts.

    loss = evaluate(model, eval_data, batch_size=8, num_ranks=1, rank=0, tp=1, device=Device())

Every rank calls these functions, and runs the model equally often and on the same shapes.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from qwen3_trn.chat import find_end_of_turn
from qwen3_trn.config import Qwen3Config
from qwen3_trn.data import PackedData, Rows
from qwen3_trn.device import Device
from qwen3_trn.encode import END_OF_TEXT
from qwen3_trn.errors import UserError
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.model import Qwen3ForCausalLM
from qwen3_trn.parallel import reshard

NEW_TOKENS = 48  # that a sample has at least, where nothing ends it
SAMPLE_LENGTHS = 64  # a sample and its prompt are as long as a multiple of this: few shapes for devices that compile
TEMPERATURE = 0.7


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM,
    eval_data: Sequence[PackedData],
    batch_size: int,
    num_ranks: int,
    rank: int,
    tp: int,
    device: Device,
) -> float:
    """The mean cross-entropy of all supervised tokens in `eval_data`, what `start.open_eval_data` returns.

    num_ranks, rank: of the data ranks, each of which takes every num_ranks-th batch; tp ranks share a batch. The last
    batches are filled up with rows of padding, which have no label.
    """
    sums = torch.zeros(2, dtype=torch.float64)  # of the loss, of supervised tokens
    for data in eval_data:
        for first in range(0, data.rows_per_epoch or 0, batch_size * num_ranks):
            begin = first + rank * batch_size
            batch = data.batch(range(begin, begin + batch_size))
            loss, _ = model.loss(**device.put(batch._asdict()))
            sums += torch.tensor([loss.item(), np.count_nonzero(batch.labels != IGNORE_INDEX)], dtype=torch.float64)
    reshard(model)
    dist.all_reduce(sums)  # on the host
    loss_sum, count = (sums / tp).tolist()
    return loss_sum / count


def read_prompts(prompts: Sequence[str], tokenizer, is_chat: bool, config: Qwen3Config) -> list[list[int]]:
    """Token ids of the prompts: texts, or .txt files with one a line.

    With is_chat each is a user's turn, if the tokenizer has a chat template. Raises UserError for a file that cannot be
    read, and for a prompt that the model cannot take.
    """
    texts: list[str] = []
    for prompt in prompts:
        if not prompt.endswith(".txt") and len(prompt) < 256 and Path(prompt).is_file():
            raise UserError(f"--prompts {prompt} is a file; expected texts, or .txt files with one prompt a line.")
        try:
            is_file = prompt.endswith(".txt")
            texts += Path(prompt).read_text(encoding="utf-8").split("\n") if is_file else [prompt]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompts {prompt} cannot be read: {error}. It ends in .txt, so it is a file.") from error
    texts = [text for text in texts if text.strip()]
    if prompts and not texts:
        raise UserError(f"--prompts {' '.join(prompts)}: there is no text.")
    found = []
    for text in texts:
        if is_chat and tokenizer.chat_template:
            turn = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True).input_ids
        else:
            ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) + NEW_TOKENS > config.max_position_embeddings:
            raise UserError(
                f"--prompts: {text[:60]!r} has {len(ids)} tokens, and {NEW_TOKENS} are to follow; the model's "
                f"max_position_embeddings is {config.max_position_embeddings}."
            )
        if max(ids) >= config.vocab_size:
            raise UserError(f"--prompts: {text[:60]!r} has token id {max(ids)}; the model has {config.vocab_size}.")
        found.append(ids)
    return found


def find_prompt(row: Rows) -> list[int]:
    """The start of a row: of a conversation up to the first answer, of a text its first 16 tokens."""
    (labelled,) = np.nonzero(row.labels != IGNORE_INDEX)
    first = int(labelled[0]) if len(labelled) else 0
    return row.input_ids[: first + 1 if first else 16].tolist()


def find_stop_tokens(tokenizer, is_chat: bool) -> list[int]:
    """Ids of the tokens that end an answer: in a chat what closes a turn, the tokenizer's own eos, the end of text."""
    end_of_turn = find_end_of_turn(tokenizer) if is_chat else None
    vocabulary = tokenizer.get_vocab()
    names = [name for name in (end_of_turn, tokenizer.eos_token, END_OF_TEXT) if name in vocabulary]
    return [vocabulary[name] for name in dict.fromkeys(names)]


def sample_texts(
    model: Qwen3ForCausalLM,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    stop_tokens: Sequence[int],
    seed: int,
    tp: int,
    device: Device,
) -> list[str]:
    """How the model goes on from each prompt: one line for the prompt, one for each of a greedy and a sampled answer.

    All ranks draw the same numbers. A forward costs the same whatever the answer's length, and each rank must run as
    many as the others: so answers are cut at their stop token when all are there.
    """
    block = math.lcm(SAMPLE_LENGTHS, tp)  # tensor parallelism cuts a row into tp parts
    length = -(-(max(map(len, prompts)) + NEW_TOKENS) // block) * block  # one shape for all prompts
    lines = []
    for prompt in prompts:
        lines.append(f"> {_show(tokenizer, prompt)}")
        ids = device.put({"ids": np.array([prompt])})["ids"]
        for name, temperature in (("greedy", 0.0), (f"sampled at {TEMPERATURE}", TEMPERATURE)):
            torch.manual_seed(seed)
            answer = model.generate(ids, length - len(prompt), temperature)[0, len(prompt) :].tolist()
            end = next((i for i, token in enumerate(answer) if token in stop_tokens), len(answer))
            lines.append(f"{name}: {_show(tokenizer, answer[:end])}")
    reshard(model)
    return lines


def _show(tokenizer, ids: Sequence[int]) -> str:
    """The text on one line, without what could steer a terminal."""
    return re.sub(r"[\x00-\x1f\x7f]", lambda match: repr(match[0])[1:-1], tokenizer.decode(ids))
