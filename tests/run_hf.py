"""What each rank reads, holds, draws and saves. Run by test_hf.py:

torchrun --nproc_per_node=N tests/run_hf.py MODELS RUNS

MODELS/NAME are model folders with the parameters in expected.safetensors; checkpoints are written to RUNS/NAME.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from qwen3_trn import launch
from qwen3_trn.config import Qwen3Config
from qwen3_trn.device import Device
from qwen3_trn.hf import EMBEDDING, HEAD, HFFolder, load_hf
from qwen3_trn.model import Qwen3ForCausalLM
from qwen3_trn.parallel import build_mesh, build_model, check_layout
from tests.common import save_checkpoint


class CountingView:
    """safetensors' view of a tensor that adds up the bytes it hands out."""

    bytes_read = 0

    def __init__(self, view):
        self.view = view

    def __getattr__(self, name):
        return getattr(self.view, name)

    def __getitem__(self, index):
        tensor = self.view[index]
        CountingView.bytes_read += tensor.nbytes
        return tensor


def local_part(parameter: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """What torch says that this rank holds of `whole`: by another way than qwen3_trn.init.owned_part."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, parameter.device_mesh, parameter.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def assert_holds(parameters: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each rank's part, and what the ranks hold together, is `expected`."""
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor), name
        assert torch.equal(parameter.to_local(), local_part(parameter, expected[name])), name
        assert torch.equal(parameter.full_tensor(), expected[name]), name


def check(folder: Path, out: Path) -> None:
    device, dims = Device(), build_mesh(launch.WORLD_SIZE)
    config = Qwen3Config.from_pretrained(folder)
    expected = load_file(folder / "expected.safetensors")
    check_layout(config, dims, 32)
    model = build_model(config, dims, device, torch.float32)
    parameters = dict(model.named_parameters())
    if 0 < config.num_experts < launch.WORLD_SIZE:
        assert {p.placements[0].dim for name, p in parameters.items() if ".experts." in name} == {1}

    # Random weights: the ranks together draw what one process draws.
    model.init_weights(seed=7)
    with torch.device("cpu"):
        alone = Qwen3ForCausalLM(config)
    alone.init_weights(seed=7)
    assert_holds(parameters, {name: parameter.detach() for name, parameter in alone.named_parameters()})

    # Weights from the folder, into nan so that nothing can be left out. Only what is owned is read, and once.
    for parameter in parameters.values():
        parameter.to_local().detach().fill_(torch.nan)
    CountingView.bytes_read = 0
    plain_slice = HFFolder.view
    HFFolder.view = lambda self, key: CountingView(plain_slice(self, key))
    load_hf(folder, config, parameters)
    HFFolder.view = plain_slice
    assert_holds(parameters, expected)
    own_bytes = sum(parameter.to_local().nbytes for parameter in parameters.values())
    assert CountingView.bytes_read == own_bytes, (CountingView.bytes_read, own_bytes)
    read_together = torch.tensor(CountingView.bytes_read)
    dist.all_reduce(read_together)
    files = [load_file(file) for file in folder.glob("model*.safetensors")]
    assert read_together.item() == sum(tensor.nbytes for tensors in files for tensor in tensors.values())

    # A tied head is one parameter, also after a step.
    tied = config.tie_word_embeddings
    for _ in range(2):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert (HEAD in dict(model.named_parameters())) != tied
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        assert len(optimizer.param_groups[0]["params"]) == len(parameters)
        head, embedding = model.lm_head.weight.to_local(), model.model.embed_tokens.weight.to_local()
        assert (head.data_ptr() == embedding.data_ptr()) == tied
        assert torch.equal(model.lm_head.weight.full_tensor(), expected[HEAD if HEAD in expected else EMBEDDING])
        if not tied:
            break
        ids = torch.arange(17)[None]
        model.loss(ids[:, :-1], ids[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = model.model.embed_tokens.weight.full_tensor().detach()
        assert not torch.equal(whole, expected[EMBEDDING])
        expected[EMBEDDING] = whole
        parameters = dict(model.named_parameters())

    # Two checkpoints; test_hf.py reads them in one process.
    load_hf(folder, config, parameters)
    for step in (1, 2):
        for parameter in parameters.values():
            parameter.to_local().detach().mul_(step)
        save_checkpoint(out, step, model, {}, companions=folder)


def main() -> None:
    launch.init_process_group("gloo", 240)
    torch.set_num_threads(1)
    models, runs = map(Path, sys.argv[1:])
    for folder in sorted(models.iterdir()):
        check(folder, runs / folder.name)
        if launch.RANK == 0:
            print(f"{folder.name}: ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)
