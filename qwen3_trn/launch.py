"""Start and stop of a run on many processes: process group, work that only one process does, errors told once.

    launch.run(main)            # main() may use everything below; UserError becomes one message and exit code 1

Works under torchrun, and in a plain `python train.py` as a world of one.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from qwen3_trn.errors import UserError

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
NODE = int(os.environ.get("GROUP_RANK", 0))

_FOREVER = timedelta(days=30)


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


def run(main: Callable[[], None]) -> NoReturn:
    """Call main() and exit. UserError, or what the file system refused, is one message, no traceback, and code 1."""
    code = 0
    try:
        main()
    except (UserError, OSError) as error:
        message = f"error: {error}"
        tell_once(message, lambda: print(message, file=sys.stderr, flush=True))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's own tear-down: on a loaded machine a rank that was done has died of SIGABRT, seldom and
    # for a reason not found (torch 2.13, gloo), which would turn a finished run into a failed one.
    os._exit(code)
