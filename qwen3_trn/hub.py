"""Downloads a model from the Hugging Face Hub: weights, configuration and tokenizer, never pickle or code.

    python -c "from qwen3_trn.hub import download; print(download('Qwen/Qwen3-0.6B', None))"

It fills huggingface_hub's own cache (snapshots/COMMIT/NAME links to blobs/HASH), so each uses what the other fetched.
The transfer is ours because `snapshot_download` of huggingface_hub 1.33 starts a file anew after a kill or a reset
connection, waits for ever on a silent server, and does not compare contents.
"""

import fnmatch
import hashlib
import io
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from huggingface_hub import HfApi, constants, errors, get_session, hf_hub_url, is_offline_mode, snapshot_download
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, hf_raise_for_status, validate_repo_id
from tqdm import tqdm

from qwen3_trn.errors import UserError

WEIGHTS = "*.safetensors"
# Qwen3 keeps its chat template in tokenizer_config.json; transformers 5 writes a chat_template.jinja.
WANTED = ["*.json", "merges.txt", "*.jinja"]
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may read it"
PATIENCE_S = 330.0  # without a new byte; the Hub's rate limits count in windows of 5 minutes
SILENCE_S = constants.HF_HUB_DOWNLOAD_TIMEOUT  # of a server that was asked; 10 unless the variable of this name is set
NUM_CONNECTIONS = 8


class RemoteFile(NamedTuple):
    name: str
    size: int  # bytes
    hash: str  # hexadecimal; SHA-256 of what is stored with Git LFS, as weights are, and git's SHA-1 of other files


class TransferError(Exception):
    """A transfer ended, but not with the file that the Hub announced."""


def download(model_id: str, revision: str | None, with_weights: bool = True) -> tuple[Path, str]:
    """Fetches what is not yet in the cache and returns the snapshot's folder and the commit hash it holds.

    `revision` is a branch, tag or commit hash, None main. Without weights it is configuration and tokenizer only.
    HF_HUB_OFFLINE=1 reads only the cache.

    A file counts when it has the size and the hash that the Hub announces. A transfer that broke, in this process or an
    earlier one, goes on where it was. After a lost connection, a damaged file, or status 408, 429 or 5xx it is tried
    again, with a line on the console, until PATIENCE_S have passed without a new byte. If the Hub fails, a full cache
    will do. Processes that share a cache, on one node or several, may call it at once: a file lock lets one of them
    fetch, and the others find what it fetched. Raises UserError.
    """
    revision = revision or constants.DEFAULT_REVISION
    try:
        validate_repo_id(model_id)
        if is_offline_mode():
            snapshot = _find_in_cache(model_id, revision, with_weights)
            if snapshot is None:
                raise UserError(f"HF_HUB_OFFLINE is set, and {_say_incomplete(model_id, revision)}")
        else:
            snapshot = _fetch_patiently(model_id, revision, with_weights)
    except errors.HFValidationError as error:
        found = f"{model_id!r} is neither a folder here nor a model id such as Qwen/Qwen3-0.6B"
        raise UserError(f"{found}: {error}") from error
    except (httpx.HTTPError, OSError) as error:
        raise UserError(_explain(model_id, revision, error)) from error
    if with_weights and (missing := _missing_weights(snapshot)):
        found = f"{model_id} at commit {snapshot.name} lacks weights: {', '.join(missing)}."
        raise UserError(f"{found} It is incomplete or has no safetensors: choose another --revision or --model.")
    return snapshot, snapshot.name


def _patterns(with_weights: bool) -> list[str]:
    return [*WANTED, WEIGHTS] if with_weights else WANTED


def _find_in_cache(model_id: str, revision: str, with_weights: bool) -> Path | None:
    patterns = _patterns(with_weights)
    try:
        folder = snapshot_download(
            model_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"], local_files_only=True
        )
    except errors.LocalEntryNotFoundError:
        return None
    snapshot = Path(folder)
    # For a snapshot that it has not listed itself, huggingface_hub asks no more than that the folder exists.
    is_whole = (snapshot / "config.json").is_file() and not (with_weights and _missing_weights(snapshot))
    return snapshot if is_whole else None


