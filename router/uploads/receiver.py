"""Receives uploads of adapters: a head says form, place and digest, and the body becomes a folder
of checked files on a shelf."""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
from starlette.datastructures import Headers

from loraplex.adapters.common.disk import disk_errors
from loraplex.adapters.common.unfinished import resumable_folder
from loraplex.adapters.errors import AdapterError, invalid
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.safetensors.header import PREFIX_BYTES, WEIGHTS_FILE, header_size
from loraplex.adapters.uploads.archive import PIECE_BYTES, ByteStream, unpack_archive
from loraplex.adapters.uploads.body import BodyBroken, BodyStream, Receive
from loraplex.adapters.uploads.shelf import UploadShelf
from loraplex.adapters.uploads.sink import FileSink
from loraplex.router.api.request.body import require
from loraplex.router.call import RequestError
from loraplex.router.files.multipart import (
    FormError,
    FormEvent,
    FormReader,
    PartBegins,
    PartContent,
    boundary_of,
)
from loraplex.router.http.body import ClientGone, check_plain
from loraplex.router.names.served import OwnedName

_TAR = ("application/x-tar", "application/tar")
_BYTES = ("", "application/octet-stream", "application/vnd.safetensors", *_TAR)
_RANGE = re.compile(r"bytes (?:(\d{1,15})-(\d{1,15})|\*)/(\d{1,15})")
_SHA256 = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]{44}):")

MAX_AT_ONCE = 16
MAX_OF_TENANT = 4
# Longest wait for the next bytes of a request whose client has come anew.
_HURRY_S = 0.2
_TAR_MAGIC = slice(257, 262)
_GZIP_MAGIC = b"\x1f\x8b"


class BodyRange(msgspec.Struct, frozen=True):
    """The part of a body that a request carries. start: None = it asks how much has come. stop:
    behind its last byte. total: bytes of the whole.
    """

    start: int | None
    stop: int
    total: int


class UploadHead(msgspec.Struct, frozen=True):
    """An upload's head. form: its content type, if it is a form. part: None = the request is the
    whole. sha256: hex of the whole, if it is said; parts always say it.
    """

    form: str | None
    part: BodyRange | None
    sha256: str | None

    def key(self, name: OwnedName) -> str | None:
        """Names the upload that this is a part of; None = it is no part."""
        return None if self.part is None else f"{name} {self.part.total} {self.sha256}"


def read_head(headers: Headers, max_bytes: int) -> UploadHead:
    """Reads an upload's head. Raises RequestError (media_type, invalid, too_large)."""
    content_type = headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (*_BYTES, "multipart/form-data"):
        expected = "application/x-tar, multipart/form-data or application/octet-stream"
        raise RequestError("media_type", f"expected content-type {expected}, got {kind[:100]!r}")
    check_plain(headers, max_bytes)
    part = _part(headers.get("content-range"))
    if part is not None and part.total > max_bytes:
        raise RequestError("too_large", f"an upload may have at most {max_bytes} bytes")
    said = headers.get("repr-digest") or (headers.get("content-digest") if part is None else None)
    form = content_type if kind == "multipart/form-data" else None
    head = UploadHead(form, part, _sha256(said))
    # Versions of an adapter have one length: only the digest tells which of them a part is of.
    message = "a part needs the `Repr-Digest: sha-256=:BASE64:` of the whole"
    require(part is None or head.sha256 is not None, message, "content-range")
    return head


def _part(said: str | None) -> BodyRange | None:
    if said is None:
        return None
    match = _RANGE.fullmatch(said.strip())
    message = "expected `bytes FIRST-LAST/TOTAL`, or `bytes */TOTAL`"
    if match is None:
        raise RequestError("invalid", f"content-range: {message}")
    total = int(match[3])
    if match[1] is None:
        return BodyRange(None, 0, total)
    start, stop = int(match[1]), int(match[2]) + 1
    require(start < stop <= total, message, "content-range")
    return BodyRange(start, stop, total)


