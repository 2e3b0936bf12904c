"""Settings of every test: one thread a process, since the models are tiny and several processes share two cores."""

import os
import subprocess
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """One token cache for the whole session, away from the user's."""
    folder = tmp_path_factory.getbasetemp() / "token-cache"
    monkeypatch.setenv("QWEN3_TRN_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory):
    """A folder such as the hub has, with random weights of the bundled miniature."""
    from qwen3_trn import Qwen3Config, Qwen3ForCausalLM
    from qwen3_trn.hf import copy_companions
    from tests.common import TINY

    folder = tmp_path_factory.mktemp("random") / "model"
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(TINY)).save_pretrained(folder)
    copy_companions(TINY, folder)
    return folder


@pytest.fixture
def interpreted(monkeypatch) -> Iterator[bool]:
    """Stand-ins for AWS's packages where they are missing, for this test only. Whether the interpreter of NKI is in."""
    import tests.nki

    monkeypatch.setenv("NKI_SIMULATOR", "1")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    before = sys.modules.copy()
    yield tests.nki.install()
    for name in ("nki", "nki.language", "nki.isa", "torch_neuronx"):
        if name not in before:
            del sys.modules[name]


@pytest.fixture
def record(interpreted):
    """tests.nki.record, which counts cycles and bytes."""
    import tests.nki

    if not interpreted:
        pytest.skip("AWS's simulator does not count cycles and bytes")
    return tests.nki.record


@pytest.fixture(scope="session")
def standin() -> dict[str, str]:
    """The environment of a process that has the device `neuron` of tests/standin, which is compiled here if need be."""
    from tests.common import REPO
    from tests.standin.neuron_standin import build

    try:
        build.check_torch()
    except RuntimeError as error:
        pytest.skip(str(error))
    process = subprocess.run([sys.executable, build.__file__], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return {"PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tests" / "standin")])}
