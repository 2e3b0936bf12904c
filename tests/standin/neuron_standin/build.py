"""Compile the stand-in's C++ into build/standin of the repository, unless it is there, and load it.

python tests/standin/neuron_standin/build.py
"""

import fcntl
import functools
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from types import ModuleType

import torch

TORCH_VERSION = "2.13.0"  # c10's internals move between releases; on another one nothing here can be trusted
NAME = "neuron_standin_ext"
_SOURCES = Path(__file__).parent / "csrc"
_BUILD = Path(__file__).parents[3] / "build" / "standin"


def check_torch() -> None:
    """Raises RuntimeError on any other torch than the one that this was written for."""
    if torch.__version__.split("+")[0] != TORCH_VERSION:
        raise RuntimeError(f"the neuron stand-in is for torch {TORCH_VERSION}; this is {torch.__version__}")


def library() -> Path:
    """Where the library of these sources and this torch is, or will be."""
    digest = hashlib.sha256(torch.__version__.encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return _BUILD / digest.hexdigest()[:16] / f"{NAME}.so"


def build() -> None:
    """Compile, if need be. Processes that come at the same time wait for the first."""
    check_torch()
    target = library()
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        from torch.utils import cpp_extension

        # A folder of its own, because a killed build leaves torch's own lock behind, which the next would wait for.
        with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
            cpp_extension.load(
                name=NAME,
                sources=[str(_SOURCES / "standin.cpp")],
                extra_cflags=["-O1", "-g0", "-Wno-attributes"],
                build_directory=folder,
                is_python_module=False,
            )
            target.parent.mkdir(exist_ok=True)
            os.replace(Path(folder) / f"{NAME}.so", target)


@functools.cache
def load() -> ModuleType:
    """The library, which must be there: csrc/standin.cpp says what it offers."""
    check_torch()
    if not library().exists():
        raise RuntimeError(f"the neuron stand-in is not built. Without it on PYTHONPATH run: python {__file__}")
    spec = importlib.util.spec_from_file_location(NAME, library())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    build()