def _sha256(said: str | None) -> str | None:
    """Hex of the sha-256 in a digest field (RFC 9530); None where the field has none."""
    match = _SHA256.search(said or "")
    try:
        return None if match is None else base64.b64decode(match[1], validate=True).hex()
    except binascii.Error:
        raise RequestError("invalid", "the digest field is not base64") from None


class PartReceived(Exception):
    """The upload is not whole yet. nbytes: that are here."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class UploadReceiver:
    """Puts uploads on a shelf. max_bytes: of one upload. idle_s: longest wait for its next bytes.
    kept: digests of uploads that must stay. It raises AdapterError while that is not known.

    Only so many run at once, so that they keep no disk and no thread from others.
    """

    def __init__(
        self,
        shelf: UploadShelf,
        max_bytes: int,
        idle_s: float,
        kept: Callable[[], Collection[str]],
    ) -> None:
        self._shelf = shelf
        self._max_bytes = max_bytes
        self._kept = kept
        self._idle_s = idle_s
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "uploads")
        self._open: Counter[str] = Counter()
        self._parts: dict[str, tuple[BodyStream, asyncio.Event]] = {}

    async def receive(self, receive: Receive, head: UploadHead, name: OwnedName) -> str:
        """Returns the digest of the upload's files, which are on the shelf. Raises RequestError,
        AdapterError and ClientGone, which leave nothing, and PartReceived.
        """
        open_now = self._open.total()
        if open_now >= MAX_AT_ONCE or self._open[name.tenant] >= MAX_OF_TENANT:
            raise RequestError("overloaded", f"{open_now} uploads are under way already")
        self._open[name.tenant] += 1
        body, key = BodyStream(receive, self._idle_s), head.key(name)
        loop = asyncio.get_running_loop()
        try:
            async with self._in_place_of_earlier(key, body):
                take = partial(self._take, body, head, key, self._kept())
                return await loop.run_in_executor(self._threads, take)
        except BodyBroken as error:
            if error.why == "gone":
                raise ClientGone from None
            message = f"nothing of the body came for {self._idle_s:g} s"
            raise RequestError("body_timeout", message) from None
        except _Incomplete as error:
            raise PartReceived(error.nbytes) from None
        finally:
            self._open -= Counter((name.tenant,))

    @contextlib.asynccontextmanager
    async def _in_place_of_earlier(self, key: str | None, body: BodyStream) -> AsyncIterator[None]:
        """Takes what still comes of an earlier request for the same upload first. Its client has
        come anew: the earlier connection may have broken without a sign.
        """
        if key is None:
            yield
            return
        earlier, mine = self._parts.get(key), (body, asyncio.Event())
        self._parts[key] = mine
        try:
            if earlier is not None:
                earlier[0].hurry(_HURRY_S)
                await earlier[1].wait()
            yield
        finally:
            mine[1].set()
            if self._parts.get(key) is mine:
                del self._parts[key]

    async def settle(self, digest: str) -> None:
        """Waits until an upload is safe on the disk. Raises AdapterError."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._sync, digest)

    def _sync(self, digest: str) -> None:
        with disk_errors(self._shelf.root):
            self._shelf.sync(digest)

    def _take(
        self, body: BodyStream, head: UploadHead, key: str | None, kept: Collection[str]
    ) -> str:
        with disk_errors(self._shelf.root):
            if head.part is None or key is None:
                return self._unpack(body, head, kept)
            self._shelf.staging_root.mkdir(parents=True, exist_ok=True)
            with resumable_folder(self._shelf.staging_root, key) as folder:
                _append(folder / "body", body, head.part)
                with (folder / "body").open("rb") as whole:
                    return self._unpack(whole, head, kept)

    def _unpack(self, stream: ByteStream, head: UploadHead, kept: Collection[str]) -> str:
        """Unpacks a whole body and puts its files on the shelf; their digest."""
        hashed = None if head.sha256 is None else _Hashed(stream)
        source = hashed or stream
        with self._shelf.staging() as folder:
            sink = FileSink(folder, self._max_bytes)
            with contextlib.closing(sink):
                if head.form is not None:
                    _unpack_form(source, head.form, sink)
                else:
                    _unpack_bytes(source, sink, folder)
                digest = sink.finish()
            if hashed is not None and hashed.hexdigest() != head.sha256:
                message = f"the body's sha-256 is {hashed.hexdigest()}, and not {head.sha256}"
                raise invalid("digest_mismatch", "", message)
            self._shelf.keep(folder, digest, kept)
        return digest


