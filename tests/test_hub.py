"""qwen3_trn.hub against a local Hub: the real huggingface_hub client, in a process of its own, as a user has it.

pytest tests/test_hub.py
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwen3_trn.errors import UserError
from qwen3_trn.hub import _check_weights
from tests.hub_server import COMMIT, TOKEN, HubServer

ROOT = Path(__file__).resolve().parent.parent
CHILD = """
import json, sys, types
package = sys.modules["qwen3_trn"] = types.ModuleType("qwen3_trn")  # without the real one's import of torch: 2 s
package.__path__ = ["qwen3_trn"]
from qwen3_trn.errors import UserError
from qwen3_trn.hub import download
try:
    folder, commit = download(sys.argv[1], sys.argv[2] or None, json.loads(sys.argv[3]))
    print(json.dumps({"folder": str(folder), "commit": commit}))
except UserError as error:
    print(json.dumps({"error": str(error), "cause": type(error.__cause__).__name__}))
"""
KEPT = ["config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
UNWANTED = ["README.md", "pytorch_model.bin", "modeling_qwen3.py", "original/model.safetensors", "onnx/config.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A model repository on disk with one weights file, laid out like Qwen/Qwen3-0.6B, plus what we never want."""
    folder = tmp_path / "repo"
    for name in [*KEPT, "chat_template.jinja", *UNWANTED]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"content of": "{name}"}}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 400)
    return folder


