"""Reading and writing config.json, against transformers' AutoConfig, and the command line.

pytest tests/test_config.py
"""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from qwen3_trn.config import Qwen3Config, TrainConfig, parse_args, parse_size, toml_to_argv
from qwen3_trn.errors import UserError
from qwen3_trn.model import parameter_shapes
from tests.common import REPO, tiny_config, write_config
from tests.test_sizes import published_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

RELEASED = published_config("0.6B")
RELEASED_MOE = published_config("30B-A3B")
# What may be absent: each has one meaning, which is that of the published files.
OPTIONAL = {"attention_dropout", "rope_scaling", "sliding_window", "max_window_layers", "torch_dtype"}


def transformers_config(raw: dict):
    return AutoConfig.for_model(**copy.deepcopy(raw))


def refused(raw: dict) -> str:
    """The message with which `raw` is refused."""
    with pytest.raises(UserError) as error:
        Qwen3Config.from_dict(raw, "some/config.json")
    assert str(error.value).startswith("some/config.json: ")
    return str(error.value)


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "moe, key", [(moe, key) for moe in (False, True) for key in tiny_config(moe=moe) if key not in OPTIONAL]
)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_missing_key_is_an_error_that_names_it_and_the_line_to_add(moe, key, how):
    raw = tiny_config(moe=moe)
    Qwen3Config.from_dict(raw)
    if how == "null":
        raw[key] = None
    else:
        del raw[key]
    message = refused(raw)
    assert f'"{key}"' in message or (key == "model_type" and key in message)
    if key not in ("model_type", "rope_theta"):
        assert f'add the line "{key}": ' in message


@pytest.mark.parametrize(
    "key",
    [
        "attention_bias",
        "hidden_act",
        "initializer_range",
        "rms_norm_eps",
        "use_sliding_window",
        "tie_word_embeddings",
        "decoder_sparse_step",
        "mlp_only_layers",
        "norm_topk_prob",
        "router_aux_loss_coef",
    ],
)
def test_the_line_to_add_is_the_released_models(key):
    """Following the advice repairs the file."""
    raw = dict(RELEASED_MOE)
    del raw[key]
    line = re.search(r"add the line (.*),$", refused(raw))[1]
    assert raw | json.loads("{" + line + "}") == RELEASED_MOE


@pytest.mark.parametrize("raw", [RELEASED, RELEASED_MOE], ids=["0.6B", "30B-A3B"])
def test_the_released_configs_are_read(raw):
    config = Qwen3Config.from_dict(raw)
    for key in ("hidden_size", "head_dim", "num_key_value_heads", "vocab_size", "tie_word_embeddings", "rms_norm_eps"):
        assert getattr(config, key) == raw[key]
    assert config.rope_theta == 1e6 and config.rope_scaling is None
    assert config.num_experts == raw.get("num_experts", 0)
    assert config.mlp_only_layers == ()
    shapes = parameter_shapes(config)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (raw["num_attention_heads"] * 128, raw["hidden_size"])
    # The published sizes: 0.6 and 30.5 billion.
    total = sum(shape.numel() for shape in shapes.values())
    assert total == (596_049_920 if raw is RELEASED else 30_532_122_624)


def test_a_sliding_window_that_is_not_used_is_ignored():
    """Some released files have sliding_window 4096 beside use_sliding_window false."""
    assert Qwen3Config.from_dict(RELEASED | {"sliding_window": 4096}) == Qwen3Config.from_dict(RELEASED)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "qwen2"}, '\'qwen2\' "qwen3" "qwen3_moe"'),
        ({"model_type": "qwen3_next"}, "'qwen3_next'"),
        ({"use_sliding_window": True}, "sliding-window not implemented"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window not implemented"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' silu"),
        ({"head_dim": 15}, "head_dim 15 even"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 num_key_value_heads 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 8 experts"),
        ({"num_experts": 0}, "num_experts 0"),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"hidden_size": -32}, "hidden_size -32"),
        ({"hidden_size": 32.0}, "hidden_size 32.0 whole"),
        ({"hidden_size": "32"}, "hidden_size '32' whole"),
        ({"num_hidden_layers": True}, "num_hidden_layers True whole"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps '1e-6' number"),
        ({"attention_bias": 0}, "attention_bias 0 true false"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' true false"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3' yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear' yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 128}}, '"factor"'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, '"original_max_position_embeddings"'),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0}}, "rope_type 'longrope'"),
    ],
)
def test_what_is_not_implemented_or_cannot_be_is_refused_by_name(changes, words):
    message = refused(tiny_config(moe=True) | changes)
    for word in words.split():
        assert word in message


