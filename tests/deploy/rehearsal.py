"""An upgrade rehearsed without a cluster: every router and worker replaced under streaming load.

Pods are the chart's, run as processes; a balancer stands for the Service. As in Kubernetes a pod
that is deleted gets preStop and SIGTERM, while new connections still come to it for some time.

    python -m tests.deploy.rehearsal --rounds 5 --streams 32
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from loraplex.launcher.demo import adapter_paths, model_path
from tests.certifying.factory import certify
from tests.deploy.chart import Object, case, merged, objects_of, of_kind, render
from tests.deploy.local_pods import Cluster, LocalPod

REQUEST_TIMEOUT_S = 60
VALUES: Object = {
    "model": {"id": str(model_path())},
    "adapters": [
        {"name": name, "ref": f"local:{adapter_paths()[name]}"} for name in ("sql", "pirate")
    ],
    "requestTimeoutSeconds": REQUEST_TIMEOUT_S,
    "router": {"replicas": 2, "preStopSeconds": 1, "drainDelaySeconds": 1, "minReadySeconds": 0},
    # Workers drain for less than a stream takes: what is left goes on at another.
    "worker": {
        "replicas": 2,
        "drainSeconds": 1,
        "minReadySeconds": 3,
        "options": {
            "executor": certify(step_s=0.02),
            "adapter-root": [str(adapter_paths()[name]) for name in ("sql", "pirate")],
        },
    },
}
# For how long new connections still come to a pod that is being stopped.
LAG_S = 1.0
_CHUNK = 1 << 16


class Balancer:
    """The Service: each new connection goes to the next endpoint."""

    def __init__(self) -> None:
        self.endpoints: list[int] = []
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(asyncio.CancelledError):
            await self._carry(reader, writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = self.endpoints[next(self._turn) % len(self.endpoints)]
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pump(reader, back), _pump(there, writer), return_exceptions=True)
            back.close()
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError):
            writer.close()


@dataclass
class Load:
    """Clients that stream one completion after another. Every answer must be the right one."""

    url: str
    right: dict[tuple[str, str], str] = field(default_factory=dict)
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def learn(self, models: list[str], prompts: int) -> None:
        """The answers as they are while nothing happens."""
        async with self._client(False) as http:
            for model in models:
                for number in range(prompts):
                    key = (model, f"message {number}")
                    self.right[key] = await self._stream(http, *key)

    async def run(self, streams: int) -> None:
        """Until `stop`. Half of the clients keep their connections, half make one each time."""
        await asyncio.gather(*(self._loop(number) for number in range(streams)))

    def stop(self) -> None:
        self._stopping.set()

    async def until_more(self, answers: int) -> None:
        """Until there are so many more; bounded in time."""
        wanted = self.answered + answers
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            while self.answered < wanted:
                self._news.clear()
                await self._news.wait()

    def _client(self, keep_alive: bool) -> httpx.AsyncClient:
        limits = httpx.Limits(max_keepalive_connections=1 if keep_alive else 0)
        return httpx.AsyncClient(trust_env=False, timeout=REQUEST_TIMEOUT_S, limits=limits)

    async def _loop(self, number: int) -> None:
        keys = itertools.cycle(sorted(self.right))
        async with self._client(keep_alive=number % 2 == 0) as http:
            for key in itertools.islice(keys, number, None):
                if self._stopping.is_set():
                    return
                try:
                    text = await self._stream(http, *key)
                except (httpx.HTTPError, ValueError) as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    continue
                self.answered += 1
                self._news.set()
                if text != self.right[key]:
                    self.failures.append(f"{key}: another answer than before")

    async def _stream(self, http: httpx.AsyncClient, model: str, prompt: str) -> str:
        """Raises ValueError for an answer that is not whole."""
        body = {"model": model, "prompt": prompt, "max_tokens": 60, "stream": True, "seed": 1}
        body["temperature"] = 0
        parts, finish = [], None
        async with http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {(await answer.aread()).decode()[:300]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(json.dumps(event["error"]))
                (choice,) = event["choices"]
                parts.append(choice["text"])
                finish = choice["finish_reason"] or finish
        if finish != "length":
            raise ValueError(f"the stream ended with {finish!r} after {len(parts)} events")
        return "".join(parts)


class Release:
    """The chart's routers and workers as they run."""

    def __init__(self, folder: Path) -> None:
        self.balancer = Balancer()
        self._cluster = Cluster(folder)
        self._objects: list[Object] = []
        self._routers: list[LocalPod] = []
        self._workers: dict[int, LocalPod] = {}
        self._numbers = itertools.count()
        self.exit_codes: Counter[int] = Counter()

    def set_values(self, change: Object) -> None:
        """What pods are made of from now on; the secret stays, as on an upgrade."""
        secrets = of_kind(self._objects, "Secret")
        made = objects_of(render(merged(merged(case("small"), VALUES), change)))
        self._objects = [o for o in made if o["kind"] != "Secret" or not secrets] + secrets

    async def install(self) -> None:
        (workers,) = of_kind(self._objects, "StatefulSet")
        (routers,) = of_kind(self._objects, "Deployment")
        async with asyncio.TaskGroup() as tasks:
            for ordinal in range(workers["spec"]["replicas"]):
                tasks.create_task(self._start_worker(ordinal))
            for _ in range(routers["spec"]["replicas"]):
                tasks.create_task(self._start_router())

    async def upgrade(self) -> None:
        """Deployment and StatefulSet at once, as `helm upgrade` does it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._roll_routers())
            tasks.create_task(self._roll_workers())

    async def close(self) -> None:
        await self.balancer.close()
        for pod in (*self._routers, *self._workers.values()):
            await pod.kill()

    async def _start_router(self) -> None:
        (owner,) = of_kind(self._objects, "Deployment")
        pod = self._cluster.pod(owner, f"router-{next(self._numbers)}", self._objects)
        self._routers.append(pod)
        await pod.start()
        await pod.ready()
        self.balancer.endpoints.append(pod.port)

    async def _roll_routers(self) -> None:
        """maxSurge 1, maxUnavailable 0: a new one is ready before an old one goes."""
        for old in list(self._routers):
            await self._start_router()
            await self._available("Deployment")
            stopping = asyncio.create_task(old.stop())
            await asyncio.sleep(LAG_S)
            self.balancer.endpoints.remove(old.port)
            self.exit_codes[await stopping] += 1
            self._routers.remove(old)

    async def _start_worker(self, ordinal: int) -> None:
        (owner,) = of_kind(self._objects, "StatefulSet")
        pod = self._cluster.pod(owner, f"{owner['metadata']['name']}-{ordinal}", self._objects)
        self._workers[ordinal] = pod
        await pod.start()
        await pod.ready()

    async def _roll_workers(self) -> None:
        """The last first; the next when the one before is ready again."""
        for ordinal in sorted(self._workers, reverse=True):
            self.exit_codes[await self._workers[ordinal].stop()] += 1
            await self._start_worker(ordinal)
            await self._available("StatefulSet")

    async def _available(self, kind: str) -> None:
        (owner,) = of_kind(self._objects, kind)
        await asyncio.sleep(owner["spec"]["minReadySeconds"])


@contextlib.asynccontextmanager
async def released(folder: Path, streams: int) -> AsyncIterator[tuple[Release, Load]]:
    """A release under load, which has ended on leaving."""
    release = Release(folder)
    try:
        release.set_values({})
        await release.install()
        load = Load(await release.balancer.start())
        await load.learn(["sql", "pirate", str(model_path().name)], prompts=2)
        running = asyncio.create_task(load.run(streams))
        try:
            yield release, load
        finally:
            load.stop()
            await running
    finally:
        await release.close()


async def rehearse(
    rounds: int, streams: int, folder: Path, say: Callable[[str], object] = print
) -> Load:
    """Upgrades and upgrades again; each new release differs in an option of both."""
    async with released(folder, streams) as (release, load):
        for number in range(1, rounds + 1):
            await load.until_more(streams)
            changed = {"max-queue": 1000 + number}, {"max-running": 64 + number}
            router, worker = ({"options": options} for options in changed)
            release.set_values({"router": router, "worker": worker})
            await release.upgrade()
            say(f"upgrade {number}: {load.answered} answers, {len(load.failures)} failed")
        await load.until_more(streams)
        assert set(release.exit_codes) == {0}, release.exit_codes
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = asyncio.run(rehearse(chosen.rounds, chosen.streams, Path(folder)))
    for failure, count in Counter(load.failures).most_common(20):
        print(f"{count:5} {failure}")
    sys.exit(1 if load.failures else 0)


if __name__ == "__main__":
    main()
