"""Stands in for `nki.jit`: launch a kernel on one core, or with kernel[2] on two, each in a thread of its own.

Source: AWS's page "NKI Language Guide" (launch, logical cores). The two cores run one program with different
`nl.program_id(0)`. They meet in `nisa.sendrecv`; what they make in shared HBM is common, and each writes its part.
"""

import threading

import numpy as np
import torch

from tests.nki import cost
from tests.nki.lint import check_python
from tests.nki.memory import Buffer, NkiError, NkiTensor, check, whole

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int32: "int32"}


class jit:
    """@nki.jit of a top-level kernel. Calling it runs it on CPU tensors, and gives tensors of torch."""

    def __init__(self, fn):
        self.fn, self.num_cores = fn, 1
        check_python(fn)

    def __getitem__(self, num_cores: int) -> "jit":
        check(num_cores in (1, 2), f"kernel[{num_cores}]: a logical core has 1 or 2 physical ones")
        kernel = jit(self.fn)
        kernel.num_cores = num_cores
        return kernel

    def __call__(self, *args, **kwargs):
        args = [_input(arg) for arg in args]
        kwargs = {name: _input(arg) for name, arg in kwargs.items()}
        launch = cost.Launch(self.num_cores)
        results: list = [None] * self.num_cores

        def run(core: cost.Core) -> None:
            cost.set_core(core)
            ending: Exception = NkiError("the other core ended without a matching sendrecv")
            try:
                results[core.program_id] = self.fn(*args, **kwargs)
            except Exception as error:
                results[core.program_id] = error
                ending = cost.OtherCoreFailed()
            if self.num_cores == 2:
                launch.inbox[1 - core.program_id].put(ending)

        threads = [threading.Thread(target=run, args=[core], daemon=True) for core in launch.cores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [result for result in results if isinstance(result, Exception)]
        for error in sorted(errors, key=lambda error: isinstance(error, cost.OtherCoreFailed)):
            raise error
        check_launch(launch)
        stored = outputs_of(results)
        cost.add_launch(launch)
        tensors = tuple(_output(storage) for storage in stored)
        return tensors if isinstance(results[0], tuple) else tensors[0]


def check_launch(launch: cost.Launch) -> None:
    """What shows at the end: memory, and that device loops ran alike on both cores."""
    for core in launch.cores:
        for kind, limit, unit in (("sbuf", cost.SBUF_BYTES, "bytes a partition"), ("psum", cost.PSUM_BANKS, "banks")):
            peak, alive = core.peak(kind)
            largest = ", ".join(f"{lifetime.label}: {lifetime.size}" for lifetime in alive[:12])
            check(peak <= limit, f"{peak} {unit} of {kind.upper()} are alive at once, of {limit}: {largest}")
    trips = [core.trip_counts for core in launch.cores]
    check(all(each == trips[0] for each in trips), f"device loops ran differently on the two cores: {trips}")


def outputs_of(results: list) -> list[Buffer]:
    """The storage of what the kernel returned, on all cores the same."""
    outputs = [result if isinstance(result, tuple) else (result,) for result in results]
    for tensor in [tensor for output in outputs for tensor in output]:
        shared = isinstance(tensor, NkiTensor) and tensor.buffer == "shared_hbm"
        whole_one = shared and tensor.size == tensor.storage.size
        check(whole_one, f"a kernel returns whole tensors in shared_hbm, found {tensor!r}")
    stored = [[tensor.storage for tensor in output] for output in outputs]
    check(all(each == stored[0] for each in stored), "the cores return different tensors")
    return stored[0]


def _input(arg):
    """A tensor becomes HBM that the kernel only reads; anything else is a constant to the compiler."""
    if isinstance(arg, np.ndarray):
        arg = torch.from_numpy(arg)
    if not isinstance(arg, torch.Tensor):
        check(not isinstance(arg, list), "an argument is a list: kernels take tuples")
        return arg
    check(arg.dtype in DTYPES and arg.device.type == "cpu", f"an argument is {arg.dtype} on {arg.device}")
    strides = arg.stride()
    check(arg.is_contiguous(), f"an argument has strides {strides}: what a launch makes of them is not documented")
    values = arg.detach().float() if arg.dtype == torch.bfloat16 else arg.detach()
    # A copy: NumPy keeps the memory that it shares, and FSDP could not free its gathered weights any more.
    values = values.clone().numpy().reshape(-1)
    return whole(Buffer("input", tuple(arg.shape), DTYPES[arg.dtype], values))


def _output(storage: Buffer) -> torch.Tensor:
    values = torch.from_numpy(storage.values.reshape(storage.shape))
    return values.to(next(dtype for dtype, name in DTYPES.items() if name == storage.dtype))
