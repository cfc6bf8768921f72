"""Batches below `--files-dir`, and what routers that share it say of them: who runs which, and who
has live work. Every method of `BatchFolder` may wait for the disk.

open/<id>                                whose batch it is; there as long as it is not over
tenants/<tenant>/batches/<id>.json       its state, written by the router that runs it
                        /<id>.cancel     when its end was asked for, by any router
                        /<id>.lock       of the process that runs it
                        /<id>.out.jsonl, <id>.errors.jsonl: answers, until it is over
"""

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec

from loraplex.adapters.common.disk import lock_file
from loraplex.router.batches.state import BatchState
from loraplex.router.call import RequestError
from loraplex.router.files.store import FileStore, names_in, off_loop, read_if_there, write_whole
from loraplex.router.files.stored_file import BATCH_ID, ids_of, is_id
from loraplex.router.shared.store import Store, StoreDown

MAX_OPEN = 100  # of a tenant
MAX_KEPT = 1000
_NOTE, _CANCEL, _LOCK = ".json", ".cancel", ".lock"
_ENDINGS = (_NOTE, _CANCEL, _LOCK, ".out.jsonl", ".errors.jsonl")
_MADE_S = 60.0
# Leases of the router that runs a batch, and of its note to others.
_CLAIMED_S, _NOTED_S = 10.0, 5.0
# A router that could not renew for so long runs nothing: another may take over soon after.
_LOST_S = 6.0
_GROUP = "batch-routers"
_read_state = msgspec.json.Decoder(BatchState).decode

_encode = msgspec.msgpack.Encoder().encode


class BatchFolder:
    """Keeps the batches of all tenants on disk. Raises OSError."""

    def __init__(self, root: Path, store: FileStore) -> None:
        self._open = root / "open"
        self._store = store

    def ids(self, tenant: str) -> list[str]:
        return ids_of(names_in(self._folder(tenant)), BATCH_ID, _NOTE)

    def find(self, tenant: str, batch_id: str) -> BatchState | None:
        if not is_id(BATCH_ID, batch_id):
            return None
        note = read_if_there(self._path(tenant, batch_id, _NOTE))
        return None if note is None else _read_state(note)

    def get(self, tenant: str, batch_id: str) -> BatchState:
        """Returns a tenant's batch. Raises RequestError (batch_not_found)."""
        found = self.find(tenant, batch_id)
        if found is None:
            raise RequestError("batch_not_found", f"no batch {batch_id[:80]!r}")
        return found

    def create(self, state: BatchState) -> None:
        """Stores a new batch. Raises RequestError when too many are open."""
        tenant = state.tenant
        count = sum(owner == tenant for owner, _ in self.open_batches())
        if count >= MAX_OPEN:
            raise RequestError("overloaded", f"{count} batches are open already; let some end")
        self._forget_old(tenant)
        self._folder(tenant).mkdir(parents=True, exist_ok=True)
        self._open.mkdir(exist_ok=True)
        # First: what is noted is also found.
        write_whole(self._open / state.id, tenant.encode())
        self.save(state)

    def save(self, state: BatchState, durable: bool = True) -> None:
        path = self._path(state.tenant, state.id, _NOTE)
        write_whole(path, msgspec.json.encode(state), durable)

    def end(self, state: BatchState) -> None:
        """Notes that a batch is over: nobody runs it again."""
        self.save(state)
        (self._open / state.id).unlink(missing_ok=True)
        for ending in _ENDINGS[1:]:
            self._path(state.tenant, state.id, ending).unlink(missing_ok=True)

    def open_batches(self) -> list[tuple[str, str]]:
        """Lists the tenant and id of each open batch, the oldest first."""
        found = []
        for batch_id in sorted(names_in(self._open)):
            tenant = read_if_there(self._open / batch_id) if is_id(BATCH_ID, batch_id) else None
            if tenant is not None:
                found.append((tenant.decode(), batch_id))
        return found

    def drop_open(self, batch_id: str, is_noted: bool, now: float) -> None:
        """Removes the note below `open/` of a batch that nobody runs any more.

        is_noted: whether the batch's state is stored. Without it only a note older than `_MADE_S`
        goes: its router may still be storing the state.
        """
        path = self._open / batch_id
        with contextlib.suppress(FileNotFoundError):
            if is_noted or path.stat().st_mtime < now - _MADE_S:
                path.unlink()

    def inputs_in_use(self, tenant: str) -> set[str]:
        """Files that open batches read."""
        mine = [batch_id for owner, batch_id in self.open_batches() if owner == tenant]
        states = [self.find(tenant, batch_id) for batch_id in mine]
        return {state.input_file_id for state in states if state is not None and not state.is_over}

    def ask_cancel(self, tenant: str, batch_id: str, now: int) -> int:
        """Notes a wish to cancel a batch. Returns when that was first asked for (Unix seconds)."""
        path = self._path(tenant, batch_id, _CANCEL)
        there = self.cancel_asked(tenant, batch_id)
        if there is None:
            write_whole(path, str(now).encode())
        return there or now

    def cancel_asked(self, tenant: str, batch_id: str) -> int | None:
        said = read_if_there(self._path(tenant, batch_id, _CANCEL))
        return None if said is None else int(said)

    def answers(self, state: BatchState) -> tuple[Path, Path]:
        """Files of the answers: of the lines that succeeded, and of the others."""
        folder, name = self._folder(state.tenant), state.id
        return folder / f"{name}.out.jsonl", folder / f"{name}.errors.jsonl"

    def lock(self, tenant: str, batch_id: str) -> int | None:
        """An open file that holds the batch for this process; None = another holds it."""
        return lock_file(self._path(tenant, batch_id, _LOCK))

    def _forget_old(self, tenant: str) -> None:
        for batch_id in sorted(self.ids(tenant))[: -MAX_KEPT + 1]:
            state = self.find(tenant, batch_id)
            if state is not None and state.is_over:
                self._path(tenant, batch_id, _NOTE).unlink(missing_ok=True)

    def _folder(self, tenant: str) -> Path:
        return self._store.folder(tenant, "batches")

    def _path(self, tenant: str, batch_id: str, ending: str) -> Path:
        return self._folder(tenant) / f"{batch_id}{ending}"