def _missing_weights(snapshot: Path) -> list[str]:
    index = snapshot / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        paths = sorted(name for name in names if Path(name).name != name or not name.endswith(".safetensors"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a safetensors index ({error!r}): choose another --revision.") from error
    if paths:  # an index must not make us read from outside its folder
        raise UserError(f"{index} names {paths[0]!r}; expected the name of a .safetensors file in the same folder.")
    return sorted(name for name in names if not (snapshot / name).is_file())


# -------------------------------------------------------------------------------------------------------- the transfer


def _fetch_patiently(model_id: str, revision: str, with_weights: bool) -> Path:
    received: dict[str, int] = {}
    num_bytes, num_tries, start = 0, 0, time.monotonic()
    while True:
        try:
            return _fetch(model_id, revision, with_weights, received)
        except (httpx.HTTPError, TransferError) as error:
            if snapshot := _find_in_cache(model_id, revision, with_weights):
                print(f"{_describe(error)}; the cache has {model_id} at commit {snapshot.name}", flush=True)
                return snapshot
            if not _may_pass(error):
                raise
            if sum(received.values()) > num_bytes:
                num_bytes, num_tries, start = sum(received.values()), 0, time.monotonic()
            num_tries += 1
            wait_s = max(min(2 ** (num_tries - 1), 60), _asked_wait(error))
            elapsed_s = time.monotonic() - start
            if elapsed_s + wait_s > PATIENCE_S:
                raise UserError(
                    f"{_describe(error)}. Given up at try {num_tries}, after {elapsed_s:.0f} s; the next would be in "
                    f"{wait_s} s. Run again later to go on where it broke: {_say_incomplete(model_id, revision)}"
                ) from error
            print(f"{_describe(error)}; next try in {wait_s} s", flush=True)
            time.sleep(wait_s)


def _may_pass(error: httpx.HTTPError | TransferError) -> bool:
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, TransferError | httpx.TimeoutException | httpx.NetworkError | httpx.RemoteProtocolError)


def _asked_wait(error: httpx.HTTPError | TransferError) -> int:
    """The seconds that the server asks to wait, 0 if it does not.

    They are in Retry-After (RFC 9110; its other form, a date, is ignored), or for status 429 in the Hub's RateLimit,
    whose t is the time until the window ends (https://huggingface.co/docs/hub/rate-limits).
    """
    if not isinstance(error, errors.HfHubHTTPError):
        return 0
    headers = error.response.headers
    match = re.fullmatch(r"(\d+)", headers.get("Retry-After", ""))
    if match is None and error.response.status_code == 429:
        match = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
    return int(match[1]) if match else 0


def _fetch(model_id: str, revision: str, with_weights: bool, received: dict[str, int]) -> Path:
    """One try. `received` is hash -> the most bytes that the file had in any try."""
    commit, files = _list_files(model_id, revision, with_weights)
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=model_id, repo_type="model"))
    snapshot = folder / "snapshots" / commit
    if not all(_is_whole(snapshot / file.name, file) for file in files):
        locks = Path(constants.HF_HUB_CACHE, ".locks", folder.name)
        for path in (locks, folder / "blobs"):
            path.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / "download.lock"):
            _fetch_blobs(model_id, commit, files, folder / "blobs", received)
            # Links come last, so that a download that was broken off leaves no snapshot that looks whole.
            snapshot.mkdir(parents=True, exist_ok=True)
            for file in files:
                link = snapshot / file.name
                if not _is_whole(link, file):
                    link.unlink(missing_ok=True)
                    link.symlink_to(Path("..", "..", "blobs", file.hash))
    ref = folder / "refs" / revision
    if revision != commit and not (ref.is_file() and ref.read_text() == commit):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    return snapshot


def _list_files(model_id: str, revision: str, with_weights: bool) -> tuple[str, list[RemoteFile]]:
    """The commit hash that `revision` is now, and the files of it that we want."""
    patterns = _patterns(with_weights)
    files = []
    try:
        info: Any = HfApi().model_info(model_id, revision=revision, timeout=SILENCE_S, files_metadata=True)
        for file in info.siblings:
            # Subfolders hold the model in other formats.
            if "/" not in file.rfilename and any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in patterns):
                digest = file.lfs.sha256 if file.lfs else file.blob_id
                files.append(RemoteFile(file.rfilename, int(file.size), digest))
        for digest in [info.sha, *(file.hash for file in files)]:
            if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest):
                raise ValueError(f"{digest!r} is no hash")
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{constants.ENDPOINT} does not answer as the Hugging Face Hub does ({type(error).__name__}): check "
            "HF_ENDPOINT, HF_TOKEN, and whether a proxy or a login page stands between."
        ) from error
    return info.sha, files


