"""An HTTP server on 127.0.0.1 that keeps files as S3 does, or as a plain web server does.

It speaks ListObjectsV2, HEAD and GET with Range, If-Match and If-Unmodified-Since.
"""

import hashlib
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

LAST_MODIFIED = "Wed, 21 Oct 2015 07:28:00 GMT"


@dataclass
class Fault:
    """What happens to requests for one file (or LIST). times: how often; after: bytes sent first.

    kind: `status` answers with it, `cut` closes the connection, `stall` sends no more, `flood`
    sends twice what was announced before.
    """

    kind: str
    status: int = 500
    code: str = "InternalError"
    headers: tuple[tuple[str, str], ...] = ()
    after: int = 0
    times: int = 1 << 30
    method: str = "GET"


class FileServer:
    """files: path without the first slash -> bytes. asked: (method, file name) -> how often."""

    def __init__(self, port: int, scheme: str = "http") -> None:
        self.port = port
        self.endpoint = f"{scheme}://127.0.0.1:{port}"
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, Fault] = {}
        self.asked: Counter[tuple[str, str]] = Counter()
        self.body_bytes: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.ranges: list[str] = []
        self.weak = self.ignore_ranges = False
        self.tells = True
        self.before_get: Any = lambda name: None
        self.released = threading.Event()

    def publish(self, prefix: str, folder: Path) -> None:
        for path in folder.iterdir():
            if path.is_file():
                self.files[f"{prefix}/{path.name}"] = path.read_bytes()

    def take_fault(self, method: str, name: str) -> Fault | None:
        fault = self.faults.get(name)
        if fault is None or fault.method != method or fault.times <= 0:
            return None
        fault.times -= 1
        return fault


class _Handler(BaseHTTPRequestHandler):
    store: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        path = unquote(url.path).lstrip("/")
        name = "LIST" if "list-type" in query else path.rpartition("/")[2]
        self.store.asked[self.command, name] += 1
        self.store.headers.append(dict(self.headers))
        if self.command == "GET":
            self.store.before_get(name)
        fault = self.store.take_fault(self.command, name)
        if fault is not None and fault.kind == "status":
            body = f"<Error><Code>{fault.code}</Code><Message>no</Message></Error>"
            self._send(fault.status, body.encode(), dict(fault.headers))
        elif name == "LIST":
            self._list(path, query)
        else:
            self._file(path, name, fault)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        start = f"{bucket.rstrip('/')}/"
        page = int(query.get("max-keys", ["1000"])[0])
        after = query.get("continuation-token", [""])[0]
        keys = sorted(
            path.removeprefix(start) for path in self.store.files if path.startswith(start)
        )
        keys = [key for key in keys if key.startswith(prefix) and key > after]
        more = len(keys) > page
        keys = keys[:page]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><ETag>{escape(_etag(data))}</ETag>"
            f"<Size>{len(data)}</Size></Contents>"
            for key in keys
            if "/" not in key[len(prefix) :] and (data := self.store.files[start + key]) is not None
        )
        token = f"<NextContinuationToken>{escape(keys[-1])}</NextContinuationToken>" if more else ""
        body = (
            '<?xml version="1.0"?><ListBucketResult><IsTruncated>'
            f"{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        )
        self._send(200, body.encode(), {"Content-Type": "application/xml"})

    def _file(self, path: str, name: str, fault: Fault | None) -> None:
        data = self.store.files.get(path)
        if data is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
            return
        if self.headers.get("If-Match", _etag(data)) != _etag(data):
            self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>", {})
            return
        tag = {"ETag": _etag(data)} if self.store.tells else {}
        if self.store.weak:
            tag = {"ETag": f"W/{_etag(data)}", "Last-Modified": LAST_MODIFIED}
        if fault is not None and fault.kind == "flood":
            data, fault = data * 2, None
        wanted = self.headers.get("Range")
        start = 0
        if wanted and not self.store.ignore_ranges:
            self.store.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            tag["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, data[start:], tag, fault)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], fault: Fault | None = None
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None:
            body = body[: fault.after]
            self.close_connection = True
        self.wfile.write(body)
        self.store.body_bytes[urlsplit(self.path).path.rpartition("/")[2]] += len(body)
        if fault is not None and fault.kind == "stall":
            self.wfile.flush()
            self.store.released.wait(60)


def _etag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"'


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def running_files(certificate: Path | None = None) -> Iterator[FileServer]:
    """certificate: PEM with its key; None = plain HTTP."""
    handler = type("Handler", (_Handler,), {})
    server = _Server(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    store = FileServer(server.server_port, "https" if certificate else "http")
    handler.store = store  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.released.set()
        server.shutdown()
        server.server_close()
        thread.join(30)
