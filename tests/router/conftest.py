import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.store import Store
from tests.router.fake_worker import FakeWorker, running_worker
from tests.router.serving import Running, running_router
from tests.router.shared.redis_server import RedisServer, running_redis
from tests.router.shared.stores import redis_store


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """As routers run: its TLS and its flow control are not asyncio's."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(time.time)
        return
    async with redis_store() as store:
        yield store


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with running_redis() as server:
        yield server


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    async with running_worker(FakeWorker()) as running:
        yield running


@pytest.fixture
async def router(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Running]:
    """One router on one worker; `pirate` is a registered adapter."""
    async with running_router(tmp_path, worker, adapters=("pirate=hub:org/pirate",)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept_router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """As `router`, once for the tests of a file that change nothing: those `of_kept_router`."""
    folder, adapters = tmp_path_factory.mktemp("router"), ("pirate=hub:org/pirate",)
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(folder, worker, adapters=adapters) as running,
    ):
        yield running
