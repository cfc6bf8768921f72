import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from tests.router.fake_worker import FakeWorker, running_worker
from tests.router.serving import Running, running_router


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """As routers run: its TLS and its flow control are not asyncio's."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    async with running_worker(FakeWorker()) as running:
        yield running


@pytest.fixture
async def router(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Running]:
    """One router on one worker; `pirate` is a registered adapter."""
    async with running_router(tmp_path, worker, adapters=("pirate=hub:org/pirate",)) as running:
        yield running
