"""The known keys: those of the operator's file, and those made through the API."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from loraplex.router.call import RequestError
from loraplex.router.file_stamp import stamp_of
from loraplex.router.shared.replica import Conflict, Replica
from loraplex.router.shared.store import Store, StoreDown, TableFull
from loraplex.router.tenancy.keys import (
    KEY_PREFIX,
    MAX_FILE_BYTES,
    ApiKey,
    Caller,
    KeysFileError,
    Tenant,
    check_key,
    digests_of,
    read_keys,
)

logger = logging.getLogger(__name__)

TABLE = "keys"
FILE_POLL_S = 1.0
# How often a key that nobody knows may make this router look for new ones.
_LOOK_S = 0.25
_decode = msgspec.json.Decoder(ApiKey).decode


class Keyring:
    """Keeps the API keys: those of the file, and those made while it runs. clock: Unix seconds.
    is_up: whether the store answers, as far as is known.

    is_shared: whether other routers make keys in it, too.

    closed: without the store no key is good, but those of the file.

    Reads are of this router's own copies; a write is in the store before it returns.
    """

    def __init__(
        self,
        store: Store,
        file: Path | None,
        closed: bool,
        is_shared: bool,
        is_up: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """Reads the keys file. Raises KeysFileError."""
        self._file = file
        self._closed = closed
        self._clock = clock
        self._made = Replica(store, TABLE, _read_key, self._index)
        self._written: list[ApiKey] = []
        self._tenants: dict[str, Tenant] = {}
        self._by_digest: dict[str, ApiKey] = {}
        self._by_id: dict[str, ApiKey] = {}
        self._looked_at = 0.0
        self._looking = asyncio.Lock()
        self.is_shared = is_shared
        self._is_up = is_up
        if file is not None:
            self._take(*read_keys_file(file))

    async def run(self) -> None:
        """Follows the store and the file until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._made.run())
            if self._file is not None:
                tasks.create_task(self._follow(self._file))

    async def identify(self, given: str | None) -> Caller:
        """Finds the caller whose key this is. Raises RequestError (unauthorized, unavailable)."""
        if not given:
            raise RequestError(
                "unauthorized", "this server wants a key, as `Authorization: Bearer KEY`"
            )
        digest = digest_of(given)
        key = self._by_digest.get(digest)
        if key is None and self.is_shared:
            await self._look()
            key = self._by_digest.get(digest)
        found = None if key is None else _same(key, digest)
        if found is None and not self._is_up():
            raise RequestError("unavailable", "keys cannot be looked up now; try again soon")
        return self._caller(check_key(found, digest, self._clock()))

    def stand_in(self, tenant: str, key_id: str) -> Caller:
        """The caller behind work that is done later. The key must still be good. Raises
        RequestError (unauthorized, unavailable)."""
        key = self._by_id.get(key_id)
        found = None if key is None or key.tenant != tenant else key
        if found is None and not self._is_up():
            raise RequestError("unavailable", "keys cannot be looked up now; try again soon")
        return self._caller(check_key(found, found.digest if found else "", self._clock()))

    def _caller(self, key: ApiKey) -> Caller:
        """The caller who has a key. Raises RequestError (unavailable)."""
        if self._closed and key.origin == "api" and not self._is_up():
            raise RequestError("unavailable", "keys cannot be checked now; try again soon")
        return Caller(key, self.tenant(key.tenant))

    def tenant(self, name: str) -> Tenant:
        return self._tenants.get(name) or Tenant(name)

    def tenants(self) -> set[str]:
        return {key.tenant for key in self.all()} | set(self._tenants)

    def all(self) -> list[ApiKey]:
        return sorted([*self._written, *self._made.values.values()], key=lambda key: key.id)

    def get(self, key_id: str) -> ApiKey:
        """Returns the key with this id. Raises RequestError (key_not_found)."""
        for key in self.all():
            if key.id == key_id:
                return key
        raise RequestError("key_not_found", f"no key {key_id[:80]!r}")

    async def create(self, wanted: ApiKey) -> tuple[ApiKey, str]:
        """Makes a key. wanted: without digest. Returns it, and its secret. Raises RequestError."""
        if any(key.id == wanted.id for key in self.all()):
            raise RequestError("conflict", f"there is a key {wanted.id!r} already")
        secret = new_secret()
        made = msgspec.structs.replace(
            wanted, digest=digest_of(secret), created_at=int(self._clock())
        )
        await self._write(made.id, made)
        return made, secret

    async def rotate(self, key_id: str, grace_s: int) -> tuple[ApiKey, str]:
        """Makes another key in place of this one; the old one is good for so long still."""
        key, secret = self._of_api(key_id), new_secret()
        rotated = msgspec.structs.replace(
            key,
            digest=digest_of(secret),
            previous=key.digest if grace_s else None,
            previous_until=int(self._clock()) + grace_s if grace_s else 0,
        )
        await self._write(key_id, rotated)
        return rotated, secret

    async def change(self, key_id: str, changes: Mapping[str, object]) -> ApiKey:
        changed = msgspec.structs.replace(self._of_api(key_id), **changes)
        await self._write(key_id, changed)
        return changed

    async def delete(self, key_id: str) -> None:
        await self._write(self._of_api(key_id).id, None)

    def _of_api(self, key_id: str) -> ApiKey:
        key = self.get(key_id)
        if key.origin == "file":
            raise RequestError("conflict", f"key {key_id!r} is the keys file's: change it there")
        return key

    async def _write(self, key_id: str, key: ApiKey | None) -> None:
        try:
            await self._made.write(key_id, None if key is None else msgspec.json.encode(key))
        except StoreDown as error:
            raise RequestError("unavailable", "keys cannot be changed now: no Redis") from error
        except TableFull as error:
            raise RequestError("conflict", "there are too many keys; delete some") from error
        except Conflict as error:
            raise RequestError("conflict", f"key {key_id!r} has just changed") from error

    async def _look(self) -> None:
        """Looks for keys that others may just have made; callers at one time share a look."""
        arrived = self._clock()
        async with self._looking:
            if not self._is_up() or self._looked_at >= arrived:
                return
            # A caller who guesses keys waits, and does not cause more look-ups.
            await asyncio.sleep(max(0.0, min(_LOOK_S, self._looked_at + _LOOK_S - arrived)))
            self._looked_at = self._clock()
            with contextlib.suppress(StoreDown):
                await self._made.refresh()

    def _index(self) -> None:
        keys = [*self._made.values.values(), *self._written]
        self._by_digest = {digest: key for key in keys for digest in digests_of(key)}
        self._by_id = {key.id: key for key in keys}

    def _take(self, keys: list[ApiKey], tenants: list[Tenant]) -> None:
        self._written = keys
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._index()

    async def _follow(self, file: Path) -> None:
        """Reads the file when it changes. One that cannot be used is logged once, and left."""
        stamp = await asyncio.to_thread(stamp_of, file)
        while True:
            await asyncio.sleep(FILE_POLL_S)
            now = await asyncio.to_thread(stamp_of, file)
            if now == stamp:
                continue
            stamp = now
            try:
                self._take(*await asyncio.to_thread(read_keys_file, file))
                logger.info("keys file %s: read again", file)
            except KeysFileError as error:
                logger.error("keys file %s: left as it was: %s", file, error)


def new_secret() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _same(key: ApiKey, digest: str) -> ApiKey | None:
    """Whether a key has this digest. The comparison takes the same time whatever was given."""
    matches = [hmac.compare_digest(known, digest) for known in digests_of(key)]
    return key if any(matches) else None


def _read_key(value: bytes) -> ApiKey | None:
    try:
        return _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        logger.error("the store has a key that cannot be read")
        return None


def read_keys_file(file: Path) -> tuple[list[ApiKey], list[Tenant]]:
    """Reads keys and tenants from a file. Raises KeysFileError."""
    try:
        with file.open("rb") as opened:
            return read_keys(opened.read(MAX_FILE_BYTES + 1))
    except OSError as error:
        raise KeysFileError(f"it cannot be read: {error.strerror}") from None
