"""Qwen3 and Qwen3-MoE, with Hugging Face's parameter names and transformers' mathematics.

    from qwen3_trn import Qwen3ForCausalLM
    model = Qwen3ForCausalLM.from_pretrained("path/to/Qwen3-0.6B")
    logits = model(input_ids)                                   # [B, T] -> [B, T, V]
    summed, count = model.loss(input_ids, labels)               # labels already shifted, -100 ignored

Shape letters: B batch, T sequence, N tokens (B * T), H hidden, Q query heads, K key/value heads, D head_dim,
I intermediate, E experts, V vocabulary. Technical report: arXiv 2505.09388.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from qwen3_trn import generate, hf
from qwen3_trn.config import Qwen3Config
from qwen3_trn.folders import new_folder
from qwen3_trn.init import init_weights, local_tensor
from qwen3_trn.kernels.registry import missing_packages, operation, register, uses_default
from qwen3_trn.loss import count_supervised, linear_cross_entropy
from qwen3_trn.moe import MoE, RouterStats
from qwen3_trn.rope import apply_rope, rope_tables

PADDING_DOCUMENT = -1  # the document id of a position that holds no token


@operation("rms_norm", "x weight eps")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) in fp32, cast back, then times weight; over the last dim (arXiv 1910.07467)."""
    x_float = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(x_float, (x.shape[-1],), eps=eps).to(x.dtype) * weight


@operation("attention", "q k v mask")
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of q k^T / sqrt(D), causal, times v; fewer key heads than query heads serve as many queries each.

    q: [B, Q, T, D], k and v: [B, K, T, D]; mask: [B, 1, T, T] bool, True where a query sees a key, or None for plain
    causal. Returns [B, Q, T, D]. As mask an override gets `first_keys`, or None.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


register(
    "attention",
    "nkilib",
    "qwen3_trn.kernels.nkilib:attention",
    available=partial(missing_packages, "torch_neuronx", "nki", "nkilib"),
    needs="qwen3_trn.kernels.nkilib:needs_attention",
)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return rms_norm(x, self.weight, self.eps)
        # Tensor parallelism. Kernels take plain tensors; of the weight's gradient each rank has a part of the sum.
        weight = self.weight.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]
        out = rms_norm(x.to_local(), weight, self.eps)
        return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)  # type: ignore[return-value]


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on each query and key head, before RoPE."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        # head_dim is a key of its own: Qwen3-0.6B has 16 heads of 128 over a hidden size of 1024.
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x: [B, T, H]; mask: as `attention` takes it."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, Q, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, K, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = apply_rope(self.q_norm(q), cos, sin)
        k = apply_rope(self.k_norm(k), cos, sin)
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP (or MoE), each on a normed input and added to the residual stream."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.moe_enabled = config.is_moe_layer(layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if self.moe_enabled else MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, valid: Tensor
    ) -> tuple[Tensor, RouterStats | None]:
        """x: [B, T, H] -> the same, and the router's statistics of a MoE layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        normed = self.post_attention_layernorm(x)
        if self.moe_enabled:
            out, stats = self.mlp(normed, valid)
            return x + out, stats
        return x + self.mlp(normed), None

    @property
    def moe(self) -> nn.Module:
        """torchtitan's name for it, see the end of Qwen3ForCausalLM."""
        return self.mlp