WRONG_VALUES = ("x", [1], {"a": 1}, -1, 0, 1.5, float("nan"), True, ["a"])


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key) if key in ("rope_theta", "rope_scaling", "mlp_only_layers") else key
        for key in sorted(tiny_config(moe=True).keys() - {"torch_dtype", "model_type"})
    ],
)
def test_a_value_of_the_wrong_type_is_never_a_traceback(key):
    """Read, or refused with the key's name: nothing but UserError may escape."""
    for value in WRONG_VALUES:
        try:
            Qwen3Config.from_dict(tiny_config(moe=True) | {key: value})
        except UserError as error:
            assert key in str(error) or key in ("use_sliding_window", "num_experts_per_tok", "rope_scaling")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 0},
        {"rope_theta": -1.0},
        {"rope_theta": True},
        {"rms_norm_eps": -1e-6},
        {"initializer_range": -0.02},
        {"rms_norm_eps": float("inf")},
        {"mlp_only_layers": "0"},
        {"mlp_only_layers": ["0"]},
        {"rope_scaling": YARN | {"factor": -4.0}},
        {"rope_scaling": YARN | {"factor": "4"}},
        # transformers turns only a part of each head then; a key that is not understood must not be ignored.
        {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}},
    ],
    ids=str,
)
def test_a_number_that_no_model_can_have_is_refused(changes):
    refused(tiny_config(moe=True) | changes)


def test_both_spellings_may_stand_side_by_side_when_they_agree():
    raw = tiny_config(moe=True, num_local_experts=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert Qwen3Config.from_dict(raw) == Qwen3Config.from_dict(tiny_config(moe=True))
    yarn = tiny_config(rope_scaling=YARN, rope_parameters=YARN | {"rope_theta": 10000.0})
    assert Qwen3Config.from_dict(yarn) == Qwen3Config.from_dict(tiny_config(rope_scaling=YARN))


@pytest.mark.parametrize(
    "moe, changes, words",
    [
        (True, {"num_local_experts": 16}, "num_experts num_local_experts 8 16"),
        (False, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta 10000 500000"),
        # transformers 5 takes the value inside rope_scaling before the one beside it.
        pytest.param(False, {"rope_scaling": YARN | {"rope_theta": 5e5}}, "rope_theta 10000 500000"),
        pytest.param(
            False, {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "yarn"
        ),
        pytest.param(False, {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "factor 4.0 2.0"),
    ],
)
def test_both_spellings_may_not_disagree(moe, changes, words):
    message = refused(tiny_config(moe=moe) | changes)
    assert "disagree" in message
    for word in words.split():
        assert word in message


def test_transformers_5_spelling_alone_is_the_same_config():
    raw = tiny_config(moe=True, rope_scaling=YARN)
    new = dict(raw)
    new["num_local_experts"] = new.pop("num_experts")
    new["dtype"] = new.pop("torch_dtype")
    new["rope_parameters"] = new.pop("rope_scaling") | {"rope_theta": new.pop("rope_theta")}
    assert Qwen3Config.from_dict(new) == Qwen3Config.from_dict(raw)


def test_type_is_the_old_spelling_of_rope_type():
    old = {"type" if key == "rope_type" else key: value for key, value in YARN.items()}
    assert Qwen3Config.from_dict(tiny_config(rope_scaling=old)).rope_scaling == YARN


def test_a_folder_without_a_readable_config_is_refused(tmp_path):
    for content, word in ((None, "no config.json"), ("{", "not valid JSON"), ("[1]", "expected a JSON object")):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=word):
            Qwen3Config.from_pretrained(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [0, 3]}, {"decoder_sparse_step": 2}])
def test_moe_layers_are_where_transformers_has_them(changes):
    raw = tiny_config(moe=True, num_hidden_layers=6) | changes
    step, dense = raw["decoder_sparse_step"], raw["mlp_only_layers"]
    expected = {(): [0, 1, 2, 3, 4, 5], (0, 3): [1, 2, 4, 5]}[tuple(dense)] if step == 1 else [1, 3, 5]
    config = Qwen3Config.from_dict(raw)
    assert [layer for layer in range(6) if config.is_moe_layer(layer)] == expected
    assert not any(Qwen3Config.from_dict(tiny_config()).is_moe_layer(layer) for layer in range(6))


def test_no_head_dim_is_derived_from_the_hidden_size():
    for path in (REPO / "qwen3_trn").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"hidden_size\s*//\s*\S*(num_attention_heads|num_heads)", source), path


