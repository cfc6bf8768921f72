"""Answers callers' questions about files and batches, each within the caller's tenant."""

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loraplex.router.api.files_and_batches import (
    BatchList,
    BatchObject,
    CreateBatchBody,
    DeletedFile,
    FileList,
    FileObject,
    ListQuery,
    page_of,
)
from loraplex.router.background import Background
from loraplex.router.batches.folder import BatchFolder
from loraplex.router.batches.inside import InsideDoor
from loraplex.router.batches.keeper import BatchKeeper
from loraplex.router.batches.state import BatchState
from loraplex.router.call import RequestError
from loraplex.router.files.store import FileStore, off_loop
from loraplex.router.files.stored_file import BATCH_ID, FILE_ID, StorageLimits, new_id
from loraplex.router.files.upload import Uploads
from loraplex.router.tenancy.keys import Caller


@dataclass(frozen=True, slots=True)
class BatchDesk:
    """Answers callers' requests about batches. room_of: how much a tenant may store. expiry_s: of a
    batch's files that say none. door: by which lines come in.
    """

    store: FileStore
    folder: BatchFolder
    keeper: BatchKeeper
    uploads: Uploads
    room_of: Callable[[str], StorageLimits]
    expiry_s: int
    door: InsideDoor

    # Files

    async def files(self, caller: Caller, query: ListQuery) -> FileList:
        found = await off_loop(self._files, caller.tenant)
        wanted = {file.id: file for file in found if query.purpose in ("", file.purpose)}
        ids, has_more = page_of([*wanted], query)
        data = [wanted[file_id] for file_id in ids]
        return FileList(data, *_ends(ids), has_more=has_more)

    def _files(self, tenant: str) -> list[FileObject]:
        found = [self.store.find(tenant, file_id) for file_id in self.store.ids(tenant)]
        now = time.time()
        return [file for file in found if file is not None and not file.has_expired(now)]

    async def file(self, caller: Caller, file_id: str) -> FileObject:
        return await off_loop(self.store.get, caller.tenant, file_id)

    async def delete(self, caller: Caller, file_id: str) -> DeletedFile:
        await off_loop(self._delete, caller.tenant, file_id)
        return DeletedFile(file_id)

    def _delete(self, tenant: str, file_id: str) -> None:
        self.store.get(tenant, file_id)
        if file_id in self.folder.inputs_in_use(tenant):
            raise RequestError(
                "conflict", f"a batch reads {file_id}: cancel it first, or wait for its end"
            )
        self.store.delete(tenant, file_id)

    # Batches

    async def create(self, caller: Caller, wanted: CreateBatchBody, window_s: int) -> BatchObject:
        state = await off_loop(self._create, caller, wanted, window_s)
        self.keeper.wake()
        return state.shown()

    def _create(self, caller: Caller, wanted: CreateBatchBody, window_s: int) -> BatchState:
        tenant, now = caller.tenant, time.time()
        file = self.store.get(tenant, wanted.input_file_id, "input_file_id")
        if file.purpose != "batch":
            message = f"`input_file_id`: the purpose of {file.id} is {file.purpose!r}, not 'batch'"
            raise RequestError("invalid", message, param="input_file_id")
        self.store.check_room(tenant, self.room_of(tenant), 2, 0)
        expires = wanted.output_expires_after
        state = BatchState(
            id=_drawn(BATCH_ID, now),
            tenant=tenant,
            key_id=caller.key_id,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            created_at=int(now),
            expires_at=int(now) + window_s,
            output_id=_drawn(FILE_ID, now),
            error_id=_drawn(FILE_ID, now),
            output_expiry_s=self.expiry_s if expires is None else expires.seconds,
            metadata=wanted.metadata,
        )
        self.folder.create(state)
        return state

    async def batches(self, caller: Caller, query: ListQuery) -> BatchList:
        ids = await off_loop(self.folder.ids, caller.tenant)
        page, has_more = page_of(ids, query)
        states = [await self._state(caller, batch_id) for batch_id in page]
        shown = [await self._shown(state) for state in states]
        return BatchList(shown, *_ends(page), has_more=has_more)

    async def batch(self, caller: Caller, batch_id: str) -> BatchObject:
        return await self._shown(await self._state(caller, batch_id))

    async def cancel(self, caller: Caller, batch_id: str) -> BatchObject:
        """Asks for the end of a batch. Its lines in flight may still end. Raises RequestError
        (conflict) for one that is over.
        """
        state = await self._state(caller, batch_id)
        if state.is_over or state.end is not None:
            raise RequestError("conflict", f"{batch_id} is {state.status}: nothing is left to stop")
        now = int(time.time())
        asked = await off_loop(self.folder.ask_cancel, caller.tenant, batch_id, now)
        self.keeper.wake()
        return state.shown(asked)

    async def _state(self, caller: Caller, batch_id: str) -> BatchState:
        running = self.keeper.state(batch_id)  # first: it may end while its note is read
        noted = await off_loop(self.folder.get, caller.tenant, batch_id)
        return noted if noted.is_over else running or noted

    async def _shown(self, state: BatchState) -> BatchObject:
        if state.is_over:
            return state.shown()
        return state.shown(await off_loop(self.folder.cancel_asked, state.tenant, state.id))


def _drawn(kind: str, now: float) -> str:
    return new_id(kind, now, secrets.token_hex(6))


def _ends(ids: list[str]) -> tuple[str | None, str | None]:
    return (ids[0], ids[-1]) if ids else (None, None)


@asynccontextmanager
async def running_batches(desk: BatchDesk | None, background: Background) -> AsyncIterator[None]:
    """Runs batches while inside."""
    if desk is None:
        yield
        return
    with contextlib.suppress(RequestError):  # it is tried again
        await desk.keeper.open()
    try:
        async with background.running(desk.keeper.run()):
            yield
    finally:
        await desk.keeper.close()