@pytest.fixture
def sharded_repo(repo: Path) -> Path:
    (repo / "model.safetensors").unlink()
    for name in SHARDS:
        (repo / name).write_text(name)
    weight_map = {"model.norm.weight": SHARDS[0], "lm_head.weight": SHARDS[1]}
    (repo / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return repo


@pytest.fixture
def fetch(tmp_path: Path):
    """fetch(server, ...) runs `download` in a fresh process and returns what it returned or raised, and its stderr."""

    def run(server: HubServer, model_id: str = "org/tiny", revision: str = "", with_weights=True, **env: str) -> dict:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        hub = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", CHILD, model_id, revision, json.dumps(with_weights)]
        done = subprocess.run(command, env=inherited | hub | env, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) | {"stderr": done.stderr}

    return run


def names_in(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def test_single_file_model_then_offline_from_the_cache(repo, fetch):
    with HubServer(repo) as server:
        first = fetch(server)
        assert first["commit"] == COMMIT
        assert names_in(first["folder"]) == sorted([*KEPT, "chat_template.jinja", "model.safetensors"])
        assert Path(first["folder"], "model.safetensors").read_bytes() == (repo / "model.safetensors").read_bytes()
        assert first["stderr"] == ""  # no progress bar in a log file
        asked = len(server.requests)
        for revision in ("", COMMIT):
            assert fetch(server, revision=revision, HF_HUB_OFFLINE="1") == first
        shutil.rmtree(Path(first["folder"]).parents[1] / "trees")  # as older huggingface_hub versions leave the cache
        assert fetch(server, revision=COMMIT, HF_HUB_OFFLINE="1") == first
        assert server.requests[asked:] == []
    assert fetch(server) == first  # the Hub is down, the cache is full


def test_sharded_model_at_a_commit(sharded_repo, fetch):
    with HubServer(sharded_repo) as server:
        result = fetch(server, revision=COMMIT)
    assert result["commit"] == COMMIT
    assert set(SHARDS) < set(names_in(result["folder"]))


def test_without_weights_then_with(repo, fetch):
    with HubServer(repo) as server:
        bare = fetch(server, with_weights=False)
        assert names_in(bare["folder"]) == sorted([*KEPT, "chat_template.jinja"])
        assert "is not complete in the cache" in fetch(server, HF_HUB_OFFLINE="1")["error"]
        assert "model.safetensors" in names_in(fetch(server)["folder"])


def test_a_dropped_connection_continues_where_it_broke(repo, fetch):
    weights = repo / "model.safetensors"
    weights.write_bytes(os.urandom(12_000_000))  # the client keeps what it has in steps of 10 MiB
    ranges: list[str | None] = []

    def drop_first(request) -> bool:
        if request.command != "GET" or not request.path.endswith(weights.name):
            return False
        ranges.append(request.headers.get("Range"))
        request.send_file(weights, drop_after=11_000_000 if len(ranges) == 1 else None)
        return True

    with HubServer(repo) as server:
        server.intercept = drop_first
        result = fetch(server)
    assert ranges == [None, f"bytes={10 * 2**20}-"]
    assert Path(result["folder"], weights.name).read_bytes() == weights.read_bytes()


def test_an_index_that_names_a_missing_file(sharded_repo, fetch):
    (sharded_repo / SHARDS[1]).unlink()
    with HubServer(sharded_repo) as server:
        error = fetch(server)["error"]
    assert f"lacks weights: {SHARDS[1]} expected" in error


@pytest.mark.parametrize("index", ["not json", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(sharded_repo, index):
    (sharded_repo / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="is not a safetensors index"):
        _check_weights("org/tiny", sharded_repo)


def test_no_safetensors_at_all(repo, fetch):
    (repo / "model.safetensors").unlink()
    with HubServer(repo) as server:
        error = fetch(server)["error"]
    assert "lacks weights: model.safetensors" in error


@pytest.mark.parametrize("token", ["", TOKEN])  # the Hub answers 401 to strangers and 404 to those it knows
def test_unknown_repository(repo, fetch, token):
    with HubServer(repo) as server:
        result = fetch(server, model_id="org/typo", HF_TOKEN=token)
    assert "org/typo was not found" in result["error"] and "hf auth login" in result["error"]


@pytest.mark.parametrize("revision", ["v9", "f" * 40])
def test_unknown_revision(repo, fetch, revision):
    with HubServer(repo) as server:
        result = fetch(server, revision=revision)
    assert f"org/tiny has no revision '{revision}'" in result["error"]


@pytest.mark.parametrize("token", ["", TOKEN])
def test_gated_repository(repo, fetch, token):
    with HubServer(repo) as server:
        server.gated = True
        error = fetch(server, HF_TOKEN=token)["error"]
    assert f"gated and you have no access: ask for it on {server.url}/org/tiny" in error
    assert "hf auth login" in error and "HF_TOKEN" in error


def test_bad_token(repo, fetch):
    with HubServer(repo) as server:
        error = fetch(server, HF_TOKEN="hf_stale")["error"]
    assert "refused your token" in error and "unset HF_TOKEN" in error


def test_hub_in_trouble(repo, fetch):
    def busy(request) -> bool:
        request.refuse(503, "come back later")
        return True

    with HubServer(repo) as server:
        server.intercept = busy
        result = fetch(server)
    assert "answered with status 503 for org/tiny" in result["error"]
    assert "come back later" in result["error"]


@pytest.mark.parametrize("revision", ["", COMMIT])
def test_no_connection_and_nothing_in_the_cache(repo, fetch, revision):
    with HubServer(repo) as server:
        pass
    error = fetch(server, revision=revision)["error"]
    assert f"{server.url} cannot be reached" in error
    assert "--init DIR" in error and "HF_HUB_OFFLINE" in error


def test_offline_with_half_a_cache(repo, fetch):
    with HubServer(repo) as server:
        Path(fetch(server)["folder"], "model.safetensors").unlink()
        asked = len(server.requests)
        result = fetch(server, HF_HUB_OFFLINE="1")
        assert "HF_HUB_OFFLINE is set, and org/tiny (revision main) is not complete" in result["error"]
        assert result["cause"] == "IncompleteSnapshotError"
        assert server.requests[asked:] == []


def test_not_a_model_id(repo, fetch):
    with HubServer(repo) as server:
        error = fetch(server, model_id="./no/such/folder")["error"]
        assert server.requests == []
    assert "neither a folder here nor a model id such as Qwen/Qwen3-0.6B" in error


def test_a_cache_that_cannot_be_written(repo, fetch, tmp_path):
    (tmp_path / "file").touch()
    with HubServer(repo) as server:
        result = fetch(server, HF_HOME=str(tmp_path / "file" / "hf"))
    assert f"could not be downloaded into {tmp_path}/file/hf" in result["error"]
    assert "Not a directory" in result["error"]
