"""Random operations on the adapters of one real worker, whose tokens certify what they belong to.

`python -m tests.server.worker.churn --operations 100000` prints what was done and found; exit
code 1 if any token, ending or count was wrong. The worker, its engine's loop, scheduler
and residency, the host tier and the store are the real ones; only the model is missing.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from loraplex.adapters.ref import AdapterRef
from loraplex.router.policy.placement.attempts import MAX_ADAPTER_FAILURES
from loraplex.server import protocol
from tests.adapter_folders import write_adapter
from tests.certifying.factory import certify
from tests.server.worker.churn_client import ChurnClient, Findings, churn_client
from tests.server.worker.worker_process import VOCAB, Worker, base, request, running

ADAPTERS = 24
AT_ONCE = 48
ROUTERS = 2
TRIES = 50
STUCK_S = 240.0
# Extents of 64 KiB: an adapter takes one to four, the device holds ten, the host eight.
MEMORY = ("--adapter-memory", "640KiB", "--host-adapter-memory", "512KiB", "--adapter-slots", "6")
# Pages for some thousand tokens: prefixes are reused, and running sequences are preempted.
KV = ("--kv-memory", "1MiB")
# Of each, content and slab: some thirty of the hundreds that refreshes make.
DISK = ("--adapter-disk", "6MiB")
RANKS = (1, 2, 4, 8, 40, 80, 120, 160)
EXECUTOR = certify(copy_polls=2, ending_polls=2, check_bytes=True)
GONE = "not in the store"


@dataclass
class Name:
    """What a reference means. digests: newest first. busy: its folder is read or written."""

    index: int
    version: int = 0
    digests: list[str] = field(default_factory=list)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef("local", f"a{self.index}")

    @property
    def is_small(self) -> bool:
        return RANKS[self.index % len(RANKS)] <= 8


class Churn:
    """Carries out random operations until `operations` are done, AT_ONCE at a time."""

    def __init__(self, worker: Worker, root: Path, operations: int, seed: int) -> None:
        self.findings = Findings()
        self._worker = worker
        self._root = root
        self._operations = operations
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._names = [Name(index) for index in range(ADAPTERS)]
        self._weights = [1 / (rank + 1) for rank in range(ADAPTERS)]
        self._clients: list[ChurnClient] = []
        self._kills = 0
        self._kinds: tuple[tuple[Callable[[ChurnClient], Awaitable[None]], int], ...] = (
            (self.generate, 600),
            (self.load, 80),
            (self.preload, 80),
            (self.evict, 120),
            (self.hint, 50),
            (self.refresh, 30),
            (self.unload, 30),
            (self.pin, 10),
        )

    async def run(self, kill_every: int) -> None:
        """kill_every: operations between kills of the engine (0 = never)."""
        for name in self._names:
            self._write(name)
        async with AsyncExitStack() as stack:
            for number in range(ROUTERS):
                client = churn_client(self._worker, self.findings, f"router {number}")
                self._clients.append(await stack.enter_async_context(client))
            left = iter(range(self._operations))
            await asyncio.gather(*(self._work(left, kill_every) for _ in range(AT_ONCE)))
            await self._settle()

    async def _work(self, left: Iterator[int], kill_every: int) -> None:
        kinds, weights = zip(*self._kinds, strict=True)
        for number in left:
            client = self._rng.choice(self._clients)
            (kind,) = self._rng.choices(kinds, weights)
            if number % 5_000 == 4_999:
                sys.stderr.write(f"{number + 1} operations, {self.findings.tokens} tokens\n")
            self.findings.counts[kind.__name__] += 1
            try:
                await asyncio.wait_for(kind(client), STUCK_S)
            except TimeoutError:
                self.findings.wrong.append(f"{kind.__name__} number {number} did not end")
            if kill_every and number % kill_every == kill_every - 1:
                self._kill_engine()

    def _kill_engine(self) -> None:
        engines = psutil.Process(self._worker.process.pid).children(recursive=True)
        for engine in engines:
            engine.kill()
            self._kills += 1

    # ---- operations

    async def generate(self, client: ChurnClient) -> None:
        """A sequence of the base or of an adapter, of a former content now and then."""
        rng = self._rng
        name = None if rng.random() < 0.1 else self._any_name()
        digest = None if name is None else await self._digest(client, name)
        length = rng.choice((3, 3, 8, 17, 40))
        shared = [5 + i % 50 for i in range(length)]  # prefixes that a cache could confuse
        prompt = shared if rng.random() < 0.5 else [rng.randrange(3, VOCAB) for _ in shared]
        asked = request(
            f"g{next(self._numbers)}", rng.randrange(1, 24), digest, (*prompt, rng.randrange(3, 9))
        )
        if rng.random() < 0.02:
            asked = msgspec.structs.replace(asked, deadline_s=rng.choice((0.001, 0.01, 10.0)))
        await self._finish(client, asked, name, rng.random() < 0.1)

    async def load(self, client: ChurnClient) -> None:
        """The caller's words to a digest."""
        await self._admit(client, self._any_name())

    async def preload(self, client: ChurnClient) -> None:
        """To the device."""
        digest = await self._digest(client, self._any_name())
        report = await client.order("load", digest)
        self._note("preload", report.error, "evicted meanwhile", "lost", "started", GONE)

    async def evict(self, client: ChurnClient) -> None:
        """From device and host memory."""
        name = self._any_name()
        report = await client.order("evict", await self._digest(client, name))
        self._note("evict", report.error, "pinned", "again", "lost")

    async def hint(self, client: ChurnClient) -> None:
        digests = [name.digests[0] for name in self._names if name.digests]
        chosen = self._rng.sample(digests, min(len(digests), 3))
        await client.send(protocol.AdapterPrefetch((*chosen, "0" * 64)))

    async def refresh(self, client: ChurnClient) -> None:
        """Other content under the same name; what runs goes on with the old."""
        name = self._any_name()
        async with name.busy:
            name.version += 1
            self._write(name)
        await self._admit(client, name)

    async def unload(self, client: ChurnClient) -> None:
        """All contents that the name ever had."""
        name = self._any_name()
        if name.digests:
            report = await client.order("evict", *name.digests)
            self._note("unload", report.error, "pinned", "again", "lost")

    async def pin(self, client: ChurnClient) -> None:
        """One small adapter, or none."""
        small = [n.digests[0] for n in self._names if n.is_small and n.digests]
        pinned = self._rng.sample(small, min(len(small), self._rng.randrange(2)))
        await client.send(protocol.AdapterPins(tuple(pinned)))

    # ---- parts of them

    def _any_name(self) -> Name:
        (name,) = self._rng.choices(self._names, self._weights)
        return name

    def _write(self, name: Name) -> None:
        rank = RANKS[name.index % len(RANKS)]
        seed = name.index + ADAPTERS * name.version
        write_adapter(self._root / name.ref.name, base(), rank=rank, seed=seed)

    async def _digest(self, client: ChurnClient, name: Name) -> str:
        if not name.digests:
            await self._admit(client, name)
        return self._rng.choice(name.digests[:2])

    async def _admit(self, client: ChurnClient, name: Name) -> None:
        for _ in range(TRIES):
            async with name.busy:
                frame = protocol.AdapterLoad(f"l{next(self._numbers)}", name.ref)
                state = await client.load(frame)
                if state.manifest is not None:
                    self._learn(name, state.manifest.digest)
                    return
            self._note("load", state.message, "disk", "quota", "store", "try again")
        self.findings.wrong.append(f"{name.ref.name} could not be loaded: {state.message}")

    def _learn(self, name: Name, digest: str) -> None:
        if digest in name.digests:
            name.digests.remove(digest)
        name.digests.insert(0, digest)
        del name.digests[4:]

    async def _finish(
        self,
        client: ChurnClient,
        asked: protocol.GenerateRequest,
        name: Name | None,
        abort: bool,
    ) -> None:
        """As a router does: a lost engine or an adapter that left the disk costs nothing."""
        gone = 0
        for attempt in range(TRIES):
            event = await client.generate(asked, abort)
            accepted = client.accepted(asked)
            self.findings.counts[f"ended in {event.error or event.finish}"] += 1
            if event.finish in ("length", "abort") or event.error == "deadline":
                return
            if event.error == "adapter_unavailable" and GONE in (event.message or ""):
                assert name is not None
                if asked.adapter != name.digests[0]:
                    return  # a former content that is nowhere any more
                gone += 1
                if gone > MAX_ADAPTER_FAILURES:
                    break
                await self._admit(client, name)
                if asked.adapter != name.digests[0]:
                    return
            elif event.error in ("engine_lost", "overloaded"):
                await client.until_ready()
            else:
                self.findings.wrong.append(f"{asked.request_id}: {event.error}: {event.message}")
                return
            asked = msgspec.structs.replace(
                asked, request_id=f"{asked.request_id}.{attempt}", accepted_ids=accepted
            )
        self.findings.wrong.append(f"{asked.request_id}: in the end {event.error}: {event.message}")

    def _note(self, kind: str, error: str | None, *known: str) -> None:
        """Counts a refusal that may be, and keeps any other as a finding."""
        if error is None:
            return
        word = next((word for word in known if word in error), None)
        if word is None:
            self.findings.wrong.append(f"{kind}: {error}")
        else:
            self.findings.counts[f"{kind} refused: {word}"] += 1

    # ---- the end

    async def _settle(self) -> None:
        """Nothing is lost: no page, no extent, no sequence."""
        for client in self._clients:
            await client.send(protocol.AdapterPins(()))
        client = self._clients[0]
        status = await self._at_rest(client)
        digests = {*status.resident, *(d for name in self._names for d in name.digests)}
        for digest in sorted(digests):
            report = await client.order("evict", digest)
            self._note("last evict", report.error)
        status = await self._at_rest(client)
        if (status.free_pages, status.resident) != (status.total_pages, ()):
            self.findings.wrong.append(f"something is left on the device: {status}")

    async def _at_rest(self, client: ChurnClient) -> protocol.WorkerStatus:
        seen = 0
        while True:
            client.changed.clear()
            await asyncio.wait_for(client.changed.wait(), STUCK_S)
            status = client.status
            assert status is not None
            busy = status.running or status.waiting or status.loading
            seen = 0 if busy or not status.ready else seen + 1
            if seen == 3:
                return status

    def report(self, seconds: float) -> dict[str, Any]:
        return {
            "operations": self._operations,
            "seconds": round(seconds, 1),
            "tokens_checked": self.findings.tokens,
            "engine_kills": self._kills,
            "counts": dict(sorted(self.findings.counts.items())),
            "worker": _worker_counters(self._worker),
            "wrong": self.findings.wrong[:20],
            "num_wrong": len(self.findings.wrong),
        }


def _worker_counters(worker: Worker) -> dict[str, float]:
    """What the worker itself counted of its tiers."""
    wanted = ("adapter_evictions_total", "adapters_staged_total", "preemptions_total")
    counters: Counter[str] = Counter()
    for line in worker.get("/metrics").text.splitlines():
        name = line.removeprefix("loraplex_worker_")
        if name.startswith(wanted) and not line.endswith(" 0.0"):
            counters[name.rpartition(" ")[0]] = int(float(line.rpartition(" ")[2]))
    return dict(counters)


def churn(folder: Path, operations: int, seed: int, kill_every: int) -> dict[str, Any]:
    """Starts a worker under `folder` and churns it; what was done and found."""
    root = folder / "adapters"
    root.mkdir()
    options = ("--adapter-root", str(root), *MEMORY, *KV, *DISK)
    with running(folder, *options, executor=EXECUTOR) as worker:
        job = Churn(worker, root, operations, seed)
        started = time.monotonic()
        asyncio.run(job.run(kill_every))
        return job.report(time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kill-every", type=int, default=5_000, help="0 = the engine is not killed"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = churn(Path(folder), arguments.operations, arguments.seed, arguments.kill_every)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 1 if report["num_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
