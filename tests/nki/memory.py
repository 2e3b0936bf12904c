"""Tensors of a kernel: where they live, how they are addressed, and what of them was written.

HBM is flat; SBUF and PSUM have up to 128 partitions, which are dim 0 of a tensor. Sources: AWS's pages "NKI Language
Guide", "NKI Access Patterns", "nki.language.ndarray" and "Trainium2 Architecture Guide for NKI".

bfloat16 is stored as float32 that is rounded to nearest even on every write, and counts as 2 bytes.
"""

import math

import numpy as np
import torch

from tests.nki import cost

PARTITIONS = 128
PSUM_BANK_BYTES = 2048  # per partition
MAX_DIMS = 5  # of an access pattern, with the partition dim
MAX_STRIDE = 2**15 - 1  # elements, on chip
MAX_COUNT = 2**16 - 1
ITEMSIZE = {"float32": 4, "bfloat16": 2, "int32": 4}
NUMPY_DTYPE = {"float32": np.float32, "bfloat16": np.float32, "int32": np.int32}
ON_CHIP = ("sbuf", "psum")


class NkiError(Exception):
    """A kernel broke a documented rule, or used what this interpreter does not have."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise NkiError(message)


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as they are stored in a tensor of this dtype: rounded to nearest even."""
    integers = np.issubdtype(values.dtype, np.integer)
    check(integers == (dtype == "int32"), f"a cast of {values.dtype} to {dtype}: its rules are not kept here")
    if dtype == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().float().numpy()
    return values.astype(NUMPY_DTYPE[dtype], copy=False)


class Register:
    """A 32-bit register of the device. Its value exists only when the kernel runs, so Python cannot compute with it."""

    def __init__(self, value: int | None = None):
        self.value = value

    def read(self) -> int:
        check(self.value is not None, "a register is read before it is loaded")
        return self.value

    def _not_python(self, *_):
        raise NkiError("a device register is not a Python number: use it as scalar_offset or as a loop bound")

    __index__ = __int__ = __float__ = __bool__ = __hash__ = __add__ = __radd__ = __sub__ = __rsub__ = _not_python
    __mul__ = __rmul__ = __floordiv__ = __mod__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _not_python


class Buffer:
    """The storage of one tensor. kind: input (HBM, read only), hbm, shared_hbm, sbuf or psum."""

    def __init__(self, kind: str, shape: tuple[int, ...], dtype: str, values: np.ndarray | None = None):
        check(dtype in ITEMSIZE, f"dtype {dtype!r}; this interpreter has {', '.join(ITEMSIZE)}")
        sizes = [type(size) is int and size > 0 for size in shape]
        check(len(shape) > 0 and all(sizes), f"shape {shape}: wants positive Python integers")
        if kind in ON_CHIP:
            check(len(shape) >= 2, f"a {kind} tensor has a partition dim and at least one free dim, found {shape}")
            check(shape[0] <= PARTITIONS, f"{shape[0]} partitions; there are {PARTITIONS}")
        self.kind, self.dtype, self.shape = kind, dtype, tuple(shape)
        self.size = math.prod(shape)
        self.row = self.size // shape[0]  # on chip, the elements of a partition
        if kind == "input":
            self.values, self.writer = values, None
        else:
            self.values = np.full(self.size, -1 if dtype == "int32" else math.nan, NUMPY_DTYPE[dtype])
            self.writer = np.zeros(self.size, np.uint8)  # 0, or 1 + the core that wrote the element
        # PSUM elements that an overwriting matmul has begun, so that another may accumulate on them.
        self.accumulating = np.zeros(self.size, bool) if kind == "psum" else None
        self.lifetime: cost.Lifetime | None = None

    @property
    def row_bytes(self) -> int:
        return self.row * ITEMSIZE[self.dtype]


