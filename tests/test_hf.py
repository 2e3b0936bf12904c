"""Hugging Face folders and training checkpoints: what is on disk is what is in the model, and what is not is refused.

The other side is transformers: it writes what we read and reads what we write. What needs several processes runs in
tests/run_hf.py under torchrun.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qwen3_trn import hf
from qwen3_trn.checkpoint import find_checkpoint, read_checkpoint
from qwen3_trn.config import Qwen3Config
from qwen3_trn.errors import UserError
from qwen3_trn.folders import new_folder
from qwen3_trn.hf import EMBEDDING, HEAD, INDEX_FILE, HFFolder
from qwen3_trn.model import Qwen3ForCausalLM, parameter_shapes
from tests.common import run_python, succeeded, tiny_config, write_config

pytestmark = pytest.mark.timeout(120)

IDS = torch.arange(40).view(2, 20) * 37 % 131


def hf_model(config: dict, seed: int = 0):
    """A transformers model in fp32 in which every parameter is random, norms too, so that no two are alike."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        around = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.data = around + 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def our_parameters(model) -> dict[str, Tensor]:
    """A transformers model's parameters under our names: the fused experts taken apart into gate and up."""
    parameters = {}
    for name, parameter in model.named_parameters():
        if name.endswith(".experts.gate_up_proj"):
            gate, up = parameter.detach().chunk(2, dim=1)
            parameters[name.replace("gate_up_proj", "gate_proj")] = gate
            parameters[name.replace("gate_up_proj", "up_proj")] = up
        else:
            parameters[name] = parameter.detach()
    return parameters


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert torch.equal(parameter, expected[name]), name


def assert_transformers_reads(folder: Path, ours: Qwen3ForCausalLM, dtype: str = "bfloat16") -> None:
    """transformers finds every tensor of `folder`, in `dtype`, and nothing else, and computes our model's logits."""
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(info.values()), info
    tensors = [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]
    assert {tensor.dtype for tensor in tensors} == {getattr(torch, dtype)}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype
    ids = IDS % ours.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs.eval()(ids).logits, rtol=1e-5, atol=1e-5)


def edit(file: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite a safetensors file after `change` has been at its tensors."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "attention_bias": True},
        {"moe": True},
        {"moe": True, "num_hidden_layers": 3, "mlp_only_layers": [1], "tie_word_embeddings": True},
        {"moe": True, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    ],
    ids=["dense", "dense-tied-bias", "moe", "moe-dense-layer-tied", "moe-every-other"],
)
def test_every_form_that_transformers_writes_reads_the_same(tmp_path, changes):
    model = hf_model(tiny_config(**changes))
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    model.save_pretrained(tmp_path / "fused-sharded", save_original_format=False, max_shard_size="20KB")
    assert (tmp_path / "one" / "model.safetensors").is_file()
    for name in ("sharded", "fused-sharded"):
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 2
    for folder in sorted(tmp_path.iterdir()):
        assert HFFolder(folder).fused == ("moe" in changes and "fused" in folder.name)
        ours = Qwen3ForCausalLM.from_pretrained(folder)
        assert_same(dict(ours.named_parameters()), our_parameters(model))
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), model(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_float_dtypes(tmp_path, dtype):
    """Files of any float dtype are read exactly into fp32, and rounded once into bf16."""
    model = hf_model(tiny_config(moe=True)).to(dtype)
    model.save_pretrained(tmp_path)
    expected = our_parameters(model)
    ours = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(ours.named_parameters()), {name: tensor.float() for name, tensor in expected.items()})
    ours = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same(dict(ours.named_parameters()), {name: tensor.bfloat16() for name, tensor in expected.items()})


