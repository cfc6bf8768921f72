"""Servers that are asked on and on, and what they answered before."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.e2e.serving import Serving
from tests.e2e.test_mixed_batch import bodies, generate

TIMEOUT_S = 240.0
_CALLERS = 8


def client(serving: Serving) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=serving.url, timeout=TIMEOUT_S)


async def assert_same_answers(
    one: Serving, other: Serving, requests: Sequence[dict[str, Any]]
) -> None:
    """All at once, to both at once."""

    async def ask(serving: Serving) -> list[str]:
        async with client(serving) as http:
            return await asyncio.gather(*(generate(http, body, stream=True) for body in requests))

    expected, found = await asyncio.gather(ask(one), ask(other))
    assert found == expected


class Answers:
    """Counts them as they come."""

    def __init__(self) -> None:
        self._count, self._came = 0, asyncio.Condition()

    async def add(self) -> None:
        async with self._came:
            self._count += 1
            self._came.notify_all()

    async def more(self, count: int) -> None:
        """Waits until so many more have come."""
        least = self._count + count
        async with self._came:
            await self._came.wait_for(lambda: self._count >= least)


@asynccontextmanager
async def under_load(serving: Serving) -> AsyncIterator[Answers]:
    """Eight callers ask until the body is over. Each answer is what it was before."""
    requests, answers, over = bodies(), Answers(), asyncio.Event()
    async with client(serving) as http:
        expected = [await generate(http, body, stream=False) for body in requests]

        async def ask(first: int) -> None:
            for number in itertools.count(first):
                if over.is_set():
                    return
                at = number % len(requests)
                assert await generate(http, requests[at], stream=True) == expected[at]
                await answers.add()

        async with asyncio.TaskGroup() as group:
            for first in range(_CALLERS):
                group.create_task(ask(first))
            yield answers
            over.set()
