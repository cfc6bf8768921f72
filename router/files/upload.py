"""An upload: a form whose file goes to the disk as it comes, within limits of bytes and time."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request

from loraplex.router.api.files_and_batches import FORM_FIELDS, FileObject, parse_form
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
from loraplex.router.files.store import FileStore, off_loop
from loraplex.router.files.stored_file import FILE_ID, StorageLimits, name_of, new_id
from loraplex.router.http.body import ClientGone
from loraplex.router.policy.batch_limits import FilesLimits

# What is gathered before it is written.
_WRITE_BYTES = 1 << 20
_MAX_FIELD_BYTES = 1024
_MAX_AT_ONCE = 16


class Uploads:
    """Receives uploads. Only so many run at once, so that they keep no disk and no memory from
    others. idle_s: longest wait for the next bytes.
    """

    def __init__(self, store: FileStore, limits: FilesLimits, idle_s: float) -> None:
        self._store = store
        self._limits = limits
        self._idle_s = idle_s
        self._open = 0

    async def receive(self, request: Request, tenant: str, room: StorageLimits) -> FileObject:
        """Stores an upload's file, or leaves nothing. Raises RequestError, ClientGone."""
        if self._open >= _MAX_AT_ONCE:
            raise RequestError("overloaded", f"{self._open} uploads are under way already")
        self._open += 1
        try:
            return await self._receive(request, tenant, room)
        finally:
            self._open -= 1

    async def _receive(self, request: Request, tenant: str, room: StorageLimits) -> FileObject:
        try:
            reader = FormReader(boundary_of(request.headers.get("content-type", "")))
        except FormError as error:
            raise RequestError("media_type", str(error)) from None
        await off_loop(self._store.check_room, tenant, room, 1, 0)
        now = time.time()
        file_id = new_id(FILE_ID, now, secrets.token_hex(6))
        path = await off_loop(self._store.begin, tenant, file_id)
        form = _Form(path, self._limits.max_file_bytes)
        try:
            await self._read(request, reader, form, tenant, room)
            purpose, expiry_s = parse_form(form.fields, self._limits.expire_s)
            require(form.filename is not None, "is needed", "file")
            require(form.nbytes, "it is empty", "file")
            await off_loop(form.flush)
            await off_loop(self._store.check_room, tenant, room, 1, 0)
            name = name_of(form.filename)
            created = int(now)
            stored = FileObject(file_id, form.nbytes, created, created + expiry_s, name, purpose)
            await off_loop(self._store.keep, tenant, path, stored)
            return stored
        finally:
            await off_loop(form.close)

    async def _read(
        self, request: Request, reader: FormReader, form: "_Form", tenant: str, room: StorageLimits
    ) -> None:
        async for piece in _pieces(request, self._idle_s):
            try:
                for event in reader.feed(piece):
                    form.take(event)
            except FormError as error:
                raise RequestError("invalid", f"the form cannot be read: {error}") from None
            if form.unwritten >= _WRITE_BYTES:
                await off_loop(form.flush)
                await off_loop(self._store.check_room, tenant, room, 1, 0)
        if not reader.is_whole:
            raise RequestError("invalid", "the form breaks off before its last boundary")


async def _pieces(request: Request, idle_s: float) -> AsyncIterator[bytes]:
    """Pieces of the body. Raises RequestError (body_timeout), ClientGone."""
    while True:
        try:
            message = await asyncio.wait_for(request.receive(), idle_s)
        except TimeoutError:
            raise RequestError(
                "body_timeout", f"nothing of the body came for {idle_s:g} s"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


class _Form:
    """The parts of a form so far: small fields, and a file on its way to the disk."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.nbytes = 0
        self._path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self._unwritten = bytearray()
        self._field = bytearray()
        self._name = ""

    @property
    def unwritten(self) -> int:
        return len(self._unwritten)

    def take(self, event: FormEvent) -> None:
        """Handles the next part of the form. Raises RequestError."""
        if isinstance(event, PartBegins):
            self._begin(event)
        elif isinstance(event, PartContent):
            self._content(event.content)
        elif self._name != "file":
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _begin(self, part: PartBegins) -> None:
        known = ", ".join(FORM_FIELDS)
        require(part.name in FORM_FIELDS, f"unknown field; known: {known}", part.name[:100])
        is_twice = part.name in self.fields or (part.name == "file" and self.filename is not None)
        require(not is_twice, "given more than once", part.name)
        self._name = part.name
        self._field.clear()
        if part.name == "file":
            self.filename = part.filename or ""

    def _content(self, content: bytes) -> None:
        if self._name == "file":
            self.nbytes += len(content)
            if self.nbytes > self._max_bytes:
                raise RequestError(
                    "too_large", f"a file may have at most {self._max_bytes} bytes", param="file"
                )
            self._unwritten += content
            return
        self._field += content
        require(
            len(self._field) <= _MAX_FIELD_BYTES, f"more than {_MAX_FIELD_BYTES} bytes", self._name
        )

    def flush(self) -> None:
        """Writes the bytes that wait to the file. Raises OSError."""
        if self._file is None:
            self._file = self._path.open("xb")
        self._file.write(self._unwritten)
        self._file.flush()
        self._unwritten.clear()

    def close(self) -> None:
        """Remove a file that was not kept."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._path.unlink(missing_ok=True)
