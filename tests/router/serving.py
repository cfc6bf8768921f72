"""The real router under uvicorn on a loopback port, in the test's own event loop."""

import asyncio
import json
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
import pytest
import uvicorn.server
from prometheus_client import CollectorRegistry

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.router.build import Hub, build_service
from loraplex.router.config import RouterConfig
from loraplex.router.http.listeners import listen
from loraplex.router.routes.app import build_app
from loraplex.router.routes.http_server import RouterServer
from loraplex.router.service import Service
from tests.router.fake_worker import SECRET

COMMIT = "c" * 40
# Of tests that ask a file's `kept_router`, on that router's event loop.
of_kept_router = pytest.mark.asyncio(loop_scope="module")


class _Hasty:
    """asyncio for uvicorn, which looks ten times a second whether it should stop."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


setattr(uvicorn.server, "asyncio", _Hasty())  # noqa: B010


async def poll(condition: Callable[[], Awaitable[bool]], patience_s: float = 120.0) -> None:
    """Polls for a condition without a signal, within a deadline: ever less often."""
    pause_s = 0.005
    async with asyncio.timeout(patience_s):
        while not await condition():
            await asyncio.sleep(pause_s)
            pause_s = min(0.1, 1.3 * pause_s)


class Reachable(Protocol):
    """A worker, or what stands between it and the router."""

    @property
    def url(self) -> str: ...


class FakeHub:
    """Every repository exists but those named `missing`; `private` ones want `let-me-in`."""

    def __init__(self) -> None:
        self.calls: list[tuple[AdapterRef, str | None]] = []

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        self.calls.append((ref, token))
        if "missing" in ref.name:
            raise AdapterError("not_found", f"no repository {ref.name}")
        if "private" in ref.name and token != "let-me-in":
            raise AdapterError("unauthorized", f"{ref.name} is private")
        if "down" in ref.name:
            raise AdapterError("unavailable", "the Hub does not answer", (), 3.0)
        return msgspec.structs.replace(ref, revision=COMMIT)


class Running:
    """A router that serves. `client` talks to it."""

    def __init__(self, service: Service, hub: FakeHub, client: httpx.AsyncClient) -> None:
        self.service = service
        self.hub = hub
        self.client = client

    async def until_ready(self) -> None:
        async def ready() -> bool:
            return (await self.client.get("/health/ready")).status_code == 200

        await poll(ready)

    async def until_idle(self) -> None:
        """No request holds anything any more."""

        async def idle() -> bool:
            return not self.service.dispatcher.running

        await poll(idle)

    async def metric(self, name: str) -> float:
        text = (await self.client.get("/metrics")).text
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
        )


@asynccontextmanager
async def running_router(
    tmp_path: Path,
    *workers: Reachable,
    wait: bool = True,
    real_hub: Hub | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    """wait: until a worker is ready. real_hub: instead of FakeHub. options: of RouterConfig."""
    defaults: dict[str, Any] = {
        "secret": SECRET,
        "cache_dir": tmp_path / "cache",
        "drain_timeout_s": 1.0,
        "worker_wait_s": 0.0,
        "check_adapters": "use",
    }
    urls = tuple(worker.url for worker in workers)
    config = RouterConfig(workers=urls, **(defaults | options))
    hub = FakeHub()
    service = build_service(config, CollectorRegistry(), real_hub or hub)
    server = RouterServer(build_app(service), service)
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve([listener]))
    try:

        async def started() -> bool:
            assert not serving.done(), serving.exception()
            return server.started

        await poll(started)
        port = listener.getsockname()[1]
        async with _client(port, config.tls_cert) as client:
            running = Running(service, hub, client)
            if workers and wait:
                await running.until_ready()
            yield running
    finally:
        server.handle_exit(signal.SIGTERM, None)
        await serving


def _client(port: int, tls_cert: Path | None) -> httpx.AsyncClient:
    if tls_cert is None:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240)
    context = trusting(tls_cert)
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", timeout=240, verify=context)


def trusting(cert: Path) -> ssl.SSLContext:
    """A client's context for a server with this self-signed certificate, whatever its name."""
    context = ssl.create_default_context(cafile=str(cert))
    context.check_hostname = False
    return context


def events_of(text: str) -> list[Any]:
    """The JSON payloads of a stream's events, `[DONE]` left out."""
    lines = [line for line in text.splitlines() if line.startswith("data:")]
    payloads = [line.removeprefix("data:").strip() for line in lines]
    return [json.loads(payload) for payload in payloads if payload != "[DONE]"]
