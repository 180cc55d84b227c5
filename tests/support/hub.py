"""An in-memory stand-in for the Hugging Face Hub, with the part of its HTTP API for uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """A repository: commits of files, and uploaded files that no commit contains yet."""

    def __init__(self) -> None:
        self.commits: list[dict[str, str]] = []
        """SHA-256 by path, for each commit, oldest first."""
        self.blobs: dict[str, bytes] = {}
        """Uploaded content, by SHA-256."""
        self.made: dict[str, Any] | None = None
        self.refuse: str | None = None
        """Requests whose path contains this text are refused."""
        self.moved = False
        """Whether another client commits before each commit."""
        self.requests: list[str] = []
        self.token = ""
        self.url = ""
        self._lock = threading.Lock()

    @property
    def files(self) -> dict[str, bytes]:
        """Return the files of the latest commit."""
        shown = self.commits[-1] if self.commits else {}
        return {path: self.blobs[oid] for path, oid in shown.items()}

    @property
    def head(self) -> str:
        """Return the id of the latest commit."""
        return f"{len(self.commits):040x}"

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON of a request."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            if self.refuse is not None and self.refuse in path:
                return 403, {"error": "refused by the test"}
            return self._answer(method, path, body)

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path.endswith("/repos/create"):
            if self.made is not None:
                return 409, {"error": "exists", "url": f"{self.url}/owner/name"}
            self.made = json.loads(body)
            return 200, {"url": f"{self.url}/owner/name"}
        if path.endswith("/validate-yaml"):
            return 200, {"warnings": [], "errors": []}
        if "/preupload/" in path:
            return 200, {"files": [_mode(each) for each in json.loads(body)["files"]]}
        if path.endswith("/objects/batch"):
            wanted = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [self._place(each) for each in wanted]}
        if method == "PUT":
            self.blobs[hashlib.sha256(body).hexdigest()] = body
            return 200, {}
        if "/commit/" in path:
            return self._commit(body)
        siblings = [{"rfilename": name} for name in (self.commits[-1] if self.commits else {})]
        return 200, {"id": "owner/name", "sha": self.head, "siblings": siblings}

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.blobs:
            return {"oid": wanted["oid"], "size": wanted["size"]}
        upload = {"href": f"{self.url}/blob/{wanted['oid']}", "header": {}}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": upload}}

    def _commit(self, body: bytes) -> tuple[int, Any]:
        lines = [json.loads(line) for line in body.splitlines()]
        if self.moved:
            self.commits.append(dict(self.commits[-1] if self.commits else {}))
        if lines[0]["value"].get("parentCommit") not in (None, self.head):
            return 412, {"error": "the branch has moved"}
        shown = dict(self.commits[-1] if self.commits else {})
        for line in lines[1:]:
            path = line["value"]["path"]
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                shown[path] = hashlib.sha256(content).hexdigest()
                self.blobs[shown[path]] = content
            elif line["key"] == "lfsFile":
                if line["value"]["oid"] not in self.blobs:
                    return 400, {"error": f"{path} was not uploaded"}
                shown[path] = line["value"]["oid"]
            else:
                del shown[path]
        self.commits.append(shown)
        return 200, {
            "commitUrl": f"{self.url}/owner/name/commit/{self.head}",
            "commitOid": self.head,
        }


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    large = file["path"].endswith((".safetensors", ".png"))
    return {
        "path": file["path"],
        "uploadMode": "lfs" if large else "regular",
        "shouldIgnore": False,
    }


@contextmanager
def stand_in() -> Iterator[Hub]:
    """Serve a hub on a local port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            hub.token = self.headers.get("Authorization") or hub.token
            status, found = hub.answer(self.command, self.path, self.rfile.read(length))
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status >= 400:
                self.send_header("X-Error-Message", found["error"])
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, *_args: Any) -> None:
            """Suppress the request log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
