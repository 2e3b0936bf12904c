"""qwen3_trn: train Qwen3 and Qwen3-MoE. `from qwen3_trn import Qwen3Config, Qwen3ForCausalLM`; see README.md."""

from qwen3_trn.config import Qwen3Config
from qwen3_trn.model import Qwen3ForCausalLM

__all__ = ["Qwen3Config", "Qwen3ForCausalLM"]
