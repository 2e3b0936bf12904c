"""Hugging Face folders in and out: safetensors, config.json, and the files that go with them.

    load_hf("path/to/Qwen3-0.6B", config, dict(model.named_parameters()))   # each rank reads only what it owns
    save_hf(folder, config, shapes, read, torch.bfloat16)   # `read(name, target)` fills in one parameter at a time

Parameters carry Hugging Face's names, so reading is the identity but for the experts, which are stacked here [E, ...]
and on disk either one tensor an expert, the published form, or transformers 5's, gate above up in one.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qwen3_trn.config import Qwen3Config
from qwen3_trn.encode import TOKENIZER_FILES
from qwen3_trn.errors import UserError
from qwen3_trn.init import owned_part

INDEX_FILE = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# Everything beside the weights that a model folder needs, taken along from the folder that a run starts from.
COMPANION_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_proj|up_proj|down_proj)")
_PER_EXPERT_KEY = re.compile(r".*\.mlp\.experts\.\d+\.")
_FUSED_KEY = re.compile(r".*\.mlp\.experts\.(gate_up_proj|down_proj)$")
_READ_BYTES = 64 * 2**20  # what is read at once, so that memory does not grow with the largest tensor


class Piece(NamedTuple):
    """A tensor on disk that holds a parameter, or one expert of it."""

    key: str
    shape: tuple[int, ...]
    expert: int | None  # the piece is parameter[expert]
    offset: int  # the parameter's rows (dim -2) start here in the tensor: the up half of a fused gate_up_proj


def pieces_of(name: str, shape: torch.Size, fused: bool) -> Iterator[Piece]:
    """The tensors on disk that make up parameter `name`."""
    match = _EXPERTS.fullmatch(name)
    if not match:
        yield Piece(name, tuple(shape), None, 0)
        return
    prefix, leaf = match.groups()
    num_experts, rows, columns = shape
    if not fused:
        for expert in range(num_experts):
            yield Piece(f"{prefix}.{expert}.{leaf}.weight", (rows, columns), expert, 0)
    elif leaf == "down_proj":
        yield Piece(f"{prefix}.down_proj", tuple(shape), None, 0)
    else:
        yield Piece(f"{prefix}.gate_up_proj", (num_experts, 2 * rows, columns), None, rows if leaf == "up_proj" else 0)


class HFFolder:
    """The safetensors of a folder, opened: which file holds which tensor. Raises UserError if they are not whole."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}  # file name -> open handle
        self.file_of: dict[str, str] = {}  # tensor name -> file name
        index = self._read_index()
        for file in sorted(set(index.values())) if index else ["model.safetensors"]:
            if not (self.folder / file).is_file():
                hint = f"; {INDEX_FILE} names it. Download the folder again." if index else self._why_no_weights()
                raise UserError(f"{self.folder / file} does not exist{hint}")
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                size = (self.folder / file).stat().st_size
                raise UserError(
                    f"{self.folder / file} ({size} bytes) is not a whole safetensors file: {error}. It is truncated or "
                    "damaged; download or write it again."
                ) from error
            self.file_of |= dict.fromkeys(self._files[file].keys(), file)
        if index and index != self.file_of:
            wrong = sorted(key for key in index.keys() | self.file_of if index.get(key) != self.file_of.get(key))
            raise UserError(
                f"{self.folder / INDEX_FILE} disagrees with the files about {len(wrong)} tensors: {list_some(wrong)}. "
                "The folder mixes two versions; download or write it again."
            )
        self.fused = any(_FUSED_KEY.match(key) for key in self.file_of)
        if self.fused and any(_PER_EXPERT_KEY.match(key) for key in self.file_of):
            raise UserError(
                f"{self.folder} holds the experts twice: one tensor an expert, and fused (gate_up_proj). It is not "
                "knowable which is meant; remove one."
            )

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        if not path.is_file():
            return {}
        try:
            index = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'{path} is not a safetensors index (JSON with a "weight_map"): {error!r}.') from error
        for file in index.values():
            # A name, not a path: an index must not make us read from outside its folder.
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise UserError(f"{path} names {file!r}; expected the name of a .safetensors file in the same folder.")
        return index

    def _why_no_weights(self) -> str:
        if not self.folder.is_dir():
            return ": there is no such folder."
        others = sorted(
            path.name for path in self.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors")
        )
        return f". Only safetensors are read (never pickle); weight files found: {', '.join(others) or 'none'}."

    def view(self, key: str):
        """safetensors' lazy view of a tensor: get_shape(), get_dtype(), [slices] -> Tensor."""
        return self._files[self.file_of[key]].get_slice(key)

    def check(self, config: Qwen3Config, shapes: dict[str, torch.Size]) -> None:
        """Every tensor is accounted for: raises UserError listing what is missing, unexpected or mis-shaped."""
        expected = {p.key: p.shape for name, shape in shapes.items() for p in pieces_of(name, shape, self.fused)}
        if config.tie_word_embeddings and HEAD in self.file_of:
            expected[HEAD] = tuple(shapes[EMBEDDING])
        missing = sorted(expected.keys() - self.file_of.keys())
        unexpected = sorted(self.file_of.keys() - expected.keys())
        wrong = []
        for key in sorted(expected.keys() & self.file_of.keys()):
            view = self.view(key)
            if tuple(view.get_shape()) != expected[key]:
                wrong.append(f"{key} is {list(view.get_shape())}, expected {list(expected[key])}")
            elif view.get_dtype() not in ("BF16", "F16", "F32"):
                wrong.append(f"{key} has dtype {view.get_dtype()}, expected BF16, F16 or F32")
        problems = []
        if missing == [HEAD] and not config.tie_word_embeddings:
            problems.append(f"config.json says tie_word_embeddings false, but there is no {HEAD} in the files")
        elif missing:
            problems.append(f"missing {len(missing)}: {list_some(missing)}")
        if unexpected:
            problems.append(f"unexpected {len(unexpected)}: {list_some(unexpected)}")
        if wrong:
            problems.append(f"mis-shaped {len(wrong)}: {list_some(wrong)}")
        if problems:
            raise UserError(f"the weights in {self.folder} do not fit its config.json: " + "; ".join(problems) + ".")
        if config.tie_word_embeddings and HEAD in self.file_of and not self._equal(HEAD, EMBEDDING):
            raise UserError(
                f"{self.folder}: config.json says tie_word_embeddings true, but {HEAD} differs from {EMBEDDING}. Set "
                f"tie_word_embeddings to false if the head is meant, or remove {HEAD}."
            )

    def _equal(self, key: str, other: str) -> bool:
        a, b = self.view(key), self.view(other)
        num_rows, columns = a.get_shape()
        step = max(1, _READ_BYTES // (4 * columns))
        return all(torch.equal(a[r : r + step], b[r : r + step]) for r in range(0, num_rows, step))

    def read(self, parameters: dict[str, Tensor]) -> None:
        """Copy the slices that this rank owns into `parameters` (plain tensors or DTensors of any float dtype)."""
        for name, parameter in parameters.items():
            for _, target, tensor in self.parts(name, parameter):
                target.copy_(tensor)

    def parts(self, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """What this rank owns of a parameter, a bounded part at a time.

        Yields (name on disk, view of the parameter, what the files hold for it in their dtype).
        """
        local, owned = owned_part(parameter)
        for piece in pieces_of(name, parameter.shape, self.fused):
            if piece.expert is None:
                yield from self._parts_of(piece, owned, local)
            elif owned[0].start <= piece.expert < owned[0].stop:
                yield from self._parts_of(piece, owned[1:], local[piece.expert - owned[0].start])

    def _parts_of(self, piece: Piece, owned: tuple[slice, ...], target: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        if target.numel() == 0:
            return
        view = self.view(piece.key)
        row_dim = max(len(owned) - 2, 0)
        if piece.offset:
            rows = owned[row_dim]
            owned = (
                *owned[:row_dim],
                slice(rows.start + piece.offset, rows.stop + piece.offset),
                *owned[row_dim + 1 :],
            )
        first, *rest = owned
        step = max(1, _READ_BYTES // (4 * max(1, target[0].numel())))
        for start in range(first.start, first.stop, step):
            stop = min(start + step, first.stop)
            yield piece.key, target[start - first.start : stop - first.start], view[slice(start, stop), *rest]


def load_hf(folder: str | Path, config: Qwen3Config, parameters: dict[str, Tensor]) -> None:
    """Check a Hugging Face folder against all of a model's parameters and read this rank's slices into them."""
    source = HFFolder(folder)
    source.check(config, {name: parameter.shape for name, parameter in parameters.items()})
    source.read(parameters)


def save_hf(
    folder: Path,
    config: Qwen3Config,
    shapes: dict[str, torch.Size],
    read: Callable[[str, Tensor], object],
    dtype: torch.dtype,
    max_shard_bytes: int = 5_000_000_000,
    fused: bool = False,
) -> None:
    """Write config.json and safetensors of at most max_shard_bytes (with an index when more than one) to a folder.

    `read(name, target)` copies a whole parameter into a tensor of `dtype`. The shard that is being filled is held, and
    one stack of experts while they are written one tensor each, which is the published form; `fused` writes a layer's
    experts as two tensors, transformers 5's form. A tensor larger than max_shard_bytes gets a file of its own. A tied
    head is not written. Raises UserError if a file cannot be written.
    """
    sources: dict[str, list[tuple[str, Piece]]] = {}  # tensor on disk -> what it is made of: gate and up where fused
    for name, shape in shapes.items():
        for piece in pieces_of(name, shape, fused):
            sources.setdefault(piece.key, []).append((name, piece))
    sizes = {key: math.prod(parts[0][1].shape) for key, parts in sources.items()}
    shards = _plan_shards(sizes, max_shard_bytes // dtype.itemsize)
    # One buffer for all shards: thousands of small tensors, made and freed again, leave holes that no one gives back.
    buffer = torch.empty(max(sum(sizes[key] for key in shard) for shard in shards), dtype=dtype)
    weight_map: dict[str, str] = {}
    stack_name, stack = "", torch.empty(0)
    for number, shard in enumerate(shards, start=1):  # file names carry the number of shards
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        start = 0
        for key in shard:
            tensors[key] = tensor = buffer[start : start + sizes[key]].view(sources[key][0][1].shape)
            start += sizes[key]
            weight_map[key] = file
            for name, piece in sources[key]:
                if piece.expert is not None:
                    if stack_name != name:
                        stack_name, stack = name, torch.empty(shapes[name], dtype=dtype)
                        read(name, stack)
                    tensor.copy_(stack[piece.expert])
                elif tensor.shape == shapes[name]:
                    read(name, tensor)
                else:
                    read(name, tensor.narrow(-2, piece.offset, shapes[name][-2]))
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"{folder / file} cannot be written: {error}. Is the disk full?") from error
    if len(shards) > 1:
        total_bytes = dtype.itemsize * sum(sizes.values())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(
        json.dumps(config.to_dict(DTYPE_NAMES[dtype]), indent=2) + "\n", encoding="utf-8"
    )


def _plan_shards(sizes: dict[str, int], max_size: int) -> list[list[str]]:
    """Tensors in order, file by file: a file is closed when the next tensor would not fit."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shards[-1] and filled + size > max_size:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    return shards


def copy_companions(source: Path, target: Path) -> None:
    """Copy config, generation config and tokenizer files, those that are there; `target` is made if needed."""
    target.mkdir(exist_ok=True)
    for name in COMPANION_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def add_stop_tokens(folder: Path, ids: list[int]) -> None:
    """Let generation_config.json, made if it is missing, stop at these tokens beside those it stops at."""
    path = folder / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path.name} is not JSON: {error}. Mend it, or remove it to have one made.") from error
    old = config.get("eos_token_id")
    old = [] if old is None else old if isinstance(old, list) else [old]
    config["eos_token_id"] = list(dict.fromkeys([*ids, *old]))
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def list_some(items: list[str], most: int = 8) -> str:
    """ "a, b, and 3 more"."""
    return ", ".join(items[:most]) + (f", and {len(items) - most} more" if len(items) > most else "")
