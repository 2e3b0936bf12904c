"""Folders that appear whole: written under another name, synced to disk, then renamed.

with new_folder("my-model") as unfinished:
    (unfinished / "config.json").write_text("{}")
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from qwen3_trn.errors import UserError

UNFINISHED = ".unfinished"  # in the names of what is not complete


@contextlib.contextmanager
def new_folder(folder: str | Path, replace: bool = False) -> Iterator[Path]:
    """Yields a folder to write into; it gets its name, by one rename, only when the body is through and all is synced.

    Raises UserError if `folder` is there already and not empty, unless it may be replaced, or if a write fails. After
    an error the unfinished folder is removed.
    """
    folder = Path(folder).resolve()
    if not replace and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; nothing is overwritten. Name another folder, or remove it.")
    # A name of its own, so that two processes that write the same folder do not write into each other's.
    unfinished = folder.with_name(f"{folder.name}{UNFINISHED}-{uuid.uuid4().hex[:8]}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        publish(unfinished, folder, replace)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # a write that fails does not say where it was
            raise UserError(f"{folder} cannot be written: {error}.") from error
        raise


def publish(unfinished: Path, folder: Path, replace: bool = False) -> None:
    """fsync all below `unfinished`, then rename it to `folder`; raises OSError if that holds something it must keep."""
    for path in [*unfinished.rglob("*"), unfinished]:
        fsync(path)
    if replace and folder.is_dir():
        old = folder.rename(unfinished.with_name(unfinished.name + "-old"))
        unfinished.rename(folder)
        shutil.rmtree(old)
    else:
        if folder.is_dir():
            folder.rmdir()
        unfinished.rename(folder)
    fsync(folder.parent)


def fsync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
