"""`attention` of packed documents and `moe_experts` by AWS's own kernels, those of the NKI Library.

    out = nkilib.attention(q, k, v, first_keys)                                  # in place of model.py's
    y, gate, up = nkilib.moe_experts(x, *slots, gate_proj, up_proj, down_proj)   # for dispatch.py's, block=128

`needs_attention` and `needs_experts` of the same arguments say why a kernel cannot take them, or None.
Written against what AWS publishes for Neuron SDK 2.32 and later (pages "Attention CTE" and "Blockwise MM Backward
Kernel API Reference", docstrings of aws-neuron/nki-library). Never run: nkilib was not at hand. docs/kernels.md says
what the documents leave open.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_trn.dispatch import gather_rows, sum_over_choices
from qwen3_trn.errors import UserError
from qwen3_trn.kernels.nki_moe import NUM_CORES, TILE, import_failed, needs_cores, needs_layout, needs_shapes

KEYS = 512  # attention_bwd works on so many keys at a time
MAX_HEAD_DIM = 128
MAX_HEADS = 512  # attention_cte: the most it was tested with, heads of all sequences together
SHARD = 32  # blockwise_mm_bwd: a core's share of a width is a multiple


def _needs_bfloat16(*tensors: Tensor) -> str | None:
    """Both kernels multiply in bfloat16, whatever they get."""
    if found := {str(tensor.dtype) for tensor in tensors} - {"torch.bfloat16"}:
        return f"dtype {', '.join(sorted(found))}; the kernels compute in bfloat16"
    return None


# ---------------------------------------------------------------------------------------------------------- attention


def needs_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """Why the kernels cannot take these arguments of `attention` (meta tensors do), or None if they can."""
    shapes = {"q": (q, "B Q T D"), "k": (k, "B K T D"), "v": (v, "B K T D")}
    if reason := needs_cores() or _needs_bfloat16(q, k, v) or needs_shapes(shapes):
        return reason
    batch, heads, length, head_dim = q.shape
    if heads % k.shape[1]:
        return f"{heads} heads of q with {k.shape[1]} of k and v; expected a multiple"
    if mask is not None and (mask.dtype != torch.int32 or mask.shape != (batch, length)):
        return f"a mask of {mask.dtype} {list(mask.shape)}; expected each query's first key, int32 {[batch, length]}"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim}; expected at most {MAX_HEAD_DIM}"
    if length % KEYS:
        return f"sequences of {length} tokens; expected a multiple of {KEYS}"
    if batch * heads > MAX_HEADS:
        return f"{batch} sequences with {heads} heads each; expected at most {MAX_HEADS} heads together"
    return None


def key_bounds(first_keys: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The kernels' bound_min and bound_max, fp32: each query's first key and the one after its last, itself.

    first_keys: int32 [B, T], or None for plain causal attention, which has no bounds.
    """
    if first_keys is None:
        return None, None
    ends = torch.arange(1, first_keys.shape[1] + 1, dtype=torch.float32, device=first_keys.device)
    return first_keys.float(), ends.expand(first_keys.shape).contiguous()