# ------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 12345.0, "rope_scaling": None},
        {"rope_theta": 12345.0, "rope_scaling": YARN | {"attention_factor": 1.2}},
        {"rope_parameters": YARN | {"rope_theta": 12345.0, "beta_fast": 16.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
    ],
    ids=["4 default", "4 yarn", "5 yarn", "5 default"],
)
def test_to_dict_is_read_as_the_same_model_by_us_and_by_transformers(tmp_path, moe, rope):
    raw = tiny_config(moe=moe)
    del raw["rope_theta"], raw["rope_scaling"]
    config = Qwen3Config.from_dict(raw | rope)
    folder = write_config(tmp_path, config.to_dict("bfloat16"))
    assert Qwen3Config.from_pretrained(folder) == config

    theirs, original = AutoConfig.from_pretrained(folder), transformers_config(raw | rope)
    assert type(theirs) is type(original)
    assert theirs.rope_parameters == original.rope_parameters
    assert theirs.rope_parameters["rope_theta"] == 12345.0
    assert str(theirs.dtype).endswith("bfloat16")
    for key in tiny_config(moe=moe).keys() - {"rope_theta", "rope_scaling", "torch_dtype"}:
        assert getattr(theirs, key) == getattr(original, key), key
    # What transformers 4 reads: its own spelling of each key.
    written = json.loads((folder / "config.json").read_text())
    assert written["rope_theta"] == 12345.0 and written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["rope_scaling"] == config.rope_scaling
    assert written["rope_parameters"] == original.rope_parameters
    assert not moe or written["num_experts"] == written["num_local_experts"] == 8
    assert written["architectures"] == ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"]


def test_keys_that_we_do_not_know_are_kept():
    extra = {"eos_token_id": [1, 2], "use_cache": True, "quantisation": {"a": [None, 1]}, "sliding_window": 4096}
    raw = tiny_config(moe=True) | extra
    untouched = copy.deepcopy(raw)
    written = Qwen3Config.from_dict(raw).to_dict("float32")
    assert raw == untouched
    for key, value in extra.items():
        assert written[key] == value
    assert untouched.keys() - written.keys() == set()


def test_to_dict_writes_the_fields_and_not_what_the_file_said():
    """A config changed in Python, or made in Python without a file, is written as it is."""
    config = dataclasses.replace(Qwen3Config.from_dict(tiny_config(moe=True)), num_hidden_layers=5, num_experts=4)
    assert Qwen3Config.from_dict(config.to_dict("float32")) == config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "raw"}
    assert Qwen3Config.from_dict(Qwen3Config(**fields).to_dict("float32")) == config


# -------------------------------------------------------------------------------------------------------- command line


def test_defaults_are_valid_and_every_field_has_a_comment_that_is_its_help(capsys):
    assert parse_args([]) == TrainConfig()
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"])
    assert stop.value.code == 0
    text = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    source = (REPO / "qwen3_trn" / "config.py").read_text(encoding="utf-8")
    for name in TrainConfig.__dataclass_fields__:
        comment = re.search(rf"\n((?:    # .*\n)+)    {name}: ", source)
        assert comment, f"{name} has no comment above it"
        assert re.sub(r"\s+# |\s+", " ", comment[1]).strip() in text, name


