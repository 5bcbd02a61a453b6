"""A stand-in for the Hugging Face hub as a file store: what its real client asks for, of one repository in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse


class HubStore(ThreadingHTTPServer):
    def __init__(self, repo: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo = repo
        self.files: dict[str, bytes] = {}
        self.commits = 0
        self.refuse = 0
        """So many commits are answered 429."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def entry(self, path: str) -> dict[str, Any] | None:
        if path in self.files:
            content = self.files[path]
            return {"type": "file", "path": path, "size": len(content), "oid": sha1(content).hexdigest()}
        if any(name.startswith(f"{path}/") for name in self.files):
            return {"type": "directory", "path": path, "size": 0, "oid": sha1(path.encode()).hexdigest()}
        return None

    def children(self, path: str, *, recursive: bool) -> list[dict[str, Any]]:
        start = f"{path}/" if path else ""
        below = [name for name in self.files if name.startswith(start)]
        names = set(below) if recursive else {start + name[len(start) :].split("/")[0] for name in below}
        return [entry for name in sorted(names) if (entry := self.entry(name))]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubStore  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        base = f"/api/models/{self.server.repo}"
        if path in (base, f"{base}/revision/main"):
            return self.answer(200, {"id": self.server.repo, "sha": "0" * 40, "siblings": [], "private": True})
        if path.startswith(f"{base}/tree/main"):
            where = path.removeprefix(f"{base}/tree/main").strip("/")
            if where and self.server.entry(where) is None:
                return self.answer(404, {"error": "no such entry"}, code="EntryNotFound")
            recursive = "recursive=true" in self.path.lower()
            return self.answer(200, self.server.children(where, recursive=recursive))
        start = f"/{self.server.repo}/resolve/main/"
        if path.startswith(start) and (content := self.server.files.get(path.removeprefix(start))) is not None:
            return self.send_file(content)
        return self.answer(404, {"error": "not found"}, code="EntryNotFound" if path.startswith(start) else "")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.body()
        if "/paths-info/" in self.path:
            asked = json.loads(body)["paths"] if body.startswith(b"{") else []
            return self.answer(200, [entry for path in asked if (entry := self.server.entry(path))])
        if "/preupload/" in self.path:
            files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in _files(body)]
            return self.answer(200, {"files": files})
        if "/commit/" in self.path:
            if self.server.refuse:
                self.server.refuse -= 1
                return self.answer(429, {"error": "slowly"}, retry_after="0")
            for row in map(json.loads, body.splitlines()):
                if row["key"] == "file":
                    self.server.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
                elif row["key"] in ("deletedFile", "deletedFolder"):
                    gone = row["value"]["path"]
                    for name in [name for name in self.server.files if f"{name}/".startswith(f"{gone.rstrip('/')}/")]:
                        del self.server.files[name]
            self.server.commits += 1
            url = f"https://huggingface.co/{self.server.repo}/commit/1"
            return self.answer(200, {"commitUrl": url, "commitOid": "1" * 40, "success": True})
        return self.answer(404, {"error": self.path})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks: list[bytes] = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def send_file(self, content: bytes) -> None:
        first, last, status = 0, len(content) - 1, 200
        if asked := self.headers.get("Range"):
            low, _, high = asked.removeprefix("bytes=").partition("-")
            first, last, status = int(low), min(int(high or last), last), 206
        part = content[first : last + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    def answer(self, status: int, content: Any, *, code: str = "", retry_after: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _files(body: bytes) -> list[dict[str, Any]]:
    return json.loads(body)["files"]


@contextmanager
def hub_serving(repo: str) -> Iterator[HubStore]:
    server = HubStore(repo)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
