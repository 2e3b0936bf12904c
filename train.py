"""Train Qwen3 or Qwen3-MoE. The whole loop is here; read it from the bottom up.

torchrun --nproc_per_node=2 train.py                                     # the bundled miniature, from random weights
torchrun --nproc_per_node=4 train.py --init hub --model Qwen/Qwen3-0.6B --data my.jsonl
python train.py --init path/to/Qwen3-0.6B --data my.txt --steps 100      # one process works too
python train.py --help
"""

import dataclasses
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from export import export
from qwen3_trn import checkpoint, hf, launch, plan, start
from qwen3_trn.checks import check_document_mask, check_loaded, name_culprit
from qwen3_trn.config import Qwen3Config, TrainConfig, parse_args, parse_size
from qwen3_trn.data import PackedData
from qwen3_trn.device import Device
from qwen3_trn.encode import load_tokenizer
from qwen3_trn.errors import UserError
from qwen3_trn.evaluate import evaluate, find_prompt, find_stop_tokens, read_prompts, sample_texts
from qwen3_trn.kernels import registry
from qwen3_trn.kernels.check import CHECK_TOKENS, check_kernels, check_needs, make_inputs
from qwen3_trn.launch import print0
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.metrics import RunLog, format_count, write_run_files, write_samples
from qwen3_trn.model import PADDING_DOCUMENT, Qwen3ForCausalLM, parameter_shapes
from qwen3_trn.moe import RouterStats, balance_loss, z_loss
from qwen3_trn.parallel import build_mesh, build_model, check_layout
from qwen3_trn.shapes import ShapeGuard
from qwen3_trn.titan import clip_grad_norm_


def micro_batches(
    data: PackedData, position: int, num_rows: int, micro_batch_size: int, num_ranks: int, rank: int
) -> list[dict[str, np.ndarray]]:
    """This rank's share of the `num_rows` rows from `position` on in the data's order, a dict of [B, T] a micro-step.

    Micro-step i of all ranks together holds consecutive rows, so the order of rows does not depend on ranks.
    """
    firsts = range(position + rank * micro_batch_size, position + num_rows, micro_batch_size * num_ranks)
    return [data.batch(range(first, first + micro_batch_size))._asdict() for first in firsts]


def agree(rows: list[dict[str, np.ndarray]], tp: int, *flags: bool) -> tuple[int, int, list[bool]]:
    """What all ranks must know before a step, in one collective between the hosts.

    Returns (tokens that are not padding, supervised tokens, flags): of the step over all ranks, of which tp share the
    same rows; a flag is set if any rank's is.
    """
    counts = torch.tensor(
        [
            sum(int((row["document_ids"] != PADDING_DOCUMENT).sum()) for row in rows),
            sum(int((row["labels"] != IGNORE_INDEX).sum()) for row in rows),
            *flags,
        ]
    )
    dist.all_reduce(counts)
    num_tokens, num_supervised, *raised = counts.tolist()
    return num_tokens // tp, num_supervised // tp, [count > 0 for count in raised]


def seed_step(*numbers: int) -> None:
    """Seed torch's generators from (seed, step, data rank): what a step draws does not depend on what ran before it.

    Nothing here draws numbers in training; a model that does resumes exactly, with no generator's state to save.
    """
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


TOTALS = ("tokens", "supervised_tokens", "skipped_steps", "dropped_choices")  # counted over the whole run


# ---------------------------------------------------------------------------------------------------------- one step


