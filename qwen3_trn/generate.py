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

    Returns [B, T + max_new_tokens] in ids' dtype. Sampling draws from torch's default CPU generator. Under FSDP every
    rank must call this with the same ids.
    """
    prompt_length, device = ids.shape[1], ids.device
    # Tokens are chosen on the host, and places are tensors: a device may lack random numbers and 64-bit indices, and
    # compile an operation for each number anew.
    ids = torch.cat((ids.cpu(), torch.zeros(ids.shape[0], max_new_tokens, dtype=ids.dtype)), dim=1)
    for end in range(prompt_length, prompt_length + max_new_tokens):
        # The positions from `end` on hold zeros; attention is causal, so no position before them sees them.
        place = torch.tensor([end - 1], dtype=torch.int32).to(device)
        logits = model(ids.to(device)).index_select(1, place).squeeze(1).float().cpu()
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            token = logits.argmax(-1, keepdim=True)
        ids[:, end] = token.squeeze(1).to(ids.dtype)
    return ids.to(device)