def test_tensors_larger_than_one_read(tmp_path, monkeypatch):
    """Large tensors are read (and a tied head compared) in blocks of rows; here of a few, the last partial."""
    for fused in (False, True):
        model = hf_model(tiny_config(moe=True, tie_word_embeddings=True))
        folder = tmp_path / f"fused-{fused}"
        model.save_pretrained(folder, save_original_format=not fused)
        edit(folder / "model.safetensors", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
        monkeypatch.setattr(hf, "_READ_BYTES", 5 * 32 * 4)
        assert_same(dict(Qwen3ForCausalLM.from_pretrained(folder).named_parameters()), our_parameters(model))
        edit(folder / "model.safetensors", lambda tensors: tensors[HEAD][-1, -1].add_(1.0))
        with pytest.raises(UserError, match="differs"):
            Qwen3ForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_and_untied_heads(tmp_path, tied, head):
    model = hf_model(tiny_config(tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)

    def change(tensors):
        if head == "absent":
            tensors.pop(HEAD, None)
        else:
            tensors[HEAD] = tensors[EMBEDDING].clone() + (head == "different")

    edit(tmp_path / "model.safetensors", change)
    if not tied and head == "absent":
        with pytest.raises(UserError, match=r"tie_word_embeddings false, but there is no lm_head\.weight"):
            Qwen3ForCausalLM.from_pretrained(tmp_path)
        return
    if tied and head == "different":
        with pytest.raises(UserError, match=r"tie_word_embeddings true, but lm_head\.weight differs"):
            Qwen3ForCausalLM.from_pretrained(tmp_path)
        return
    ours = Qwen3ForCausalLM.from_pretrained(tmp_path)
    expected = our_parameters(model)
    if not tied:
        expected[HEAD] = expected[EMBEDDING] + (head == "different")
    assert_same(dict(ours.named_parameters()), expected)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied


def test_tied_head_of_another_dtype_is_compared_by_value(tmp_path):
    model = hf_model(tiny_config(tie_word_embeddings=True)).bfloat16()
    model.save_pretrained(tmp_path)
    edit(tmp_path / "model.safetensors", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].float()}))
    assert_same(
        dict(Qwen3ForCausalLM.from_pretrained(tmp_path, torch.bfloat16).named_parameters()), our_parameters(model)
    )


def test_symlinked_files_as_in_the_hub_cache(tmp_path):
    model = hf_model(tiny_config())
    model.save_pretrained(tmp_path / "blobs", max_shard_size="20KB")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
        blob = file.rename(file.with_name(f"blob{number}"))  # blobs have hashes for names
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    assert_same(dict(Qwen3ForCausalLM.from_pretrained(snapshot).named_parameters()), our_parameters(model))


