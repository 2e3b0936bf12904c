"""Watch that a step runs the same shapes as the steps before it: a device that compiles each shape stops to compile.

guard = ShapeGuard(record=True)
for batch in batches:
    with guard.step():
        forward_backward(model, batch, ...)
    print(guard.changes())                       # what the first two steps did not run
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARM_UP_STEPS = 2  # the second may still be new: the optimizer's state is made in the first


class _Recorder(TorchDispatchMode):
    """Collects each operation with the dtypes and shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # they come again as operations on plain tensors
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shapes = (f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
        self.programs.add(f"{func}({', '.join(shapes)})")
        return func(*args, **(kwargs or {}))


class ShapeGuard:
    """Counts what the steps run: graphs that torch.compile made, and, with `record`, each (operation, shapes).

    Recording takes some microseconds an operation, and torch.compile does not run under it: it is for eager steps.
    """

    def __init__(self, record: bool):
        self.num_graphs = 0
        self.num_late_graphs = 0  # made after the warm-up
        self._num_steps = 0
        self._recorder = _Recorder() if record else None
        self._known: set[str] = set()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch what runs inside as one step."""
        before = counters["stats"]["unique_graphs"]
        self._num_steps += 1
        with self._recorder or contextlib.nullcontext():
            yield
        made = counters["stats"]["unique_graphs"] - before
        self.num_graphs += made
        self.num_late_graphs += made if self._num_steps > WARM_UP_STEPS else 0

    def changes(self) -> list[str]:
        """The operations and shapes that are new since the last call; none while the warm-up lasts."""
        programs = self._recorder.programs if self._recorder else set()
        new = sorted(programs - self._known) if self._num_steps > WARM_UP_STEPS else []
        self._known |= programs
        return new
