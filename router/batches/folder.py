"""Batches below `--files-dir`. Routers may share it. Every method may wait for the disk.

open/<id>                                whose batch it is; there as long as it is not over
tenants/<tenant>/batches/<id>.json       its state, written by the router that runs it
                        /<id>.cancel     when its end was asked for, by any router
                        /<id>.lock       of the process that runs it
                        /<id>.out.jsonl, <id>.errors.jsonl: answers, until it is over
"""

import contextlib
from pathlib import Path

import msgspec

from loraplex.adapters.common.disk import lock_file
from loraplex.router.batches.state import BatchState
from loraplex.router.call import RequestError
from loraplex.router.files.disk import names_in, read_if_there, write_whole
from loraplex.router.files.store import FileStore
from loraplex.router.files.stored_file import BATCH_ID, ids_of, is_id

MAX_OPEN = 100  # of a tenant
MAX_KEPT = 1000
_NOTE, _CANCEL, _LOCK = ".json", ".cancel", ".lock"
_ENDINGS = (_NOTE, _CANCEL, _LOCK, ".out.jsonl", ".errors.jsonl")
_MADE_S = 60.0
_read_state = msgspec.json.Decoder(BatchState).decode


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