@torch.compiler.assume_constant_result  # torch.compile calls it, and does not look into it
def _define_attention() -> None:
    """Define torch.ops.qwen3_trn.nkilib_attention when it is first used: only then AWS's packages are imported."""
    if hasattr(torch.ops.qwen3_trn, "nkilib_attention"):
        return
    try:
        from nkilib.core.attention.attention_bwd import attention_bwd
        from nkilib.core.attention.attention_cte import attention_cte
        from torch_neuronx import nki_op
    except ImportError as error:
        raise import_failed("nkilib's kernels of attention", "torch_neuronx, nki and nkilib", error) from error

    @nki_op("qwen3_trn::nkilib_attention", mutates_args={})
    def forward(q: Tensor, k: Tensor, v: Tensor, first_keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the output [B, Q, T, D] and the log-sum-exp of the scores, fp32 [B, Q, 128, T / 128]."""
        batch, heads = q.shape[:2]
        first, end = (
            None if bound is None else bound.repeat_interleave(heads, dim=0)[..., None]
            for bound in key_bounds(first_keys)
        )
        # Heads count as sequences; where there are fewer of k and v, each serves the next Q / K of q.
        out, negative_max, sum_reciprocal = attention_cte[NUM_CORES](
            q=q.flatten(0, 1).contiguous(),
            k=k.flatten(0, 1).contiguous(),
            v=v.flatten(0, 1).contiguous(),
            scale=1.0,
            causal_mask=True,
            tp_q=True,  # [..., T, D]
            tp_k=True,
            tp_out=False,
            cache_softmax=True,
            bound_min=first,
            bound_max=end,
        )
        lse = -negative_max - sum_reciprocal.log()  # already in the layout of attention_bwd
        return out.unflatten(0, (batch, heads)), lse.unflatten(0, (batch, heads))

    @nki_op("qwen3_trn::nkilib_attention_backward", mutates_args={})
    def backward(
        out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first_keys: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        first, end = key_bounds(first_keys)
        grads = attention_bwd[NUM_CORES](
            q_ref=q.transpose(2, 3).contiguous(),  # [B, heads, D, T], as all of them
            k_ref=k.transpose(2, 3).contiguous(),
            v_ref=v.transpose(2, 3).contiguous(),
            o_ref=out.transpose(2, 3).contiguous(),
            dy_ref=out_grad.transpose(2, 3).contiguous(),
            lse_ref=lse,
            bound_min=first,
            bound_max=end,
            use_causal_mask=True,
            mixed_precision=True,  # what is between the matmuls in fp32
            softmax_scale=1.0,
        )
        q_grad, k_grad, v_grad = (grad.transpose(2, 3).contiguous() for grad in grads)
        return q_grad, k_grad, v_grad

    @forward.register_fake
    def _(q, k, v, first_keys):
        lse = q.new_empty(*q.shape[:2], TILE, q.shape[2] // TILE, dtype=torch.float32)
        return q.new_empty(q.shape), lse

    @backward.register_fake
    def _(out_grad, q, k, v, first_keys, out, lse):
        return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))

    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs, *output)

    def autograd(ctx, out_grad: Tensor, _lse_grad):
        return *backward(out_grad, *ctx.saved_tensors), None

    forward.register_autograd(autograd, setup_context=setup_context)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention within documents, softmax(q k^T / sqrt(D)) v.

    q: [B, Q, T, D], k and v: [B, K, T, D] bf16; mask: int32 [B, T], the first key that each query sees, its document's
    first token, or None for plain causal attention. Returns [B, Q, T, D]. Raises UserError where `needs_attention`
    gives a reason.
    """
    if reason := needs_attention(q, k, v, mask):
        raise UserError(f"nkilib's attention cannot run: {reason}. Leave out this kernel to use PyTorch's.")
    _define_attention()
    # Scaled here: then neither the forward kernel's limits on `scale` matter, nor whether its maxima are scaled ones.
    out, _ = torch.ops.qwen3_trn.nkilib_attention(q * q.shape[-1] ** -0.5, k, v, mask)
    return out


# -------------------------------------------------------------------------------------------------------- the experts


def needs_experts(
    x: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    group_ends: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
) -> str | None:
    """Why the kernels cannot take these arguments of `moe_experts` (meta tensors do), or None if they can."""
    arguments = (x, choice_of_slot, slot_of_choice, group_ends, gate_proj, up_proj, down_proj)
    return (
        needs_cores()
        or _needs_bfloat16(x, gate_proj, up_proj, down_proj)
        or needs_layout(*arguments, NUM_CORES * SHARD)
    )


def block_experts(num_slots: int, group_ends: Tensor) -> Tensor:
    """The expert of each block of 128 slots, int32 [blocks, 1]; of those after the last group, the last expert.

    No token is in those: their rows of x are zero, and so is all that they add to a gradient.
    """
    starts = torch.arange(0, num_slots, TILE, dtype=torch.int32, device=group_ends.device)
    experts = (starts[:, None] >= group_ends).sum(1, keepdim=True, dtype=torch.int32)
    return experts.clamp(max=group_ends.shape[0] - 1)


def _kernel_weights(gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> dict[str, Tensor]:
    """Our layout, Hugging Face's, to the kernels': [E, H, 2, I] and [E, I, H]."""
    return {
        "gate_up_proj_weight": torch.stack((gate_proj, up_proj)).permute(1, 3, 0, 2).contiguous(),
        "down_proj_weight": down_proj.transpose(1, 2).contiguous(),
    }


@torch.compiler.assume_constant_result
def _define_experts() -> None:
    """As `_define_attention`, torch.ops.qwen3_trn.nkilib_moe_experts.

    The kernels know tokens, affinities of tokens and experts, and blocks of tokens of one expert. Here each slot is a
    token with affinity 1. Then the kernels neither weight nor add up the rows of a token, which `moe_combine` does,
    and the output is one row a slot.
    """
    if hasattr(torch.ops.qwen3_trn, "nkilib_moe_experts"):
        return
    try:
        import nki.language as nl
        from nkilib.experimental.moe.bwd.blockwise_mm_backward import blockwise_mm_bwd
        from nkilib.experimental.moe.forward.bwmm_shard_on_H import blockwise_mm_baseline_shard_hidden
        from torch_neuronx import nki_op
    except ImportError as error:
        raise import_failed("nkilib's kernels of moe_experts", "torch_neuronx, nki and nkilib", error) from error

    @nki_op("qwen3_trn::nkilib_moe_experts", mutates_args={})
    def forward(
        x: Tensor,
        choice_of_slot: Tensor,
        slot_of_choice: Tensor,
        group_ends: Tensor,
        gate_proj: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns y [S, H], and gate and up for backward in the kernel's layout, [S / 128, 2, I, 128]."""
        num_slots, (num_experts, intermediate, _) = choice_of_slot.shape[0], gate_proj.shape
        token_of_slot = F.pad(choice_of_slot // slot_of_choice.shape[1], (0, 1), value=x.shape[0])
        y, gate_up = blockwise_mm_baseline_shard_hidden[NUM_CORES](
            hidden_states=gather_rows(x, token_of_slot),  # and a last row of zeros, which it wants for padding
            expert_affinities_masked=x.new_ones((num_slots + 1) * num_experts, 1),
            **_kernel_weights(gate_proj, up_proj, down_proj),
            block_size=TILE,
            token_position_to_id=torch.arange(num_slots, dtype=torch.int32, device=x.device),
            block_to_expert=block_experts(num_slots, group_ends),
            gate_up_activations_T=x.new_empty(num_slots // TILE, 2, intermediate, TILE),  # written and returned
        )
        return y[:num_slots], gate_up

    @nki_op("qwen3_trn::nkilib_moe_experts_backward", mutates_args={})
    def backward(
        y_grad: Tensor,
        x: Tensor,
        choice_of_slot: Tensor,
        slot_of_choice: Tensor,
        group_ends: Tensor,
        gate_proj: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
        gate_up: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_slots, num_experts = choice_of_slot.shape[0], gate_proj.shape[0]
        y_grad = y_grad.contiguous()
        slots_x_grad, _, gate_up_grad, down_grad = blockwise_mm_bwd[NUM_CORES](
            hidden_states=gather_rows(x, choice_of_slot // slot_of_choice.shape[1]),
            expert_affinities_masked=x.new_ones(num_slots * num_experts, 1),
            **_kernel_weights(gate_proj, up_proj, down_proj),
            gate_up_proj_act_checkpoint_T=gate_up,
            # Only the affinities' gradient depends on this, and nobody wants it: any tensor of the shape does.
            down_proj_act_checkpoint=y_grad.view(-1, TILE, y_grad.shape[1]),
            token_position_to_id=torch.arange(num_slots, dtype=torch.int32, device=x.device),
            block_to_expert=block_experts(num_slots, group_ends),
            output_hidden_states_grad=y_grad,
            block_size=TILE,
            accumulation_dtype=nl.float32,
        )
        gate_grad, up_grad = (grad.contiguous() for grad in gate_up_grad.permute(2, 0, 3, 1))
        x_grad = sum_over_choices(slots_x_grad, slot_of_choice)
        return x_grad, gate_grad, up_grad, down_grad.transpose(1, 2).contiguous()

    @forward.register_fake
    def _(x, choice_of_slot, slot_of_choice, group_ends, gate_proj, up_proj, down_proj):
        num_slots = choice_of_slot.shape[0]
        gate_up = x.new_empty(num_slots // TILE, 2, gate_proj.shape[1], TILE)
        return x.new_empty(num_slots, x.shape[1]), gate_up

    @backward.register_fake
    def _(y_grad, x, choice_of_slot, slot_of_choice, group_ends, gate_proj, up_proj, down_proj, gate_up):
        return tuple(tensor.new_empty(tensor.shape) for tensor in (x, gate_proj, up_proj, down_proj))

    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs, output[1])

    def autograd(ctx, y_grad: Tensor, _gate_up_grad):
        x_grad, *weight_grads = backward(y_grad, *ctx.saved_tensors)
        return x_grad, None, None, None, *weight_grads

    forward.register_autograd(autograd, setup_context=setup_context)


def moe_experts(
    x: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    group_ends: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The SwiGLU experts on their slots, as `qwen3_trn.dispatch.moe_experts`; groups must end at multiples of 128.

    x: [N, H] bf16; the indices are `Slots`; gate_proj and up_proj: [E, I, H], down_proj: [E, H, I] bf16. Returns y
    [S, H], gate and up [S, I], the latter without a gradient. Weights' gradients are summed in fp32. Raises UserError
    where `needs_experts` gives a reason.
    """
    arguments = (x, choice_of_slot, slot_of_choice, group_ends, gate_proj, up_proj, down_proj)
    if reason := needs_experts(*arguments):
        raise UserError(f"nkilib's moe_experts cannot run: {reason}. Leave out this kernel to use PyTorch's.")
    _define_experts()
    y, gate_up = torch.ops.qwen3_trn.nkilib_moe_experts(*arguments)
    gate, up = gate_up.detach().permute(1, 0, 3, 2).flatten(1, 2)
    return y, gate, up
