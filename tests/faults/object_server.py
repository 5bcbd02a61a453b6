"""An object store that speaks enough of S3 for a real client, and breaks as often as it is told.

Faults: the connection is cut at a random byte of a body, on the way in or out; 429 with Retry-After; 500; and the
worst, 200 for an object of which only a part was kept.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

FAULTS = ("cut_in", "cut_in_kept", "cut_out", "429", "500", "truncated")


class ObjectServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, seed: int = 0, share: float = 0.0, faults: tuple[str, ...] = FAULTS) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.share, self.faults, self.done = share, faults, Counter[str]()
        self.requests = 0
        self._random, self._lock = random.Random(seed), threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, method: str) -> tuple[str, float]:
        """Of one request, and how far into its body it strikes."""
        with self._lock:
            self.requests += 1
            kind = self._random.choice(self.faults) if self._random.random() < self.share else ""
            if kind.startswith("cut_in") or kind == "truncated":
                kind = kind if method == "PUT" else ""
            if kind == "cut_out" and method != "GET":
                kind = ""
            if kind:
                self.done[kind] += 1
            return kind, self._random.random()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is what these tests are about."""


@contextmanager
def served(server: ObjectServer) -> Iterator[ObjectServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_PUT(self) -> None:
        kind, place = self.server.fault("PUT")
        length = int(self.headers["Content-Length"])
        if kind.startswith("cut_in"):
            part = self.rfile.read(int(place * length))
            if kind == "cut_in_kept":
                self.server.objects[self.key] = part
            self.cut()
            return
        body = self.rfile.read(length)
        if self.refused(kind):
            return
        self.server.objects[self.key] = body[: int(place * length)] if kind == "truncated" else body
        self.answer(200, b"")

    def do_GET(self) -> None:
        kind, place = self.server.fault("GET")
        if self.refused(kind):
            return
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self.answer(200, self.listing(query), xml=True)
            return
        found = self.server.objects.get(self.key)
        if found is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>", xml=True)
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        body = found[int(span[1]) : int(span[2]) + 1] if span else found
        self.answer(206 if span else 200, body, sent=int(place * len(body)) if kind == "cut_out" else None)

    def do_HEAD(self) -> None:
        kind, _ = self.server.fault("HEAD")
        found = self.server.objects.get(self.key)
        if self.refused(kind):
            return
        self.send_response(200 if found is not None else 404)
        self.send_header("Content-Length", str(len(found or b"")))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        for key in re.findall(r"<Key>(.*?)</Key>", body):
            self.server.objects.pop(f"{self.key.split('/')[0]}/{key}", None)
        self.answer(200, b"<DeleteResult></DeleteResult>", xml=True)

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).strip("/")

    def listing(self, query: dict[str, list[str]]) -> bytes:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        bucket = self.key
        keys = sorted(key.removeprefix(f"{bucket}/") for key in list(self.server.objects) if key.startswith(bucket))
        contents, folders = [], set()
        for key in keys:
            if not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            size = len(self.server.objects.get(f"{bucket}/{key}", b""))
            contents.append(f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size></Contents>")
        parts = "".join(contents) + "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{parts}</ListBucketResult>".encode()

    def refused(self, kind: str) -> bool:
        if kind == "429":
            self.answer(429, b"<Error><Code>SlowDown</Code></Error>", xml=True, retry_after="0.02")
        elif kind == "500":
            self.answer(500, b"<Error><Code>InternalError</Code></Error>", xml=True)
        return kind in ("429", "500")

    def answer(
        self, status: int, body: bytes, *, xml: bool = False, retry_after: str = "", sent: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml" if xml else "application/octet-stream")
        if retry_after:
            self.send_header("Retry-After", retry_after)
        if not xml:
            self.send_header("ETag", '"e"')
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if sent is None else body[:sent])
        if sent is not None:
            self.cut()

    def cut(self) -> None:
        self.wfile.flush()
        self.close_connection = True
