"""A small Hugging Face Hub for tests: serves a folder on loopback as one model repository at one commit.

    with HubServer(folder) as server:
        subprocess.run(..., env={"HF_ENDPOINT": server.url, ...})  # server.requests lists what was asked

It speaks what qwen3_trn.hub and `snapshot_download` use: model info, tree, and resolve, which sends small files with
range and etag and redirects weights to another path, as the Hub redirects to its CDN. It answers like huggingface.co to
unknown names and to tokens (seen in huggingface_hub's utils/_http.py). Every request passes through `server.intercept`
first: replace it to inject faults (429, 503, dropped connections); it returns True when it has answered the request
itself. See test_hub.py for examples.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_valid"


class HubServer(ThreadingHTTPServer):
    """`requests` holds "METHOD path" of all requests so far. `gated` asks for access on every file."""

    def __init__(self, folder: Path, repo_id: str = "org/tiny"):
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.folder = folder
        self.repo_id = repo_id
        self.gated = False
        self.requests: list[str] = []
        self.intercept: Callable[[HubRequest], bool] = lambda request: False
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.shutdown()
        self.server_close()


class HubRequest(BaseHTTPRequestHandler):
    """One request; also the object that `intercept` gets."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if not self.server.intercept(self):
            self.route()

    do_HEAD = do_GET

    def route(self) -> None:
        if self.path.startswith("/cdn/"):
            return self.send_file(self.server.folder / unquote(self.path.removeprefix("/cdn/")))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        # /api/models/OWNER/NAME | .../revision/REV | .../tree/REV, and /OWNER/NAME/resolve/REV/FILE
        verb, revision, *file = rest or ["revision", "main"]
        token = self.headers.get("Authorization")
        if token not in (None, f"Bearer {TOKEN}"):
            self.refuse(401, "Invalid credentials in Authorization header")
        elif f"{owner}/{name}" != self.server.repo_id:
            # To a stranger a missing and a private repository look the same.
            if token:
                self.refuse(404, "Repository not found", code="RepoNotFound")
            else:
                self.refuse(401, "Invalid username or password.")
        elif revision not in ("main", COMMIT):
            self.refuse(404, f"Invalid rev id: {revision}", code="RevisionNotFound")
        elif is_api and verb == "revision":
            self.send_json(
                {"id": self.server.repo_id, "sha": COMMIT, "siblings": [self.sibling(p) for p in self.files()]}
            )
        elif is_api and verb == "tree":
            self.send_json([self.tree_entry(path) for path in self.files()])
        elif self.server.gated:
            self.refuse(403 if token else 401, "Access to this model is restricted.", code="GatedRepo")
        elif (path := self.server.folder / "/".join(file)).suffix == ".safetensors" and path.is_file():
            linked = {"X-Linked-Size": str(path.stat().st_size), "X-Linked-ETag": f'"{etag_of(path)}"'}
            headers = linked | {"X-Repo-Commit": COMMIT, "Location": f"{self.server.url}/cdn/{'/'.join(file)}"}
            self.send_bytes(302, b"", headers)
        elif path.is_file():
            self.send_file(path)
        else:
            self.refuse(404, "Entry not found", code="EntryNotFound")

    def files(self) -> list[Path]:
        return sorted(path for path in self.server.folder.rglob("*") if path.is_file())

    def sibling(self, path: Path) -> dict:
        """What model info says of a file when it is asked for `blobs`."""
        name, size, etag = path.relative_to(self.server.folder).as_posix(), path.stat().st_size, etag_of(path)
        lfs = {"lfs": {"sha256": etag, "size": size, "pointerSize": 134}} if path.suffix == ".safetensors" else {}
        return {"rfilename": name, "size": size, "blobId": etag[:40]} | lfs

    def tree_entry(self, path: Path) -> dict:
        sibling = self.sibling(path)
        lfs = {"lfs": {"oid": etag_of(path), "size": sibling["size"], "pointerSize": 134}} if "lfs" in sibling else {}
        return {"type": "file", "path": sibling["rfilename"], "size": sibling["size"], "oid": sibling["blobId"]} | lfs

    def refuse(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None) -> None:
        """Answers with an error as the Hub words it: X-Error-Message, and X-Error-Code where it has one."""
        error = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | (headers or {})
        self.send_json({"error": message}, status, error)

    def send_json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_bytes(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def send_file(self, path: Path, drop_after: int | None = None) -> None:
        """Sends the file or the rest of it that Range asks for; `drop_after` bytes later the connection breaks."""
        content = path.read_bytes()
        headers = {"ETag": f'"{etag_of(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if "Range" not in self.headers:
            return self.send_bytes(200, content, headers, drop_after)
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            return self.send_bytes(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_bytes(206, content[start:], headers, drop_after)

    def send_bytes(self, status: int, content: bytes, headers: dict[str, str], drop_after: int | None = None) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:drop_after])
        self.close_connection = drop_after is not None

    def log_message(self, *args) -> None:
        pass  # the tests read `server.requests`


def etag_of(path: Path) -> str:
    """SHA-256 of weights, which the Hub keeps with Git LFS; of other files the hash that git gives them."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
