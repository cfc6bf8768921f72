"""A rollout in a fleet of real processes: two routers, two workers, a Redis, certified tokens.

Each has a short test with routers in process, in `tests/router/operations`.
"""

import asyncio
import itertools
import random
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.launcher.demo import adapter_paths
from tests.certifying.certificates import certified_output
from tests.chaos.load import DIGEST_HEADER, Certifier
from tests.chaos.processes import Fleet, Process, Shape
from tests.router.serving import poll
from tests.router.shared.redis_server import running_redis

OLD, NEW, BROKEN = "local:pirate", "local:sql", "local:broken"
pytestmark = pytest.mark.exhaustive

PATIENCE_S = 240.0
USERS = [f"user-{number}" for number in range(24)]


class OwnFleet(Fleet):
    """Its workers have a root of the test's, too: `own` of the folder."""

    def _worker(self, folder: Path, number: int) -> Process:
        process = super()._worker(folder, number)
        process._arguments += ["--adapter-root", str(folder / "own")]
        return process


class Rolling:
    """Clients of a fleet who check each token by the digest that the answer's head told."""

    def __init__(self, fleet: Fleet, http: httpx.AsyncClient) -> None:
        self.fleet = fleet
        self.one, self.two = fleet.routers
        self.certifier = Certifier()
        self.answered = 0
        self._http = http
        self._numbers = itertools.count()

    async def call(self, router: Process, method: str, path: str, **body: Any) -> dict[str, Any]:
        url = f"{router.url}/v1/adapters{path}"
        answer = await self._http.request(method, url, json=body or None)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def ask(self, router: Process, user: str, tokens: int = 5) -> str:
        """The digest that answered, streamed; every token was its own."""
        prompt = f"{next(self._numbers)} a river of stone"
        body = {
            "model": "mine",
            "prompt": prompt,
            "max_tokens": tokens,
            "user": user,
            "stream": True,
        }
        url, text = f"{router.url}/v1/completions", ""
        async with self._http.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            digest = answer.headers[DIGEST_HEADER]
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
        ids = self.certifier.tokenizer.encode(prompt).ids
        expected = certified_output(digest, ids, tokens, self.certifier._options)
        assert text == self.certifier.text(expected)
        self.answered += 1
        return str(digest)

    async def versions(self, router: Process) -> dict[str, str]:
        """The digest that each user gets."""
        digests = [await self.ask(router, user) for user in USERS]
        return dict(zip(USERS, digests, strict=True))

    async def until_live(self, *weights: int) -> dict[str, Any]:
        """On both routers; the old version's first. What the second tells."""
        shown: dict[str, Any] = {}

        async def are_so() -> bool:
            for router in self.fleet.routers:
                shown.update(await self.call(router, "GET", "/mine"))
                versions = (shown["rollout"] or {"versions": []})["versions"]
                if tuple(version["live_weight"] for version in versions) != weights:
                    return False
            return True

        await poll(are_so, PATIENCE_S)
        return shown

    async def roll_out(self, ref: str, weight: int, guards: dict[str, Any] | None = None) -> None:
        versions = [{"reference": ref, "weight": weight}]
        await self.call(self.one, "POST", "/mine/rollout", versions=versions, guards=guards)


