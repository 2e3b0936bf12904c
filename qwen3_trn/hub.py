"""Downloads a model from the Hugging Face Hub: weights, configuration and tokenizer, never pickle or code.

    python -c "from qwen3_trn.hub import download; print(download('Qwen/Qwen3-0.6B', None))"

`huggingface_hub` does the work. Here: which files we accept, the check that all weights are there, one clear error for
each way to fail. Only one process a file system should call `download`.
"""

import json
import sys
from pathlib import Path

import httpx
from huggingface_hub import constants, errors, is_offline_mode, snapshot_download
from huggingface_hub.utils import disable_progress_bars

from qwen3_trn.errors import UserError

WEIGHTS = "*.safetensors"
# Qwen3 keeps its chat template in tokenizer_config.json; transformers 5 writes a chat_template.jinja.
WANTED = ["*.json", "merges.txt", "*.jinja"]
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may read it"


def download(model_id: str, revision: str | None, with_weights: bool = True) -> tuple[Path, str]:
    """Fetches what is not yet in the cache and returns the snapshot's folder and the commit hash it holds.

    `revision` is a branch, tag or commit hash, None main. Without weights it is configuration and tokenizer only.
    HF_HUB_OFFLINE=1 reads only the cache. Raises UserError.
    """
    revision = revision or constants.DEFAULT_REVISION
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        snapshot = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=[*WANTED, WEIGHTS] if with_weights else WANTED,
            ignore_patterns=["*/*"],  # subfolders hold the model in other formats
            local_files_only=is_offline_mode(),
        )
    except (errors.HFValidationError, httpx.HTTPError, OSError) as error:
        raise UserError(_explain(model_id, revision, error)) from error
    if with_weights:
        _check_weights(model_id, Path(snapshot))
    return Path(snapshot), Path(snapshot).name


def _explain(model_id: str, revision: str, error: Exception) -> str:
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    # Before it gives up, the client looks into the cache: "not in the cache" then hides why it had to.
    cause = (isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__) or error
    status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
    if isinstance(cause, errors.HFValidationError):
        return f"{model_id!r} is neither a folder here nor a model id such as Qwen/Qwen3-0.6B: {cause}"
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{model_id} has no revision {revision!r} on {hub}: give --revision a branch, tag or commit it has."
    if isinstance(cause, errors.GatedRepoError):
        return f"{model_id} is gated and you have no access: ask for it on {hub}/{model_id}, then {LOG_IN}."
    if status == 401 and "Invalid credentials" in str(cause):
        return f"{hub} refused your token: {LOG_IN}; for a public model, unset HF_TOKEN."
    if isinstance(cause, errors.RepositoryNotFoundError) or status == 401:  # to strangers, private looks like missing
        return f"{model_id} was not found on {hub}: check the spelling. If it is private, {LOG_IN}."
    if status is not None:
        return f"{hub} answered with status {status} for {model_id}: try again later. Details: {cause}"
    if isinstance(cause, errors.LocalEntryNotFoundError | httpx.HTTPError):
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else f"{hub} cannot be reached ({cause})"
        found = f"{why}, and {model_id} (revision {revision}) is not complete in the cache {cache}. "
        folder = "Without a connection, use --init DIR with a folder that holds the model; "
        copy = f"or run `hf download {model_id}` elsewhere, copy that cache, set HF_HOME to it and HF_HUB_OFFLINE=1."
        return found + folder + copy
    return f"{model_id} could not be downloaded into {cache}: {cause}"


def _check_weights(model_id: str, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    try:
        names = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ["model.safetensors"]
        missing = sorted(name for name in set(names) if not (folder / name).is_file())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a safetensors index ({error!r}): choose another --revision.") from error
    if missing:
        found = f"{model_id} at commit {folder.name} lacks weights: {', '.join(missing)} expected in {folder}. "
        retry = "If the Hub was out of reach just now, run again with a connection; else the repository is incomplete "
        raise UserError(found + retry + "or has no safetensors: choose another --revision or --model.")
