"""export.py: what was trained is what is exported, in the form transformers reads, and a wrong export is no export.

The checkpoints are written by 2 ranks (tests/run_export.py).
"""

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import export
from qwen3_trn import hf
from qwen3_trn.checkpoint import find_checkpoint
from qwen3_trn.config import Qwen3Config
from qwen3_trn.errors import UserError
from qwen3_trn.hf import EMBEDDING, INDEX_FILE
from qwen3_trn.model import Qwen3ForCausalLM
from tests.common import REPO, TINY, run_python, succeeded, tiny_config, write_config
from tests.test_hf import assert_same, assert_transformers_reads, edit

pytestmark = pytest.mark.timeout(120)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS = {
    "dense-tied": tiny_config(vocab_size=1024, tie_word_embeddings=True),
    "dense-yarn": tiny_config(vocab_size=1024, attention_bias=True, rope_theta=5e5, rope_scaling=YARN),
    "moe": tiny_config(vocab_size=1024, moe=True),
    "moe-dense-layers": tiny_config(
        vocab_size=1024, moe=True, num_hidden_layers=3, mlp_only_layers=[1], tie_word_embeddings=True
    ),
    # nothing divides anything, and 5 experts on 2 ranks
    "moe-odd": tiny_config(
        **{"moe": True, "vocab_size": 133, "hidden_size": 37, "moe_intermediate_size": 15, "num_experts": 5},
        **{"head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 7},
    ),
    "moe-one-expert": tiny_config(moe=True, num_experts=1, num_experts_per_tok=1, tie_word_embeddings=True),
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
        ("moe-dense-layers", ["--experts", "fused", "--max-shard-size", "50KB", "--verify-with", "transformers"]),
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
    assert ("transformers' logits differ by at most" in process.stdout) == ("--verify-with" in options)
    if "--verify-with" not in options:  # transformers draws a progress bar
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


@pytest.mark.parametrize("max_shard_bytes", [1, 10**9])
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_experts(tmp_path, runs, name, max_shard_bytes):
    """transformers 5's form: it loads it, and has the tensors of its own. Of a dense model there is one form only."""
    ours = trained(runs / name, torch.bfloat16)
    output = tmp_path / "fused"
    export.export(find_checkpoint(runs / name), output, torch.bfloat16, max_shard_bytes, fused=True)
    assert_transformers_reads(output, ours)
    files = [load_file(file) for file in sorted(output.glob("*.safetensors"))]
    shapes = {key: tensor.shape for tensors in files for key, tensor in tensors.items()}
    assert len(files) == (1 if max_shard_bytes > 1 else len(shapes))  # a tensor that is too large has its own file
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(output)).bfloat16()
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=False)
    assert shapes == {key: tensor.shape for key, tensor in load_file(tmp_path / "theirs" / "model.safetensors").items()}
    assert_same(
        dict(Qwen3ForCausalLM.from_pretrained(output).named_parameters()),
        {name: parameter.detach() for name, parameter in ours.named_parameters()},
    )
    if not ours.config.num_experts and max_shard_bytes > 1:
        export.export(find_checkpoint(runs / name), tmp_path / "plain", torch.bfloat16, max_shard_bytes)
        assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-shard-size", "0"], "'0' is not a size"),
        (["--max-shard-size", "-1GB"], "'-1GB' is not a size"),
        (["--max-shard-size", "5 shards"], "'5 shards' is not a size"),
        (["--dtype", "fp16"], "fp16"),
        (["--experts", "stacked"], "stacked"),
        (["--verify-with", "vllm"], "vllm"),
    ],
)
def test_wrong_options(tmp_path, runs, monkeypatch, capsys, options, message):
    monkeypatch.setattr("sys.argv", ["export.py", str(runs / "moe"), str(tmp_path / "out"), *options])
    with pytest.raises((UserError, SystemExit)) as error:
        export.main()
    if isinstance(error.value, SystemExit):
        assert error.value.code == 2
    assert message in str(error.value) + capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_where_no_folder_can_be(tmp_path, runs):
    source = find_checkpoint(runs / "moe")
    (tmp_path / "file").write_text("mine")
    before = sorted(runs.rglob("*"))
    for folder, error, message in (
        (tmp_path / "file", UserError, "nothing is overwritten"),
        (tmp_path / "file" / "out", OSError, "Not a directory"),
        (source / "hf", UserError, "belongs to training"),
        (source.parent / "hf", UserError, "belongs to training"),
        (source, UserError, "belongs to training"),
    ):
        with pytest.raises(error, match=message):
            export.export(source, folder, torch.bfloat16, 10**9)
    assert sorted(runs.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    export.export(source, tmp_path / "new" / "parent" / "out", torch.bfloat16, 10**9)
    assert (tmp_path / "new" / "parent" / "out" / "model.safetensors").is_file()


def test_too_little_room_is_said_before_the_work(tmp_path, runs, monkeypatch):
    usage = export.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"out needs .* KB; on its disk 1\.0 KB are free"):
        export.export(find_checkpoint(runs / "moe"), tmp_path / "out", torch.bfloat16, 10**9)
    assert list(tmp_path.iterdir()) == []


