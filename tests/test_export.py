"""export.py: what was trained is what is exported, in the form transformers reads, and a wrong export is no export.

The checkpoints are written by 2 ranks (tests/run_export.py).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import export
from qwen3_trn import hf
from qwen3_trn.checkpoint import find_checkpoint
from qwen3_trn.config import Qwen3Config
from qwen3_trn.errors import UserError
from qwen3_trn.hf import EMBEDDING, INDEX_FILE
from qwen3_trn.model import Qwen3ForCausalLM
from tests.common import REPO, TINY, run_python, succeeded, tiny_config, write_config
from tests.test_hf import assert_transformers_reads, edit

pytestmark = pytest.mark.timeout(120)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS = {
    "dense-tied": tiny_config(vocab_size=1024, tie_word_embeddings=True),
    "dense-yarn": tiny_config(vocab_size=1024, attention_bias=True, rope_theta=5e5, rope_scaling=YARN),
    "moe": tiny_config(vocab_size=1024, moe=True),
    "moe-dense-layers": tiny_config(
        vocab_size=1024, moe=True, num_hidden_layers=3, mlp_only_layers=[1], tie_word_embeddings=True
    ),
}
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run's folder for each of CONFIGS, beside the folder of models that they started from."""
    folder = tmp_path_factory.mktemp("export")
    for name, config in CONFIGS.items():
        model = write_config(folder / "models" / name, config)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(TINY / file, model / file)
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    succeeded(run_python("tests/run_export.py", folder / "models", folder / "runs", ranks=2, timeout=100))
    return folder / "runs"


def trained(run: Path, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """The model that the run's checkpoint must hold, rounded to `dtype`; not by way of the checkpoint."""
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(CONFIGS[run.name]))
    expected = load_file(run / "expected.safetensors")
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(expected[name].to(dtype))
    return model


# ------------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense-tied", []),
        ("dense-yarn", ["--dtype", "fp32"]),
        ("moe", ["--dtype", "fp32", "--max-shard-size", "50KB"]),
        ("moe-dense-layers", ["--dtype", "bf16", "--max-shard-size", "50KB"]),
    ],
)
def test_command(tmp_path, runs, name, options):
    """From another working directory, with relative paths."""
    run = runs / name
    source = run if options else run / "checkpoints" / "step_7"  # a run, or a checkpoint
    output = tmp_path / "exported"
    process = run_python(REPO / "export.py", source.relative_to(runs), output, *options, cwd=runs)
    assert "missing 0, unexpected 0" in succeeded(process)
    assert str(output) in process.stdout
    assert process.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]

    dtype = torch.float32 if "fp32" in options else torch.bfloat16
    assert_transformers_reads(output, trained(run, dtype), hf.DTYPE_NAMES[dtype])
    files = sorted(output.glob("*.safetensors"))
    if "--max-shard-size" in options:
        assert len(files) > 3 and (output / INDEX_FILE).is_file()
        for file in files:
            tensors = load_file(file)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 50_000
    else:
        assert [file.name for file in files] == ["model.safetensors"]

    # What belongs to the model besides its weights.
    model = runs.parent / "models" / name
    for file in TOKENIZER_FILES:
        assert (output / file).read_bytes() == (model / file).read_bytes()
    assert AutoTokenizer.from_pretrained(output)("Once upon a time").input_ids
    assert GenerationConfig.from_pretrained(output) == GenerationConfig.from_pretrained(model)
    before, after = AutoConfig.from_pretrained(model), AutoConfig.from_pretrained(output)
    assert after.rope_parameters == before.rope_parameters
    assert after.rope_parameters["rope_theta"] == CONFIGS[name]["rope_theta"]
    assert Qwen3Config.from_pretrained(output) == Qwen3Config.from_dict(CONFIGS[name])
    card = (output / "README.md").read_text()
    assert "# exported" in card and "7 steps" in card and '"lr": 0.001' in card


def test_both_spellings_of_transformers_4_and_5_are_in_the_config(tmp_path, runs):
    for name in CONFIGS:
        export.export(find_checkpoint(runs / name), tmp_path / name, torch.bfloat16, 10**9)
        written = json.loads((tmp_path / name / "config.json").read_text())
        for key, value in CONFIGS[name].items():
            assert written[key] == (value if key != "torch_dtype" else "bfloat16"), key
        rope = {"rope_type": "default"} | (CONFIGS[name]["rope_scaling"] or {})
        assert written["rope_parameters"] == rope | {"rope_theta": CONFIGS[name]["rope_theta"]}
        assert written["dtype"] == "bfloat16"
        assert written.get("num_local_experts") == CONFIGS[name].get("num_experts")


def test_command_refuses_a_folder_that_is_there(tmp_path, runs):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    process = run_python("export.py", runs / "moe", tmp_path / "mine")
    assert process.returncode == 1
    assert process.stderr.startswith("error: ") and "exists and is not empty" in process.stderr
    assert "Traceback" not in process.stderr and "verified" not in process.stdout
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "notes.txt"]