# ------------------------------------------------------------------------------------------------- what is refused, how


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Folders by transformers that the tests below copy and damage: one file, several, and several of a MoE."""
    folder = tmp_path_factory.mktemp("written")
    hf_model(tiny_config()).save_pretrained(folder / "one")
    hf_model(tiny_config()).save_pretrained(folder / "sharded", max_shard_size="20KB")
    hf_model(tiny_config(moe=True)).save_pretrained(folder / "moe")
    return folder


def drop(*names: str):
    return lambda folder: edit(folder / "model.safetensors", lambda tensors: [tensors.pop(name) for name in names])


def put(make: Callable[[dict[str, Tensor]], dict[str, Tensor]]):
    return lambda folder: edit(folder / "model.safetensors", lambda tensors: tensors.update(make(tensors)))


def truncate(name: str, size: int):
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:size])

    return change


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-00001-of-*.safetensors"))[0]


def remove_first_shard(folder: Path) -> None:
    first_shard(folder).unlink()


def move_tensor(folder: Path) -> None:
    """The first shard loses a tensor that the index says is there."""
    edit(first_shard(folder), lambda tensors: tensors.pop(sorted(tensors)[0]))


def duplicate_tensor(folder: Path) -> None:
    """Two shards hold one tensor."""
    stolen = load_file(first_shard(folder))
    edit(sorted(folder.glob("model-00002-of-*"))[0], lambda tensors: tensors.update(stolen))


def index_names(file: str, absolute: bool = False):
    """The index says a tensor is in `file`, which is there, but outside of the folder."""

    def change(folder: Path) -> None:
        outside = folder.parent / "outside.safetensors"
        first_shard(folder).rename(outside)
        text = (folder / INDEX_FILE).read_text()
        name = next(name for name in json.loads(text)["weight_map"].values() if name.startswith("model-00001"))
        (folder / INDEX_FILE).write_text(text.replace(name, str(outside.resolve()) if absolute else file))

    return change


def index_names_folder(folder: Path) -> None:
    (folder / "folder.safetensors").mkdir()
    index_names("folder.safetensors")(folder)


def write_index(content: str | bytes):
    return lambda folder: (folder / INDEX_FILE).write_bytes(content if isinstance(content, bytes) else content.encode())


def add_fused_experts(folder: Path) -> None:
    fused = torch.zeros(8, 48, 32)
    edit(folder / "model.safetensors", lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": fused}))


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"
# what is done to a copy of which folder, and what the one message must say
REFUSED = {
    "missing": ("one", drop(Q_PROJ, NORM), ["missing 2", Q_PROJ, NORM]),
    "missing-expert": ("moe", drop(EXPERT.format(3), EXPERT.format(7)), ["missing 2", EXPERT.format(3), "7.up_proj"]),
    "unexpected": ("one", put(lambda t: {"visual.w": t[NORM].clone()}), ["unexpected 1", "visual.w"]),
    "one-expert-too-many": (
        "moe",
        put(lambda t: {EXPERT.format(8): t[EXPERT.format(0)] + 1}),
        ["unexpected 1", "8.up_"],
    ),
    "mis-shaped": ("one", put(lambda t: {Q_PROJ: t[Q_PROJ].T}), ["mis-shaped 1", Q_PROJ, "[32, 64]", "[64, 32]"]),
    "mis-shaped-expert": (
        "moe",
        put(lambda t: {EXPERT.format(3): t[NORM] + 1}),
        [EXPERT.format(3), "[32]", "[24, 32]"],
    ),
    "all-three": (
        "one",
        put(lambda t: {"visual.w": t.pop(NORM), Q_PROJ: t[Q_PROJ][:5]}),
        ["missing 1", NORM, "unexpected 1", "visual.w", "mis-shaped 1", "[5, 32]"],
    ),
    "int8": ("one", put(lambda t: {Q_PROJ: t[Q_PROJ].to(torch.int8)}), [Q_PROJ, "I8", "BF16, F16 or F32"]),
    "fp8": ("one", put(lambda t: {Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)}), [Q_PROJ, "F8_E4M3"]),
    "shard-absent": ("sharded", remove_first_shard, ["model-00001-of-", "does not exist", INDEX_FILE, "Download"]),
    "cut-in-header": ("one", truncate("model.safetensors", 200), ["model.safetensors (200 bytes)", "truncated"]),
    "cut-in-data": ("one", truncate("model.safetensors", -100), ["model.safetensors (", "truncated"]),
    "empty-file": ("one", truncate("model.safetensors", 0), ["model.safetensors (0 bytes)", "truncated"]),
    "index-points-up": ("sharded", index_names("../outside.safetensors"), [INDEX_FILE, "'../outside", "same folder"]),
    "index-points-away": (
        "sharded",
        index_names("", absolute=True),
        [INDEX_FILE, "/outside.safetensors'", "same folder"],
    ),
    "index-points-down": (
        "sharded",
        index_names("sub/x.safetensors"),
        [INDEX_FILE, "'sub/x.safetensors'", "same folder"],
    ),
    "index-names-nul": ("sharded", index_names(r"x\u0000.safetensors"), ["x\0.safetensors does not exist", INDEX_FILE]),
    "index-names-folder": ("sharded", index_names_folder, ["folder.safetensors does not exist", INDEX_FILE]),
    "index-names-pickle": ("sharded", index_names("weights.bin"), [INDEX_FILE, "'weights.bin'", ".safetensors"]),
    "index-disagrees": ("sharded", move_tensor, [INDEX_FILE, "disagrees", "about 1 tensors", "two versions"]),
    "tensor-twice": ("sharded", duplicate_tensor, [INDEX_FILE, "disagrees"]),
    "index-not-json": ("sharded", write_index("<html>"), [INDEX_FILE, "not a safetensors index"]),
    "index-not-text": ("sharded", write_index(b"\xff\xfe\x00"), [INDEX_FILE, "not a safetensors index"]),
    "index-no-map": ("sharded", write_index('{"metadata": {}}'), [INDEX_FILE, "weight_map"]),
    "index-is-a-list": ("sharded", write_index("[]"), [INDEX_FILE, "weight_map"]),
    "index-map-is-a-list": ("sharded", write_index('{"weight_map": ["a.safetensors"]}'), [INDEX_FILE, "weight_map"]),
    "index-number": ("sharded", write_index('{"weight_map": {"model.norm.weight": 3}}'), [INDEX_FILE, "3"]),
    "index-empty": ("sharded", write_index('{"weight_map": {}}'), ["does not exist", "model-00001-of-"]),
    "experts-twice": ("moe", add_fused_experts, ["experts twice", "gate_up_proj"]),
    "only-pickle": ("one", only_pickle, ["model.safetensors does not exist", "never pickle", "pytorch_model.bin"]),
    "no-weights": ("one", lambda folder: (folder / "model.safetensors").unlink(), ["does not exist", "found: none"]),
    "no-config": ("one", lambda folder: (folder / "config.json").unlink(), ["no config.json"]),
    "no-folder": ("one", shutil.rmtree, ["no config.json", "expected a Hugging Face model folder"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, written, case):
    which, damage, expected = REFUSED[case]
    folder = tmp_path / "model"
    shutil.copytree(written / which, folder)
    Qwen3ForCausalLM.from_pretrained(folder)
    damage(folder)
    with pytest.raises(UserError) as error:
        Qwen3ForCausalLM.from_pretrained(folder)
    message = str(error.value)
    assert str(folder) in message
    for part in expected:
        assert part in message, message


def test_a_long_list_is_cut(tmp_path):
    hf_model(tiny_config(moe=True)).save_pretrained(tmp_path)
    drop(*(EXPERT.format(expert) for expert in range(8)), NORM)(tmp_path)
    with pytest.raises(UserError, match=r"missing 9: .*and 1 more"):
        Qwen3ForCausalLM.from_pretrained(tmp_path)


def test_weights_of_another_size_are_listed(tmp_path):
    """A config.json of one size beside the weights of another."""
    hf_model(tiny_config()).save_pretrained(tmp_path)
    write_config(tmp_path, tiny_config(num_hidden_layers=3, intermediate_size=64))
    with pytest.raises(
        UserError, match=r"missing 11: model\.layers\.2\..*mis-shaped 6: .*\[48, 32\], expected \[64, 32\]"
    ):
        Qwen3ForCausalLM.from_pretrained(tmp_path)


def test_folder_without_weights_says_so():
    with pytest.raises(UserError, match=r"/no/such/model\.safetensors does not exist: there is no such folder"):
        HFFolder("/no/such")


# -------------------------------------------------------------------------------------------------------------- writing


def our_model(seed: int = 1, **changes) -> Qwen3ForCausalLM:
    """One of our models in which every parameter is random."""
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(**changes)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def rounded(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The model rounded to bf16, what the default of save_pretrained writes."""
    return model.bfloat16().float()