FILE_TOO_LARGE = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
runpy.run_path("export.py", run_name="__main__")
"""


def test_a_write_that_fails_is_one_message_and_nothing_is_left(tmp_path, runs):
    """By a limit on the size of files, which a full disk resembles; the tokenizer is smaller."""
    process = run_python("-c", FILE_TOO_LARGE, runs / "moe", tmp_path / "out")
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1 and process.stderr.startswith("error: "), process.stderr
    assert "model.safetensors cannot be written" in process.stderr and "File too large" in process.stderr
    assert list(tmp_path.iterdir()) == []


KILLED_MIDWAY = """
import os, runpy, signal
from qwen3_trn import hf
hf.copy_companions = lambda source, target: None
save_file, saved = hf.save_file, []
def save_two_then_die(*arguments, **options):
    save_file(*arguments, **options)
    saved.append(arguments)
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
hf.save_file = save_two_then_die
runpy.run_path("export.py", run_name="__main__")
"""


def test_an_export_that_was_killed_can_be_run_again(tmp_path, runs):
    process = run_python("-c", KILLED_MIDWAY, runs / "moe", tmp_path / "out", "--max-shard-size", "20KB")
    assert process.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out.unfinished-") and len(list(left.iterdir())) == 2
    export.export(find_checkpoint(runs / "moe"), tmp_path / "out", torch.bfloat16, 20_000)
    Qwen3ForCausalLM.from_pretrained(tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out", left]


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


def flip_fused_bit(tensors) -> None:
    tensors["model.layers.1.mlp.experts.gate_up_proj"].view(torch.int16)[7, 30, 3] ^= 1  # of the up half


def swap_fused_halves(tensors) -> None:
    tensor = tensors["model.layers.0.mlp.experts.gate_up_proj"]
    tensor.copy_(tensor.clone().roll(24, dims=1))


def flip_fused_down_bit(tensors) -> None:
    tensors["model.layers.0.mlp.experts.down_proj"].view(torch.int16)[7, 31, 23] ^= 1  # the very last value


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (flip_fused_bit, "1.*gate_up_proj"),
        (swap_fused_halves, "0.*gate_up_proj"),
        (flip_fused_down_bit, "0.*down_proj"),
    ],
)
def test_a_wrong_fused_file_is_found(tmp_path, runs, monkeypatch, change, key):
    corrupt_after_writing(monkeypatch, change)
    with pytest.raises(RuntimeError, match=rf"layers\.{key} in .* is not what the checkpoint holds"):
        export.export(find_checkpoint(runs / "moe"), tmp_path / "out", torch.bfloat16, 10**9, fused=True)
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_compared_are_an_error(tmp_path, runs, monkeypatch):
    """A verification that passes something over must not pass."""
    parts = hf.HFFolder.parts
    monkeypatch.setattr(hf.HFFolder, "parts", lambda self, *arguments: list(parts(self, *arguments))[1:])
    with pytest.raises(RuntimeError, match=r"0 of the \d+ values of model\.embed_tokens\.weight were compared"):
        export.export(find_checkpoint(runs / "moe"), tmp_path / "out", torch.bfloat16, 10**9)
    monkeypatch.undo()
    shapes = export.parameter_shapes
    monkeypatch.setattr(export, "verify_values", lambda *arguments: None)
    monkeypatch.setattr(hf.HFFolder, "check", lambda *arguments: None)
    monkeypatch.setattr(export.checkpoint, "check_checkpoint", lambda *arguments: None)
    monkeypatch.setattr(
        hf,
        "save_hf",
        lambda folder, config, known, *rest, save=hf.save_hf: save(
            folder, config, {name: shape for name, shape in known.items() if name != "extra"}, *rest
        ),
    )
    monkeypatch.setattr(export, "parameter_shapes", lambda config: shapes(config) | {"extra": torch.Size([1])})
    with pytest.raises(RuntimeError, match=r"no block holds \['extra'\], so they were not verified"):
        export.export(find_checkpoint(runs / "moe"), tmp_path / "out", torch.bfloat16, 10**9)
    assert list(tmp_path.iterdir()) == []


def test_verification_with_transformers_finds_other_logits_and_lost_tensors(tmp_path, runs, monkeypatch, capsys):
    source, verify = find_checkpoint(runs / "moe"), export.verify

    def run() -> None:
        export.export(source, tmp_path / "out", torch.bfloat16, 10**9, with_transformers=True)

    with monkeypatch.context() as patch:
        patch.setattr(export, "verify", lambda *arguments: verify(*arguments) + 2e-3)
        with pytest.raises(RuntimeError, match=r"the logits of transformers' model .* differ by 0\.002"):
            run()
    with monkeypatch.context() as patch:
        patch.setattr(export, "verify", lambda *arguments: torch.zeros(1, 64, 1024))
        patch.setattr(hf.HFFolder, "check", lambda *arguments: None)
        corrupt_after_writing(patch, drop_tensor)
        with pytest.raises(
            RuntimeError, match=r"otherwise than it was written: .*layers\.1\.self_attn\.k_norm\.weight"
        ):
            run()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)  # as if it was not installed
        with pytest.raises(UserError, match="--verify-with transformers: its models cannot be imported"):
            run()
    assert list(tmp_path.iterdir()) == []
    assert "verified" not in capsys.readouterr().out
    run()


@pytest.mark.parametrize("change", [swap_experts, swap_gate_and_up])
def test_logits_alone_find_it_too(tmp_path, runs, monkeypatch, change):
    """The comparison of logits is of use only if it would fail where the comparison of values did not look."""
    corrupt_after_writing(monkeypatch, change)
    monkeypatch.setattr(export, "verify_values", lambda *arguments: None)
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


@pytest.mark.slow
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
