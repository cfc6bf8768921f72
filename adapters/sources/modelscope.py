"""Adapters on ModelScope, through the HTTP API that its own client speaks. Its client keeps a cache
and credentials of its own, and brings no single file from where it broke off.

Nothing but public repositories is read: no credential is sent.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loraplex.adapters.common.authorities import trusted_context
from loraplex.adapters.errors import AdapterError, invalid
from loraplex.adapters.peft.files import is_relevant
from loraplex.adapters.ref import MODELSCOPE_ENDPOINT, AdapterRef, pin_of, shown_name
from loraplex.adapters.sources.base import PinnedSource, RemoteFile, changed, refused, unreachable
from loraplex.adapters.sources.partial import RemoteBytes, range_start

DEFAULT_TIMEOUT_S = 10.0
# The hub cuts a list off here, and does not say so.
MAX_ENTRIES = 3000
_MAX_LIST_BYTES = 8 << 20
_MAX_REDIRECTS = 5
_PIECE_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTENT = ("blob", "file")


class _Entry(msgspec.Struct, rename="pascal"):
    """A file or folder of a listing. revision: the commit that last changed it."""

    path: str
    type: str = "blob"
    size: int | None = None
    sha256: str | None = None
    revision: str | None = None


class _Files(msgspec.Struct, rename="pascal"):
    files: list[_Entry] | None = None


class _Listing(msgspec.Struct, rename="pascal"):
    """ModelScope's answer to a request for a list of files. code: 200, or what is wrong, under an
    HTTP status that may be 200 all the same.
    """

    code: int
    data: _Files | None = None


_read_listing = msgspec.json.Decoder(_Listing).decode


class ModelScopeSource(PinnedSource):
    """Fetches adapters from ModelScope. owners: those allowed; `*` = all. endpoint: of the hub.
    timeout_s: to connect, and between two reads.
    """

    def __init__(
        self,
        owners: Sequence[str],
        endpoint: str = MODELSCOPE_ENDPOINT,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._owners = frozenset(owners)
        self._api = httpx.URL(endpoint.rstrip("/") + "/api/v1/models/")
        self._client = httpx.Client(
            verify=trusted_context(),
            timeout=timeout_s,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"accept-encoding": "identity", "user-agent": "loraplex"},
        )

    def _fetch(self, ref: AdapterRef, name: str, file: RemoteFile, target: Path) -> None:
        super()._fetch(ref, name, file, target)
        if _SHA256.fullmatch(file.tag) and _sha256_of(target) != file.tag:
            target.unlink()
            raise changed(ref)

    def _check(self, ref: AdapterRef) -> None:
        owner = ref.name.partition("/")[0]
        if "*" not in self._owners and owner not in self._owners:
            message = f"adapters of {owner!r} are not allowed here (--modelscope-owner)"
            raise AdapterError("forbidden", message)

    def _list(self, ref: AdapterRef) -> Mapping[str, RemoteFile]:
        params = {"Revision": pin_of(ref).label, "Recursive": "False"}
        with self._request(ref, "repo/files", params, {}) as answer:
            if answer.status_code != 200:
                raise refused(ref, answer.status_code, answer.headers.get("retry-after"))
            listing = _listing(ref, _bounded(ref, answer))
        entries = (listing.data.files if listing.data is not None else None) or []
        if len(entries) >= MAX_ENTRIES:
            message = f"the repository has {MAX_ENTRIES} entries or more at its top"
            raise invalid("too_many_files", shown_name(ref), message)
        files = {
            entry.path: _remote_file(ref, entry)
            for entry in entries
            if entry.type in _CONTENT and is_relevant(entry.path)
        }
        return files

    @contextmanager
    def _open(
        self, ref: AdapterRef, name: str, file: RemoteFile, offset: int
    ) -> Iterator[RemoteBytes]:
        """Opens a file. One that has a commit for its tag is that commit's."""
        is_commit = _COMMIT.fullmatch(file.tag) is not None
        params = {"Revision": file.tag if is_commit else pin_of(ref).label, "FilePath": name}
        headers = {"range": f"bytes={offset}-"} if offset else {}
        with self._request(ref, "repo", params, headers) as answer:
            if answer.status_code in (404, 410, 416):
                raise changed(ref)
            if answer.status_code not in (200, 206):
                raise refused(ref, answer.status_code, answer.headers.get("retry-after"))
            start = range_start(answer.status_code, answer.headers.get("content-range"))
            yield RemoteBytes(start, answer.iter_raw())

    @contextmanager
    def _request(
        self, ref: AdapterRef, route: str, params: Mapping[str, str], headers: Mapping[str, str]
    ) -> Iterator[httpx.Response]:
        """Sends a request. Follows the hub to its storage, never from HTTPS to less."""
        url = self._api.join(f"{ref.name}/{route}").copy_merge_params(dict(params))
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                with self._client.stream("GET", url, headers=dict(headers)) as answer:
                    if not answer.is_redirect:
                        yield answer
                        return
                    url = url.join(answer.headers["location"])
                if url.scheme != "https" and self._api.scheme == "https":
                    break
        except (httpx.HTTPError, httpx.InvalidURL):
            raise unreachable(ref) from None
        raise unreachable(ref)


def _bounded(ref: AdapterRef, answer: httpx.Response) -> bytes:
    body = bytearray()
    for piece in answer.iter_raw():
        body += piece
        if len(body) > _MAX_LIST_BYTES:
            raise unreachable(ref)
    return bytes(body)


def _listing(ref: AdapterRef, body: bytes) -> _Listing:
    try:
        listing = _read_listing(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise unreachable(ref) from None
    if listing.code != 200:
        raise AdapterError("not_found", f"{shown_name(ref)} is not to be had on ModelScope")
    return listing


def _remote_file(ref: AdapterRef, entry: _Entry) -> RemoteFile:
    tag = next((tag for tag in (entry.sha256, entry.revision) if tag), "")
    if entry.size is None or entry.size < 0 or not _is_tag(tag):
        message = "ModelScope reports no size of the file, or neither hash nor commit"
        raise invalid("unpinned_file", entry.path, message)
    return RemoteFile(tag, entry.size)


def _is_tag(tag: str) -> bool:
    return _SHA256.fullmatch(tag) is not None or _COMMIT.fullmatch(tag) is not None


def _sha256_of(path: Path) -> str:
    digest: Any = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return str(digest.hexdigest())