class NkiTensor:
    """A view of a buffer: shape, strides and offset in elements, and at most one offset known only at run time."""

    def __init__(self, storage: Buffer, shape, strides, offset=0, scalar_offset=None, scalar_stride=0, rows=None):
        self.storage, self.shape, self.strides, self.offset = storage, tuple(shape), tuple(strides), offset
        self.scalar_offset, self.scalar_stride = scalar_offset, scalar_stride
        self.rows = rows  # SBUF tensor [P, 1]: the rows of the storage that dim 0 goes through

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def buffer(self) -> str:
        return "hbm" if self.storage.kind == "input" else self.storage.kind

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def on_chip(self) -> bool:
        return self.storage.kind in ON_CHIP

    @property
    def dynamic(self) -> bool:
        return self.scalar_offset is not None or self.rows is not None

    @property
    def free_size(self) -> int:
        """Elements of a partition."""
        return self.size // self.shape[0]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def run(self) -> int:
        """Elements in a row in memory, in the innermost dims; on chip and for indexed rows within one row of dim 0."""
        length = 1
        first = 1 if self.on_chip or self.rows is not None else 0
        for size, stride in reversed(list(zip(self.shape[first:], self.strides[first:], strict=True))):
            if size != 1 and stride != length:
                break
            length *= size
        return length

    def is_contiguous(self) -> bool:
        return self.run() == (self.free_size if self.on_chip else self.size)

    def __repr__(self) -> str:
        return f"{self.storage.kind}{list(self.shape)}:{self.dtype}"

    # Views

    def __getitem__(self, key) -> "NkiTensor":
        """Integers and slices. On chip an integer keeps dim 0, and a result has at least two dims; in HBM one."""
        check(not self.dynamic, "a view with a run-time offset cannot be sliced: put the slice into its pattern")
        keys = list(key) if isinstance(key, tuple) else [key]
        if ... in keys:
            at = keys.index(...)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        check(len(keys) <= self.ndim, f"{len(keys)} indices for {self}")
        keys += [slice(None)] * (self.ndim - len(keys))
        shape, strides, offset = [], [], self.offset
        for dim, (index, size, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            if type(index) is int:
                start = index + size if index < 0 else index
                check(0 <= start < size, f"index {index} in dim {dim} of {self}")
                offset += start * stride
                if dim == 0 and self.on_chip:
                    shape.append(1)
                    strides.append(stride)
                continue
            check(isinstance(index, slice), f"{self} is indexed by {type(index).__name__}: wants integers and slices")
            start, stop, step = (
                default if value is None else value
                for value, default in zip((index.start, index.stop, index.step), (0, size, 1), strict=True)
            )
            check(all(type(value) is int for value in (start, stop, step)), "a slice's bounds are Python integers")
            start, stop = (value + size if value < 0 else value for value in (start, stop))
            check(0 <= start < stop <= size and step > 0, f"slice {start}:{stop}:{step} in dim {dim} of {self}")
            check(step == 1 or dim > 0 or not self.on_chip, f"a partition dim is not sliced in steps, found {step}")
            offset += start * stride
            shape.append(-(-(stop - start) // step))
            strides.append(stride * step)
        while len(shape) < (2 if self.on_chip else 1):
            shape.append(1)
            strides.append(1)
        return NkiTensor(self.storage, shape, strides, offset)

    def ap(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0) -> "NkiTensor":
        """An access pattern over the whole storage: [stride, count] pairs in elements ("NKI Access Patterns").

        scalar_offset, a register or a [1, 1] int32 SBUF tensor, is read when the instruction runs and counts in steps
        of dim `indirect_dim`. vector_offset, a [P, 1] SBUF tensor, holds a row of a 2-D HBM tensor for each partition.
        """
        where = f"access pattern {pattern} of {self}"
        # Whether `offset` counts from a slice's start or from the storage's is told differently in AWS's pages.
        whole = not self.dynamic and self.size == self.storage.size and self.is_contiguous()
        check(whole, f"{where}: wants a whole tensor, not a slice of one")
        check(scalar_offset is None or vector_offset is None, f"{where}: one of scalar_offset and vector_offset")
        strides, shape = zip(*pattern, strict=True)
        offset = 0 if offset is None else offset
        integers = all(type(number) is int for number in (*strides, *shape, offset))
        check(integers and min(strides) >= 0 and min(shape) > 0, f"{where}: wants Python integers, and elements")
        if self.on_chip:
            check(strides[0] == self.storage.row, f"{where}: the first stride is a partition's {self.storage.row}")
        step = math.prod(self.shape[indirect_dim + 1 :])
        if scalar_offset is not None:
            check(indirect_dim > 0 or not self.on_chip, f"{where}: a partition offset is not dynamic")
            if isinstance(scalar_offset, NkiTensor):
                check_index(scalar_offset, (1, 1), "scalar_offset")
            else:
                check(isinstance(scalar_offset, Register), f"{where}: scalar_offset is a register or a [1, 1] tensor")
        if vector_offset is not None:
            check(not self.on_chip and self.ndim == 2 and indirect_dim == 0, f"{where}: indexed rows want 2-D HBM")
            check(strides[0] == self.shape[1], f"{where}: the first stride is a row's {self.shape[1]}")
            check_index(vector_offset, (shape[0], 1), "vector_offset")
        return NkiTensor(self.storage, shape, strides, offset, scalar_offset, step, vector_offset)

    # Access, when an instruction runs

    def start(self) -> int:
        """The first element's address in the storage, after the check that the whole view lies inside."""
        base = self.offset
        if self.scalar_offset is not None:
            value = self.scalar_offset
            base += self.scalar_stride * (value.read() if isinstance(value, Register) else int(value.read()[0, 0]))
        counted = list(zip(self.shape, self.strides, strict=True))
        if self.on_chip:
            partition, free = divmod(base, self.storage.row)
            free += sum((size - 1) * stride for size, stride in counted[1:])
            last = partition + self.shape[0] - 1
            inside = base >= 0 and free < self.storage.row and last < self.storage.shape[0]
        elif self.rows is not None:
            inside = base >= 0 and base + sum((size - 1) * stride for size, stride in counted[1:]) < self.strides[0]
        else:
            inside = base >= 0 and base + sum((size - 1) * stride for size, stride in counted) < self.storage.size
        check(inside, f"{self} at {base} is out of range of {self.storage.kind} {self.storage.shape}")
        return base

    def view(self, of: np.ndarray) -> np.ndarray:
        """`of`, an array as long as the storage, seen through this view."""
        strides = [stride * of.itemsize for stride in self.strides]
        return np.ndarray(self.shape, of.dtype, of, self.start() * of.itemsize, strides)

    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """The values of a view with indexed rows, at these rows: [len(rows), *shape[1:]]."""
        self.touch()
        shape = (self.storage.shape[0], *self.shape[1:])

        def pick(of: np.ndarray) -> np.ndarray:
            strides = [stride * of.itemsize for stride in self.strides]
            return np.ndarray(shape, of.dtype, of, self.start() * of.itemsize, strides)[rows]

        self.check_written(None if self.storage.writer is None else pick(self.storage.writer))
        return pick(self.storage.values)

    def read(self) -> np.ndarray:
        """The values, in this view's shape; reading what was never written is an error."""
        self.touch()
        self.check_written(None if self.storage.writer is None else self.view(self.storage.writer))
        return self.view(self.storage.values)

    def check_written(self, writer: np.ndarray | None) -> None:
        check(writer is None or bool((writer > 0).all()), f"{self} is read before it is written")
        own = self.storage.kind != "shared_hbm" or bool((writer == 1 + cost.core().program_id).all())
        check(own, f"{self} was written by the other core: nothing orders this read after that write")

    def write(self, values: np.ndarray, rows=slice(None)) -> None:
        """Store values, cast to this dtype, in these rows of dim 0, of as many elements."""
        self.check_writable()
        view = self.view(self.storage.values)
        view[rows] = cast(values, self.dtype).reshape(view[rows].shape)
        self.mark_written(self.view(self.storage.writer), rows)
        if self.storage.accumulating is not None:
            self.view(self.storage.accumulating)[rows] = False

    def check_writable(self) -> None:
        self.touch()
        check(self.rows is None, f"{self}: rows are gathered, not scattered")
        check(self.storage.kind != "input", f"{self} is an input: a kernel does not write its inputs")
        extent = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            check(size == 1 or stride >= extent, f"{self} is written with strides {self.strides}, which overlap")
            extent += stride * (size - 1)

    def mark_written(self, writer: np.ndarray, rows) -> None:
        """`writer`: who wrote each element, in this view's shape."""
        mine = 1 + cost.core().program_id
        if self.storage.kind != "shared_hbm":
            writer[rows] = mine
            return
        with cost.core().launch.lock:
            free = bool(((writer[rows] == 0) | (writer[rows] == mine)).all())
            check(free, f"both cores write the same elements of {self}")
            writer[rows] = mine

    def touch(self) -> None:
        """Note the use for the tensor's lifetime."""
        if self.storage.lifetime is not None:
            check(self.storage.lifetime.usable, f"{self} was declared in a device loop's body that has ended")
            cost.core().use(self.storage.lifetime)


def whole(storage: Buffer) -> NkiTensor:
    """The tensor of all of a buffer."""
    shape = storage.shape
    return NkiTensor(storage, shape, [math.prod(shape[dim + 1 :]) for dim in range(len(shape))])


def check_index(tensor: NkiTensor, shape: tuple[int, int], what: str) -> None:
    right = isinstance(tensor, NkiTensor) and (tensor.buffer, tensor.shape, tensor.dtype) == ("sbuf", shape, "int32")
    check(right, f"{what} is {tensor}: wants SBUF {list(shape)} int32")
