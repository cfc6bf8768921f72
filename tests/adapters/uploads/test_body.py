"""Reads the body of an upload in a thread, as it comes."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from loraplex.adapters.uploads.body import BodyBroken, BodyStream


async def test_a_body_whose_time_has_just_ended_may_be_hurried() -> None:
    asked = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    body = BodyStream(receive, 60.0)
    reading = asyncio.get_running_loop().run_in_executor(None, body.read, 1)
    await asked.wait()
    body.hurry(0.0)
    await asyncio.sleep(0)
    body.hurry(0.0)
    with pytest.raises(BodyBroken, match="idle"):
        await reading