def learning_rate(step: int, settings: TrainConfig) -> float:
    """The rate of step 1 to settings.steps: linear warm-up to lr, then the schedule, which ends at min_lr."""
    lr, min_lr, warmup_steps = settings.lr, settings.min_lr, settings.warmup_steps
    if step <= warmup_steps:
        return lr * step / warmup_steps
    if settings.schedule == "constant":
        return lr
    decay_steps = settings.steps - warmup_steps
    if settings.schedule == "wsd":
        decay_steps = min(decay_steps, max(1, settings.steps // 5))
    progress = max(0.0, 1 - (settings.steps - step) / decay_steps)
    shape = (1 + math.cos(math.pi * progress)) / 2 if settings.schedule == "cosine" else 1 - progress
    return min_lr + (lr - min_lr) * shape


@torch.library.impl("aten::_fused_adamw_.tensor_lr", "Meta")
def _(*args, **kwargs) -> None:
    """To DTensor, which infers shapes from it: without it torch 2.13 runs the update on whole, unsharded tensors."""


def build_optimizer(model: Qwen3ForCausalLM, args: TrainConfig) -> AdamW:
    """AdamW that decays matrices (embedding and experts among them) and leaves norm weights and biases alone."""
    names = {"experts": [], "matrices": [], "norms and biases": []}
    for name, parameter in model.named_parameters():
        # Experts apart, because under expert parallelism they live on another mesh, and the fused step takes one.
        kind = "norms and biases" if parameter.dim() < 2 else "experts" if ".experts." in name else "matrices"
        names[kind].append(parameter)
    groups = [
        {"name": name, "params": params, "weight_decay": 0.0 if name == "norms and biases" else args.weight_decay}
        for name, params in names.items()
        if params
    ]
    optimizer = AdamW(groups, lr=0.0, betas=args.adam_betas, eps=args.adam_eps, fused=True)
    for group in optimizer.param_groups:
        # A tensor, because a device that compiles the update compiles it for each number anew.
        group["lr"] = torch.zeros((), device=group["params"][0].device)
    return optimizer


def sum_over_ranks(stats: RouterStats) -> RouterStats:
    """The router statistics of one micro-step over all ranks, without gradient, in one collective."""
    flat = torch.cat([tensor.detach().flatten() for tensor in stats])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in stats])
    return RouterStats(*(part.view_as(tensor) for part, tensor in zip(parts, stats, strict=True)))


def forward_backward(
    model: Qwen3ForCausalLM,
    batches: list[dict[str, Tensor]],
    num_supervised: int,
    aux_coef: float = 0.0,
    z_coef: float = 0.0,
    tp: int = 1,
) -> tuple[dict[str, Tensor], RouterStats | None]:
    """Accumulate the gradients of one step over this rank's micro-batches.

    batches: input_ids, labels, positions, document_ids, each [B, T] on the device. num_supervised: of the whole step,
    over all ranks and micro-batches. The cross-entropy is a sum divided by it, so it does not depend on how the step
    is split; the auxiliary losses are means over micro-steps. tp: ranks that share a micro-batch and all return its
    loss, of which each then reports a part.

    Returns this rank's share of each loss that is computed ("loss" is the cross-entropy), and the router statistics
    summed over micro-batches (None for a dense model).
    """
    losses: dict[str, Tensor] = {}
    totals = None
    # A tensor, because a device that compiles a division compiles it for each number anew.
    divisor = torch.tensor(float(num_supervised)).to(batches[0]["labels"].device)
    for batch in batches:
        terms = model.loss_terms(**batch)
        parts = {"loss": terms.cross_entropy / divisor}
        total = parts["loss"]
        if aux_coef or z_coef:
            global_stats = sum_over_ranks(terms.router)
            if aux_coef:
                parts["aux_loss"] = balance_loss(terms.router, global_stats) / len(batches)
                total = total + aux_coef * parts["aux_loss"]
            if z_coef:
                parts["z_loss"] = z_loss(terms.router, global_stats) / len(batches)
                total = total + z_coef * parts["z_loss"]
        total.backward()
        parts["loss"] = parts["loss"] / tp
        losses = {name: losses.get(name, 0) + part.detach() for name, part in parts.items()}
        if terms.router is not None:
            stats = RouterStats(*(tensor.detach() for tensor in terms.router))
            totals = stats if totals is None else RouterStats(*map(torch.add, totals, stats))
    return losses, totals


