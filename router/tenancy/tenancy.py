"""Keys, quotas and usage of this router: the parts, built from its options, and run."""

import contextlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from loraplex.adapters.common.loopback import is_loopback
from loraplex.router.background import Background
from loraplex.router.config import RouterConfig
from loraplex.router.shared.sharing import Sharing
from loraplex.router.shared.store import StoreDown
from loraplex.router.tenancy.audit import Audit
from loraplex.router.tenancy.keyring import Keyring
from loraplex.router.tenancy.keys import NOBODY, Caller
from loraplex.router.tenancy.metering import Admission, Metering
from loraplex.router.tenancy.price_file import read_prices

VOUCHER_SCHEME = "Batch"


class Vouchers:
    """Makes and reads vouchers: values of the header `Authorization` that nobody else can make."""

    def __init__(self) -> None:
        self._secret = secrets.token_urlsafe(32)

    def header(self, tenant: str, key_id: str) -> str:
        return f"{VOUCHER_SCHEME} {self._secret}:{tenant}:{key_id}"

    def read(self, given: str) -> tuple[str, str] | None:
        """Reads a voucher's tenant and key id; None = it is not from here."""
        secret, _, who = given.partition(":")
        if not hmac.compare_digest(secret.encode("utf-8", "replace"), self._secret.encode()):
            return None
        tenant, _, key_id = who.partition(":")
        return tenant, key_id


class ExposureError(Exception):
    """Others could reach this router, and nobody said who may use it."""


@dataclass(frozen=True, slots=True)
class Tenancy:
    """All about callers: keys, usage, the audit log. needs_keys: callers must have a key."""

    needs_keys: bool
    keyring: Keyring
    metering: Metering
    audit: Audit
    vouchers: Vouchers

    async def identify(self, authorization: str | None) -> Caller:
        """The caller that the header names. Raises RequestError (unauthorized, unavailable)."""
        scheme, _, given = (authorization or "").partition(" ")
        if scheme == VOUCHER_SCHEME and (said := self.vouchers.read(given)) is not None:
            found = self.keyring.stand_in(*said) if self.needs_keys else NOBODY
            return msgspec.structs.replace(found, is_batch=True)
        if not self.needs_keys:
            return NOBODY
        return await self.keyring.identify(given.strip() if scheme.lower() == "bearer" else None)

    @asynccontextmanager
    async def run(self, background: Background) -> AsyncIterator[None]:
        """Runs the parts. Counts are written before the end, if the store answers."""
        parts = (self.keyring, self.metering, self.audit)
        try:
            async with background.running(*(part.run() for part in parts)):
                yield
        finally:
            await self.metering.close()
            with contextlib.suppress(StoreDown):
                await self.audit.flush()


def make_tenancy(config: RouterConfig, sharing: Sharing, router_id: str) -> Tenancy:
    """Makes the router's parts that know callers. Raises KeysFileError, PricesError."""

    def is_up() -> bool:
        return sharing.is_up

    store = sharing.store
    closed = config.quota_outage == "closed"
    is_shared = sharing.link is not None
    keyring = Keyring(store, config.keys_file, closed, is_shared, is_up, time.time)
    admission = Admission(store, is_up, config.quota_outage, router_id)
    prices = None if config.prices is None else read_prices(config.prices)
    metering = Metering(store, admission, prices=prices)
    return Tenancy(needs_keys(config), keyring, metering, Audit(store), Vouchers())


def needs_keys(config: RouterConfig) -> bool:
    if config.auth == "auto":
        return config.keys_file is not None or not is_loopback(config.host)
    return config.auth == "keys"


def check_exposure(config: RouterConfig) -> None:
    """Raises ExposureError for a router that nobody could use, or that anyone could unsaid."""
    if needs_keys(config) and config.keys_file is None and not config.admin_key:
        raise ExposureError(
            f"callers of {config.host} need keys, and there is no way to one: give --keys-file, "
            "or --admin-key-file and make some with `loraplex key create`; or let anyone who "
            "reaches it use it with --auth none"
        )
