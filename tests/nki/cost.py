"""The core that is running a kernel: what its engines were asked to do, and how much memory was alive at once.

`record()` collects the launches inside a `with` block. The cycles are estimates of throughput: what the pages of the
instructions printed as "Estimated instruction cost" until SDK 2.26 ("nki.isa.nc_matmul" and so on), with the clocks and
fast modes of the "Trainium2 Architecture Guide for NKI". Expect 30% of error and more on small tiles. A kernel needs at
least the time of its busiest engine; nothing here schedules the engines against each other.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

SBUF_BYTES = 208 * 1024  # of a partition's 224 KiB, what is left beside the DMA engines' descriptor rings
PSUM_BANKS = 8
CLOCK_GHZ = {"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2, "dma": 1.0}  # "dma" counts nanoseconds
DMA_BYTES_PER_NS = 368  # 16 engines of 23 GB/s each
MIN_CYCLES = 64  # between the starts of two instructions of one engine
DYNAMIC_CYCLES = 600  # at least, where an on-chip address is known at run time only


@dataclass
class Lifetime:
    """When a tensor was made and last used, counted in instructions."""

    kind: str
    size: int  # bytes per partition, or banks of PSUM
    label: str
    start: int
    end: int
    usable: bool = True


class OtherCoreFailed(Exception):
    """This core cannot go on, because the other one has stopped with an error, which is the one to show."""


class Launch:
    """One run of a kernel on its cores, and what they share."""

    def __init__(self, num_cores: int):
        self.cores = [Core(self, program_id) for program_id in range(num_cores)]
        self.shared: list = []  # storage in shared HBM, in the order of creation
        self.lock = threading.Lock()
        self.inbox: list[queue.Queue] = [queue.Queue() for _ in self.cores]


@dataclass
class Core:
    """One core's run of one kernel."""

    launch: "Launch"
    program_id: int
    cycles: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLOCK_GHZ, 0.0))
    dma_bytes: int = 0
    instructions: int = 0  # of the program: a device loop's body counts once
    trip_counts: list[int] = field(default_factory=list)  # of each device loop
    lifetimes: list[Lifetime] = field(default_factory=list)
    num_shared: int = 0  # tensors in shared HBM that this core has asked for
    now: int = 0
    loop: list[tuple] | None = None  # the instructions of the device loop's iteration that is running

    def allocate(self, kind: str, size: int, label: str) -> Lifetime:
        """`size`: bytes per partition, or banks of PSUM."""
        self.lifetimes.append(Lifetime(kind, size, label, self.now, self.now))
        return self.lifetimes[-1]

    def use(self, lifetime: Lifetime) -> None:
        lifetime.end = self.now

    def spend(self, engine: str, cycles: float, what: tuple) -> None:
        """Count one instruction. `what` describes it as the compiler sees it, once for all iterations of a loop."""
        self.cycles[engine] += cycles
        self.now += 1
        if self.loop is None:
            self.instructions += 1
        else:
            self.loop.append(what)

    def exchange(self, values, description: tuple):
        """Give both to the other core, and return what it gives. Waits for it, or raises if it ends without."""
        inbox, other = self.launch.inbox[self.program_id], self.launch.inbox[1 - self.program_id]
        other.put((values, description))
        theirs = inbox.get()
        if isinstance(theirs, Exception):
            raise theirs
        return theirs

    def peak(self, kind: str) -> tuple[int, list[Lifetime]]:
        """The most that is alive at once, bytes per partition or banks, and what they were, the largest first."""
        mine = [lifetime for lifetime in self.lifetimes if lifetime.kind == kind]
        changes = np.zeros(self.now + 2, np.int64)
        for lifetime in mine:
            changes[lifetime.start] += lifetime.size
            changes[lifetime.end + 1] -= lifetime.size
        alive = changes.cumsum()
        at = int(alive.argmax())
        then = [lifetime for lifetime in mine if lifetime.start <= at <= lifetime.end]
        return int(alive[at]), sorted(then, key=lambda lifetime: -lifetime.size)


_running = threading.local()  # each core of a launch has a thread


def core() -> Core:
    """The core that is running."""
    if not hasattr(_running, "core"):
        raise RuntimeError("an instruction outside of a kernel: decorate the kernel with nki.jit")
    return _running.core


def set_core(one: Core) -> None:
    """Of this thread."""
    _running.core = one


