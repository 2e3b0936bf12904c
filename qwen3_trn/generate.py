"""Text from a model: a plain loop without a cache, for samples during training and quick checks.

    out = model.generate(ids, max_new_tokens=50, temperature=0.8)

Every step runs the same shape, so that a device which compiles each shape compiles one. For serving, load the export
in an inference engine.
"""

import torch
from torch import Tensor


@torch.no_grad()
def generate(model, ids: Tensor, max_new_tokens: int, temperature: float = 0.0) -> Tensor:
    """Continue ids [B, T] by max_new_tokens tokens each: the most likely one at temperature 0, else sampled.

    Returns [B, T + max_new_tokens] in ids' dtype. Sampling draws from torch's default generator. Under FSDP every rank
    must call this with the same ids.
    """
    prompt_length = ids.shape[1]
    ids = torch.cat((ids, ids.new_zeros(ids.shape[0], max_new_tokens)), dim=1)
    for end in range(prompt_length, prompt_length + max_new_tokens):
        # The positions from `end` on hold zeros; attention is causal, so no position before them sees them.
        logits = model(ids)[:, end - 1].float()
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            token = logits.argmax(-1, keepdim=True)
        ids[:, end] = token.squeeze(1).to(ids.dtype)
    return ids