@pytest.mark.parametrize(
    "argv, field, value",
    [
        (["--lr", "3e-4"], "lr", 3e-4),
        (["--lr=3e-4"], "lr", 3e-4),
        (["--lr", "1e-3", "--lr", "2e-3"], "lr", 2e-3),
        (["--seq-len", "64"], "seq_len", 64),
        (["--seq_len", "64"], "seq_len", 64),
        (["--data", "a.txt", "b*.jsonl", "--steps", "3"], "data", ("a.txt", "b*.jsonl")),
        (["--adam-betas", "0.8", "0.9"], "adam_betas", (0.8, 0.9)),
        (["--min-lr", "0"], "min_lr", 0.0),
        (["--warmup-steps", "0"], "warmup_steps", 0),
        (["--max-grad-norm", "inf"], "max_grad_norm", math.inf),
        (["--router-aux-loss-coef", "config"], "router_aux_loss_coef", "config"),
        (["--router-aux-loss-coef", "0.01"], "router_aux_loss_coef", 0.01),
        (["--no-export"], "export", False),
        (["--no-load-check"], "load_check", False),
        (["--epochs", "0.5"], "epochs", 0.5),
        (["--schedule", "wsd"], "schedule", "wsd"),
    ],
)
def test_a_flag_sets_its_field(argv, field, value):
    config = parse_args(argv)
    assert getattr(config, field) == value
    assert type(getattr(config, field)) is type(value)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--lr", "nan"], "--lr nan"),
        (["--lr", "-1e-3"], "--lr -0.001 more"),
        (["--lr", "0"], "--lr 0 more"),
        pytest.param(["--lr", "inf"], "--lr inf"),
        (["--min-lr", "-1"], "--min-lr -1"),
        (["--weight-decay", "nan"], "--weight-decay nan"),
        (["--weight-decay", "-0.1"], "--weight-decay -0.1"),
        pytest.param(["--weight-decay", "inf"], "--weight-decay inf"),
        (["--router-aux-loss-coef", "nan"], "--router-aux-loss-coef nan"),
        (["--router-z-loss-coef", "-1"], "--router-z-loss-coef -1"),
        (["--steps", "0"], "--steps 0"),
        (["--steps", "-3"], "--steps -3"),
        (["--epochs", "0"], "--epochs 0"),
        pytest.param(["--epochs", "inf"], "--epochs inf"),
        (["--seq-len", "0"], "--seq-len 0"),
        (["--global-batch-size", "0"], "--global-batch-size 0"),
        (["--micro-batch-size", "-1"], "--micro-batch-size -1"),
        (["--max-grad-norm", "0"], "--max-grad-norm 0"),
        (["--adam-eps", "0"], "--adam-eps 0"),
        (["--adam-betas", "0.9", "1.0"], "--adam-betas 1.0"),
        (["--adam-betas", "nan", "0.9"], "--adam-betas nan"),
        (["--dist-timeout", "0"], "--dist-timeout 0"),
        (["--log-every", "0"], "--log-every 0"),
        (["--steps", "3", "--epochs", "2"], "--steps --epochs"),
        (["--max-shard-size", "5 apples"], "'5 apples' 5GB"),
        (["--max-shard-size", "0GB"], "'0GB' 5GB"),
        (["--max-shard-size", "-5GB"], "'-5GB' 5GB"),
        (["--config", "/nowhere/x.toml"], "--config /nowhere/x.toml"),
    ],
)
def test_values_that_no_run_could_use_are_refused(argv, words):
    with pytest.raises(UserError) as error:
        parse_args(argv)
    for word in words.split():
        assert word in str(error.value)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--step", "3"], ["--step", "Perhaps you meant", "--steps"]),
        (["--learning-rates", "1"], ["--learning-rates"]),
        (["--globalbatchsize", "8"], ["--globalbatchsize", "--global-batch-size"]),
        (["--dtype", "fp16"], ["fp16", "bf16"]),
        (["--schedule", "linear"], ["linear", "cosine"]),
        (["--steps", "ten"], ["ten", "--steps"]),
        (["--steps", "1.5"], ["1.5", "--steps"]),
        (["--adam-betas", "0.9"], ["--adam-betas"]),
        (["--router-aux-loss-coef", "file"], ["file", "config"]),
        (["stray"], ["stray"]),
    ],
)
def test_a_command_line_that_cannot_be_read_exits_with_what_is_wrong(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(argv)
    assert stop.value.code not in (0, None)
    captured = capsys.readouterr()
    for word in words:
        assert word in captured.out + captured.err


TOML = """
# a recipe
lr = 2e-4
steps = 7
data = ["a.txt", "b.txt"]
adam_betas = [0.8, 0.9]
export = false
load-check = true
schedule = "wsd"
router_aux_loss_coef = "config"
max_grad_norm = inf
"""


def write_toml(folder: Path, text: str, name: str = "x.toml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_toml_to_argv(tmp_path):
    assert toml_to_argv(write_toml(tmp_path, TOML)) == [
        *("--lr", "0.0002", "--steps", "7", "--data", "a.txt", "b.txt", "--adam-betas", "0.8", "0.9"),
        *("--no-export", "--load-check", "--schedule", "wsd", "--router-aux-loss-coef", "config"),
        *("--max-grad-norm", "inf"),
    ]


@pytest.mark.parametrize("equals_sign", [False, True])
def test_the_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path, equals_sign):
    path = write_toml(tmp_path, TOML)
    option = [f"--config={path}"] if equals_sign else ["--config", path]
    expected = TrainConfig(
        config=path,
        lr=2e-4,
        steps=7,
        data=("a.txt", "b.txt"),
        adam_betas=(0.8, 0.9),
        export=False,
        schedule="wsd",
        router_aux_loss_coef="config",
        max_grad_norm=math.inf,
    )
    assert parse_args(option) == expected
    flags = ["--lr", "5e-5", "--data", "c.txt", "--export"]
    for argv in (option + flags, flags + option):
        config = parse_args(argv)
        assert (config.lr, config.data, config.export, config.steps) == (5e-5, ("c.txt",), True, 7)


def test_the_last_of_two_files_wins(tmp_path):
    first, second = write_toml(tmp_path, "lr = 1e-3\nsteps = 5", "a.toml"), write_toml(tmp_path, "lr = 2e-3", "b.toml")
    config = parse_args(["--config", first, "--config", second])
    assert (config.lr, config.steps, config.config) == (2e-3, 5, second)


@pytest.mark.parametrize(
    "text, words",
    [
        ("lr = ", "TOML"),
        ("[optimizer]\nlr = 1.0", "[optimizer] table"),
        ("lr = nan", "--lr nan"),
        ("steps = 3\nepochs = 1.0", "--steps --epochs"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        parse_args(["--config", write_toml(tmp_path, text)])
    for word in words.split():
        assert word in str(error.value)


@pytest.mark.parametrize("text, words", [("stepps = 3", "stepps --steps"), ('steps = "many"', "many --steps")])
def test_an_unknown_key_or_value_in_a_file_exits_with_the_nearest_name(tmp_path, text, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--config", write_toml(tmp_path, text)])
    assert stop.value.code not in (0, None)
    captured = capsys.readouterr()
    for word in words.split():
        assert word in captured.out + captured.err


@pytest.mark.parametrize(
    "text, expected",
    [
        ("5GB", 5 * 10**9),
        ("200MB", 2 * 10**8),
        ("1.5GiB", 3 * 2**29),
        (" 10 kb ", 10**4),
        ("1234", 1234),
        ("64KIB", 2**16),
        ("1B", 1),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GB", "5 apples", "-1GB", "0", "0.0MB", "1e9", "0.4B", "5TBs"],
)
def test_what_is_not_a_size(text):
    with pytest.raises(UserError, match="size"):
        parse_size(text)


@pytest.mark.parametrize("flag", ["--kernel", "--data", "--eval-data", "--eval_data", "--prompts"])
def test_a_list_is_given_once(flag):
    """argparse would keep the last one, and say nothing."""
    with pytest.raises(UserError, match=f"{flag.replace('_', '-')} is given 2 times; put all values after one"):
        parse_args([flag, "a=b", "--steps", "3", f"{flag}=c=d"])
