"""What a chosen kernel is asked before a run: whether it takes the run's shapes, and whether it computes the same.

inputs_of = partial(make_inputs, config, args, dims, device.expert_block, dtype)
check_needs(partial(inputs_of, micro_batch_size, args.seq_len, "meta"))              # allocates nothing
lines = check_kernels(partial(inputs_of, 2, CHECK_TOKENS, device.torch_device))      # --check-kernels
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qwen3_trn import dispatch, launch
from qwen3_trn.config import Qwen3Config, TrainConfig
from qwen3_trn.errors import UserError
from qwen3_trn.kernels import registry
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.model import document_mask, first_keys
from qwen3_trn.titan import ParallelDims

Arguments = tuple[Any, ...]  # of an operation

CHECK_TOKENS = 512  # of each row that --check-kernels computes on, unless --seq-len is less
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # of a tensor's largest value, by the dtype of the inputs


def make_inputs(
    config: Qwen3Config,
    args: TrainConfig,
    dims: ParallelDims,
    block: int,
    dtype: torch.dtype,
    num_rows: int,
    seq_len: int,
    device: torch.device | str,
    op: str,
) -> list[Arguments]:
    """What this rank's model passes to an override of `op`, of which it may make more than one kind of call.

    num_rows x seq_len tokens of random values, two documents a row where args mask them; on the meta device, shapes
    alone. block: as `dispatch.assign_slots` takes it. Raises UserError if the model has no such operation.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        if torch.device(device).type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return (std * torch.randn(shape, generator=generator)).to(dtype).to(device)

    tp, hidden, head_dim = args.tp, config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads // tp, config.num_key_value_heads // tp
    own_tokens = num_rows * seq_len // tp  # outside of attention and the head, tensor parallelism cuts the sequence
    if op == "attention":
        q = normal(num_rows, seq_len, heads, head_dim).transpose(1, 2)
        k, v = (normal(num_rows, seq_len, kv_heads, head_dim).transpose(1, 2) for _ in range(2))
        documents = (torch.arange(seq_len) >= seq_len // 3).int().expand(num_rows, -1).to(device)
        return [(q, k, v, first_keys(documents) if args.mask_documents else None)]
    if op == "rms_norm":
        shapes = (num_rows, seq_len // tp, hidden), (num_rows, seq_len, heads, head_dim)
        return [(normal(*shape), normal(shape[-1]), config.rms_norm_eps) for shape in shapes]
    if op == "linear_cross_entropy":
        labels = torch.randint(config.vocab_size, (num_rows * seq_len,), generator=generator, dtype=torch.int32)
        labels[::3] = IGNORE_INDEX
        weight = normal(config.vocab_size // tp, hidden, std=hidden**-0.5)
        group = dims.get_mesh("tp").get_group() if dims.tp_enabled else None
        return [(normal(num_rows * seq_len, hidden), weight, labels.to(device), group)]
    if not config.num_experts:
        raise UserError(f"--kernel {op} is for models with experts; this one is dense.")
    num_experts, top_k = config.num_experts // args.ep, config.num_experts_per_tok
    logits = normal(own_tokens, config.num_experts, dtype=torch.float32)
    if op == "router":
        return [(logits, top_k, config.norm_topk_prob)]
    weights, expert_ids = registry.default_of("router")(logits, top_k, config.norm_topk_prob)
    capacity = None
    if args.moe_capacity is not None:
        capacity = dispatch.expert_capacity(own_tokens, top_k, config.num_experts, args.moe_capacity, block)
    expert_ids = torch.where(expert_ids < num_experts, expert_ids, num_experts)
    slots = dispatch.assign_slots(expert_ids, num_experts, block, capacity)
    if op == "moe_combine":
        y = normal(slots.choice_of_slot.shape[0], hidden)
        return [(y, weights, slots.choice_of_slot, slots.slot_of_choice)]
    intermediate = config.moe_intermediate_size // (tp if args.ep == 1 else 1)
    gate_proj, up_proj = (normal(num_experts, intermediate, hidden, std=hidden**-0.5) for _ in range(2))
    down_proj = normal(num_experts, hidden, intermediate, std=intermediate**-0.5)
    return [(normal(own_tokens, hidden), *slots, gate_proj, up_proj, down_proj)]


def check_needs(inputs_of: Callable[[str], list[Arguments]]) -> None:
    """Raises UserError if a chosen kernel cannot take its inputs, which may be on the meta device."""
    for op, override in registry.overrides().items():
        for arguments in inputs_of(op):
            if reason := override.needs(*arguments):
                raise UserError(f"--kernel {op}={override.name} cannot take what this run computes: {reason}.")


def check_kernels(inputs_of: Callable[[str], list[Arguments]]) -> list[str]:
    """Compare each chosen kernel with its default, outputs and gradients. Collective. Returns a line for each.

    Raises UserError on every rank if they disagree on any.
    """
    lines = []
    for op, override in registry.overrides().items():
        for arguments in inputs_of(op):
            tolerance = max(TOLERANCE[argument.dtype] for argument in arguments if _is_float(argument))
            try:
                found = _compute(op, override.name, override.function, arguments)
            except Exception as error:
                error.add_note(f"In --kernel {op}={override.name}, on the small input of --check-kernels.")
                raise
            expected = _compute(op, "PyTorch's", registry.default_of(op), _default_arguments(op, arguments))
            differences = {name: _difference(found.get(name), tensor) for name, tensor in expected.items()}
            text = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
            lines.append(f"           checked {op}, differences over the largest value: {text}")
            failure = None
            # `not <=` rather than `>`, so that nan fails too.
            if not all(difference <= tolerance for difference in differences.values()):
                failure = (
                    f"--kernel {op}={override.name} computes something else than PyTorch's {op}. Differences over the "
                    f"largest value: {text} (inf: no tensor of this shape and dtype); expected at most {tolerance:g}."
                )
            _raise_together(failure)
    return lines


def _raise_together(failure: str | None) -> None:
    """Raises UserError on every rank if any rank has a failure: the first of them. Collective."""
    failures: list[str | None] = [None] * launch.WORLD_SIZE
    dist.all_gather_object(failures, failure)
    for rank, found_there in enumerate(failures):
        if found_there:
            raise UserError(f"{found_there} (rank {rank})")


def _is_float(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


def _default_arguments(op: str, arguments: Arguments) -> Arguments:
    """The same for the default. PyTorch's attention takes a mask: tokens with one first key are of one document."""
    if op != "attention" or arguments[3] is None:
        return arguments
    return *arguments[:3], document_mask(arguments[3])


def _compute(op: str, kernel: str, function: Callable, arguments: Arguments) -> dict[str, Tensor]:
    """By name, what `function` returns and the gradients of its floating-point arguments, for a random gradient.

    Nothing if it does not return tensors. Collective. Raises UserError if on any rank it changes an argument, which
    others read too.
    """
    names = registry.parameters_of(op)
    leaves = [a.detach().clone().requires_grad_(_is_float(a)) if isinstance(a, Tensor) else a for a in arguments]
    # As in the model, x and its like are results of others, which autograd lets be changed in place.
    given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def check_unchanged() -> None:
        failure = None
        for name, tensor, argument in zip(names, given, arguments, strict=True):
            if isinstance(tensor, Tensor) and not torch.equal(tensor.detach(), argument):
                failure = f"--kernel {op}={kernel} changes its argument {name}, which others read too. Work on a copy."
        _raise_together(failure)

    outputs = function(*given)
    check_unchanged()  # before backward, which would say less of it
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not all(isinstance(output, Tensor) for output in outputs) or (op == "moe_experts" and len(outputs) != 3):
        return {}
    if op == "moe_experts":  # of what it returns only y's rows with a token are defined
        choice_of_slot, slot_of_choice = arguments[1:3]
        (rows,) = torch.where(choice_of_slot < slot_of_choice.numel())
        outputs = (outputs[0][rows],)
    generator = torch.Generator().manual_seed(1)
    for output in outputs:
        if output.requires_grad:
            output.backward(torch.randn(output.shape, generator=generator).to(output), retain_graph=True)
    check_unchanged()
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    grads = ((name, leaf.grad) for name, leaf in zip(names, leaves, strict=True) if _is_float(leaf))
    return found | {f"gradient of {name}": grad for name, grad in grads if grad is not None}


def _difference(found: Tensor | None, expected: Tensor) -> float:
    """The largest difference over the largest value; infinite without a tensor of the same shape and dtype."""
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    largest = expected.abs().max().item()
    difference = (found.float() - expected.float()).abs().max().item()
    return difference / largest if largest else difference
