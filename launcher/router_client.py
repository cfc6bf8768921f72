"""A client of a running router's operator API, and tables of its answers."""

import argparse
import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loraplex.adapters.common.authorities import trusted_context
from loraplex.adapters.uploads.archive import adapter_files, archive_bytes, archive_pieces
from loraplex.launcher.options import MAX_PORT, OptionError

DEFAULT_URL = "http://127.0.0.1:8080"
HTTP_URL = "http://host:port or https://host:port"
# Loading waits for a download, unloading for running requests.
TIMEOUT_S = 900.0
_ATTEMPTS = 5
_INCOMPLETE = 308


class Failed(Exception):
    """A request failed; str() is what the router, or the network, said."""


def add_router_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the router [{DEFAULT_URL}]")
    parser.add_argument(
        "--admin-key-file", metavar="PATH", help="file with the key [LORAPLEX_ADMIN_KEY]"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def connect(url: str, admin_key: str) -> httpx.Client:
    """Opens an HTTP client for a router's admin API. Raises OptionError."""
    if not is_http_url(url):
        raise OptionError(f"--url must be {HTTP_URL}, got {url[:200]!r}")
    if not admin_key.isascii():
        raise OptionError("the admin key must be ASCII, as it is sent in a header")
    return httpx.Client(
        base_url=server_url(url),
        headers=bearer(admin_key),
        timeout=TIMEOUT_S,
        verify=trusted_context(),
        trust_env=False,
    )


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key; none for no key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_http_url(url: str) -> bool:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    port = 1 if parts.port is None else parts.port
    return parts.scheme in ("http", "https") and bool(parts.host) and 0 < port <= MAX_PORT


def server_url(text: str) -> str:
    """A server's address, as callers write it, with `/v1` or without. Raises ValueError."""
    if not is_http_url(text):
        raise ValueError(f"expected {HTTP_URL}, got {text[:80]!r}")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def send(http: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """Sends a request and gives the answer's JSON. Raises Failed."""
    try:
        answer = http.request(method, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unanswered(http, error) from error
    return _content(http, answer)


def _unanswered(http: httpx.Client, error: Exception) -> Failed:
    if isinstance(error, httpx.ConnectError):
        where = "start one, or say where it is (--url)"
        return Failed(f"no router answers at {http.base_url} ({error}): {where}")
    return Failed(f"{http.base_url}: {error}")


def _content(http: httpx.Client, answer: httpx.Response) -> Any:
    """The JSON of an answer that is a success. Raises Failed."""
    try:
        content = answer.json()
    except json.JSONDecodeError:
        raise Failed(f"{http.base_url} answered {answer.status_code}, not in JSON") from None
    if answer.is_success:
        return content
    fault = content.get("error") if isinstance(content, dict) else None
    message = fault.get("message") if isinstance(fault, dict) else fault
    raise Failed(str(message or f"{http.base_url} answered {answer.status_code}"))


def push(http: httpx.Client, path: str, folder: Path) -> Any:
    """Uploads a folder's adapter, going on where it broke off; the answer's JSON. Raises Failed."""
    try:
        files = adapter_files(folder)
        total = archive_bytes(files)
        return _put(http, path, files, total)
    except OSError as error:
        raise Failed(f"{folder}: {error.strerror or error}") from error


def _put(http: httpx.Client, path: str, files: list[Path], total: int) -> Any:
    digest: dict[str, str] = {}
    start = 0
    for attempt in range(_ATTEMPTS):
        try:
            part = {"content-range": f"bytes {start}-{total - 1}/{total}"} if attempt else {}
            body = _from(archive_pieces(files), start)
            headers = {"content-type": "application/x-tar", **part, **digest}
            headers["content-length"] = str(total - start)
            answer = http.put(path, content=body, headers=headers)
        except httpx.TransportError as error:
            digest = digest or {"repr-digest": _digest(files)}
            start = _received(http, path, total, digest, error)
            continue
        if answer.status_code != _INCOMPLETE:
            return _content(http, answer)
        start = int(answer.json()["received"])
    raise Failed(f"{http.base_url}: the upload broke off {_ATTEMPTS} times")


def _digest(files: list[Path]) -> str:
    """The digest of the tar of these files, as a field (RFC 9530). Raises OSError."""
    sha256 = hashlib.sha256()
    for piece in archive_pieces(files):
        sha256.update(piece)
    return f"sha-256=:{base64.b64encode(sha256.digest()).decode()}:"


def _received(
    http: httpx.Client, path: str, total: int, digest: dict[str, str], cause: Exception
) -> int:
    """Bytes of a broken upload that the router has. Raises Failed when it does not answer."""
    try:
        part = {"content-type": "application/x-tar", "content-range": f"bytes */{total}"}
        answer = http.put(path, headers=part | digest)
    except httpx.HTTPError:
        raise _unanswered(http, cause) from cause
    if answer.status_code != _INCOMPLETE:
        _content(http, answer)
    return int(answer.json()["received"])


def _from(pieces: Iterator[bytes], start: int) -> Iterator[bytes]:
    """The bytes from `start` on."""
    for piece in pieces:
        if start < len(piece):
            yield piece[start:]
        start = max(0, start - len(piece))


def as_json(content: list[Any]) -> str:
    return json.dumps(content[0] if len(content) == 1 else content, indent=2) + "\n"


def json_text(value: Any) -> str:
    """Any value that msgspec encodes, as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows as lines with the columns below each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