def test_command_says_what_is_wrong_with_a_path(tmp_path):
    process = run_python("export.py", tmp_path / "no-such-run", tmp_path / "out")
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1 and f"error: {tmp_path / 'no-such-run'} is neither a run" in process.stderr
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- what verification catches


def flip_one_bit(tensors) -> None:
    """The least change there is: the last bit of one value, in the row of a token that the fixed prompt has not."""
    row = next(row for row in range(1024) if row not in {position * 7919 % 1024 for position in range(64)})
    tensors[EMBEDDING].view(torch.int16)[row, 5] ^= 1


def swap_experts(tensors) -> None:
    first, second = (f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in (2, 5))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def swap_gate_and_up(tensors) -> None:
    first, second = (f"model.layers.0.mlp.experts.3.{name}_proj.weight" for name in ("gate", "up"))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def round_to_fp16(tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()


def drop_tensor(tensors) -> None:
    tensors.pop("model.layers.1.self_attn.k_norm.weight")


def add_tensor(tensors) -> None:
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


def corrupt_after_writing(monkeypatch, change) -> None:
    """Let `change` have the written tensors before they are verified."""
    save_hf = hf.save_hf

    def save_and_change(folder, *arguments):
        save_hf(folder, *arguments)
        edit(folder / "model.safetensors", change)

    monkeypatch.setattr(hf, "save_hf", save_and_change)


FOUND = {
    flip_one_bit: (RuntimeError, r"model\.embed_tokens\.weight .* is not what the checkpoint holds"),
    swap_experts: (RuntimeError, r"layers\.1\.mlp\.experts\.2\.gate_proj\.weight .* is not what the checkpoint holds"),
    swap_gate_and_up: (RuntimeError, r"layers\.0\.mlp\.experts\.3\.gate_proj\.weight"),
    round_to_fp16: (RuntimeError, r"model\.norm\.weight"),
    drop_tensor: (UserError, r"missing 1: model\.layers\.1\.self_attn\.k_norm\.weight"),
    add_tensor: (UserError, r"unexpected 1: model\.layers\.1\.self_attn\.rotary_emb\.inv_freq"),
}


@pytest.mark.parametrize("change", FOUND)
def test_a_wrong_file_is_found_and_nothing_is_left(tmp_path, runs, monkeypatch, capsys, change):
    error, message = FOUND[change]
    corrupt_after_writing(monkeypatch, change)
    with pytest.raises(error, match=message):
        export.export(find_checkpoint(runs / "moe"), tmp_path / "out", torch.bfloat16, 10**9)
    assert list(tmp_path.iterdir()) == []
    assert "verified" not in capsys.readouterr().out


@pytest.mark.parametrize("change", [swap_experts, swap_gate_and_up])
def test_logits_alone_find_it_too(tmp_path, runs, monkeypatch, change):
    """The comparison of logits is of use only if it would fail where the comparison of values did not look."""
    corrupt_after_writing(monkeypatch, change)
    monkeypatch.setattr(export, "verify_values", lambda *arguments: 0)
    with pytest.raises(RuntimeError, match=r"export: model\.layers\.\d computes other values"):
        export.export(find_checkpoint(runs / "moe"), tmp_path / "out", torch.bfloat16, 10**9)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_config_is_found_and_nothing_is_left(tmp_path, runs, monkeypatch):
    """Right weights beside a config.json that computes something else are a wrong model."""
    to_dict = Qwen3Config.to_dict
    monkeypatch.setattr(Qwen3Config, "to_dict", lambda self, dtype: to_dict(self, dtype) | {"rms_norm_eps": 1e-5})
    with pytest.raises(RuntimeError, match=r"config\.json"):
        export.export(find_checkpoint(runs / "dense-yarn"), tmp_path / "out", torch.bfloat16, 10**9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_any_layout_exports_the_same_bytes(name, tmp_path):
    """What was loaded on 4 ranks, split in any way, comes out as save_pretrained in one process writes it."""
    from tests.run_reexport import LAYOUTS

    changes = {"vocab_size": 128, "num_key_value_heads": 4, "tie_word_embeddings": name == "dense"}
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(moe=name == "moe", **changes)))
    model.save_pretrained(tmp_path / "model", torch.float32)
    expected = (tmp_path / "model" / "model.safetensors").read_bytes()
    succeeded(run_python("tests/run_reexport.py", tmp_path / "model", tmp_path, ranks=4))
    for number, layout in enumerate(LAYOUTS):
        if "ep" in layout and name == "dense":
            continue
        source = tmp_path / str(number) / "checkpoints" / "step_0"
        export.export(source, tmp_path / f"again-{number}", torch.float32, 5_000_000_000)
        assert (tmp_path / f"again-{number}" / "model.safetensors").read_bytes() == expected, layout