def save_sharded(
    model: Qwen3ForCausalLM, folder: Path, dtype: torch.dtype, max_shard_bytes: int, fused: bool = False
) -> None:
    parameters = dict(model.named_parameters())

    def read(name: str, target: Tensor) -> None:
        target.copy_(parameters[name].detach())

    with new_folder(folder) as unfinished:
        hf.save_hf(unfinished, model.config, parameter_shapes(model.config), read, dtype, max_shard_bytes, fused)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"moe": True, "tie_word_embeddings": True},
        {"moe": True, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ],
    ids=["dense-bias", "dense-tied", "moe-tied", "moe-dense-layers"],
)
def test_transformers_reads_what_we_write(tmp_path, changes):
    model = our_model(**changes)
    model.save_pretrained(tmp_path / "fp32", dtype=torch.float32)
    assert_transformers_reads(tmp_path / "fp32", model, "float32")
    assert_same(
        dict(Qwen3ForCausalLM.from_pretrained(tmp_path / "fp32").named_parameters()), dict(model.named_parameters())
    )
    for fused in (False, True):
        save_sharded(model, tmp_path / f"sharded-{fused}", torch.float32, 20_000, fused)
        assert_transformers_reads(tmp_path / f"sharded-{fused}", model, "float32")
    model.save_pretrained(tmp_path / "bf16")  # bf16 is the default
    rounded(model)
    assert_transformers_reads(tmp_path / "bf16", model, "bfloat16")


