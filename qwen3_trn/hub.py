"""Downloads a model from the Hugging Face Hub: weights, configuration and tokenizer, never pickle or code.

    python -c "from qwen3_trn.hub import download; print(download('Qwen/Qwen3-0.6B', None))"

`huggingface_hub` does the work, also over Xet, and its file locks let one process of those that share a cache fetch a
file. Here: which files we accept, patience with a Hub in trouble, the comparison of what came with the Hub's hashes,
and one clear error for each way to fail.
"""

import json
import re
import sys
import time
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, errors, get_session, is_offline_mode, snapshot_download
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from qwen3_trn.errors import UserError

WEIGHTS = "*.safetensors"
# Qwen3 keeps its chat template in tokenizer_config.json; transformers 5 writes a chat_template.jinja.
WANTED = ["*.json", "merges.txt", "*.jinja"]
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may read it"
# Of tries in vain. The Hub's rate limits count in windows of 5 minutes (https://huggingface.co/docs/hub/rate-limits).
PATIENCE_S = 330.0
SILENCE_S = 30.0  # of a Hub that was asked for something other than a file


class DamagedError(Exception):
    """What came is not what the Hub says it should be."""


def download(model_id: str, revision: str | None, with_weights: bool = True) -> tuple[Path, str]:
    """Fetches what is not yet in the cache and returns the snapshot's folder and the commit hash it holds.

    `revision` is a branch, tag or commit hash, None main. Without weights it is configuration and tokenizer only.
    HF_HUB_OFFLINE=1 reads only the cache.

    A transfer that breaks goes on where it was; after a kill, with the first file that was not complete. What may pass
    (a lost connection, status 408, 429 and 5xx, a damaged file) is tried again, with a line on the console, until
    PATIENCE_S have passed without a new file. If the Hub is out of reach, a full cache will do. Raises UserError.
    """
    try:
        validate_repo_id(model_id)
    except errors.HFValidationError as error:
        found = f"{model_id!r} is neither a folder here nor a model id such as Qwen/Qwen3-0.6B"
        raise UserError(f"{found}: {error}") from error
    revision = revision or constants.DEFAULT_REVISION
    if not sys.stderr.isatty():
        disable_progress_bars()
    if _limit_silence not in get_session().event_hooks["request"]:
        get_session().event_hooks["request"].append(_limit_silence)
    files_before = num_files = _count_files(model_id)
    num_tries, start = 0, time.monotonic()
    while True:
        try:
            snapshot = snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=[*WANTED, WEIGHTS] if with_weights else WANTED,
                ignore_patterns=["*/*"],  # subfolders hold the model in other formats
                local_files_only=is_offline_mode(),
            )
            folder = Path(snapshot)
            if _count_files(model_id) > files_before:  # hashing takes time, so not for what was there already
                _compare_hashes(model_id, folder)
            break
        except (ValueError, LookupError, TypeError, AssertionError) as error:  # the client trusts what it is answered
            raise UserError(
                f"{constants.ENDPOINT} does not answer as the Hugging Face Hub does ({error!r}): check HF_ENDPOINT, "
                "and whether a proxy or a login page stands between."
            ) from error
        except (httpx.HTTPError, OSError, DamagedError) as error:
            # Before it gives up, the client looks into the cache: "not in the cache" then hides why it had to.
            cause = (isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__) or error
            if not _may_pass(cause):
                raise UserError(_explain(model_id, revision, cause)) from error
            if (files_now := _count_files(model_id)) > num_files:
                num_files, num_tries, start = files_now, 0, time.monotonic()
            num_tries += 1
            wait_s = max(min(2 ** (num_tries - 1), 60), _asked_wait(cause))
            elapsed_s = time.monotonic() - start
            if elapsed_s + wait_s > PATIENCE_S:
                raise UserError(
                    f"{_describe(cause)}. Given up at try {num_tries}, after {elapsed_s:.0f} s; the next would be in "
                    f"{wait_s} s. Run again later to go on: {_say_incomplete(model_id, revision)}"
                ) from error
            print(f"{_describe(cause)}; next try in {wait_s} s", flush=True)
            time.sleep(wait_s)
    if with_weights and (missing := _missing_weights(folder)):
        raise UserError(
            f"{model_id} at commit {folder.name} lacks weights: {', '.join(missing)}. The repository is incomplete or "
            "has no safetensors: choose another --revision or --model."
        )
    return folder, folder.name