class Embedding(nn.Embedding):
    """The rows of the tokens.

    Under tensor parallelism `group` is set: each rank has its part of the vocabulary, and gets its part of the
    sequence.
    """

    group: dist.ProcessGroup | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: [B, T] -> [B, T, H]."""
        if self.group is None:
            return super().forward(input_ids)
        weight = local_tensor(self.weight)
        local_ids = input_ids - self.group.rank() * weight.shape[0]
        is_here = (local_ids >= 0) & (local_ids < weight.shape[0])
        rows = F.embedding(torch.where(is_here, local_ids, 0), weight)
        rows = torch.where(is_here[..., None], rows, 0)
        return funcol.wait_tensor(funcol.reduce_scatter_single_autograd(rows, "sum", 1, self.group))


class Qwen3Model(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        self.mask_documents = True  # else a token sees all that stands before it in its row
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: Tensor, positions: Tensor | None, document_ids: Tensor | None
    ) -> tuple[Tensor, RouterStats | None]:
        """Returns hidden states [B, T, H] and the router statistics stacked over MoE layers (None if dense)."""
        x = self.embed_tokens(input_ids)
        if positions is None or not self.mask_documents:
            length = input_ids.shape[1]
            positions = torch.arange(length, device=input_ids.device, dtype=torch.int32).expand_as(input_ids)
        cos, sin = rope_tables(self.config, positions, x.dtype)
        mask, valid = None, torch.ones_like(input_ids, dtype=torch.bool)
        if document_ids is not None:
            valid = document_ids != PADDING_DOCUMENT
            if self.mask_documents:
                mask = document_mask(document_ids) if uses_default("attention") else first_keys(document_ids)
        all_stats = []
        for layer in self.layers:
            x, stats = layer(x, cos, sin, mask, valid)
            if stats is not None:
                all_stats.append(stats)
        stacked = RouterStats(*map(torch.stack, zip(*all_stats, strict=True))) if all_stats else None
        return self.norm(x), stacked


def document_mask(document_ids: Tensor) -> Tensor:
    """Causal within each document and nothing across. document_ids: [B, T] -> [B, 1, T, T] bool."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]


def first_keys(document_ids: Tensor) -> Tensor:
    """The first key that each query sees, where its document begins. document_ids: [B, T] -> [B, T] int32.

    With it a kernel can mask documents without a [T, T] mask: query t sees keys first_keys[t] to t.
    """
    length = document_ids.shape[1]
    begins = document_ids != F.pad(document_ids[:, :-1], (1, 0))
    first = torch.arange(length, device=document_ids.device, dtype=torch.int32) * begins.int()
    # A running maximum in log2(T) steps; torch.cummax would also return 64-bit indices.
    step = 1
    while step < length:
        first = torch.maximum(first, F.pad(first[:, :-step], (step, 0)))
        step *= 2
    return first


class LMHead(nn.Linear):
    """The output projection. With labels it returns the summed loss, in chunks, instead of logits.

    Under tensor parallelism `group` is set: each rank has its part of the sequence and of the vocabulary.
    """

    group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """x: [B, T, H] -> logits [B, T, V]; with labels [B, T] -> the summed cross-entropy, a scalar."""
        weight = local_tensor(self.weight)
        if self.group is not None:
            x = funcol.wait_tensor(funcol.all_gather_single_autograd(x, 1, self.group))
        if labels is not None:
            return linear_cross_entropy(x.flatten(0, 1), weight, labels.flatten(), self.group)
        logits = F.linear(x, weight)
        if self.group is not None:
            logits = funcol.wait_tensor(funcol.all_gather_single_autograd(logits, 2, self.group))
        return logits


class LossTerms(NamedTuple):
    """What a micro-batch contributes on this rank."""

    cross_entropy: Tensor  # [] fp32: summed over supervised tokens
    num_supervised: Tensor  # [] int32
    router: RouterStats | None  # stacked over the MoE layers