def _fetch_blobs(model_id: str, commit: str, files: list[RemoteFile], blobs: Path, received: dict[str, int]) -> None:
    # By hash, because two names may have one content.
    files = list({file.hash: file for file in files if not _is_whole(blobs / file.hash, file)}.values())
    stop = threading.Event()

    def fetch(file: RemoteFile) -> None:
        for num_bytes in _transfer(hf_hub_url(model_id, file.name, revision=commit), blobs / file.hash, file):
            most = received.get(file.hash, 0)
            received[file.hash] = max(most, num_bytes)
            progress.update(received[file.hash] - most)
            if stop.is_set():
                return

    total, start = sum(file.size for file in files), sum(received.get(file.hash, 0) for file in files)
    with (
        tqdm(total=total, initial=start, unit="B", unit_scale=True, desc="Downloading", disable=None) as progress,
        ThreadPoolExecutor(NUM_CONNECTIONS) as pool,
    ):
        try:
            futures = [pool.submit(fetch, file) for file in files]
            wait(futures)
        finally:
            stop.set()  # after Ctrl-C the threads end at their next chunk
    for future in futures:
        future.result()


def _transfer(url: str, blob: Path, file: RemoteFile) -> Iterator[int]:
    """Fetches what BLOB.incomplete lacks, then renames it to `blob`. Yields its number of bytes after each chunk."""
    incomplete = blob.with_name(f"{blob.name}.incomplete")
    incomplete.touch()
    with incomplete.open("r+b") as target:
        start = target.seek(0, os.SEEK_END)
        if start < file.size:
            headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={start}-"}
            with get_session().stream("GET", url, headers=headers, timeout=SILENCE_S) as response:
                if response.status_code == 416:  # it has no byte at `start`
                    target.truncate(0)
                    raise TransferError(f"{url} ended after {start} bytes, expected {file.size}")
                hf_raise_for_status(response)
                target.seek(start if response.status_code == 206 else 0)
                for chunk in response.iter_bytes():
                    target.write(chunk)
                    yield target.tell()
                    if target.tell() > file.size:
                        break
            if target.tell() < file.size:
                raise TransferError(f"{url} ended after {target.tell()} bytes, expected {file.size}")
        target.seek(0)
        if _hash(target, file) != file.hash:
            target.truncate(0)
            raise TransferError(f"{url} arrived damaged: expected {file.size} bytes with hash {file.hash}")
        os.fsync(target.fileno())
    if not _is_whole(blob, file):  # where file locks do nothing, another process may have been faster
        incomplete.replace(blob)


def _is_whole(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size


def _hash(content: io.BufferedIOBase, file: RemoteFile) -> str:
    if len(file.hash) == 64:
        return hashlib.file_digest(content, "sha256").hexdigest()
    content_bytes = content.read()
    return hashlib.sha1(b"blob %d\0%b" % (len(content_bytes), content_bytes), usedforsecurity=False).hexdigest()


# ------------------------------------------------------------------------------------------------------------ messages


def _describe(error: httpx.HTTPError | TransferError) -> str:
    if isinstance(error, TransferError):
        return str(error)
    if isinstance(error, errors.HfHubHTTPError):
        url, reason = error.response.url.copy_with(query=None), error.server_message or "no reason given"
        return f"{url} answered with status {error.response.status_code} ({reason})"
    return f"the connection to {error.request.url.copy_with(query=None)} failed ({error})"


def _say_incomplete(model_id: str, revision: str) -> str:
    found = f"{model_id} (revision {revision}) is not complete in the cache {constants.HF_HUB_CACHE}. "
    folder = "Without a connection, use --init DIR with a folder that holds the model; "
    copy = f"or run `hf download {model_id}` elsewhere, copy that cache, set HF_HOME to it and HF_HUB_OFFLINE=1."
    return found + folder + copy


def _explain(model_id: str, revision: str, error: Exception) -> str:
    """What to do about an error that another try does not cure."""
    hub = constants.ENDPOINT
    is_refused = isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model_id} has no revision {revision!r} on {hub}: give --revision a branch, tag or commit it has."
    if isinstance(error, errors.GatedRepoError):
        return f"{model_id} is gated and you have no access: ask for it on {hub}/{model_id}, then {LOG_IN}."
    if is_refused and "Invalid credentials" in str(error):
        return f"{hub} refused your token: {LOG_IN}; for a public model, unset HF_TOKEN."
    if is_refused or isinstance(error, errors.RepositoryNotFoundError):  # to strangers, private looks like missing
        return f"{model_id} was not found on {hub}: check the spelling. If it is private, {LOG_IN}."
    if isinstance(error, errors.HfHubHTTPError):
        return f"{model_id} could not be downloaded: {_describe(error)}."
    if isinstance(error, httpx.HTTPError):
        return f"{_describe(error)}, and {_say_incomplete(model_id, revision)}"
    return f"{model_id} could not be downloaded into {constants.HF_HUB_CACHE}: {error}"