class Record:
    """What launches did. Engines and cores work side by side: of two cores, the busier counts."""

    def __init__(self):
        self.launches: list[Launch] = []

    @property
    def cycles(self) -> dict[str, float]:
        """Of each engine, in its own clock; "dma" in nanoseconds."""
        return {
            name: sum(max(one.cycles[name] for one in launch.cores) for launch in self.launches) for name in CLOCK_GHZ
        }

    @property
    def time_us(self) -> dict[str, float]:
        """Each engine's busy time in microseconds."""
        return {name: cycles / CLOCK_GHZ[name] / 1000 for name, cycles in self.cycles.items()}

    @property
    def bound(self) -> str:
        """The busiest engine."""
        return max(self.time_us, key=self.time_us.__getitem__)

    @property
    def dma_bytes(self) -> int:
        """Bytes moved by a core."""
        return sum(max(one.dma_bytes for one in launch.cores) for launch in self.launches)

    @property
    def instructions(self) -> int:
        """Length of the programs; a device loop's body counts once."""
        return sum(max(one.instructions for one in launch.cores) for launch in self.launches)

    @property
    def sbuf_peak(self) -> int:
        """Bytes per partition: the sum of what is alive at once. A compiler may need more."""
        return max(one.peak("sbuf")[0] for launch in self.launches for one in launch.cores)

    @property
    def psum_peak(self) -> int:
        """Banks. A tensor takes whole ones."""
        return max(one.peak("psum")[0] for launch in self.launches for one in launch.cores)


_records: list[Record] = []


@contextmanager
def record() -> Iterator[Record]:
    """Collect the launches inside the block."""
    _records.append(Record())
    try:
        yield _records[-1]
    finally:
        _records.pop()


def add_launch(launch: Launch) -> None:
    for each in _records:
        each.launches.append(launch)


# Cycles of an instruction. Operands are NkiTensors; the longest one counts.


def _small(*tensors) -> bool:
    """16-bit, in SBUF and without gaps: what VectorE's fast modes want."""
    return all(t.itemsize == 2 and t.buffer == "sbuf" and t.is_contiguous() for t in tensors)


def _stride_factor(tensors) -> int:
    """An innermost stride above 16 bytes halves the bandwidth of SBUF and PSUM."""
    return 2 if any(t.shape[-1] > 1 and t.strides[-1] * t.itemsize > 16 for t in tensors) else 1


def elementwise(tensors, per_element: float = 1.0) -> float:
    """Of VectorE, ScalarE and GpSimd, from their operands with one element or more a lane and step."""
    longest = max(t.free_size for t in tensors)
    cycles = max(MIN_CYCLES, longest * per_element * _stride_factor(tensors))
    return max(cycles, DYNAMIC_CYCLES) if any(t.dynamic for t in tensors) else cycles


def copy(dst, src) -> float:
    """tensor_copy and tensor_scalar on VectorE: four 16-bit elements a cycle, two where strided or with PSUM."""
    if _small(dst, src):
        return elementwise([dst, src], 1 / 4)
    return elementwise([dst, src], 1 / 2 if dst.itemsize == src.itemsize == 2 else 1)


def two_tensors(dst, data1, data2) -> float:
    """tensor_tensor on VectorE: two reads of SBUF take turns, unless they are 16-bit or one is of PSUM."""
    fast = _small(dst, data1, data2) or "psum" in (data1.buffer, data2.buffer)
    return elementwise([dst, data1, data2], 1 if fast else 2)


def matmul(stationary, moving) -> float:
    """nc_matmul: a column of `moving` a cycle; the next stationary tile loads meanwhile. float32 takes four passes."""
    passes = 4 if moving.dtype == "float32" else 1
    return passes * max(min(MIN_CYCLES, stationary.free_size), moving.free_size)


def transpose(data) -> float:
    """nc_transpose on the tensor engine: a matmul of `data`, stationary, with an identity."""
    passes = 4 if data.dtype == "float32" else 1
    return passes * max(data.shape[0], min(MIN_CYCLES, data.free_size))


def dma(dst, src) -> tuple[int, float]:
    """Bytes and nanoseconds of a dma_copy. Its fixed 1.3 us of latency are left out: queues overlap it.

    Descriptors under 2 KiB lose bandwidth, by an assumed d / (d + 512); an SBUF side with few partitions reaches
    fewer of the 16 engines. AWS's pages give the two effects, not their size.
    """
    moved = max(dst.size * dst.itemsize, src.size * src.itemsize)
    descriptor = min(t.run() * t.itemsize for t in (dst, src))
    efficiency = 1.0 if descriptor >= 2048 else descriptor / (descriptor + 512)
    engines = min([16, *(-(-t.shape[0] // 8) for t in (dst, src) if t.on_chip)])
    return moved, moved / (DMA_BYTES_PER_NS * efficiency * engines / 16)


def dma_transpose(dst) -> tuple[int, float]:
    """Bytes and nanoseconds: at most 90% of a copy's rate."""
    moved = dst.size * dst.itemsize
    return moved, moved / (DMA_BYTES_PER_NS * 0.9)


def indexed_rows(rows: int) -> float:
    """GpSimd's cycles to write the descriptors of a gather or scatter: 1 us for 128 rows, a guess."""
    return rows / 128 * 1000 * CLOCK_GHZ["gpsimd"]