def test_the_tied_head_is_not_written_and_experts_are_in_the_published_form(tmp_path):
    our_model(moe=True, tie_word_embeddings=True).save_pretrained(tmp_path / "ours")
    hf_model(tiny_config(moe=True, tie_word_embeddings=True)).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / by / "model.safetensors") for by in ("ours", "theirs"))
    assert {k: t.shape for k, t in ours.items()} == {k: t.shape for k, t in theirs.items()}


def test_shards_and_index_are_in_hugging_faces_form(tmp_path):
    model = our_model(moe=True)
    save_sharded(model, tmp_path / "many", torch.bfloat16, 20_000)
    hf_model(tiny_config(moe=True)).bfloat16().save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    contents = {file.name: load_file(file) for file in files}
    for tensors in contents.values():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
    assert len(files) < sum(t.nbytes for ts in contents.values() for t in ts.values()) / 20_000 * 1.5  # well filled
    index = json.loads((tmp_path / "many" / INDEX_FILE).read_text())
    theirs = json.loads((tmp_path / "theirs" / INDEX_FILE).read_text())
    assert index["weight_map"] == {key: name for name, tensors in contents.items() for key in tensors}
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    save_sharded(model, tmp_path / "one", torch.bfloat16, 10**9)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    assert_same(
        dict(Qwen3ForCausalLM.from_pretrained(tmp_path / "many").named_parameters()),
        dict(Qwen3ForCausalLM.from_pretrained(tmp_path / "one").named_parameters()),
    )


@pytest.mark.parametrize("fused", [False, True], ids=["per-expert", "fused"])
def test_a_save_holds_one_shard_and_one_stack_of_experts(tmp_path, fused):
    """Counted in tensors that are filled in: each parameter once, and never a copy of a whole one beside the shard."""
    model = our_model(moe=True)
    parameters, largest_shard = dict(model.named_parameters()), 60_000
    filled: dict[str, int] = {}
    storages: dict[str, int] = {}

    def read(name: str, target: Tensor) -> None:
        target.copy_(parameters[name].detach())
        filled[name] = filled.get(name, 0) + target.numel()
        storages[name] = target.untyped_storage().nbytes()

    with new_folder(tmp_path / "model") as unfinished:
        shapes = parameter_shapes(model.config)
        hf.save_hf(unfinished, model.config, shapes, read, torch.bfloat16, largest_shard, fused)
    assert filled == {name: parameter.numel() for name, parameter in parameters.items()}
    files = [path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")]
    for name, storage in storages.items():  # the shard's buffer, or the stack that experts are taken from
        if ".experts." in name and not fused:
            assert storage == 2 * parameters[name].numel()
        else:
            assert storage <= max(files)


def test_bytes_are_deterministic(tmp_path):
    for name in ("a", "b"):
        save_sharded(our_model(moe=True), tmp_path / name, torch.bfloat16, 20_000)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_folder_with_something_in_it_is_left_untouched(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine too")
    for name in ("full", "file"):
        with pytest.raises(UserError, match=f"{name} exists and is not empty; nothing is overwritten"):
            our_model().save_pretrained(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "notes.txt"]
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    our_model().save_pretrained(tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("No space left on device"), (UserError, "model cannot be written: No space left on device")),
        (SafetensorError("I/O error"), (UserError, r"model-00002-of-\d+\.safetensors cannot be written: I/O error")),
        (KeyboardInterrupt(), (KeyboardInterrupt, None)),
    ],
    ids=["disk", "disk-in-safetensors", "ctrl-c"],
)
def test_an_error_midway_leaves_no_folder(tmp_path, monkeypatch, error, told):
    calls = []

    def save_two_then_fail(tensors, path, metadata):
        calls.append(path)
        save_file(tensors, path, metadata)
        if len(calls) == 2:
            raise error

    monkeypatch.setattr(hf, "save_file", save_two_then_fail)
    with pytest.raises(told[0], match=told[1]):
        save_sharded(our_model(), tmp_path / "model", torch.bfloat16, 20_000)
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save_sharded(our_model(), tmp_path / "model", torch.bfloat16, 20_000)  # and the next try works
    Qwen3ForCausalLM.from_pretrained(tmp_path / "model")


