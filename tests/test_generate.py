"""generate: greedy against transformers, sampling against the softmax.

pytest tests/test_generate.py
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from qwen3_trn.config import Qwen3Config
from qwen3_trn.model import Qwen3ForCausalLM
from tests.common import tiny_config

NEW_TOKENS = 12


def make_model(moe: bool = False, **changes) -> Qwen3ForCausalLM:
    """Weights larger than initial ones, so that logits are far apart and depend on the whole context."""
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(moe=moe, **changes)))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [1, 7])
def test_greedy_is_what_transformers_generates(tmp_path, moe, batch, length):
    model = make_model(moe)
    model.save_pretrained(tmp_path / "hf", dtype=torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.randint(131, (batch, length))
    out = model.generate(ids, NEW_TOKENS)
    expected = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    assert torch.equal(out, expected)
    assert torch.equal(out[:, :length], ids) and out.dtype == ids.dtype
    # Rounding cannot have decided: the best token leads by far more than it.
    best = model(out).topk(2, dim=-1).values
    assert (best[..., 0] - best[..., 1])[:, length - 1 : -1].min() > 1e-3
    assert len(set(out[0, length:].tolist())) > 3  # not the same token over and over, which a bug could give as well


def test_rows_of_a_batch_do_not_see_each_other():
    model = make_model(moe=True)
    ids = torch.randint(131, (2, 5))
    together = model.generate(ids, NEW_TOKENS)
    for row in range(2):
        assert torch.equal(model.generate(ids[row : row + 1], NEW_TOKENS)[0], together[row])
    assert not torch.equal(together[0], together[1])


def test_sampling_is_reproducible_and_depends_on_the_seed():
    model = make_model()
    ids = torch.randint(131, (2, 5))
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(model.generate(ids, NEW_TOKENS, temperature=1.0))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(runs[0][:, :5], ids)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_samples_have_the_distribution_of_softmax_of_logits_over_temperature(temperature):
    """20,000 draws of the token after one prompt; a chi-square of 8 outcomes beyond 40 has a chance of 1e-6."""
    model = make_model(vocab_size=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
    draws = 20_000
    torch.manual_seed(0)
    out = model.generate(torch.full((draws, 1), 3), 1, temperature=temperature)
    observed = out[:, 1].bincount(minlength=8)
    expected = draws * (model(torch.tensor([[3]]))[0, 0] / temperature).softmax(-1)
    assert expected.min() > 5 and expected.max() < 0.95 * draws
    assert ((observed - expected) ** 2 / expected).sum() < 40


def test_a_low_temperature_is_greedy():
    model = make_model()
    ids = torch.randint(131, (2, 5))
    assert torch.equal(model.generate(ids, NEW_TOKENS, temperature=1e-4), model.generate(ids, NEW_TOKENS))


def test_every_step_has_the_same_shape_and_no_gradient():
    """A device that compiles each shape compiles one; and nothing is kept for a backward."""
    model = make_model()
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append((args[0].shape, out.requires_grad)))
    ids = torch.randint(131, (2, 5))
    untouched = ids.clone()
    model.generate(ids, 4)
    assert seen == [((2, 9), False)] * 4
    assert torch.equal(ids, untouched)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_keep_their_dtype(dtype):
    model = make_model()
    ids = torch.randint(131, (1, 4)).to(dtype)
    out = model.generate(ids, 3)
    assert out.dtype == dtype
    assert torch.equal(out.long(), model.generate(ids.long(), 3))
    assert torch.equal(model.generate(ids, 0), ids)


def test_a_bf16_model_generates():
    model = copy.deepcopy(make_model(moe=True)).to(torch.bfloat16)
    out = model.generate(torch.randint(131, (1, 4)), 3, temperature=1.0)
    assert out.shape == (1, 7) and out.max() < 131
