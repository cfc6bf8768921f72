"""An engine that never gets ready is ended, and said to be the reason."""

import asyncio
from typing import cast
from unittest.mock import Mock

import pytest

from server.worker.engine_process import EngineProcess
from server.worker.engine_supervisor import EngineListener, EngineStartError, EngineSupervisor


class Silent:
    """An engine process that says nothing."""

    def __init__(self) -> None:
        self.closed = False

    async def receive(self) -> None:
        await asyncio.Event().wait()

    async def close(self, grace_s: float) -> None:
        self.closed = True


async def test_an_engine_that_is_never_ready_is_ended() -> None:
    engine = Silent()

    async def start() -> EngineProcess:
        return cast(EngineProcess, engine)

    supervisor = EngineSupervisor(start, Mock(spec=EngineListener), 60.0, start_timeout_s=0.01)
    with pytest.raises(EngineStartError, match=r"not ready within 0\.01 s"):
        await asyncio.wait_for(supervisor.run(), 30)
    assert engine.closed