def _limit_silence(request: httpx.Request) -> None:
    """Give a request a limit where huggingface_hub (1.33) gives none: model info and lists of files."""
    if request.extensions["timeout"]["read"] is None:
        request.extensions["timeout"] = httpx.Timeout(SILENCE_S).as_dict()


def _compare_hashes(model_id: str, folder: Path) -> None:
    """Remove from the cache what is not as the Hub's hashes say, and raise DamagedError about it."""
    damaged = [m["path"] for m in HfApi().verify_repo_checksums(model_id, revision=folder.name).mismatches]
    for name in damaged:
        (folder / name).resolve().unlink()
        (folder / name).unlink(missing_ok=True)
    if damaged:
        raise DamagedError(f"{', '.join(damaged)} of {model_id} arrived damaged: not as the Hub's hashes say")


def _count_files(model_id: str) -> int:
    """Complete files of the model in the cache."""
    blobs = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=model_id, repo_type="model"), "blobs")
    return sum(not path.name.endswith(".incomplete") for path in blobs.glob("*"))


def _missing_weights(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        paths = sorted(name for name in names if Path(name).name != name or not name.endswith(".safetensors"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a safetensors index ({error!r}): choose another --revision.") from error
    if paths:  # an index must not make us read from outside its folder
        raise UserError(f"{index} names {paths[0]!r}; expected the name of a .safetensors file in the same folder.")
    return sorted(name for name in names if not (folder / name).is_file())


def _may_pass(cause: BaseException) -> bool:
    """Whether another try may succeed."""
    if isinstance(cause, errors.HfHubHTTPError):
        return cause.response.status_code in (408, 429) or cause.response.status_code >= 500
    is_short = isinstance(cause, OSError) and "Consistency check failed" in str(cause)
    passing = (DamagedError, httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
    return is_short or (isinstance(cause, passing) and not is_offline_mode())


def _asked_wait(cause: BaseException) -> int:
    """The seconds that the server asks to wait, 0 if it does not.

    They are in Retry-After (RFC 9110; its other form, a date, is ignored), or for status 429 in the Hub's RateLimit,
    whose t is the time until the window ends (https://huggingface.co/docs/hub/rate-limits).
    """
    if not isinstance(cause, errors.HfHubHTTPError):
        return 0
    headers = cause.response.headers
    match = re.fullmatch(r"(\d+)", headers.get("Retry-After", ""))
    if match is None and cause.response.status_code == 429:
        match = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
    return int(match[1]) if match else 0


# ------------------------------------------------------------------------------------------------------------ messages


def _describe(cause: BaseException) -> str:
    if isinstance(cause, errors.HfHubHTTPError):
        url, reason = cause.response.url.copy_with(query=None), cause.server_message or "no reason given"
        return f"{url} answered with status {cause.response.status_code} ({reason})"
    if isinstance(cause, httpx.RequestError):
        return f"the connection to {cause.request.url.copy_with(query=None)} failed ({cause})"
    return " ".join(str(cause).split())


def _say_incomplete(model_id: str, revision: str) -> str:
    return (
        f"{model_id} (revision {revision}) is not complete in the cache {constants.HF_HUB_CACHE}. "
        "Without a connection, use --init DIR with a folder that holds the model; or run "
        f"`hf download {model_id}` elsewhere, copy that cache, set HF_HOME to it and HF_HUB_OFFLINE=1."
    )


def _explain(model_id: str, revision: str, cause: BaseException) -> str:
    """What to do about an error that another try does not cure."""
    hub = constants.ENDPOINT
    is_refused = isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code == 401
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{model_id} has no revision {revision!r} on {hub}: give --revision a branch, tag or commit it has."
    if isinstance(cause, errors.GatedRepoError):
        return f"{model_id} is gated and you have no access: ask for it on {hub}/{model_id}, then {LOG_IN}."
    if is_refused and "Invalid credentials" in str(cause):
        return f"{hub} refused your token: {LOG_IN}; for a public model, unset HF_TOKEN."
    if is_refused or isinstance(cause, errors.RepositoryNotFoundError):  # to strangers, private looks like missing
        return f"{model_id} was not found on {hub}: check the spelling. If it is private, {LOG_IN}."
    if isinstance(cause, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else f"{hub} cannot be reached"
        return f"{why}, and {_say_incomplete(model_id, revision)}"
    if isinstance(cause, httpx.HTTPError):
        return f"{_describe(cause)}, and {_say_incomplete(model_id, revision)}"
    return f"{model_id} could not be downloaded into {constants.HF_HUB_CACHE}: {cause}"
