"""Every published architecture, two layers deep and 32 times narrower: from transformers, one step, and back.

Head counts, experts and experts a token are the published ones; widths (hidden, head_dim, intermediate, vocabulary) are
divided by 32, so every ratio stays. The full sizes are counted on the meta device.
"""

import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from qwen3_trn.config import Qwen3Config
from qwen3_trn.model import Qwen3ForCausalLM, parameter_shapes
from tests.common import write_config
from tests.test_hf import assert_transformers_reads, our_parameters

pytestmark = pytest.mark.timeout(60)

KEYS = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size tie_word_embeddings"
MOE_KEYS = "moe_intermediate_size num_experts num_experts_per_tok"
# Those keys, and the number of parameters: what the safetensors of Qwen's repositories hold, a tied head counted once.
PUBLISHED = {
    "0.6B": ((1024, 28, 16, 8, 3072, True), (), 596_049_920),
    "1.7B": ((2048, 28, 16, 8, 6144, True), (), 1_720_574_976),
    "4B": ((2560, 36, 32, 8, 9728, True), (), 4_022_468_096),
    "8B": ((4096, 36, 32, 8, 12288, False), (), 8_190_735_360),
    "14B": ((5120, 40, 40, 8, 17408, False), (), 14_768_307_200),
    "32B": ((5120, 64, 64, 8, 25600, False), (), 32_762_123_264),
    "30B-A3B": ((2048, 48, 32, 4, 6144, False), (768, 128, 8), 30_532_122_624),
    "235B-A22B": ((4096, 94, 64, 4, 12288, False), (1536, 128, 8), 235_093_634_560),
}
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "vocab_size")


def published_config(size: str) -> dict:
    """config.json of Qwen/Qwen3-SIZE, in the form it is published in (transformers 4.51)."""
    sizes, moe_sizes, _ = PUBLISHED[size]
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if moe_sizes else "Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "model_type": "qwen3_moe" if moe_sizes else "qwen3",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0 if moe_sizes else 1000000,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    } | dict(zip(KEYS.split(), sizes, strict=True))
    config["max_window_layers"] = config["num_hidden_layers"]
    if moe_sizes:
        config |= dict(zip(MOE_KEYS.split(), moe_sizes, strict=True)) | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    return config


def toy_config(size: str) -> dict:
    config = published_config(size) | {"num_hidden_layers": 2, "max_window_layers": 2}
    for key in WIDTHS:
        if key in config:
            config[key], rest = divmod(config[key], 32)
            assert rest == 0
    return config


def write_published(folder: Path, config: dict):
    """A folder as it is on the hub: weights in bf16 by transformers, config.json as published. Returns their model."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(write_config(folder, config)))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        mean, std = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, 0.5 / math.sqrt(parameter.shape[-1]))
        parameter.data = (mean + std * torch.randn(parameter.shape, generator=generator)).bfloat16()
    model.save_pretrained(folder)
    write_config(folder, config)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("size", PUBLISHED)
def test_load_train_save(tmp_path, size):
    config = toy_config(size)
    theirs = write_published(tmp_path / "published", config)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "published")
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = our_parameters(theirs)
    assert loaded.keys() == expected.keys() == parameter_shapes(model.config).keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)
    assert ("lm_head.weight" in loaded) != config["tie_word_embeddings"]

    ids = torch.randint(config["vocab_size"], (2, 33), generator=torch.Generator().manual_seed(1))
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    with torch.no_grad():
        assert_close(model(inputs), theirs(inputs).logits, rtol=1e-5, atol=1e-5)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    summed, count = model.loss(inputs, labels)
    loss = summed / count
    assert_close(loss, theirs(inputs, labels=inputs, shift_labels=labels).loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, loaded[name]), f"{name} was not trained"
    with torch.no_grad():
        assert model.loss(inputs, labels)[0] / count < loss - 0.01

    model.save_pretrained(tmp_path / "trained", dtype=torch.float32)
    assert_transformers_reads(tmp_path / "trained", model, "float32")
    model.save_pretrained(tmp_path / "trained-bf16")
    assert_transformers_reads(tmp_path / "trained-bf16", model.bfloat16().float(), "bfloat16")


@pytest.mark.parametrize("size", PUBLISHED)
def test_full_size_has_the_published_number_of_parameters(size):
    config = Qwen3Config.from_dict(published_config(size))
    assert sum(shape.numel() for shape in parameter_shapes(config).values()) == PUBLISHED[size][2]