class Qwen3ForCausalLM(nn.Module):
    """A Qwen3 or Qwen3-MoE language model.

    Qwen3ForCausalLM(config) draws random weights with seed 0; `from_pretrained(DIR)` reads a folder's. Under
    `torch.device("meta")` nothing is allocated; parallel.py uses that to build a model that no rank could hold.
    """

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):
            self.model = Qwen3Model(config)
            self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        if device.type != "meta":
            self.materialize(device)
            self.init_weights(seed=0)

    def tie_weights(self) -> None:
        """Make head and embedding one parameter where the config ties them. `to_empty` and FSDP can part them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def materialize(self, device: torch.device | str) -> None:
        """Allocate every parameter on `device`, uninitialised."""
        self.to_empty(device=device)
        self.tie_weights()

    def init_weights(self, seed: int) -> None:
        """Draw every parameter this rank owns: normal(0, initializer_range) for matrices, ones for norms, zero biases.

        The values depend on the seed, the parameter's name and the row alone, not on ranks or layout.
        """
        init_weights(dict(self.named_parameters()), self.config.initializer_range, seed)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Logits [B, T, V].

        input_ids: [B, T] integers. positions: [B, T], default 0..T-1. document_ids: [B, T]; tokens attend only within
        their document, -1 marks padding; default: each row is one document.
        """
        hidden, _ = self.model(input_ids, positions, document_ids)
        return self.lm_head(hidden)

    def loss(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(summed cross-entropy fp32, number of supervised tokens int32).

        labels: [B, T], already shifted (labels[t] is the token after input_ids[t]), -100 where not supervised.
        """
        terms = self.loss_terms(input_ids, labels, positions, document_ids)
        return terms.cross_entropy, terms.num_supervised

    def loss_terms(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> LossTerms:
        """`loss`, with the router's statistics, from which moe.py forms the auxiliary losses."""
        hidden, router = self.model(input_ids, positions, document_ids)
        return LossTerms(self.lm_head(hidden, labels), count_supervised(labels), router)

    @classmethod
    def from_pretrained(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> "Qwen3ForCausalLM":
        """Read a Hugging Face folder's config.json and safetensors on the CPU. Raises UserError on any mismatch."""
        with torch.device("meta"):
            model = cls(Qwen3Config.from_pretrained(folder)).to(dtype)
        model.materialize("cpu")
        hf.load_hf(folder, model.config, dict(model.named_parameters()))
        return model

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json and safetensors in Hugging Face's form. Raises UserError if `folder` holds anything."""
        parameters = dict(self.named_parameters())
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        with new_folder(folder) as unfinished:
            hf.save_hf(
                unfinished, self.config, shapes, lambda name, target: target.copy_(parameters[name].detach()), dtype
            )

    def generate(self, ids: Tensor, max_new_tokens: int, temperature: float = 0.0) -> Tensor:
        """Continue ids [B, T] by max_new_tokens each, greedily at temperature 0. Returns [B, T + max_new_tokens]."""
        return generate.generate(self, ids, max_new_tokens, temperature)

    def num_parameters(self) -> int:
        """All parameters, over all ranks; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_active_parameters(self) -> int:
        """Parameters that one token is multiplied with: the head but not the embedding, k of the E experts."""
        active = self.lm_head.weight.numel()
        for name, parameter in self.model.layers.named_parameters():
            share = self.config.num_experts_per_tok / self.config.num_experts if ".experts." in name else 1
            active += round(parameter.numel() * share)
        return active

    def flops_per_token(self, seq_len: int) -> float:
        """Training FLOPs a token: 6 a parameter (PaLM, arXiv 2204.02311, appendix B), plus causal attention.

        Attention is two [T, T] x D products a head, half of them masked, three times with backward; document masks,
        which save more, are not counted.
        """
        config = self.config
        attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq_len
        return 6 * self.num_active_parameters() + attention

    # The names by which torchtitan's `apply_fsdp_to_decoder` finds its way around a decoder.
    @property
    def tok_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    @property
    def layers(self) -> dict[str, nn.Module]:
        return dict(self.model.layers.named_children())

    @property
    def norm(self) -> nn.Module:
        return self.model.norm

    @property
    def enable_weight_tying(self) -> bool:
        return self.config.tie_word_embeddings


def parameter_shapes(config: Qwen3Config) -> dict[str, torch.Size]:
    """Name and shape of every parameter of the model that `config` describes; nothing is allocated."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Qwen3ForCausalLM(config).named_parameters()}