class Claims:
    """Claims of this router on batches, so that no other router runs them: a lease in what routers
    share, a lock in the folder. The lease decides between machines, the lock between processes that
    share no store.
    """

    def __init__(self, store: Store, folder: BatchFolder, router_id: str) -> None:
        self._store = store
        self._folder = folder
        self._me = router_id.encode()
        self._locks: dict[str, int] = {}
        self._renewed: dict[str, float] = {}

    async def take(self, tenant: str, batch_id: str) -> bool:
        """Claims a batch for this router. False = another router has it, or nobody can say who.
        Raises RequestError of a disk."""
        with contextlib.suppress(StoreDown):
            if await self._lease(batch_id):
                lock = await off_loop(self._folder.lock, tenant, batch_id)
                if lock is not None:
                    self._locks[batch_id] = lock
                    self._renewed[batch_id] = _now()
                    return True
                await self._unlease(batch_id)
        return False

    async def renew(self, batch_id: str) -> bool:
        """Renews the claim on a batch. False = it may be another's by now."""
        try:
            if not await self._lease(batch_id):
                return False
            self._renewed[batch_id] = _now()
        except StoreDown:
            return _now() - self._renewed[batch_id] < _LOST_S
        return True

    async def give_back(self, batch_id: str) -> None:
        os.close(self._locks.pop(batch_id))
        del self._renewed[batch_id]
        with contextlib.suppress(StoreDown):
            await self._unlease(batch_id)

    async def _lease(self, batch_id: str) -> bool:
        """Whether it is this router's now. Raises StoreDown."""
        name = _name(batch_id)
        if await self._store.swap(name, self._me, self._me, _CLAIMED_S):
            return True
        return await self._store.add(name, self._me, _CLAIMED_S) is None

    async def _unlease(self, batch_id: str) -> None:
        await self._store.swap(_name(batch_id), self._me, None, _CLAIMED_S)


def _name(batch_id: str) -> str:
    return f"batches:{batch_id}"


def _now() -> float:
    return asyncio.get_running_loop().time()


class RouterNote(msgspec.Struct, frozen=True, array_like=True):
    """A router's note to the others about its batches. folder: the id that is kept in it."""

    folder: str
    live: bool


_decode = msgspec.msgpack.Decoder(RouterNote).decode


class FleetView:
    """Other routers' notes about batches. others: what other routers said last. is_shared: whether
    there can be others.
    """

    def __init__(self, store: Store, router_id: str, is_shared: bool) -> None:
        self._store = store
        self._router_id = router_id
        self._is_shared = is_shared
        self._others: list[RouterNote] = []

    @property
    def live(self) -> bool:
        """Whether another router has live work."""
        return any(note.live for note in self._others)

    def has_other_folder(self, folder: str) -> bool:
        return any(note.folder != folder for note in self._others)

    async def tell(self, note: RouterNote) -> None:
        """Sends a note to other routers, and reads theirs. Without a store nothing changes."""
        if not self._is_shared:
            return
        with contextlib.suppress(StoreDown):
            await self._store.lease(_GROUP, self._router_id, _encode(note), _NOTED_S)
            notes = await self._store.leased(_GROUP)
            self._others = [
                _decode(value) for router, value in notes.items() if router != self._router_id
            ]

    async def leave(self) -> None:
        if self._is_shared:
            with contextlib.suppress(StoreDown):
                await self._store.unlease(_GROUP, self._router_id)
