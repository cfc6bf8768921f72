"""Orders about many adapters: registered, brought to the device, taken away."""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import quote

import httpx

from loraplex.launcher.bench.commands import (
    add_folders,
    add_server,
    names_in,
    print_points,
    run_async,
    target_of,
)
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.target import Target, model_of
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import whole
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
    """Sends one order; returns None, or the server's refusal. `register` takes `local:NAME`."""
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
    """Sorts names, those on no device before the others. Raises BenchError."""
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
    """Orders each adapter once, `concurrency` at a time."""
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


def add_operator(parser: Parser) -> None:
    """Adds the operator's key."""
    parser.add_argument(
        "--admin-key-file", metavar="PATH", help="file with the key [LORAPLEX_ADMIN_KEY]"
    )


def add_arguments(parser: Parser) -> None:
    """Adds the order, the server and the adapters."""
    parser.add_argument("action", choices=get_args(Action))
    add_server(parser)
    add_operator(parser)
    add_folders(parser, required=True)
    parser.add_argument("--concurrency", type=whole(1), default=16)


def run(arguments: argparse.Namespace) -> None:
    """Raises OptionError, BenchError."""
    names = names_in(arguments)
    target = target_of(arguments)
    orders = run_async(order_all(target, arguments.action, names, arguments.concurrency))
    if not orders.done:
        why = next(iter(orders.errors.values()))
        raise BenchError(f"none of {len(names)} adapters: {orders.action} failed: {why}")
    print_points([orders], arguments.json)
    if orders.failed:
        raise BenchError(f"{orders.action} failed for {orders.failed} of {len(names)} adapters")
