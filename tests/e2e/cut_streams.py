"""Streams that are cut in the middle of their answers: a process of the server is killed."""

import asyncio
import json
import signal
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import httpx
import psutil

from tests.e2e.serving import Serving
from tests.e2e.under_load import TIMEOUT_S, client

_LEAST, _PART = 8, 0.5  # tokens of an answer before the kill, and the part of it that is too late


def worker(serving: Serving) -> psutil.Process | None:
    """None between two lives."""
    for process in psutil.Process(serving.process.pid).children():
        with suppress(psutil.NoSuchProcess):
            if "worker" in process.cmdline():
                return process
    return None


def resumes(serving: Serving) -> int:
    """Attempts after the first, of all requests so far."""
    text = httpx.get(f"{serving.url}/metrics", timeout=TIMEOUT_S).text
    lines = [line for line in text.splitlines() if line.startswith("loraplex_resumes_total{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


class CutStreams:
    """Streams of completions that run at once. find: the process to kill, once: a stream that gets
    no token between two deaths is held to be their cause. None = none is killed. spared: bodies
    whose streams begin no kill, by number."""

    def __init__(
        self,
        serving: Serving,
        find: Callable[[Serving], psutil.Process | None] | None = None,
        spared: Collection[int] = (),
    ) -> None:
        self._serving, self._find, self._spared = serving, find, spared
        self._came: dict[int, list[int]] = defaultdict(list)
        self.cut: dict[int, list[int]] = {}  # by body: ids that had come

    async def run(self, bodies: list[dict[str, Any]]) -> list[tuple[list[int], str]]:
        """Ids and text of each answer. bodies: with `max_tokens`, `stream`, `return_token_ids`."""
        async with client(self._serving) as http:
            streams = (self._stream(http, *numbered) for numbered in enumerate(bodies))
            return await asyncio.gather(*streams)

    async def _stream(
        self, http: httpx.AsyncClient, number: int, body: dict[str, Any]
    ) -> tuple[list[int], str]:
        text = ""
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    self._came[number] += choice.get("token_ids") or []
                    text += choice["text"]
                    self._kill_after(number, body["max_tokens"])
        return self._came[number], text

    def _kill_after(self, number: int, count: int) -> None:
        is_early = _LEAST < len(self._came[number]) < _PART * count
        if self._find is None or self.cut or number in self._spared or not is_early:
            return
        if (victim := self._find(self._serving)) is not None:
            victim.send_signal(signal.SIGKILL)
            self.cut |= {each: [*ids] for each, ids in self._came.items() if 0 < len(ids) < count}
