"""Adapters on HTTPS servers that the operator listed: PEFT's files at `https://host[:port]/path/`.

A host's name is resolved once for each file, its addresses are judged, and the connection goes to
the address that was judged. No redirect is followed, no proxy asked, no credential sent.
"""

import re
import ssl
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from loraplex.adapters.common.authorities import trusted_context
from loraplex.adapters.common.web_hosts import (
    MAX_ADDRESSES,
    PORT,
    Lookup,
    is_public,
    listed_host,
    look_up,
)
from loraplex.adapters.errors import AdapterError, Findings, invalid
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.files import SIDE_FILES
from loraplex.adapters.peft.validate import WEIGHTS_FILE
from loraplex.adapters.ref import AdapterRef, shown_name
from loraplex.adapters.safetensors.header import (
    INDEX_FILES,
    MAX_INDEX_BYTES,
    MAX_SHARDS,
    parse_index,
)
from loraplex.adapters.sources.base import PinnedSource, RemoteFile, changed, refused, unreachable
from loraplex.adapters.sources.partial import RemoteBytes, range_start

DEFAULT_TIMEOUT_S = 10.0
_FILES = (CONFIG_FILE, WEIGHTS_FILE, *SIDE_FILES)
_LENGTH = re.compile(r"[0-9]{1,18}")


class HttpsSource(PinnedSource):
    """Fetches adapters from web servers. hosts: `host` = port 443 at public addresses; `host:port`
    = that port, at any address.

    timeout_s: to connect, and between two reads. certificates: None = the system's and certifi's.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        certificates: ssl.SSLContext | None = None,
        lookup: Lookup = look_up,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._hosts = dict(listed_host(host, "--https-host") for host in hosts)
        self._lookup = lookup
        self._client = httpx.Client(
            verify=certificates or trusted_context(),
            timeout=timeout_s,
            trust_env=False,
            follow_redirects=False,
            # A kept connection to this address may have shown another host's certificate.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"accept-encoding": "identity", "user-agent": "loraplex"},
        )

    def _check(self, ref: AdapterRef) -> bool:
        """Whether the host may have a private address."""
        place = _place(ref)[:2]
        if place not in self._hosts:
            message = f"{shown_name(ref)}: adapters of its host are not allowed here (--https-host)"
            raise AdapterError("forbidden", message)
        return self._hosts[place]

    def _list(self, ref: AdapterRef) -> Mapping[str, RemoteFile]:
        files = self._heads(ref, _FILES)
        if WEIGHTS_FILE not in files:
            files |= self._shards(ref)
        return files

    def _heads(self, ref: AdapterRef, names: Iterable[str]) -> dict[str, RemoteFile]:
        """Asks for the named files; returns those that exist."""
        files = {}
        for name in names:
            with self._request("HEAD", ref, name, {}) as answer:
                if answer.status_code not in (404, 410):
                    _check_answer(answer, ref)
                    files[name] = _remote_file(answer, name)
        return files

    def _shards(self, ref: AdapterRef) -> dict[str, RemoteFile]:
        """An index and the files that it names, as nobody lists what else is there."""
        for name, index in self._heads(ref, INDEX_FILES).items():
            data = self._read(ref, name, index) if index.size <= MAX_INDEX_BYTES else b""
            named = parse_index(data, name, Findings()) or {}
            shards = sorted(set(named.values()))[: MAX_SHARDS + 1]
            return {name: index} | self._heads(ref, shards)
        return {}

    def _read(self, ref: AdapterRef, name: str, file: RemoteFile) -> bytes:
        with tempfile.TemporaryDirectory(prefix="loraplex-index-") as folder:
            target = Path(folder) / name
            self._fetch(ref, name, file, target)
            return target.read_bytes()

    @contextmanager
    def _open(
        self, ref: AdapterRef, name: str, file: RemoteFile, offset: int
    ) -> Iterator[RemoteBytes]:
        is_etag = file.tag.startswith('"')
        headers = {"if-match" if is_etag else "if-unmodified-since": file.tag}
        if offset:
            headers["range"] = f"bytes={offset}-"
        with self._request("GET", ref, name, headers) as answer:
            if answer.status_code in (404, 410, 412, 416):
                raise changed(ref)
            _check_answer(answer, ref)
            if _tag(answer) != file.tag:
                raise changed(ref)
            start = range_start(answer.status_code, answer.headers.get("content-range"))
            yield RemoteBytes(start, answer.iter_raw())

    @contextmanager
    def _request(
        self, method: str, ref: AdapterRef, name: str, headers: Mapping[str, str]
    ) -> Iterator[httpx.Response]:
        try:
            with closing(self._send(method, ref, name, headers)) as answer:
                yield answer
        except httpx.HTTPError:
            raise unreachable(ref) from None

    def _send(
        self, method: str, ref: AdapterRef, name: str, headers: Mapping[str, str]
    ) -> httpx.Response:
        """Sends to the first address that accepts a connection. Raises httpx.HTTPError."""
        host, port, path = _place(ref)
        addresses = self._addresses(ref, host, port)
        for number, address in enumerate(addresses, 1):
            request = self._client.build_request(
                method,
                f"https://{f'[{address}]' if ':' in address else address}:{port}/{path}/{name}",
                headers={**headers, "host": host if port == PORT else f"{host}:{port}"},
                # The certificate must be the host's, whatever its address.
                extensions={"sni_hostname": host},
            )
            try:
                return self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(addresses):
                    raise
        raise unreachable(ref)

    def _addresses(self, ref: AdapterRef, host: str, port: int) -> Sequence[str]:
        """Looks up a host's addresses: judged, and at most a few."""
        try:
            addresses = self._lookup(host, port)
        except (OSError, UnicodeError):
            raise unreachable(ref) from None
        if not self._check(ref) and not all(map(is_public, addresses)):
            message = f"{shown_name(ref)}: its host has a private address (--https-host HOST:PORT)"
            raise AdapterError("forbidden", message)
        return addresses[:MAX_ADDRESSES]


def _place(ref: AdapterRef) -> tuple[str, int, str]:
    server, _, path = ref.name.partition("/")
    host, _, port = server.partition(":")
    return host, int(port or PORT), path


def _check_answer(answer: httpx.Response, ref: AdapterRef) -> None:
    """Checks an answer before its body is read. Raises AdapterError for any but a plain one."""
    if answer.is_redirect:
        raise AdapterError("not_found", f"{shown_name(ref)} is a redirect, which is not followed")
    if answer.status_code not in (200, 206):
        raise refused(ref, answer.status_code, answer.headers.get("retry-after"))
    if answer.headers.get("content-encoding", "identity") != "identity":
        message = "the server compresses, though it was asked not to"
        raise invalid("unpinned_file", shown_name(ref), message)


def _remote_file(answer: httpx.Response, name: str) -> RemoteFile:
    tag, size = _tag(answer), answer.headers.get("content-length", "")
    if not tag or not _LENGTH.fullmatch(size):
        message = f"the server reports no length of {name}, or neither ETag nor Last-Modified"
        raise invalid("unpinned_file", name, message)
    return RemoteFile(tag, int(size))


def _tag(answer: httpx.Response) -> str:
    """The tag of an answer's file. A weak ETag says nothing of bytes."""
    etag = str(answer.headers.get("etag", ""))
    return etag if etag.startswith('"') else str(answer.headers.get("last-modified", ""))
