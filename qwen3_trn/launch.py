"""Start and stop of a run on many processes: process group, work that only one does, signals, errors told once.

    launch.run(main)            # main() may use everything below; UserError becomes one message and exit code 1

Works under torchrun, and in a plain `python train.py` as a world of one.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from qwen3_trn.errors import UserError

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
NODE = int(os.environ.get("GROUP_RANK", 0))

_FOREVER = timedelta(days=30)
_STARTED = time.monotonic()


@functools.cache
def store() -> dist.Store:
    """The key-value store that the job's processes share; there before the process group is."""
    if WORLD_SIZE == 1:
        return dist.HashStore()
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    shared = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size=WORLD_SIZE,
        is_master=RANK == 0 and not agent_has_it,
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"qwen3_trn/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)


def init_process_group(backend: str, timeout_s: int) -> None:
    """Form the default process group. Do this before the accelerator is touched."""
    dist.init_process_group(
        backend, store=store(), rank=RANK, world_size=WORLD_SIZE, timeout=timedelta(seconds=timeout_s)
    )


def limit_waits(groups: Iterable[dist.ProcessGroup], timeout_s: int) -> None:
    """Set the timeout of a mesh's groups, to which torch (2.13) gives 30 minutes whatever the default group has."""
    for group in groups:
        _set_pg_timeout(timedelta(seconds=timeout_s), group)


def print0(*lines: str) -> None:
    """Print lines on rank 0 only."""
    if RANK == 0:
        print(*lines, sep="\n", flush=True)


def run_once(name: str, work: Callable[[], Any], per_node: bool = False) -> Any:
    """Let one process (a node, if per_node) do `work` while the others wait for its JSON-able result.

    The wait is on the store, so work that takes longer than a collective's timeout is no problem. If the work fails,
    every process raises UserError with its message.
    """
    is_worker = LOCAL_RANK == 0 if per_node else RANK == 0
    key = f"once/{name}/{NODE if per_node else 'job'}"
    if not is_worker:
        store().wait([key], _FOREVER)
        answer = json.loads(store().get(key))
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["result"]
    try:
        result = work()
    except BaseException as error:
        store().set(key, json.dumps({"error": str(error) or repr(error)}))
        raise
    store().set(key, json.dumps({"result": result}))
    return result


def tell_once(what: str, tell: Callable[[], None]) -> None:
    """Call `tell` on the first process that gets here with this text; the others return when it has been told.

    They wait because torchrun kills all processes as soon as one has exited.
    """
    key = f"tell/{hashlib.sha256(what.encode()).hexdigest()}"
    if store().add(key, 1) == 1:
        tell()
        store().set(key + "/told", "1")
    else:
        with contextlib.suppress(dist.DistError):  # the teller died; this process is about to exit too
            store().wait([key + "/told"], timedelta(seconds=10))


class StopFlag:
    """Set by SIGTERM, SIGINT or --max-minutes: the run should save and end after the step that is going on.

    From its making on, a first signal only sets the flag. A second one ends the process at once.
    """

    def __init__(self, max_minutes: float | None):
        self.reason: str | None = None
        self._deadline = math.inf if max_minutes is None else _STARTED + 60 * max_minutes
        self._signal_time: float | None = None
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def is_set(self) -> bool:
        if self.reason is None and time.monotonic() >= self._deadline:
            self.reason = "--max-minutes"
        return self.reason is not None

    def grace_left(self) -> str:
        """What there is to say about the time until torchrun kills this process; empty if it will not."""
        if self._signal_time is None or not dist.is_torchelastic_launched():
            return ""
        timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))  # torchrun's own default
        left = timeout - (time.monotonic() - self._signal_time)
        return f"; torchrun kills what still runs in {left:.0f} s, unless its --shutdown-timeout says otherwise"

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        # Schedulers signal every process, and torchrun passes on the signal that it got: twice at once is once.
        if self._signal_time is not None and now - self._signal_time > 1:
            os._exit(128 + number)
        if self._signal_time is None:
            self._signal_time = now
            self.reason = signal.Signals(number).name
            if RANK == 0:
                # Not print(), which the signal may have interrupted.
                text = f"{self.reason}: stopping after this step{self.grace_left()}. A second signal stops at once.\n"
                os.write(sys.stderr.fileno(), text.encode())


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGINT raise KeyboardInterrupt: where there is nothing to save, but folders to clean up."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(main: Callable[[], None]) -> NoReturn:
    """Call main() and exit. UserError, or what the file system refused, is one message, no traceback, and code 1.

    What went wrong also stands in torchrun's closing report.
    """
    interrupt_on_signals()
    reporter = get_error_handler()
    reporter.initialize()
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (UserError, OSError) as error:
        message = f"error: {error}"
        tell_once(message, lambda: print(message, file=sys.stderr, flush=True))
        error.__traceback__ = error.__cause__ = error.__context__ = None  # the report is to show the message alone
        reporter.record_exception(error)
        code = 1
    except KeyboardInterrupt:
        tell_once("interrupted", lambda: print("interrupted", file=sys.stderr, flush=True))
        code = 128 + signal.SIGINT
    except BaseException as error:
        traceback.print_exc()
        reporter.record_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's own tear-down, which would wait for a checkpoint's writer that waits for ranks that are
    # gone. And on a loaded machine a rank that was done has died there of SIGABRT, seldom and for a reason not found
    # (torch 2.13, gloo), which would turn a finished run into a failed one.
    os._exit(code)
