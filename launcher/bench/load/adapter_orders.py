"""Lifecycle calls of a load test: adapters registered, brought to the device, taken away."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

import httpx

from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.target import Target, model_of
from loraplex.launcher.refusals import error_text
from loraplex.launcher.router_client import bearer
from loraplex.router.http.client import http_client

Action = Literal["register", "load", "unload"]
_UNLOAD: dict[str, object] = {"wait_s": 60}


@dataclass(frozen=True, slots=True)
class Orders:
    """done: adapters, in `seconds`. errors: what the server said of others, the first of each."""

    action: Action
    done: int
    failed: int
    seconds: float
    per_s: float
    errors: dict[str, str]


def client(target: Target, connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return http_client(target.timeout_s, target.url, bearer(target.admin_key), limits)


async def order(http: httpx.AsyncClient, action: Action, name: str) -> str | None:
    """None, or what the server says against it. `register` takes `local:NAME`."""
    body: dict[str, object]
    if action == "register":
        path, body = "/v1/adapters", {"name": name, "ref": model_of(name, registered=False)}
    else:
        path = f"/v1/adapters/{quote(name, safe='')}/{action}"
        body = dict(_UNLOAD if action == "unload" else {})
    try:
        answer = await http.post(path, json=body)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return None if answer.is_success else f"{answer.status_code}: {error_text(answer.content)}"


async def absent_first(http: httpx.AsyncClient, names: Sequence[str]) -> list[str]:
    """Registered ones, those that are on no device before the others. Raises BenchError."""
    try:
        answer = await http.get("/v1/adapters")
        answer.raise_for_status()
        resident = {adapter["id"] for adapter in answer.json()["data"] if adapter["resident_on"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{http.base_url}v1/adapters lists no adapters: {error!r}") from None
    return sorted(names, key=lambda name: name in resident)


async def order_all(
    target: Target, action: Action, names: Sequence[str], concurrency: int
) -> Orders:
    """Each once, `concurrency` at a time."""
    pending, errors = iter(names), dict[str, str]()

    async def caller(http: httpx.AsyncClient) -> None:
        for name in pending:
            error = await order(http, action, name)
            if error is not None:
                errors[name] = error

    started = time.monotonic()
    async with client(target, concurrency) as http:
        await asyncio.gather(*(caller(http) for _ in range(min(concurrency, len(names)))))
    seconds = time.monotonic() - started
    done = len(names) - len(errors)
    by_text = {text: name for name, text in reversed(errors.items())}
    rate = round(done / seconds, 2)
    first = {name: text for text, name in by_text.items()}
    return Orders(action, done, len(errors), round(seconds, 3), rate, first)
