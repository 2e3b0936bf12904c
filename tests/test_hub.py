"""qwen3_trn.hub against a local Hub, with the real huggingface_hub, in a process of its own, as a user has it.

pytest tests/test_hub.py
"""

import gzip
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from qwen3_trn import Qwen3Config, Qwen3ForCausalLM
from qwen3_trn.errors import UserError
from qwen3_trn.hf import HFFolder, copy_companions
from qwen3_trn.hub import _missing_weights
from tests.common import REPO, TINY, run_python, succeeded
from tests.hub_server import COMMIT, TOKEN, HubRequest, HubServer

CHILD = """
import json, sys, types
package = sys.modules["qwen3_trn"] = types.ModuleType("qwen3_trn")  # without the real one's import of torch: 2 s
package.__path__ = ["qwen3_trn"]
from qwen3_trn import hub
from qwen3_trn.errors import UserError
model_id, revision, with_weights, hub.PATIENCE_S = json.loads(sys.argv[1])
hub.SILENCE_S = 1
try:
    folder, commit = hub.download(model_id, revision, with_weights)
    result = {"folder": str(folder), "commit": commit}
except UserError as error:
    result = {"error": str(error)}
print(json.dumps(result))
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
    (folder / "generation_config.json").write_text((folder / "config.json").read_text())  # two names, one blob
    (folder / "model.safetensors").write_bytes(os.urandom(200_000))
    return folder


@pytest.fixture
def sharded_repo(repo: Path) -> Path:
    (repo / "model.safetensors").unlink()
    for name in SHARDS:
        (repo / name).write_text(name)
    weight_map = {"model.norm.weight": SHARDS[0], "lm_head.weight": SHARDS[1]}
    (repo / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return repo


def hub_environment(server: HubServer, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture
def start(tmp_path: Path):
    """start(server, code, ...) runs Python code in a fresh process with no cache and no Hub but the server's."""

    def run(server: HubServer, code: str, *arguments: str, **env: str) -> subprocess.Popen:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        command = [sys.executable, "-c", code, *arguments]
        env = inherited | hub_environment(server, tmp_path) | env
        return subprocess.Popen(command, env=env, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return run


@pytest.fixture
def start_fetch(start):
    """start_fetch(server, ...) starts `download`."""

    def run(server, model_id="org/tiny", revision=None, with_weights=True, patience_s=0.5, **env: str):
        return start(server, CHILD, json.dumps([model_id, revision, with_weights, patience_s]), **env)

    return run


@pytest.fixture
def fetch(start_fetch):
    """fetch(server, ...) returns what `download` returned or raised, and what it wrote on the console."""
    return lambda *args, **options: result_of(start_fetch(*args, **options))


def result_of(process: subprocess.Popen) -> dict:
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    *printed, result = stdout.splitlines()
    return json.loads(result) | {"printed": printed, "stderr": stderr}


def names_in(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def files_asked(server: HubServer) -> list[str]:
    """The names of the files whose content was asked for, redirects not counted."""
    paths = [request.removeprefix("GET ") for request in server.requests if request.startswith("GET ")]
    sent = [
        path
        for path in paths
        if path.startswith("/cdn/") or ("/resolve/" in path and not path.endswith(".safetensors"))
    ]
    return sorted(path.rsplit("/")[-1] for path in sent)


def is_weights(request: HubRequest) -> bool:
    return request.command == "GET" and request.path.startswith("/cdn/")


# ------------------------------------------------------------------------------------------------- downloads that work


def test_single_file_model_then_offline_from_the_cache(repo, fetch):
    with HubServer(repo) as server:
        first = fetch(server)
        assert first["commit"] == COMMIT
        assert names_in(first["folder"]) == sorted([*KEPT, "chat_template.jinja", "model.safetensors"])
        for name in names_in(first["folder"]):
            assert Path(first["folder"], name).read_bytes() == (repo / name).read_bytes()
        assert first["printed"] == [] and first["stderr"] == ""  # no progress bar in a log file
        # config.json and generation_config.json have one content here, and it came once.
        assert len(files_asked(server)) == len({*KEPT, "chat_template.jinja", "model.safetensors"}) - 1
        asked = len(server.requests)
        assert fetch(server) == first
        assert [request.split("?")[0] for request in server.requests[asked:]] == [
            "GET /api/models/org/tiny/revision/main"
        ]
        asked = len(server.requests)
        for revision in (None, COMMIT):
            assert fetch(server, revision=revision, HF_HUB_OFFLINE="1") == first
        assert server.requests[asked:] == []
    assert fetch(server)["folder"] == first["folder"]  # the Hub is down, the cache is full


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
        asked = len(files_asked(server))
        assert "model.safetensors" in names_in(fetch(server)["folder"])
        assert len(files_asked(server)) == asked + 1


def test_the_cache_is_huggingface_hubs_own(repo, fetch, start):
    """What either has fetched, the other finds."""
    client = (
        "from huggingface_hub import snapshot_download; print(snapshot_download('org/tiny', ignore_patterns='*/*'))"
    )
    with HubServer(repo) as server:
        ours = fetch(server)
        asked = files_asked(server)
        theirs, stderr = start(server, client).communicate(timeout=60)
        assert theirs.strip() == ours["folder"], stderr
        assert sorted({*files_asked(server)} - {*asked}) == ["README.md", "modeling_qwen3.py", "pytorch_model.bin"]
        shutil.rmtree(Path(ours["folder"]).parents[1])
        theirs, stderr = start(server, client).communicate(timeout=60)
        asked = files_asked(server)
        assert fetch(server)["folder"] == theirs.strip(), stderr
        assert files_asked(server) == asked


def test_two_processes_on_one_cache(sharded_repo, start_fetch):
    def slowly(request: HubRequest) -> bool:
        if is_weights(request):
            time.sleep(1)
        return False

    with HubServer(sharded_repo) as server:
        server.intercept = slowly
        processes = [start_fetch(server) for _ in range(2)]
        first, second = map(result_of, processes)
    assert first == second and first["commit"] == COMMIT
    assert len(files_asked(server)) == len({*files_asked(server)}) == len(KEPT) + 3  # 2 shards, index, template, - 1


def test_what_a_killed_process_left_is_used(sharded_repo, fetch, start_fetch):
    """Files that were complete are not asked for again; the one on its way begins anew, as huggingface_hub wants it."""
    half_is_there = threading.Event()

    def stall_once(request: HubRequest) -> bool:
        if not is_weights(request) or not request.path.endswith(SHARDS[1]) or half_is_there.is_set():
            return False
        time.sleep(1)  # the other files have come
        request.send_file(sharded_repo / SHARDS[1], drop_after=2)
        request.wfile.flush()
        half_is_there.set()
        time.sleep(2)
        return True

    with HubServer(sharded_repo) as server:
        server.intercept = stall_once
        process = start_fetch(server)
        assert half_is_there.wait(30)
        process.kill()
        process.communicate()
        asked = len(files_asked(server))
        result = fetch(server)
        assert len(files_asked(server)) == asked + 1
    assert Path(result["folder"], SHARDS[1]).read_text() == SHARDS[1]


def test_packed_json(repo, fetch):
    def pack(request: HubRequest) -> bool:
        if not request.path.startswith("/api/models/org/tiny/revision/"):
            return False
        siblings = [request.sibling(path) for path in request.files()]
        info = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        request.send_bytes(200, gzip.compress(info.encode()), {"Content-Encoding": "gzip"})
        return True

    with HubServer(repo) as server:
        server.intercept = pack
        assert fetch(server)["commit"] == COMMIT


# ------------------------------------------------------------------------------------------------- faults and patience


def status(code: int, **headers: str):
    return lambda request: request.refuse(
        code, "come back later", headers={k.replace("_", "-"): headers[k] for k in headers}
    )


def drop(num_bytes: int):
    return lambda request: request.send_file(request.server.folder / "model.safetensors", drop_after=num_bytes)


def reset(request: HubRequest) -> None:
    drop(150_000)(request)
    request.wfile.flush()
    time.sleep(0.2)  # a reset takes what was not read yet
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()


def send(content: bytes):
    return lambda request: request.send_bytes(200, content, {})


def cut(request: HubRequest) -> None:
    request.send_bytes(200, (request.server.folder / "model.safetensors").read_bytes()[:1000], {})


def stay_silent(request: HubRequest) -> None:
    time.sleep(2)
    request.close_connection = True


FAULTS = {
    "408": status(408),
    "429": status(429, Retry_After="2"),
    "503": status(503, Retry_After="0"),
    "dropped at once": drop(0),
    "dropped": drop(100_000),
    "reset": reset,
    "silent": stay_silent,
    "too short": cut,
    "damaged": send(bytes(200_000)),
}
"""What a server can do wrong on one file. Some of it huggingface_hub tries again itself."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes(repo, fetch, fault):
    asked = []

    def once(request: HubRequest) -> bool:
        if is_weights(request):
            asked.append(time.monotonic())
            if len(asked) == 1:
                FAULTS[fault](request)
        return is_weights(request) and len(asked) == 1

    with HubServer(repo) as server:
        server.intercept = once
        result = fetch(server, patience_s=5, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert Path(result["folder"], "model.safetensors").read_bytes() == (repo / "model.safetensors").read_bytes()
    assert len(asked) == 2
    if fault == "429":
        assert asked[1] - asked[0] > 1.9


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("503", "answered with status 503 (come back later)"),
        ("too short", "file should be of size 200000 but has size 1000"),
        ("damaged", "model.safetensors of org/tiny arrived damaged"),
    ],
)
def test_a_fault_that_stays(repo, fetch, fault, message):
    def always(request: HubRequest) -> bool:
        if is_weights(request):
            FAULTS[fault](request)
        return is_weights(request)

    with HubServer(repo) as server:
        server.intercept = always
        result = fetch(server, patience_s=2.5)
        assert files_asked(server).count("model.safetensors") == 2
    assert message in result["error"]
    (line,) = result["printed"]
    assert message in line and line.endswith("; next try in 1 s")
    assert "Given up at try 2" in result["error"] and "is not complete in the cache" in result["error"]
    assert result["error"].count("Given up at try") == 1
    assert result["stderr"] == ""


def test_the_wait_that_the_hub_asks_for(repo, fetch):
    """Of model info, which huggingface_hub does not ask for twice; its header for rate limits counts too."""
    answers = iter([status(429, RateLimit='"api";r=0;t=2'), status(503, Retry_After="3"), status(500)])

    def refuse(request: HubRequest) -> bool:
        answer = next(answers, None)
        if answer:
            answer(request)
        return bool(answer)

    with HubServer(repo) as server:
        server.intercept = refuse
        result = fetch(server, patience_s=30)
    assert result["commit"] == COMMIT
    assert [line.rsplit(";")[-1] for line in result["printed"]] == [f" next try in {s} s" for s in (2, 3, 4)]


def test_half_of_a_download_is_not_taken_for_a_cache(repo, fetch):
    """Not even where the revision names its folder, and without weights, whose index would tell."""

    def refuse_one(request: HubRequest) -> bool:
        is_asked = request.command == "GET" and request.path.endswith("/tokenizer.json")
        if is_asked:
            time.sleep(0.3)  # the others have come
            status(503)(request)
        return is_asked

    with HubServer(repo) as server:
        server.intercept = refuse_one
        for _ in range(2):
            result = fetch(server, revision=COMMIT, with_weights=False)
            assert "tokenizer.json answered with status 503" in result["error"]
        assert "is not complete in the cache" in fetch(server, revision=COMMIT, HF_HUB_OFFLINE="1")["error"]


def test_a_wait_longer_than_our_patience_is_not_begun(repo, fetch):
    with HubServer(repo) as server:
        server.intercept = lambda request: status(503, Retry_After="3600")(request) or True
        result = fetch(server, patience_s=330)
        assert len(server.requests) == 1
    assert "answered with status 503 (come back later). Given up at try 1, after 0 s" in result["error"]
    assert "the next would be in 3600 s" in result["error"]


def test_a_hub_that_is_silent(repo, fetch):
    with HubServer(repo) as server:
        server.intercept = lambda request: stay_silent(request) or True
        assert "failed (timed out)" in fetch(server)["error"]


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_no_connection_and_nothing_in_the_cache(repo, fetch, revision):
    with HubServer(repo) as server:
        pass
    error = fetch(server, revision=revision)["error"]
    assert f"the connection to {server.url}/api/models/org/tiny/" in error
    assert "--init DIR" in error and "HF_HUB_OFFLINE" in error


@pytest.mark.parametrize("answer", ["<html>Please log in", "[]", "{}", '{"id": "org/tiny", "sha": null}'])
def test_a_server_that_is_no_hub(repo, fetch, answer):
    with HubServer(repo) as server:
        server.intercept = lambda request: request.send_bytes(200, answer.encode(), {}) or True
        assert "does not answer as the Hugging Face Hub does" in fetch(server)["error"]


# ------------------------------------------------------------------------------------------------- errors that stay


def test_an_index_that_names_a_missing_file(sharded_repo, fetch):
    (sharded_repo / SHARDS[1]).unlink()
    with HubServer(sharded_repo) as server:
        error = fetch(server)["error"]
    assert f"lacks weights: {SHARDS[1]}." in error


@pytest.mark.parametrize("index", ["not json", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(sharded_repo, index):
    (sharded_repo / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="is not a safetensors index"):
        _missing_weights(sharded_repo)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", ""])
def test_an_index_that_points_outside(sharded_repo, fetch, name):
    index = {"weight_map": {"lm_head.weight": SHARDS[0], "model.norm.weight": name}}
    (sharded_repo / "model.safetensors.index.json").write_text(json.dumps(index))
    (sharded_repo / "sub").mkdir()
    for outside in (sharded_repo.parent / "x.safetensors", sharded_repo / "sub" / "x.safetensors"):
        outside.touch()  # it is refused, not missed
    with HubServer(sharded_repo) as server:
        error = fetch(server)["error"]
    assert (
        f"model.safetensors.index.json names {name!r}; expected the name of a .safetensors file in the same folder"
        in error
    )


def test_no_safetensors_at_all(repo, fetch):
    (repo / "model.safetensors").unlink()
    with HubServer(repo) as server:
        error = fetch(server)["error"]
    assert "lacks weights: model.safetensors" in error


@pytest.mark.parametrize("token", ["", TOKEN])  # the Hub answers 401 to strangers and 404 to those it knows
def test_unknown_repository(repo, fetch, token):
    with HubServer(repo) as server:
        result = fetch(server, model_id="org/typo", HF_TOKEN=token)
        assert len(server.requests) == 1
    assert "org/typo was not found" in result["error"] and "hf auth login" in result["error"]


@pytest.mark.parametrize("revision", ["v9", "f" * 40])
def test_unknown_revision(repo, fetch, revision):
    with HubServer(repo) as server:
        result = fetch(server, revision=revision)
        assert len(server.requests) == 1
    assert f"org/tiny has no revision '{revision}'" in result["error"]


@pytest.mark.parametrize("token", ["", TOKEN])
def test_gated_repository(repo, fetch, token):
    with HubServer(repo) as server:
        server.gated = True
        result = fetch(server, HF_TOKEN=token)
    assert f"gated and you have no access: ask for it on {server.url}/org/tiny" in result["error"]
    assert "hf auth login" in result["error"] and "HF_TOKEN" in result["error"]
    assert result["printed"] == []


def test_bad_token(repo, fetch):
    with HubServer(repo) as server:
        error = fetch(server, HF_TOKEN="hf_stale")["error"]
        assert len(server.requests) == 1
    assert "refused your token" in error and "unset HF_TOKEN" in error


def test_refused_without_a_reason(repo, fetch):
    with HubServer(repo) as server:
        server.intercept = lambda request: request.send_bytes(403, b"", {}) or True
        error = fetch(server)["error"]
        assert len(server.requests) == 1
    assert "answered with status 403" in error


def test_offline_with_half_a_cache(repo, fetch):
    with HubServer(repo) as server:
        Path(fetch(server)["folder"], "model.safetensors").unlink()
        asked = len(server.requests)
        result = fetch(server, HF_HUB_OFFLINE="1")
        assert "HF_HUB_OFFLINE is set, and org/tiny (revision main) is not complete" in result["error"]
        assert server.requests[asked:] == []


def test_not_a_model_id(repo, fetch):
    with HubServer(repo) as server:
        for offline in ("", "1"):
            error = fetch(server, model_id="./no/such/folder", HF_HUB_OFFLINE=offline)["error"]
            assert "neither a folder here nor a model id such as Qwen/Qwen3-0.6B" in error
        assert server.requests == []


def test_an_endpoint_that_is_no_url(repo, fetch):
    with HubServer(repo) as server:
        result = fetch(server, HF_ENDPOINT="huggingface.co")
    assert "the connection to " in result["error"] and result["printed"] == []


def test_a_cache_that_cannot_be_written(repo, fetch, tmp_path):
    (tmp_path / "file").touch()
    with HubServer(repo) as server:
        result = fetch(server, HF_HOME=str(tmp_path / "file" / "hf"))
    assert f"could not be downloaded into {tmp_path}/file/hf" in result["error"]
    assert "Not a directory" in result["error"]


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def model_repo(tmp_path: Path) -> Path:
    """A repository with random weights of the bundled miniature."""
    folder = tmp_path / "model"
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(TINY)).save_pretrained(folder)
    copy_companions(TINY, folder)
    return folder


def test_weights_are_read_through_the_caches_links(model_repo, fetch):
    with HubServer(model_repo) as server:
        snapshot = Path(fetch(server)["folder"])
    assert (snapshot / "model.safetensors").resolve().parent.name == "blobs"
    ours, published = HFFolder(snapshot), HFFolder(model_repo)
    assert ours.file_of == published.file_of
    assert all(torch.equal(ours.view(key)[:], published.view(key)[:]) for key in ours.file_of)


def train(server: HubServer, tmp_path: Path, out: str, ranks: int, **env: str) -> subprocess.CompletedProcess:
    flags = ["--init", "hub", "--model", "org/tiny", "--revision", "main", "--no-load-check"]
    flags += ["--steps", "1", "--seq-len", "64", "--no-export"]
    environment = {
        "HF_HUB_OFFLINE": "0",
        "QWEN3_TRN_CACHE": str(tmp_path / "tokens"),
        **hub_environment(server, tmp_path),
    }
    return run_python(REPO / "train.py", *flags, "--out", tmp_path / out, ranks=ranks, **environment | env)


def test_train_from_the_hub_then_offline(model_repo, tmp_path):
    with HubServer(model_repo) as server:
        succeeded(train(server, tmp_path, "first", ranks=2))
        assert sorted(files_asked(server)) == sorted(path.name for path in model_repo.iterdir())  # once each
        assert json.loads((tmp_path / "first" / "env.json").read_text())["commit"] == COMMIT
        asked = len(server.requests)
        succeeded(train(server, tmp_path, "offline", ranks=0, HF_HUB_OFFLINE="1"))
        assert server.requests[asked:] == []
    assert json.loads((tmp_path / "offline" / "env.json").read_text())["commit"] == COMMIT


def test_a_failing_hub_ends_every_rank_with_one_message(model_repo, tmp_path):
    with HubServer(model_repo) as server:
        server.intercept = lambda request: status(503, Retry_After="3600")(request) or True
        process = train(server, tmp_path, "out", ranks=2)
        assert len(server.requests) == 1
    assert process.returncode == 1
    assert process.stderr.count("error: http") == 1
    assert f'File "{REPO}' not in process.stderr
    assert not (tmp_path / "out").exists()
