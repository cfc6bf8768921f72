"""Measures a router with a million registered names: memory, start, lists, lookups, placement.

`python -m tools.bench names` registers them in a Redis of its own, starts routers against it, and
prints one JSON object.
"""

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
import psutil
from redis.asyncio import Redis

from loraplex.adapters.manifest import DIGEST_FORM, AdapterManifest
from loraplex.adapters.ref import AdapterRef, format_ref
from loraplex.launcher import config
from loraplex.router.names.registration import Change, Registration
from loraplex.router.policy.placement.placement import PlacementRequest, Placer, WorkerView
from loraplex.router.policy.rollout import Content

_PREFIX, _ADMIN = "bench", "bench-admin"
_TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
_BATCH = 5000
_ASKED = 50


def registration(number: int, tenants: int) -> Registration:
    """A resolved adapter of one of the tenants, as the API registers it."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    ref = AdapterRef("hub", f"acme-{number % tenants}/adapter-{number}", digest[:40])
    manifest = AdapterManifest(
        digest, "meta-llama/Llama-3.1-8B", _TARGETS, (16,), 84_000_000, "BF16", form=DIGEST_FORM
    )
    content = Content(ref, manifest)
    change = Change(digest, 1_790_000_000, "register", "admin", format_ref(ref))
    return Registration(
        name=f"adapter-{number}",
        ref=msgspec.structs.replace(ref, revision=None),
        origin="api",
        state="ready",
        content=content,
        history=(change,),
        tenant=f"tenant-{number % tenants}",
    )


async def fill(url: str, names: int, tenants: int) -> int:
    """Writes the table as routers do. Returns the bytes of its rows."""
    redis, nbytes = Redis.from_url(url), 0
    stem = f"{_PREFIX}:{{table:adapters}}"
    for first in range(0, names, _BATCH):
        rows: dict[Any, Any] = {}
        order: dict[str, float] = {}
        for number in range(first, min(names, first + _BATCH)):
            one = registration(number, tenants)
            row = b"1:" + msgspec.json.encode(one)
            rows[str(one.key)], order[str(one.key)] = row, number + 1
            nbytes += len(row)
        async with redis.pipeline(transaction=False) as pipeline:
            pipeline.hset(f"{stem}:rows", mapping=rows)
            pipeline.zadd(f"{stem}:order", order)
            await pipeline.execute()
    version: dict[Any, Any] = {"name": "bench", "writes": names, "ordered": names}
    await redis.hset(f"{stem}:version", mapping=version)
    await redis.aclose()
    return nbytes


class Router:
    """A router process against a Redis, from its start to its end."""

    def __init__(self, url: str, folder: Path) -> None:
        options = ["--redis", url, "--redis-prefix", _PREFIX, "--port", "0", "--auth", "none"]
        environ = {**config.environment({}), "LORAPLEX_ADMIN_KEY": _ADMIN}
        command = [sys.executable, "-m", "loraplex", "router", *options, "--cache-dir", str(folder)]
        began = time.monotonic()
        self.process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if "listening on" in line)
        base = line.rstrip().rpartition(" ")[2]
        key = {"Authorization": f"Bearer {_ADMIN}"}
        self.http = httpx.Client(base_url=base, headers=key, timeout=600, trust_env=False)
        self.http.get("/health/live").raise_for_status()
        self.start_s = time.monotonic() - began
        self.start_cpu_s = sum(psutil.Process(self.process.pid).cpu_times()[:2])

    @property
    def rss(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) << 10

    def ms(self, path: str) -> float:
        """The median of several answers, in milliseconds; the first, which may sort, is apart."""
        self.http.get(path).raise_for_status()
        return median(_ms(lambda: self.http.get(path).raise_for_status()) for _ in range(_ASKED))

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait()


def _ms(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return (time.monotonic() - began) * 1e3


def measure(url: str, folder: Path, names: int) -> dict[str, Any]:
    """Figures of a router with the names that the Redis has."""
    router = Router(url, folder)
    try:
        rss = router.rss
        middle = f"tenant-{names // 2 % 10_000}::adapter-{names // 2}"
        return {
            "start_s": round(router.start_s, 2),
            "start_cpu_s": round(router.start_cpu_s, 2),
            "rss": rss,
            "first_page_ms": round(_ms(lambda: router.http.get("/v1/adapters?limit=100")), 1),
            "page_ms": round(router.ms("/v1/adapters?limit=100"), 1),
            "later_page_ms": round(router.ms(f"/v1/adapters?limit=100&after={middle}"), 1),
            "search_ms": round(router.ms(f"/v1/adapters?limit=100&search=r-{names // 2}"), 1),
            "missing_search_ms": round(router.ms("/v1/adapters?limit=100&search=nothing"), 1),
            "tenant_page_ms": round(router.ms("/v1/adapters?limit=100&tenant=tenant-7"), 1),
            "one_ms": round(router.ms("/v1/adapters/adapter-7?tenant=tenant-7"), 1),
            "metrics_ms": round(router.ms("/metrics"), 1),
            "rss_after": router.rss,
        }
    finally:
        router.stop()


def placement_us(names: int) -> float:
    """Mean microseconds of a choice of a worker, each for another of so many adapters."""
    placer, count = Placer(), 20_000
    workers = [WorkerView(f"w{i}", ready=True, credits=256, rows=256) for i in range(8)]
    began = time.process_time()
    for number in range(count):
        digest = f"{number * 7919 % names:064x}"
        request = PlacementRequest(digest, f"hub:acme/{digest}", 84_000_000)
        decision = placer.choose(request, workers, workers, number * 1e-3, 0.0)
        assert decision is not None
        placer.place(request, decision, number * 1e-3)
        decision.worker.leave(digest)
    return round((time.process_time() - began) / count * 1e6, 2)


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Runs a Redis of its own that keeps nothing. Gives its URL."""
    socket = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", ""]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.05)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=10_000)


def run(arguments: argparse.Namespace) -> None:
    """Measures a router without names, and with all, and prints the figures."""
    found: dict[str, Any] = {"names": arguments.names, "tenants": arguments.tenants}
    with tempfile.TemporaryDirectory() as text, running_redis(Path(text)) as url:
        folder = Path(text)
        empty = Router(url, folder)
        rss = empty.rss
        empty.stop()
        nbytes = asyncio.run(fill(url, arguments.names, arguments.tenants))
        found["row_bytes"] = round(nbytes / arguments.names)
        found |= measure(url, folder, arguments.names)
        found["bytes_a_name"] = round((found["rss"] - rss) / arguments.names)
        found["empty_rss"] = rss
    found["placement_us"] = {str(n): placement_us(n) for n in (1000, arguments.names)}
    print(json.dumps(found, indent=2))
