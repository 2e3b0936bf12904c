"""Rotary position embeddings, plain and YaRN.

    python - <<END
    import torch
    from qwen3_trn import Qwen3Config
    from qwen3_trn.rope import apply_rope, rope_tables
    cos, sin = rope_tables(Qwen3Config.from_pretrained("assets/tiny"), torch.arange(4)[None], torch.float32)
    print(apply_rope(torch.ones(1, 4, 2, cos.shape[-1]), cos, sin))
    END

Shape letters: B batch, T sequence, D head_dim.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qwen3_trn.config import Qwen3Config


def _rope_frequencies(theta: float, dim: int, scaling: dict[str, Any] | None) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2], fp32 on the CPU, and the factor on cos and sin.

    Plain RoPE (arXiv 2104.09864), or YaRN (arXiv 2309.00071, sections 3.2 to 3.4): low frequencies are interpolated
    by `factor`, high ones kept, with a linear ramp between the dims that turn beta_slow and beta_fast times within the
    original context. As in transformers' `_compute_yarn_parameters`.
    """
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)  # / (2 pi)
    if not scaling:
        return 1.0 / wavelengths, 1.0
    factor, original_length = scaling["factor"], scaling["original_max_position_embeddings"]

    def dim_that_turns(times: float) -> float:
        return dim * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_that_turns(scaling.get("beta_fast") or 32), dim_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = magnitude(1.0)
        if mscale and mscale_all_dim:
            attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
    return frequencies, attention_factor


def rope_tables(config: Qwen3Config, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, [B, T, D] in `dtype`, computed in fp32. positions: [B, T] integers.

    Computed from the config at each forward and never kept in a buffer, which initialisation on the meta device and
    dtype casts would spoil.
    """
    frequencies, factor = _rope_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
    angles = positions[..., None].float() * frequencies.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head, split-half: dim i turns with dim i + D/2. x: [B, T, heads, D]; cos, sin: [B, T, D]."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(2) + rotated * sin.unsqueeze(2)