@pytest.fixture
async def rolling(tmp_path: Path) -> AsyncIterator[Rolling]:
    broken = tmp_path / "own" / "broken"
    shutil.copytree(adapter_paths()["summary"], broken)
    (broken / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    async with running_redis() as redis, httpx.AsyncClient(timeout=240, trust_env=False) as http:
        shape = Shape(workers=2, routers=2, step_s=0.01)
        # A Redis that is late for once is none that is away.
        fleet = OwnFleet(tmp_path, shape, redis, "--redis-timeout-s", "1")
        try:
            await fleet.start_all()
            rolling = Rolling(fleet, http)
            await rolling.call(rolling.one, "POST", "", name="mine", ref=OLD)

            async def known() -> bool:
                answer = await http.get(f"{rolling.two.url}/v1/adapters/mine")
                return answer.status_code == 200

            await poll(known, PATIENCE_S)
            yield rolling
        finally:
            await fleet.close()


async def test_from_nothing_to_all_over_a_restart(rolling: Rolling) -> None:
    """Callers stay with their versions, also past a killed router; running answers end as begun."""
    [old] = set((await rolling.versions(rolling.two)).values())
    await rolling.roll_out(NEW, 0)
    await rolling.until_live(100, 0)
    assert set((await rolling.versions(rolling.two)).values()) == {old}
    await rolling.roll_out(NEW, 50)
    await rolling.until_live(50, 50)
    half = await rolling.versions(rolling.one)
    assert await rolling.versions(rolling.two) == half
    assert len(set(half.values())) == 2

    rolling.one.signal(signal.SIGKILL)
    await rolling.one.exited()
    assert await rolling.versions(rolling.two) == half, "the other router is not concerned"
    rolling.fleet.start(rolling.one)
    await rolling.fleet.until_whole()
    assert await rolling.versions(rolling.one) == half, "all is there again"

    before = [user for user, digest in half.items() if digest == old]
    running = [
        asyncio.create_task(rolling.ask(router, before[0], tokens=400))
        for router in rolling.fleet.routers
    ]

    async def both_run() -> bool:
        counts = [
            await rolling.fleet.metric(router, "loraplex_requests_running")
            for router in rolling.fleet.routers
        ]
        return counts == [1, 1] or any(task.done() for task in running)

    await poll(both_run, PATIENCE_S)
    await rolling.roll_out(NEW, 100)
    await rolling.until_live(0, 100)
    new = set((await rolling.versions(rolling.two)).values())
    assert new == set(half.values()) - {old}
    promoted = await rolling.call(rolling.two, "POST", "/mine/promote")
    assert (promoted["ref"], {promoted["digest"]}) == (NEW, new)
    assert {await task for task in running} == {old}
    back = await rolling.call(rolling.one, "POST", "/mine/rollback")
    assert back["digest"] == old
    told = await rolling.call(rolling.one, "GET", "/mine/history")
    actions = [change["action"] for change in told["data"]]
    assert actions == ["rollback", "promote", *["rollout"] * 3, "register"]


async def chat(rolling: Rolling, router: Process) -> set[int]:
    """A chat of each user: the statuses. A broken version's template fails."""
    body = {"model": "mine", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    url = f"{router.url}/v1/chat/completions"
    answers = [await rolling._http.post(url, json={**body, "user": user}) for user in USERS]
    return {answer.status_code for answer in answers}


async def until_back(rolling: Rolling) -> set[int]:
    """Until chats got a broken version taken back on both routers: the statuses that were seen."""
    statuses: set[int] = set()

    async def is_back() -> bool:
        for router in rolling.fleet.routers:
            statuses.update(await chat(rolling, router))
        told = [await rolling.call(router, "GET", "/mine") for router in rolling.fleet.routers]
        return all(one["rollout"]["versions"][1]["live_weight"] == 0 for one in told)

    await poll(is_back, PATIENCE_S)
    return statuses


async def test_a_broken_version_goes_back_by_itself(rolling: Rolling) -> None:
    await rolling.roll_out(BROKEN, 50, {"min_requests": 5, "max_latency_ratio": None})
    await rolling.until_live(50, 50)
    assert await until_back(rolling) == {200, 400}
    shown = await rolling.until_live(100, 0)
    assert "requests failed" in shown["rollout"]["versions"][1]["why"]
    assert len(set((await rolling.versions(rolling.one)).values())) == 1
    counts = [
        await rolling.fleet.metric(router, 'loraplex_adapter_rollbacks_total{by="guard"}')
        for router in rolling.fleet.routers
    ]
    assert sum(counts) == 1


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_a_broken_version_goes_back_without_redis(rolling: Rolling, fault: str) -> None:
    """On each router by itself, with nobody asked; and for good when Redis is back."""
    await rolling.roll_out(BROKEN, 50, {"min_requests": 5, "max_latency_ratio": None})
    await rolling.until_live(50, 50)
    redis, routers = rolling.fleet.redis, rolling.fleet.routers
    if fault == "frozen":
        redis.freeze()
    else:
        await redis.kill()
    assert await until_back(rolling) == {200, 400}
    for router in routers:
        assert await chat(rolling, router) == {200}
        assert len(set((await rolling.versions(router)).values())) == 1
        alone = 'loraplex_adapter_rollbacks_total{by="guard_alone"}'
        assert await rolling.fleet.metric(router, alone) == 1
    if fault == "frozen":
        redis.thaw()
    else:
        await redis.start()

    async def agree() -> bool:
        told = [await rolling.call(router, "GET", "/mine/history") for router in routers]
        lists = [[change["action"] for change in one["data"]] for one in told]
        return told[0] == told[1] and lists[0] == ["rollback", "rollout", "register"]

    await poll(agree, PATIENCE_S)
    shown = await rolling.until_live(100, 0)
    assert "without Redis" in shown["rollout"]["versions"][1]["why"]


class Drill:
    """Clients under load, while shares move at random and things die."""

    def __init__(self, rolling: Rolling) -> None:
        self.rolling = rolling
        self.fleet = rolling.fleet
        self.dice = random.Random(7)
        self.dead: set[Process] = set()
        self.stopping = asyncio.Event()

    async def client(self) -> None:
        while not self.stopping.is_set():
            router = self.dice.choice(self.fleet.routers)
            life = router.lives
            try:
                await self.rolling.ask(router, self.dice.choice(USERS), self.dice.choice([3, 30]))
            except httpx.HTTPError:
                killed = router in self.dead or router.lives != life
                assert killed, "only a killed router breaks answers"
                await asyncio.sleep(0)

    async def kill(self) -> None:
        router = self.dice.choice(self.fleet.routers)
        self.dead.add(router)
        router.signal(signal.SIGKILL)
        await router.exited()
        self.fleet.start(router)
        await self.fleet.until_whole()
        self.dead.discard(router)

    async def empty(self) -> None:
        await self.fleet.redis.command("FLUSHALL")

    async def kill_redis(self) -> None:
        """A router fills the table again: with that one killed before, the name would be lost."""
        await self.fleet.redis.kill()
        await self.fleet.redis.start()

        async def filled() -> bool:
            return bool(await self.fleet.redis.command("KEYS", "*{table:*"))

        await poll(filled, PATIENCE_S)

    async def shift(self) -> None:
        versions = [{"reference": NEW, "weight": self.dice.choice([0, 5, 50, 100])}]
        url = f"{self.dice.choice(self.fleet.routers).url}/v1/adapters/mine/rollout"
        body = {"versions": versions, "guards": None}
        answer = await self.rolling._http.post(url, json=body)
        assert answer.status_code in (200, 409, 503), answer.text

    async def answers(self, more: int) -> None:
        """Until so many more were whole and right."""
        goal = self.rolling.answered + more

        async def came() -> bool:
            return self.rolling.answered >= goal

        await poll(came, PATIENCE_S)

    async def agree(self) -> bool:
        """Both routers say the same, and nothing waits to be in force."""
        told = [await self.rolling.call(r, "GET", "/mine") for r in self.fleet.routers]
        first, second = ((one["rollout"], one["history"]) for one in told)
        states = {version["state"] for version in first[0]["versions"]}
        return first == second and "warming" not in states


async def test_nothing_is_lost_while_shares_move_and_things_die(rolling: Rolling) -> None:
    drill = Drill(rolling)
    async with asyncio.TaskGroup() as clients:
        for _ in range(4):
            clients.create_task(drill.client())
        for fault in (drill.kill, drill.empty, drill.kill_redis, drill.kill, drill.empty):
            await drill.shift()
            await drill.shift()
            await fault()
            await drill.answers(10)
        drill.stopping.set()
    await poll(drill.agree, PATIENCE_S)
    assert await rolling.versions(rolling.one) == await rolling.versions(rolling.two)
