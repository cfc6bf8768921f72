"""Notes that routers share about batches: the folder of each, and whether it has live work."""

import contextlib

import msgspec

from loraplex.router.shared.store import Store, StoreDown

_LEASE_S = 5.0
_GROUP = "batch-routers"


class RouterNote(msgspec.Struct, frozen=True, array_like=True):
    """A router's note to the others about its batches. folder: the id that is kept in it."""

    folder: str
    live: bool


_encode = msgspec.msgpack.Encoder().encode
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
            await self._store.lease(_GROUP, self._router_id, _encode(note), _LEASE_S)
            notes = await self._store.leased(_GROUP)
            self._others = [
                _decode(value) for router, value in notes.items() if router != self._router_id
            ]

    async def leave(self) -> None:
        if self._is_shared:
            with contextlib.suppress(StoreDown):
                await self._store.unlease(_GROUP, self._router_id)
