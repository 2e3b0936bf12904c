"""A test-only interpreter for the part of AWS's Neuron Kernel Interface (NKI) that our kernels use.

AWS's `nki` wheel is not on the default package index, and a kernel runs only on Trainium. So that the kernels can be
tested anywhere, `install()` puts modules named `nki`, `nki.language` and `nki.isa` in place where the wheel is absent.
They execute a kernel with NumPy, one instruction after another, and stop with `NkiError` where it breaks a limit that
AWS documents for Trainium2. They also count what each engine would have to do.

    import tests.nki
    tests.nki.install()
    from qwen3_trn.kernels import nki_moe  # imports nki
    with tests.nki.record() as r:
        outputs = some_kernel[2](x, ids)   # torch or NumPy arrays; [2]: on two cores
    print(r.cycles["tensor"], r.time_us, r.dma_bytes, r.sbuf_peak, r.psum_peak)

    memory.py     tensors in HBM, SBUF and PSUM, access patterns, what was written
    cost.py       the running core: cycles, bytes, lifetimes, peaks; `record`
    language.py   nki.language: dtypes, buffers, operators, device loops
    isa.py        nki.isa: the instructions with their limits
    lint.py       the Python that a kernel may use
    jit.py        nki.jit: a launch on one or two cores

What this cannot show: how the compiler places tensors and whether it spills; ordering between DMA queues and engines
(instructions run here in program order); the hardware's approximations of silu, exp and so on, and its order of
summation; any legality beyond the rules listed in these files; real time. A kernel that passes here has not run on
Trainium.
"""

import importlib
import sys
from types import ModuleType

import torch

from tests.nki import isa, language
from tests.nki.cost import record
from tests.nki.jit import jit
from tests.nki.memory import NkiError

__all__ = ["NkiError", "install", "record"]


def install() -> bool:
    """Make `import nki` find this interpreter, unless AWS's wheel is there. Returns whether the interpreter is in.

    And `import torch_neuronx`, where absent, a module with `nki_op`, by which kernels become operations of torch.
    """
    if not _importable("nki.language"):
        package = ModuleType("nki", "Stands in for AWS's nki wheel: tests/nki/__init__.py.")
        package.jit, package.language, package.isa = jit, language, isa
        sys.modules |= {"nki": package, "nki.language": language, "nki.isa": isa}
    if not _importable("torch_neuronx"):
        binding = ModuleType("torch_neuronx", "Stands in for AWS's torch_neuronx: tests/nki/__init__.py.")
        binding.nki_op = nki_op
        sys.modules["torch_neuronx"] = binding
    return sys.modules["nki.language"] is language


def nki_op(name, fn=None, mutates_args=()):
    """As torch_neuronx.nki_op: a custom operation of torch from an annotated function; also a decorator."""
    return torch.library.custom_op(name, fn, mutates_args=tuple(mutates_args))


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True