def test_what_a_killed_save_left_is_no_obstacle(tmp_path):
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished" / "model-00001-of-00009.safetensors").write_text("half")
    our_model().save_pretrained(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_two_writers_of_one_folder_do_not_mix(tmp_path):
    """The first to finish has the name; the other fails and leaves nothing."""
    with pytest.raises(OSError, match="not empty"), new_folder(tmp_path / "model") as slow:
        (slow / "from").write_text("slow")
        with new_folder(tmp_path / "model") as fast:
            (fast / "from").write_text("fast")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "from").read_text() == "fast"


# ------------------------------------------------------------------------------------------- several ranks, checkpoints


def write_cases(folder: Path, ranks: int) -> dict[str, dict[str, Tensor]]:
    """Model folders for tests/run_hf.py, each with what it holds in expected.safetensors, under our names."""
    few_experts = {"moe": True, "num_experts": ranks - 1, "num_experts_per_tok": 1, "tie_word_embeddings": True}
    odd_sizes = {
        "vocab_size": 133,
        "hidden_size": 37,
        "intermediate_size": 45,
        "head_dim": 6,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }
    cases = {  # name -> (config, arguments of save_pretrained)
        "dense-tied": (tiny_config(vocab_size=2504, tie_word_embeddings=True), {}),  # three blocks of rows to draw
        "dense-odd": (tiny_config(**odd_sizes, attention_bias=True), {"max_shard_size": "20KB"}),
        "moe": (tiny_config(moe=True), {"max_shard_size": "20KB"}),
        # 5 experts on 4 ranks: 2, 2, 1 and none
        "moe-odd": (tiny_config(moe=True, num_experts=5, **odd_sizes, moe_intermediate_size=15), {}),
        "moe-odd-fused": (tiny_config(moe=True, num_experts=5, **odd_sizes), {"save_original_format": False}),
        # fewer experts than ranks: torchtitan shards the dim after
        "moe-few": (tiny_config(**few_experts), {}),
        "moe-few-fused": (tiny_config(**few_experts), {"save_original_format": False}),
    }
    expected = {}
    for seed, (name, (config, how)) in enumerate(cases.items()):
        model = hf_model(config, seed)
        model.save_pretrained(folder / name, **how)
        expected[name] = {key: tensor.contiguous() for key, tensor in our_parameters(model).items()}
        save_file(expected[name], folder / name / "expected.safetensors")
    return expected


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.timeout(200)
def test_sharded(tmp_path, ranks):
    """The assertions about what each rank holds and reads are in tests/run_hf.py."""
    expected = write_cases(tmp_path / "models", ranks)
    output = succeeded(run_python("tests/run_hf.py", tmp_path / "models", tmp_path / "runs", ranks=ranks, timeout=150))
    for name, tensors in expected.items():
        assert f"{name}: ok" in output
        # The checkpoint, in this one process, without a process group.
        out = tmp_path / "runs" / name
        assert (out / "checkpoints" / "latest").resolve().name == "step_2"
        assert find_checkpoint(out) == out / "checkpoints" / "step_2"
        assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest", "step_1", "step_2"]
        for step in (1, 2):
            source = find_checkpoint(out / "checkpoints" / f"step_{step}")
            assert json.loads((source / "trainer.json").read_text()) == {"step": step}
            assert (source / "config.json").read_bytes() == (tmp_path / "models" / name / "config.json").read_bytes()
            parameters = {key: torch.full_like(tensor, torch.nan) for key, tensor in tensors.items()}
            read_checkpoint(source, parameters)
            assert_same(parameters, {key: tensor * step for key, tensor in tensors.items()})
        one = {EMBEDDING: torch.full_like(tensors[EMBEDDING], torch.nan)}  # as export.py does: one at a time
        read_checkpoint(find_checkpoint(out), one)
        assert torch.equal(one[EMBEDDING], tensors[EMBEDDING] * 2)


def test_a_run_without_a_complete_checkpoint_is_refused(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step_5.unfinished" / "weights").mkdir(parents=True)
    for path in (tmp_path / "run", tmp_path / "nowhere", tmp_path / "run" / "checkpoints" / "step_5.unfinished"):
        with pytest.raises(UserError, match=f"{path} is neither a run with a complete checkpoint"):
            find_checkpoint(path)
