"""The model against transformers, in fp32: logits at every position, loss, every gradient; rotary tables; packing.

Every case is a folder written by transformers' own save_pretrained with weights far from their initial values (norms
that are not one, biases that are not zero, a router with a clear preference) and read by our from_pretrained.

pytest tests/test_parity.py
"""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from qwen3_trn import hf
from qwen3_trn.config import Qwen3Config
from qwen3_trn.loss import IGNORE_INDEX
from qwen3_trn.model import Qwen3ForCausalLM, RMSNorm
from qwen3_trn.moe import RouterStats, balance_loss
from qwen3_trn.rope import rope_tables
from tests.common import tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
NO_LENGTH = {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 512}

# name -> (mixture of experts?, form of the folder, changes to the tiny config). The forms: "5" is what transformers 5
# writes, "4" has transformers 4's spelling of config.json, "fused" has one gate_up_proj for all experts.
CASES = {
    "dense": (False, "5", {}),
    "dense, config.json of transformers 4": (False, "4", {}),
    "dense, tied": (False, "5", {"tie_word_embeddings": True}),
    "dense, attention bias": (False, "4", {"attention_bias": True}),
    "dense, tied, attention bias": (False, "4", {"tie_word_embeddings": True, "attention_bias": True}),
    "dense, one kv head": (False, "5", {"num_key_value_heads": 1}),
    "dense, as many kv heads as query heads": (False, "5", {"num_key_value_heads": 4}),
    "dense, heads x head_dim below hidden": (False, "5", {"num_attention_heads": 2, "head_dim": 6}),
    "dense, large eps": (False, "5", {"rms_norm_eps": 0.1}),
    "dense, rope_theta 1e6": (False, "4", {"rope_theta": 1e6}),
    "yarn": (False, "5", {"rope_scaling": YARN}),
    "yarn, config.json of transformers 4": (False, "4", {"rope_scaling": YARN}),
    "yarn, released form (theta 1e6)": (False, "4", {"rope_scaling": YARN, "rope_theta": 1e6, "head_dim": 64}),
    "yarn, attention_factor": (False, "5", {"rope_scaling": YARN | {"attention_factor": 1.4}}),
    "yarn, beta_fast, beta_slow": (False, "4", {"rope_scaling": YARN | {"beta_fast": 6.0, "beta_slow": 2.0}}),
    "yarn, not truncated": (False, "5", {"rope_scaling": YARN | {"beta_fast": 6.0, "truncate": False}}),
    "yarn, mscale": (False, "5", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "yarn, only one mscale": (False, "5", {"rope_scaling": YARN | {"mscale": 0.7}}),
    "yarn, factor 1": (False, "4", {"rope_scaling": YARN | {"factor": 1.0}}),
    "yarn, factor not a power of two": (False, "4", {"rope_scaling": NO_LENGTH}),
    "moe": (True, "5", {}),
    "moe, config.json of transformers 4": (True, "4", {}),
    "moe, fused file": (True, "fused", {}),
    "moe, k not normalised": (True, "5", {"norm_topk_prob": False}),
    "moe, k=1": (True, "5", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    "moe, k=1 not normalised": (True, "4", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "moe, k=8 of 8": (True, "5", {"num_experts_per_tok": 8, "norm_topk_prob": True}),
    "moe, k=8 of 8 not normalised": (True, "4", {"num_experts_per_tok": 8, "norm_topk_prob": False}),
    "moe, 32 experts (some without tokens)": (True, "fused", {"num_experts": 32}),
    "moe, tied, attention bias": (True, "4", {"tie_word_embeddings": True, "attention_bias": True}),
    "moe, first layer dense": (True, "5", {"mlp_only_layers": [0]}),
    "moe, every second layer": (True, "4", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "moe, every second layer, last one dense": (
        True,
        "fused",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "moe, no layer with experts": (True, "5", {"mlp_only_layers": [0, 1]}),
    "moe, yarn": (True, "5", {"rope_scaling": YARN | {"attention_factor": 0.9}, "rope_theta": 1e6}),
    "moe, odd widths (no grouped matmul)": (True, "5", {"hidden_size": 30, "moe_intermediate_size": 10}),
}


def make_oracle(config: dict, dtype: torch.dtype = torch.float32):
    """transformers' model, eager attention and a loop over experts, with weights that leave no term at 0 or 1."""
    torch.manual_seed(0)
    # transformers writes into the dict it is given.
    oracle = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**copy.deepcopy(config)), attn_implementation="eager"
    )
    if "num_experts" in config:
        oracle.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.3)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.2)
    return oracle.to(dtype)


def write_folder(oracle, folder: Path, form: str) -> Path:
    oracle.save_pretrained(folder, save_original_format=form != "fused")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert any(key.endswith("experts.gate_up_proj") for key in file.keys()) == (form == "fused")  # noqa: SIM118
    if form == "4":
        path = folder / "config.json"
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        config["torch_dtype"] = config.pop("dtype")
        config.pop("layer_types", None)
        if "num_local_experts" in config:
            config["num_experts"] = config.pop("num_local_experts")
        path.write_text(json.dumps(config))
    return folder


def make_pair(tmp_path: Path, moe: bool, form: str = "5", **changes):
    """(transformers' model, ours with the same weights, through a folder)."""
    oracle = make_oracle(tiny_config(moe=moe, **changes))
    return oracle, Qwen3ForCausalLM.from_pretrained(write_folder(oracle, tmp_path / "hf", form))


def random_batch(vocab_size: int, batch: int = 3, length: int = 13) -> tuple[Tensor, Tensor]:
    """(input ids, shifted labels of which a third is not supervised), the same every time."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (batch, length), generator=generator)
    labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    return ids, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 1 / 3, IGNORE_INDEX)


def our_gradients(oracle) -> dict[str, Tensor]:
    """transformers' gradients under our parameters' names."""
    gradients = {}
    for name, parameter in oracle.named_parameters():
        if parameter.grad is None:
            continue
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            gradients[prefix + "gate_proj"], gradients[prefix + "up_proj"] = parameter.grad.chunk(2, dim=1)
        else:
            gradients[name] = parameter.grad
    return gradients


def assert_same_gradients(ours: dict[str, Tensor | None], expected: dict[str, Tensor]) -> None:
    """Within 1e-4 of each tensor's largest value, or 1e-7 of the model's where a gradient is mathematically zero."""
    assert ours.keys() == expected.keys()
    floor = 1e-7 * max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        assert ours[name] is not None, name
        worst = (ours[name] - gradient).abs().max().item()
        assert worst <= max(1e-4 * gradient.abs().max().item(), floor), f"{name} is off by {worst}"


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_are_those_of_transformers(tmp_path, case):
    moe, form, changes = CASES[case]
    oracle, model = make_pair(tmp_path, moe, form, **changes)
    ids, labels = random_batch(model.config.vocab_size)

    expected_logits = oracle(input_ids=ids).logits
    logits = model(ids)
    assert expected_logits.std() > 0.5  # or the absolute tolerance would say little
    assert (logits - expected_logits).abs().max() < 1e-4

    # shift_labels: transformers' loss on labels that are shifted already, a mean over the supervised ones.
    expected_loss = oracle(input_ids=ids, labels=labels, shift_labels=labels).loss
    summed, count = model.loss(ids, labels)
    assert count == (labels != IGNORE_INDEX).sum()
    assert abs(summed / count - expected_loss) < 1e-5

    expected_loss.backward()
    (summed / count).backward()
    assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, our_gradients(oracle))


def test_loss_is_transformers_loss_on_labels_that_it_shifts_itself(tmp_path):
    oracle, model = make_pair(tmp_path, moe=False)
    ids, _ = random_batch(model.config.vocab_size)
    summed, count = model.loss(ids, F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX))
    assert count == ids.shape[0] * (ids.shape[1] - 1)
    assert abs(summed / count - oracle(input_ids=ids, labels=ids).loss) < 1e-5


def test_balancing_loss_and_its_gradient_are_those_of_transformers(tmp_path):
    """Through the model: statistics of every MoE layer, pooled, back to every parameter that the routers depend on."""
    oracle, model = make_pair(tmp_path, moe=True, num_hidden_layers=3, mlp_only_layers=[1])
    ids, labels = random_batch(model.config.vocab_size)
    expected = oracle(input_ids=ids, output_router_logits=True).aux_loss
    router = model.loss_terms(ids, labels).router
    assert router.tokens_per_expert.shape == (2, 8)
    loss = balance_loss(router, router)
    assert abs(loss - expected) < 1e-5
    expected.backward()
    loss.backward()
    expected_gradients = our_gradients(oracle)
    # The last MoE layer's experts, and what comes after them, have no part in it.
    assert "model.layers.2.mlp.gate.weight" in expected_gradients
    assert "model.layers.2.mlp.experts.down_proj" not in expected_gradients
    assert_same_gradients({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected_gradients)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("rope_scaling", [None, YARN], ids=["default", "yarn"])
def test_logits_at_far_positions(tmp_path, moe, rope_scaling):
    """Positions around 4095 and 40959, which a row of that length would have, without the row."""
    oracle, model = make_pair(tmp_path, moe, rope_scaling=rope_scaling, rope_theta=1e6)
    ids, _ = random_batch(model.config.vocab_size)
    positions = torch.tensor([0, 4083, 40947])[:, None] + torch.arange(ids.shape[1])
    # Far apart within a row too, where the angle between query and key is large.
    positions[1, 6:] += 30000
    logits = model(ids, positions=positions)
    # transformers takes position_ids that jump for packed documents unless it is given a mask.
    mask = torch.ones_like(ids)
    assert (logits - oracle(input_ids=ids, position_ids=positions, attention_mask=mask).logits).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rms_norm_is_transformers(dtype):
    """In bf16 too to the last bit but one: the statistics in fp32, then rounded, and only then times weight."""
    torch.manual_seed(0)
    x = torch.randn(50, 24).mul(3).to(dtype)
    ours, theirs = RMSNorm(24, 1e-3).to(dtype), Qwen3RMSNorm(24, 1e-3).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight.normal_(1.0, 0.3))
    expected = theirs(x)
    assert ours(x).dtype == dtype
    # fp32's rounding before that to bf16 may differ, and turn a tie the other way, rarely.
    wrong = (ours(x) != expected).float().mean()
    assert torch.allclose(ours(x), expected, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)
    assert dtype == torch.float32 or wrong < 0.01


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        YARN,
        YARN | {"original_max_position_embeddings": 32768},
        YARN | {"original_max_position_embeddings": 4096, "factor": 3.7},
        YARN | {"attention_factor": 1.4},
        YARN | {"beta_fast": 6.0, "beta_slow": 2.0},
        YARN | {"beta_fast": 6.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"beta_fast": 1.5, "beta_slow": 1.4},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        YARN | {"mscale": 0.7},
        YARN | {"factor": 1.0},
    ],
    ids=lambda scaling: (
        ",".join(f"{k}={v}" for k, v in (scaling or {}).items() if v != YARN.get(k)) or str(bool(scaling))
    ),
)
def test_rope_tables_are_those_of_transformers_rotary_module(scaling, theta, head_dim):
    raw = tiny_config(rope_theta=theta, head_dim=head_dim, rope_scaling=scaling)
    positions = torch.tensor([[0, 1, 2, 511, 4095, 40959], [40958, 131071, 7, 0, 32768, 1]])
    rotary = Qwen3RotaryEmbedding(AutoConfig.for_model(**copy.deepcopy(raw)))
    for dtype, tolerance in [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)]:  # a bfloat16 near 1 has steps of 8e-3
        tables = rope_tables(Qwen3Config.from_dict(raw), positions, dtype)
        for table, expected in zip(tables, rotary(torch.zeros((), dtype=dtype), positions), strict=True):
            assert table.dtype == dtype
            assert (table - expected).abs().max() < tolerance


def test_rope_tables_are_right_after_a_fake_tensor_run():
    """--plan and compile run the model on fake tensors first; nothing that they made may be kept for the real run."""
    config = Qwen3Config.from_dict(tiny_config(rope_theta=54321.0))
    with FakeTensorMode():
        rope_tables(config, torch.zeros(1, 4, dtype=torch.long), torch.float32)
    cos, _ = rope_tables(config, torch.zeros(1, 4, dtype=torch.long), torch.float32)
    assert torch.equal(cos, torch.ones(1, 4, 16))


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_nothing_is_left_of_the_memory_that_meta_initialisation_allocates(tmp_path, moe):
    """Allocate on meta, fill the memory with NaN, load: the logits are right, so no buffer or parameter was missed."""
    oracle, model = make_pair(tmp_path, moe, tie_word_embeddings=True, attention_bias=True)
    ids, _ = random_batch(model.config.vocab_size)
    with torch.device("meta"):
        fresh = Qwen3ForCausalLM(model.config)
    fresh.materialize("cpu")
    with torch.no_grad():
        for tensor in [*fresh.parameters(), *fresh.buffers()]:
            tensor.fill_(float("nan"))
    hf.load_hf(tmp_path / "hf", fresh.config, dict(fresh.named_parameters()))
    assert torch.equal(fresh(ids), model(ids))
    assert (fresh(ids) - oracle(input_ids=ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_bf16_model_is_as_near_to_fp32_as_transformers_is(tmp_path, moe):
    """Both round to bf16 in slightly different places (we keep router and combine in fp32), so neither is the oracle.

    The oracle is transformers in fp32 on the same bf16 weights. We may be half as far again from it as transformers in
    bf16 is, on average, and the two are no further apart than the triangle makes likely.
    """
    oracle = make_oracle(tiny_config(moe=moe)).to(torch.bfloat16)
    folder = write_folder(oracle, tmp_path / "hf", "5")
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    exact = Qwen3ForCausalLM.from_pretrained(folder)
    ids, labels = random_batch(model.config.vocab_size)
    with torch.no_grad():
        logits, theirs, truth = model(ids), oracle(input_ids=ids).logits, copy.deepcopy(oracle).float()(input_ids=ids)
        summed, count = model.loss(ids, labels)
        exact_summed, _ = exact.loss(ids, labels)
    assert logits.dtype == torch.bfloat16
    our_error = (logits - truth.logits).abs()
    their_error = (theirs - truth.logits).abs()
    assert our_error.mean() < 1.5 * their_error.mean()
    assert (logits - theirs).abs().float().mean() < 2 * their_error.mean()
    assert summed.dtype == torch.float32
    assert abs(summed - exact_summed) / count < 2e-2


# ------------------------------------------------------------------------------------------------------------ packing

A, B, PAD = slice(0, 5), slice(5, 13), slice(13, 16)


def packed_row(vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One row of document A, document B and padding, no token of one occurring in another: ids, labels, positions,
    document ids."""
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(2))[:16][None]
    labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX).clone()
    labels[:, [4, 12, 13, 14, 15]] = IGNORE_INDEX
    positions = torch.tensor([[*range(5), *range(8), 0, 0, 0]])
    documents = torch.tensor([[0] * 5 + [1] * 8 + [-1] * 3])
    return ids, labels, positions, documents


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_packed_document_has_the_logits_it_has_alone(tmp_path, moe):
    oracle, model = make_pair(tmp_path, moe, rope_scaling=YARN)
    ids, _, positions, documents = packed_row(model.config.vocab_size)
    packed = model(ids, positions, documents)
    for document in (A, B):
        assert (packed[:, document] - model(ids[:, document])).abs().max() < 1e-5
        assert (packed[:, document] - oracle(input_ids=ids[:, document]).logits).abs().max() < 1e-4
    # Without the mask document B does see A: the row above could have told.
    assert (model(ids, positions)[:, B] - packed[:, B]).abs().max() > 0.1


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_documents_loss_has_no_gradient_in_another_document(tmp_path, moe):
    _, model = make_pair(tmp_path, moe)
    ids, labels, positions, documents = packed_row(model.config.vocab_size)
    for supervised, other in ((A, B), (B, A)):
        only = torch.full_like(labels, IGNORE_INDEX)
        only[:, supervised] = labels[:, supervised]
        model.zero_grad()
        model.loss(ids, only, positions, documents)[0].backward()
        gradient = model.model.embed_tokens.weight.grad
        assert (gradient[ids[:, other]] == 0).all()
        assert (gradient[ids[:, PAD]] == 0).all()
        # The last token of a document predicts nothing; every other one contributes.
        assert (gradient[ids[0, supervised][:-1]].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_padding_is_finite_and_moves_nothing(tmp_path, moe):
    _, model = make_pair(tmp_path, moe)
    ids, labels, positions, documents = packed_row(model.config.vocab_size)
    other_ids = ids.clone()
    other_ids[:, PAD] = 0

    def run(ids: Tensor, end: int) -> tuple[Tensor, Tensor, RouterStats | None, dict[str, Tensor]]:
        model.zero_grad()
        inputs = ids[:, :end], labels[:, :end], positions[:, :end], documents[:, :end]
        terms = model.loss_terms(*inputs)
        loss = terms.cross_entropy + (balance_loss(terms.router, terms.router) if moe else 0)
        loss.backward()
        logits = model(inputs[0], *inputs[2:])
        return logits, loss, terms.router, {name: p.grad for name, p in model.named_parameters()}

    with_padding, without = run(ids, 16), run(ids, 13)
    for logits, loss, router, gradients in (with_padding, run(other_ids, 16)):
        assert logits.isfinite().all()
        assert (logits[:, :13] - without[0]).abs().max() < 1e-5
        assert abs(loss - without[1]) < 1e-4
        assert_same_gradients(gradients, without[3])
        if moe:
            assert router.tokens_per_expert.sum(1).tolist() == [13 * 2, 13 * 2]
            for statistic, expected in zip(router, without[2], strict=True):
                assert torch.allclose(statistic, expected, rtol=1e-5)
            assert torch.equal(router.tokens_per_expert, without[2].tokens_per_expert)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_row_of_nothing_but_padding_is_finite_and_gives_zero_gradients(tmp_path, moe):
    _, model = make_pair(tmp_path, moe)
    ids, labels, positions, documents = (torch.cat((t, t)) for t in packed_row(model.config.vocab_size))
    labels.fill_(IGNORE_INDEX)
    documents.fill_(-1)
    assert model(ids, positions, documents).isfinite().all()
    summed, count = model.loss(ids, labels, positions, documents)
    assert summed == 0 and count == 0
    summed.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name
