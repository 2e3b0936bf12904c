"""What a run checks of itself: that weights arrived, that documents do not see each other, where a bad step comes from.

    check_document_mask(model, batch_size=8, seq_len=512, device=Device(), dtype=torch.float32)

Every rank calls these functions.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from qwen3_trn import launch
from qwen3_trn.config import Qwen3Config
from qwen3_trn.device import Device
from qwen3_trn.errors import UserError
from qwen3_trn.init import local_tensor
from qwen3_trn.launch import print0
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.model import Qwen3ForCausalLM
from qwen3_trn.moe import RouterStats
from qwen3_trn.parallel import reshard


def check_loaded(loss: float, config: Qwen3Config) -> None:
    """Published weights start far below ln(vocabulary), the loss of a model that knows nothing."""
    ln_vocab = math.log(config.vocab_size)
    print0(f"first loss {loss:.4f}; random weights would give about ln({config.vocab_size}) = {ln_vocab:.2f}")
    if not math.isfinite(loss):
        raise UserError(f"the first loss is {loss}: the loaded weights hold values that are not finite, or overflow.")
    if loss >= 0.95 * ln_vocab:
        raise UserError(
            f"the first loss is {loss:.2f}, and ln(vocabulary) is {ln_vocab:.2f}: the loaded weights look random. "
            "Either they do not belong to this config and tokenizer, or the data is nothing like what they were "
            "trained on. If they are meant to be random, say --no-load-check."
        )


@torch.no_grad()
def check_document_mask(
    model: Qwen3ForCausalLM, batch_size: int, seq_len: int, device: Device, dtype: torch.dtype
) -> None:
    """Raises UserError if a document's loss moves when the other one in its row changes.

    Two documents a row, of the shape and by the attention that training takes. The loss is that of the second one's
    first and last tokens: what leaks reaches the first at its strongest.
    """
    ids = np.arange(batch_size * seq_len, dtype=np.int32).reshape(batch_size, seq_len) * 7919 % model.config.vocab_size
    places = np.arange(seq_len, dtype=np.int32)
    cut = seq_len // 3  # not where an attention kernel would begin a block
    is_second = places >= cut
    labels = np.where(np.isin(places, [cut, seq_len - 1]), ids, IGNORE_INDEX)
    rows = np.zeros_like(ids)
    others = {"labels": labels, "positions": rows + places - cut * is_second, "document_ids": rows + is_second}

    def compute_loss(input_ids: np.ndarray) -> float:
        torch.manual_seed(0)  # a model that draws numbers, as for dropout, is to draw the same ones
        return model.loss(**device.put(others | {"input_ids": input_ids}))[0].item()

    before = compute_loss(ids)
    after = compute_loss(np.where(is_second, ids, (ids + 1) % model.config.vocab_size))
    reshard(model)
    # Nothing should move, except by rounding where experts get other tokens beside the same ones. Random weights, which
    # leak least, moved by 2e-3 and more without the mask.
    if abs(after - before) > (1e-5 if dtype == torch.float32 else 5e-4) * abs(before):  # nan is told of elsewhere
        raise UserError(
            f"documents in one row see each other: the loss of one went from {before} to {after} when the other "
            "changed. The attention that was chosen does not mask documents, or a --kernel changes what it is given. "
            "Use --no-pack for the one, PyTorch's for the other."
        )


def name_culprit(model: Qwen3ForCausalLM, compute: Callable[[], tuple[dict[str, Tensor], RouterStats | None]]) -> str:
    """Compute a bad step once more, before clipping spreads what is not finite, and say where it comes from.

    compute: forward_backward of this rank's share. Every rank must call it.
    """
    losses, _ = compute()
    bad_loss = not all(bool(loss.isfinite()) for loss in losses.values())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    names = [name for name, grad in gradients.items() if not bool(local_tensor(grad).isfinite().all())]
    found: list[tuple[bool, list[str]]] = [(False, [])] * launch.WORLD_SIZE
    dist.all_gather_object(found, (bad_loss, names))
    ranks = [str(rank) for rank, (bad, _) in enumerate(found) if bad]
    bad_names = {name for _, names in found for name in names}
    in_order = [name for name, _ in model.named_parameters() if name in bad_names]
    if not ranks and not in_order:
        return "Computed again it was finite, so look for a fault of the machine."
    loss = f"the loss itself is not finite on rank {', '.join(ranks)}" if ranks else "the loss is finite on every rank"
    return (
        f"Computed again, {loss}; gradients are not finite in {len(in_order)} parameters, the first of them "
        f"{in_order[0] if in_order else 'none'}."
    )
