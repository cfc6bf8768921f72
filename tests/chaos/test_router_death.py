"""kill -9 of a router: the worker frees what it ran for it, and a retry elsewhere runs once."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

from loraplex.server import protocol
from tests.chaos.load import Certifier, Order, keyed, lorax
from tests.chaos.processes import Fleet, Process, Shape
from tests.router.shared.redis_server import running_redis

COUNT = 4
TOKENS = 150
STATUSES_A_SECOND = 2


class Watcher:
    """Connected to a worker as a router is, with nothing to ask; it hears the worker's state."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def until_running(self, count: int) -> int:
        """Waits until so many sequences run; how many reports said otherwise before."""
        others = 0
        async with asyncio.timeout(240):
            while True:
                frame = protocol.decode_worker_frame(await self._socket.recv(decode=False))
                if isinstance(frame, protocol.WorkerStatus):
                    if (frame.running, frame.waiting) == (count, 0):
                        return others
                    others += 1


@asynccontextmanager
async def watching(fleet: Fleet, worker: Process) -> AsyncIterator[Watcher]:
    headers = {"Authorization": f"Bearer {fleet.secret}"}
    url = f"ws://127.0.0.1:{worker.port}/connect"
    async with connect(url, additional_headers=headers, proxy=None) as socket:
        await socket.send(protocol.encode(protocol.RouterHello("watcher")))
        yield Watcher(socket)


async def until_not(status: int, asking: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    async with asyncio.timeout(240):
        while True:
            answer = await asking()
            if answer.status_code != status:
                return answer
            await asyncio.sleep(0.1)


async def ask(client: httpx.AsyncClient, router: Process, order: Order) -> httpx.Response:
    """Asks again for as long as Redis is late."""
    body = lorax(order)
    body["parameters"]["details"] = True
    return await until_not(
        503, lambda: client.post(f"{router.url}/generate", json=body, headers=keyed(order))
    )


def long_orders(certifier: Certifier, dice: random.Random) -> list[Order]:
    """None ends early: all of them run together for many of the worker's reports."""
    orders: list[Order] = []
    while len(orders) < COUNT:
        order = certifier.order(dice, TOKENS, TOKENS)
        if len(order.expected) == TOKENS:
            orders.append(order)
    return orders


def ids_of(answer: httpx.Response) -> Any:
    return [token["id"] for token in answer.json()["details"]["tokens"]]


async def answered(client: httpx.AsyncClient, router: Process, order: Order) -> httpx.Response:
    """Asks again for as long as the key's first request may still run."""
    return await until_not(409, lambda: ask(client, router, order))


@pytest.mark.exhaustive
async def test_orphans_are_freed_and_a_retry_runs_once(tmp_path: Path) -> None:
    certifier = Certifier()
    orders = long_orders(certifier, random.Random(1))
    async with running_redis() as redis:
        # A Redis that is late for once must not let a request run again.
        strict = ("--quota-outage", "closed")
        fleet = Fleet(tmp_path, Shape(workers=1, routers=2), redis, *strict)
        (worker,), (dying, other) = fleet.workers, fleet.routers
        try:
            await fleet.start_all()
            async with (
                httpx.AsyncClient(timeout=240, trust_env=False) as client,
                watching(fleet, worker) as watcher,
            ):
                asking = [asyncio.create_task(ask(client, dying, o)) for o in orders]
                await watcher.until_running(COUNT)
                dying.signal(signal.SIGKILL)
                for broken in asking:
                    with pytest.raises(httpx.TransportError):
                        await broken
                early = await ask(client, other, orders[0])
                assert early.status_code == 409, "its first request may run still"
                late = await watcher.until_running(0)
                assert late <= 2 * STATUSES_A_SECOND, "orphans ran for more than two seconds"
                again = await asyncio.gather(*(answered(client, other, o) for o in orders))
                assert [ids_of(answer) for answer in again] == [o.expected for o in orders]
                assert not [a for a in again if "idempotency-replayed" in a.headers]
                fleet.start(dying)
                await fleet.until_whole()
                for router in (dying, other):
                    kept = await asyncio.gather(*(answered(client, router, o) for o in orders))
                    assert [a.content for a in kept] == [a.content for a in again]
                    assert all("idempotency-replayed" in a.headers for a in kept)
                finished = "loraplex_worker_finished_sequences_total"
                assert await fleet.metric(worker, finished) == 2 * COUNT
                assert await fleet.metric(worker, "loraplex_worker_orphaned_sequences") == 0
        finally:
            await fleet.close()
