"""Adapters of one worker connection: loads and orders under way, and what the worker has."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from loraplex.adapters.common.newest import NewestKept
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.router.names.served import Merge, Origin, uploads_of
from loraplex.router.shared_tasks import SharedTasks
from loraplex.server.protocol import (
    AdapterLoad,
    AdapterMerge,
    AdapterOrder,
    AdapterReport,
    AdapterState,
    OrderAction,
)

MAX_LOADS = 1024
MAX_ORDERS = 256
MAX_REMEMBERED_ADAPTERS = 1 << 16

# Sends a worker the files of uploads, by their digests. Raises AdapterError.
Supply = Callable[[Sequence[str]], Awaitable[None]]


class ProtocolFault(Exception):
    """The worker sent something that the protocol does not allow."""


class ConnectionLoads:
    """Tracks the loads that were asked for over one connection.

    `send` puts a frame on the wire; it raises what the connection raises when it is gone. `supply`
    sends the worker the files of uploads.
    """

    def __init__(self, send: Callable[[AdapterLoad | AdapterMerge], None], supply: Supply) -> None:
        self.admitted = NewestKept[str, None](MAX_REMEMBERED_ADAPTERS)
        self._send = send
        self._supply = supply
        self._loads: dict[str, asyncio.Future[AdapterManifest]] = {}
        self._admitting = SharedTasks[tuple[str, Origin, str | None], AdapterManifest]()
        self._next_load = 0

    async def admit(self, origin: Origin, token: str | None, digest: str) -> None:
        """Lets the worker have this content; callers with the same credential share one load."""
        load = partial(self.load, origin, token, digest)
        await self._admitting.run((digest, origin, token), load)

    async def load(
        self, origin: Origin, token: str | None, expected_digest: str | None = None
    ) -> AdapterManifest:
        """Asks the worker to bring an adapter. token: opens a reference. Raises AdapterError. The
        worker is sent the files of an upload that it does not have."""
        try:
            return await self._load(origin, token, expected_digest)
        except AdapterError as error:
            if error.code != "missing":
                raise
        await self._supply(uploads_of(origin))
        return await self._load(origin, token, expected_digest)

    async def _load(
        self, origin: Origin, token: str | None, expected_digest: str | None
    ) -> AdapterManifest:
        if len(self._loads) >= MAX_LOADS:
            raise AdapterError("unavailable", "too many adapters are being fetched", (), 2.0)
        load_id = f"l{self._next_load}"
        self._next_load += 1
        if isinstance(origin, Merge):
            self._send(origin.frame(load_id))
        else:
            credential = None if token is None else str(token)
            self._send(AdapterLoad(load_id, origin, credential, expected_digest))
        future: asyncio.Future[AdapterManifest] = asyncio.get_running_loop().create_future()
        self._loads[load_id] = future
        try:
            return await future
        finally:
            self._loads.pop(load_id, None)

    def on_state(self, state: AdapterState) -> None:
        """Note the worker's word on a load. Raises ProtocolFault."""
        future = self._loads.get(state.load_id)
        if future is None or future.done():
            return
        if state.stage == "ready":
            if state.manifest is None:
                raise ProtocolFault("an adapter is ready without a manifest")
            self.admitted[state.manifest.digest] = None
            future.set_result(state.manifest)
        elif state.stage == "failed":
            future.set_exception(
                AdapterError(
                    state.error or "unavailable",
                    state.message or "the worker could not load the adapter",
                    state.violations,
                    state.retry_after_s,
                    state.trained_for,
                )
            )

    def forget(self, digest: str) -> None:
        """The worker said that it does not have it (any more)."""
        self.admitted.pop(digest, None)

    def fail_all(self, error: Exception) -> None:
        for future in self._loads.values():
            if not future.done():
                future.set_exception(error)


class ConnectionOrders:
    """Orders under way on one connection. `send` as for ConnectionLoads."""

    def __init__(self, send: Callable[[AdapterOrder], None]) -> None:
        self._send = send
        self._orders: dict[str, asyncio.Future[AdapterReport]] = {}
        self._next_order = 0

    async def order(self, action: OrderAction, digests: Sequence[str]) -> AdapterReport:
        """Sends an order, and waits until the worker has carried it out or says why it cannot. A
        load that nobody waits for any more is withdrawn. Raises AdapterError."""
        if len(self._orders) >= MAX_ORDERS:
            raise AdapterError("unavailable", "too many orders are being carried out", (), 2.0)
        order_id = f"o{self._next_order}"
        self._next_order += 1
        self._send(AdapterOrder(order_id, action, tuple(digests)))
        future: asyncio.Future[AdapterReport] = asyncio.get_running_loop().create_future()
        self._orders[order_id] = future
        try:
            return await future
        except asyncio.CancelledError:
            if action == "load":  # an eviction is carried out all the same
                with contextlib.suppress(Exception):  # `send`'s, when the connection is gone
                    self._send(AdapterOrder(order_id, "withdraw", ()))
            raise
        finally:
            self._orders.pop(order_id, None)

    def on_report(self, report: AdapterReport) -> None:
        future = self._orders.get(report.order_id)
        if future is not None and not future.done():
            future.set_result(report)

    def fail_all(self, error: Exception) -> None:
        for future in self._orders.values():
            if not future.done():
                future.set_exception(error)