class _Incomplete(AdapterError):
    """The body is not whole; what has come is kept."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("unavailable", "the upload is not whole yet")
        self.nbytes = nbytes


class _Hashed:
    """A stream whose bytes are hashed as they are read."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256()

    def read(self, count: int) -> bytes:
        piece = self._stream.read(count)
        self._sha256.update(piece)
        return piece

    def hexdigest(self) -> str:
        """Hashes what nobody has read yet, too."""
        while self.read(PIECE_BYTES):
            pass
        return self._sha256.hexdigest()


class _Ahead:
    """A stream of which some bytes were read already."""

    def __init__(self, start: bytes, stream: ByteStream) -> None:
        self._start = io.BytesIO(start)
        self._stream = stream

    def read(self, count: int) -> bytes:
        piece = self._start.read(count)
        return piece + self._stream.read(count - len(piece)) if len(piece) < count else piece


def _append(path: Path, body: BodyStream, part: BodyRange) -> None:
    """Appends a part to what has come. Raises _Incomplete until all is there."""
    with path.open("ab") as file:
        have = file.tell()
        if part.start is None or part.start > have:
            raise _Incomplete(have)
        file.truncate(part.start)
        left = part.stop - part.start
        try:
            while left and (piece := body.read(min(left, PIECE_BYTES))):
                file.write(piece)
                left -= len(piece)
        except BodyBroken:
            left -= file.write(body.rest()[:left])
        have = part.stop - left
    if have < part.total:
        raise _Incomplete(have)


def _unpack_bytes(stream: ByteStream, sink: FileSink, folder: Path) -> None:
    """Unpacks a tar, or weights whose metadata have the config."""
    start = stream.read(512)
    if start.startswith(_GZIP_MAGIC):
        raise invalid("bad_archive", "", "the upload is compressed; send an uncompressed tar")
    ahead = _Ahead(start, stream)
    if start[_TAR_MAGIC] == b"ustar" or start == bytes(512):
        unpack_archive(ahead, sink)
        return
    if start[PREFIX_BYTES : PREFIX_BYTES + 1] != b"{":
        raise invalid(
            "bad_archive", "", "the upload is neither an uncompressed tar nor safetensors"
        )
    sink.begin(WEIGHTS_FILE)
    while piece := ahead.read(PIECE_BYTES):
        sink.write(piece)
    sink.end()
    sink.begin(CONFIG_FILE)
    sink.write(_config_within(folder / WEIGHTS_FILE))
    sink.end()


def _config_within(weights: Path) -> bytes:
    """The config in a weights file's metadata, under the name of its file."""
    with weights.open("rb") as file:
        size = header_size(file.read(PREFIX_BYTES), weights.stat().st_size)
        header = json.loads(file.read(size))  # the sink has judged it
    config = header.get("__metadata__", {}).get(CONFIG_FILE)
    if config is None:
        message = f"neither a tar nor weights with `{CONFIG_FILE}` among their metadata"
        raise invalid("missing_file", CONFIG_FILE, message)
    return str(config).encode()


def _unpack_form(stream: ByteStream, content_type: str, sink: FileSink) -> None:
    """Unpacks a form with a part for each file."""
    try:
        reader = FormReader(boundary_of(content_type))
        while piece := stream.read(PIECE_BYTES):
            for event in reader.feed(piece):
                _take_event(event, sink)
    except FormError as error:
        raise RequestError("invalid", f"the form cannot be read: {error}") from None
    if not reader.is_whole:
        raise RequestError("invalid", "the form breaks off before its last boundary")


def _take_event(event: FormEvent, sink: FileSink) -> None:
    if isinstance(event, PartBegins):
        sink.begin((event.filename or event.name).rpartition("/")[2])
    elif isinstance(event, PartContent):
        sink.write(event.content)
    else:
        sink.end()