def read_step(losses: dict[str, Tensor], grad_norm: Tensor, totals: RouterStats | None) -> dict[str, Any]:
    """Sum a step's numbers over ranks and bring them to the host: the step's one synchronisation."""
    flat = torch.cat([torch.stack(list(losses.values())), *(tensor.flatten() for tensor in totals or ())])
    dist.all_reduce(flat)
    norm, *numbers = torch.cat([grad_norm.reshape(1).to(flat), flat]).tolist()
    values: dict[str, Any] = {**dict(zip(losses, numbers, strict=False)), "grad_norm": norm}
    if totals is not None:
        ends = np.cumsum([tensor.numel() for tensor in totals])[:-1]
        tokens, _, _, entropy, num_tokens, dropped = np.split(np.array(numbers[len(losses) :]), ends)
        tokens = tokens.reshape(totals.tokens_per_expert.shape)  # [MoE layers, E]
        values |= {
            "load_max_over_mean": (tokens.max(1) / tokens.mean(1)).tolist(),
            "dead_experts": (tokens == 0).mean(1).tolist(),
            "router_entropy": (entropy / num_tokens).tolist(),
        }
        if dropped.any():
            values["dropped_choices"] = int(dropped.sum())
    return values


# ----------------------------------------------------------------------------------------------------------- the run


def end_save(saver: checkpoint.Saver, on_error: str) -> None:
    """Wait for the checkpoint that is being written, if one is; every rank calls it."""
    try:
        saver.wait()
    except checkpoint.SaveError as error:
        if on_error == "stop":
            raise
        print0(f"warning: {error} The run goes on (--on-save-error continue).")


def say_how_to_go_on(out: Path) -> str:
    found = checkpoint.list_checkpoints(out)
    if not found:
        return "There is no checkpoint yet."
    launcher = f"torchrun --nproc_per_node={launch.LOCAL_WORLD_SIZE}" if dist.is_torchelastic_launched() else "python"
    return f"To go on from {found[-1].name}: {launcher} train.py --init resume --out {out}"


