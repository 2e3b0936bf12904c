"""A small Hugging Face Hub for tests: serves a folder on loopback as one model repository at one commit.

    with HubServer(folder) as server:
        subprocess.run(..., env={"HF_ENDPOINT": server.url, ...})  # server.requests lists what was asked

It speaks what `snapshot_download` uses: model info, tree, and resolve with etag, commit, length and range, and answers
like huggingface.co to unknown names and to tokens (seen in huggingface_hub's utils/_http.py). Every request passes
through `server.intercept` first: replace it to inject faults (429, 503, dropped connections); it returns True when it
has answered the request itself. See test_hub.py for examples.
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
            self.send_json({"id": self.server.repo_id, "sha": COMMIT})
        elif is_api and verb == "tree":
            self.send_json([self.describe(path) for path in sorted(self.server.folder.rglob("*")) if path.is_file()])
        elif self.server.gated:
            self.refuse(403 if token else 401, "Access to this model is restricted.", code="GatedRepo")
        elif (self.server.folder / "/".join(file)).is_file():
            self.send_file(self.server.folder / "/".join(file))
        else:
            self.refuse(404, "Entry not found", code="EntryNotFound")

    def describe(self, path: Path) -> dict:
        name = path.relative_to(self.server.folder).as_posix()
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": etag_of(path)}

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
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_bytes(206 if start else 200, content[start:], headers, drop_after)

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
    return hashlib.sha256(path.read_bytes()).hexdigest()