def train(args: TrainConfig) -> tuple[Path, bool]:
    """Run to the end, or until it is told to stop. Returns the run's folder, and whether it came to the end."""
    device = Device()
    environment = device.set_environment()
    launch.init_process_group(device.backend, args.dist_timeout)
    device.start(launch.LOCAL_RANK, launch.LOCAL_WORLD_SIZE)

    found = launch.run_once("run", lambda: str(start.find_run(args) or ""))
    resumed = Path(found) if found else None
    # A new run's state; of a resumed one it is what its checkpoint says.
    state: dict[str, Any] = {"step": 0, "position": 0, "tokens": 0, "supervised_tokens": 0}
    state |= {"skipped_steps": 0, "bad_steps_in_a_row": 0}
    if args.moe_capacity:
        state["dropped_choices"] = 0
    if resumed:
        checkpoint.verify_files(resumed)
        state |= checkpoint.read_state(resumed)
    if args.init == "resume":
        args = dataclasses.replace(args, init=state["settings"]["init"], resume="must")
    model_folder, commit = start.find_model(args, resumed)
    config = Qwen3Config.from_pretrained(model_folder)
    num_ranks = launch.WORLD_SIZE
    dims = build_mesh(num_ranks, args.dp_replicate, args.dp_shard, args.tp, args.ep)
    launch.limit_waits([mesh.get_group() for mesh in dims.get_all_one_dimensional_meshes().values()], args.dist_timeout)
    check_layout(config, dims, args.seq_len)
    start.check_flags(args, config)
    compile_backend = device.compile_backend(args.compile, args.ac)
    compute_dtype = device.compute_dtype(args.dtype)
    data_ranks = num_ranks // args.tp
    data_rank = launch.RANK // args.tp
    micro_batch_size, num_micro_steps = start.split_batch(args, data_ranks)
    kernels = registry.choose(args.kernel)
    inputs_of = partial(make_inputs, config, args, dims, device.expert_block, compute_dtype)
    check_needs(partial(inputs_of, micro_batch_size, args.seq_len, "meta"))
    if args.check_kernels:
        kernels += check_kernels(partial(inputs_of, 2, min(args.seq_len, CHECK_TOKENS), device.torch_device))
    pretrained = args.init != "random" and not resumed
    if pretrained:
        weights = hf.HFFolder(model_folder)
        weights.check(config, parameter_shapes(config))
    data = start.open_data(args, config, model_folder)
    eval_data = start.open_eval_data(args, config, model_folder)
    tokenizer, is_chat = load_tokenizer(model_folder), "chat" in data.fingerprint["format"]
    prompts = launch.run_once("prompts", lambda: read_prompts(args.prompts, tokenizer, is_chat, config))
    stop_tokens = find_stop_tokens(tokenizer, is_chat)
    if resumed:
        start.check_unchanged(args, config, data, resumed)
    settings = start.resolve(args, config, data, state["step"], state["position"])
    out = Path(launch.run_once("out", lambda: str(start.choose_out(args, model_folder, resumed))))
    if launch.RANK == 0:
        facts = {"device": device.type, "world_size": num_ranks, "model_folder": str(model_folder), "commit": commit}
        facts["resumed_from"] = str(resumed) if resumed else None
        # Without `out` and `resume`, so that --config OUT/config.toml repeats the run elsewhere.
        not_settings = {"out": None, "config": None, "resume": None}
        write_run_files(out, dataclasses.asdict(settings) | not_settings, facts)
        if model_folder != out / "model":
            hf.copy_companions(model_folder, out / "model")
    dist.barrier()
    if not (out / "config.toml").is_file():
        raise UserError(
            f"rank {launch.RANK} does not see {out}, which rank 0 made: --out must be on a shared file system."
        )

    parts = args.moe_capacity, start.use_equal_groups(args, config, device), args.mask_documents
    model = build_model(config, dims, device, compute_dtype, args.ac, compile_backend, *parts)
    optimizer = build_optimizer(model, args)
    if resumed:
        checkpoint.load_checkpoint(resumed, model, optimizer, state["step"] - state["skipped_steps"])
    elif pretrained:
        weights.read(dict(model.named_parameters()))
    else:
        model.init_weights(args.seed)

    peak_flops, peak_source = device.peak_flops(compute_dtype)
    heads = config.num_attention_heads // args.tp, config.head_dim
    attention = device.attention_kernel(micro_batch_size, args.seq_len, *heads, args.mask_documents)
    if not registry.uses_default("attention"):
        attention = "of --kernel, with the first key of each query for documents"
    epochs = data.rows_per_epoch and settings.steps * args.global_batch_size / data.rows_per_epoch
    epochs = f" = {epochs:.2f} epochs" if epochs else ""
    print0(
        f"run        {out}",
        f"model      {model_folder}: {config.model_type}, {format_count(model.num_parameters())} parameters, "
        f"{format_count(model.num_active_parameters())} in the matmuls of a token",
        f"weights    {resumed or (args.init if pretrained else f'random, seed {args.seed}')}",
        *(f"data       {line}" for line in data.describe()),
        *(f"eval data  {line}" for part in eval_data for line in part.describe()),
        f"step       {args.global_batch_size} rows = {args.global_batch_size * args.seq_len} tokens: {data_ranks} data "
        f"ranks x {num_micro_steps} micro-batches x {micro_batch_size} rows",
        f"length     {settings.steps} steps{epochs}; {state['step']} are done",
        f"rate       {settings.lr:g} to {settings.min_lr:g}, {args.schedule}, {settings.warmup_steps} warm-up steps",
        *(
            f"AdamW      {group['name']}: {len(group['params'])} tensors, "
            f"{format_count(sum(p.numel() for p in group['params']))} parameters, decay {group['weight_decay']:g}"
            for group in optimizer.param_groups
        ),
        f"layout     {num_ranks} ranks: dp_replicate {dims.dp_replicate} x dp_shard {dims.dp_shard} x tp {dims.tp}"
        f"{f', ep {dims.ep}' if config.num_experts else ''}; recompute {args.ac}, compile {compile_backend or 'off'}",
        f"device     {num_ranks} x {device.type}; compute {compute_dtype}, weights and optimizer torch.float32",
        *(f"           {setting}" for setting in environment),
        f"attention  {attention}",
        *kernels,
        f"MFU        against {peak_flops / 1e9:,.0f} GFLOP/s a rank ({peak_source})",
    )

    log = RunLog(out, settings.steps) if launch.RANK == 0 else None
    if args.mask_documents and not args.moe_capacity:  # with which documents do compete for room
        check_document_mask(model, micro_batch_size, args.seq_len, device, compute_dtype)
    saver = checkpoint.Saver(out, out / "model", args.keep, saved_step=state["step"])
    state |= {"settings": dataclasses.asdict(settings), "fingerprint": data.fingerprint}
    state |= {"model": [start.name_model(args), args.revision], "commit": commit}
    state["stop_tokens"] = stop_tokens if is_chat else None
    if "prompt" not in state:  # a resumed run keeps it
        state["prompt"] = find_prompt(data.row(0))
    prompts = prompts or [state["prompt"]]
    sample = partial(sample_texts, model, tokenizer, prompts, stop_tokens, args.seed, args.tp, device)
    stop = launch.StopFlag(args.max_minutes)
    guard = ShapeGuard(record=device.static_shapes and compile_backend is None)
    first_step = state["step"] + 1
    window_start, window_tokens, window_steps, data_s, save_s = time.perf_counter(), 0, 0, 0.0, 0.0
    while state["step"] < settings.steps:
        step, position = state["step"] + 1, state["position"]
        data_start = time.perf_counter()
        rows = micro_batches(data, position, args.global_batch_size, micro_batch_size, data_ranks, data_rank)
        data_s += time.perf_counter() - data_start
        num_tokens, num_supervised, (stopping, save_failed) = agree(rows, args.tp, stop.is_set(), saver.has_failed())
        if save_failed:
            end_save(saver, args.on_save_error)
        if stopping:
            break
        seed_step(args.seed, step, data_rank)
        batches = [device.put(row) for row in rows]
        for group in optimizer.param_groups:
            group["lr"].copy_(torch.tensor(learning_rate(step, settings)))
        state |= {"step": step, "position": position + args.global_batch_size}
        state["tokens"] += num_tokens
        state["supervised_tokens"] += num_supervised
        window_tokens += num_tokens
        window_steps += 1
        if num_supervised == 0:
            state["skipped_steps"] += 1
            print0(f"warning: step {step} has no supervised token; it is skipped ({state['skipped_steps']} so far)")
            values = {}
        else:
            coefficients = settings.router_aux_loss_coef, args.router_z_loss_coef
            compute = partial(forward_backward, model, batches, num_supervised, *coefficients, args.tp)
            with guard.step():
                losses, router = compute()
                grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm, ep_enabled=args.ep > 1)
                values = read_step(losses, grad_norm, router)
            if changes := guard.changes():
                first = ", ".join(changes[:3])
                print0(
                    f"warning: step {step} ran {len(changes)} new shapes, which {device.type} had to compile: "
                    f"{first} ..."
                )
            if args.moe_capacity:
                state["dropped_choices"] += values.get("dropped_choices", 0)
            if step == 1 and pretrained and args.load_check:
                check_loaded(values["loss"], config)
            if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
                optimizer.step()
                state["bad_steps_in_a_row"] = 0
            else:
                state["skipped_steps"] += 1
                state["bad_steps_in_a_row"] += 1
                print0(
                    f"warning: step {step} has loss {values['loss']} and gradient norm {values['grad_norm']}; it is "
                    f"not applied ({state['skipped_steps']} skipped so far)"
                )
            optimizer.zero_grad()
        if state["bad_steps_in_a_row"] >= args.max_bad_steps:
            end_save(saver, args.on_save_error)
            raise UserError(
                f"up to step {step}, {state['bad_steps_in_a_row']} steps in a row had a loss or gradient that is not "
                f"finite; none was applied. {name_culprit(model, compute)} Its rows are {position} to "
                f"{state['position'] - 1} of the data's order. Lower --lr, or look at the data. {say_how_to_go_on(out)}"
            )

        is_last = step == settings.steps
        evaluates = bool(eval_data) and (is_last or (args.eval_every > 0 and step % args.eval_every == 0))
        if step % args.log_every == 0 or step == first_step or is_last or evaluates:
            device.synchronize()
            now = time.perf_counter()
            tokens_per_s = window_tokens / (now - window_start)
            values |= {total: state[total] for total in TOTALS if total in state}
            values |= {
                "lr": learning_rate(step, settings),
                "tokens_per_s": tokens_per_s,
                "mfu": tokens_per_s * model.flops_per_token(args.seq_len) / (peak_flops * num_ranks),
                "peak_memory_bytes": device.peak_memory(),
                "step_time_s": (now - window_start) / window_steps,
                "data_s": data_s,
                "save_s": save_s,
                "position": state["position"],
            }
            if evaluates:
                parts = micro_batch_size, data_ranks, data_rank, args.tp
                values["eval_loss"] = evaluate(model, eval_data, *parts, device)
            if log:
                log.log(step, values)
            window_start, window_tokens, window_steps, data_s, save_s = time.perf_counter(), 0, 0, 0.0, 0.0

        if args.sample_every and step % args.sample_every == 0 and not is_last:
            sample_start, lines = time.perf_counter(), sample()
            if log:
                write_samples(out, step, lines)
            window_start += time.perf_counter() - sample_start  # it is no part of a step's time

        if args.save_every and step % args.save_every == 0 and not is_last:
            save_start = time.perf_counter()
            end_save(saver, args.on_save_error)
            saver.save(state, model, optimizer)
            save_s += time.perf_counter() - save_start

    ended = state["step"] >= settings.steps
    if not ended:
        print0(f"stopping   after step {state['step']}: {stop.reason or 'another rank was told to'}{stop.grace_left()}")
    end_save(saver, args.on_save_error)
    if saver.saved_step != state["step"]:
        saver.save(state, model, optimizer)
        saver.wait()
    ended = ended and not agree([], args.tp, stop.reason is not None)[2][0]  # a signal may have come meanwhile
    launch.interrupt_on_signals()
    print0(*(f"fallback   {name} ran on the CPU: {device.type} lacks it" for name in device.fallback_operations()))
    if compile_backend:
        print0(f"compiled   {guard.num_graphs} graphs in the steps, {guard.num_late_graphs} of them after step 2")
    if state["skipped_steps"]:
        print0(f"warning: {state['skipped_steps']} of {state['step']} steps were skipped, see above")
    if log:
        log.close()
    if ended:
        lines = sample()
        if log:
            write_samples(out, state["step"], lines)
    else:
        print0(f"stopped    after step {state['step']} of {settings.steps}. {say_how_to_go_on(out)}")
    dist.destroy_process_group()
    return out, ended


def main() -> None:
    args = parse_args(sys.argv[1:])
    if args.plan:
        plan.print_plan(args)
        return
    out, ended = train(args)
    # The export needs one process and can take long, so the others have gone by now.
    if ended and args.export and launch.RANK == 0:
        registry.choose([])  # the export is compared on the CPU, whatever trained
        newest = checkpoint.find_checkpoint(out)
        export(newest, out / "hf", torch.bfloat16, parse_size(args.max_shard_size), replace=True)


if __name__ == "__main__":
    launch.run(main)
