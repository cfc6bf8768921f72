"""Versions that the adapters file declares: what is carried out, and what an operator may do."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef
from loraplex.router.names.registration import Registration, RolloutRequest, seen
from loraplex.router.names.rollout_moves import Shares, rolled_back, split, stays_back, with_shares
from loraplex.router.names.served import OwnedName
from loraplex.router.operations.adapters_file import (
    BY,
    FileContents,
    NameEntry,
    plan_rollouts,
    read,
)
from loraplex.router.operations.declarations import RETRY_S, AdaptersFile
from loraplex.router.operations.rollouts import GUARD
from loraplex.router.policy.rollout import Content, Declared, Guards, Rollout, Version
from loraplex.server.protocol import AdapterLoad
from tests.router.fake_worker import FakeWorker, make_manifest, running_worker
from tests.router.operations.test_shared_adapters import call
from tests.router.serving import Running, poll, running_router
from tests.router.shared.redis_server import running_redis

MINE, PIRATE = OwnedName("mine"), OwnedName("pirate")
OLD, NEW, NEXT = (AdapterRef("hub", f"org/{name}") for name in ("old", "new", "next"))


def entry(*versions: tuple[str, int], **more: Any) -> dict[str, Any]:
    told = [{"reference": ref, "weight": weight} for ref, weight in versions]
    return {"name": "mine", "ref": "org/old", "versions": told, **more}


def file_of(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"adapters": entries}).encode()


def test_an_entry_says_what_a_rollouts_body_says() -> None:
    yaml = b"""
adapters:
  - name: mine
    ref: hub:org/old
    versions:
      - {reference: hub:org/old, weight: 60}
      - {reference: hub:org/new, weight: 20}
    guards: {min_requests: 7, max_latency_ratio: null}
"""
    guards = Guards(min_requests=7, max_latency_ratio=None)
    said = Declared(((OLD, 60), (NEW, 20)), guards)
    assert read(yaml, "hub") == FileContents({MINE: NameEntry(OLD, False, said)}, {})
    usual = read(file_of(entry(("org/new", 5))), "hub").wanted[MINE].rollout
    assert usual == Declared(((NEW, 5),), Guards())
    none = read(file_of(entry(("org/new", 5), guards=None)), "hub").wanted[MINE].rollout
    assert none == Declared(((NEW, 5),), None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (entry(), "length >= 1"),
        (entry(("org/old", 5)), "beside the present one"),
        (entry(("org/new", 60), ("org/next", 60)), "100 at most"),
        (entry(("org/new", 5), ("org/new", 6)), "there twice"),
        (entry(("org/new", 101)), "<= 100"),
        (entry(("org/old", 0), ("org/new", 0)), "weight"),
        (entry(("plain", 5)), "versions[0].reference"),
        (entry(("org/new", 5), guards={"window_s": 1}), "guards.window_s"),
        (entry(("org/new", 5), guards={"gards": 1}), "gards"),
        ({"name": "mine", "ref": "org/old", "guards": {}}, "`guards`: they need `versions`"),
        ({"name": "mine", "ref": "org/old", "versions": [{"ref": "org/new", "weight": 5}]}, "ref"),
    ],
)
def test_a_wrong_rollout_is_reported_and_leaves_its_name_alone(
    wrong: dict[str, Any], words: str
) -> None:
    contents = read(file_of(wrong, {"name": "good", "ref": "org/one"}), "hub")
    assert set(contents.wanted) == {OwnedName("good")}
    assert words in contents.errors[MINE]
    there = Registration("mine", OLD, "file", rollout=Rollout("r", (), 100, 100))
    assert plan_rollouts(contents, [there]).end == ()


WEIGHTS = st.sampled_from([0, 5, 50])
SAID = st.none() | st.builds(
    Declared,
    st.dictionaries(st.sampled_from([NEW, NEXT]), WEIGHTS, min_size=1).map(
        lambda weights: tuple(weights.items())
    ),
    st.sampled_from([None, Guards()]),
)
BACK = st.sets(st.sampled_from(["org/new", "org/next"]))


def carry_out(registration: Registration, request: RolloutRequest) -> Registration:
    """As `Rollouts.roll_out` does, without a fleet."""
    own, others = split([OLD], request.versions)
    there = registration.rollout
    versions = []
    for ref, weight in others:
        known = next((v for v in there.versions if v.ref == ref), None) if there else None
        if known is not None and stays_back(known, weight, there, request.declared):
            versions.append(known)
        else:
            content = Content(ref, make_manifest(ref.name))
            versions.append(Version(ref, content, weight))
    assert not isinstance(request.guards, msgspec.UnsetType)
    shares = Shares(tuple(versions), own, request.guards, request.declared)
    return with_shares(registration, shares, "id", 0.0, request.by)


@given(st.lists(st.tuples(SAID, BACK), min_size=1, max_size=6))
def test_what_went_back_stays_until_its_line_changes(
    edits: list[tuple[Declared | None, set[str]]],
) -> None:
    """edits: what the file says from then on, and what then goes back."""
    there = seen(
        Registration("mine", OLD, "file", state="ready"), Content(OLD, make_manifest("org/old")), 0
    )
    before: dict[AdapterRef, int] = {}
    back: set[AdapterRef] = set()
    for said, goes in edits:
        contents = FileContents({MINE: NameEntry(OLD, False, said)}, {})
        todo = plan_rollouts(contents, [there])
        for request in todo.roll_out.values():
            there = carry_out(there, request)
        if todo.end:
            there = msgspec.structs.replace(there, rollout=None)
        again = plan_rollouts(contents, [there])
        assert (again.roll_out, again.end) == ({}, ()), "carried out, nothing is left to do"
        now = dict(said.versions) if said else {}
        back = {ref for ref in back if ref in now and before.get(ref) == now[ref]}
        before = now
        versions = there.rollout.versions if there.rollout else ()
        assert {v.ref for v in versions} == set(now)
        for version in versions:
            assert version.rolled_back == (version.ref in back)
            assert version.weight == (0 if version.ref in back else now[version.ref])
            if version.ref.name in goes and version.weight:
                there = rolled_back(there, version.digest, "bad", 0.0, GUARD)
                back.add(version.ref)


def test_an_operators_rollout_is_left_alone_where_the_file_says_nothing() -> None:
    operators = Registration("mine", OLD, "file", rollout=Rollout("r", (), 100, 100))
    nothing = FileContents({MINE: NameEntry(OLD, False)}, {})
    assert plan_rollouts(nothing, [operators]).end == ()
    said = FileContents({MINE: NameEntry(OLD, False, Declared(((NEW, 5),), None))}, {})
    assert set(plan_rollouts(said, [operators]).roll_out) == {MINE}, "else it has the last word"


def test_versions_are_of_the_owner_that_an_entry_names() -> None:
    contents = read(
        file_of(
            entry(("org/new", 5)),
            entry(("org/next", 7), tenant="acme"),
            {"name": "mine", "ref": "org/old", "tenant": "globex"},
        ),
        "hub",
    )
    assert contents.errors == {}
    there = [
        Registration("mine", OLD, "file", tenant=tenant) for tenant in ("", "acme", "globex", "x")
    ]
    requests = plan_rollouts(contents, there).roll_out
    assert {name: request.versions for name, request in requests.items()} == {
        MINE: ((NEW, 5),),
        OwnedName("mine", "acme"): ((NEXT, 7),),
    }


# With a router


class Follower:
    """A router that reads the file on demand."""

    now = 0.0

    def __init__(self, router: Running, path: Path) -> None:
        self.router = router
        self.admin, self.rollouts = router.service.admin, router.service.rollouts
        self.path = path
        self.file = AdaptersFile(path, self.admin, self.rollouts, "hub", lambda: self.now)

    @property
    def states(self) -> dict[str, tuple[str, int]]:
        rollout = self.admin.get(MINE).rollout
        return {v.ref.name: (v.state, v.live) for v in rollout.versions} if rollout else {}

    async def until(self, **expected: tuple[str, int]) -> None:
        async def so() -> bool:
            return self.states == {f"org/{name}": state for name, state in expected.items()}

        await poll(so)


writes = iter(range(1, 1_000_000))


def write(path: Path, *entries: dict[str, Any]) -> None:
    path.write_bytes(file_of(*entries))
    stamp = next(writes)
    os.utime(path, ns=(stamp, stamp))


@pytest.fixture
def follower(router: Running, tmp_path: Path) -> Follower:
    return Follower(router, tmp_path / "adapters.json")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.router.operations.rollouts.TICK_S", 0.05)


async def test_rolled_out_moved_on_promoted_and_ended(follower: Follower) -> None:
    write(follower.path, entry(("org/new", 5)))
    await follower.file.poll()
    assert follower.file.errors == {}
    await follower.until(new=("serving", 5))
    [*_, change] = follower.admin.get(MINE).history
    assert (change.action, change.by) == ("rollout", BY)
    write(follower.path, entry(("org/new", 100)))
    await follower.file.poll()
    await follower.until(new=("serving", 100))
    write(follower.path, {"name": "mine", "ref": "org/new"})
    await follower.file.poll()
    there = follower.admin.get(MINE)
    assert (there.ref, there.rollout) == (NEW, None), "promoted by declaring it"
    write(follower.path, entry(("org/next", 5), ref="org/new"))
    await follower.file.poll()
    write(follower.path, {"name": "mine", "ref": "org/new"})
    await follower.file.poll()
    assert follower.states == {}


async def test_an_operator_takes_back_and_does_nothing_else(follower: Follower) -> None:
    write(follower.path, entry(("org/new", 50)))
    await follower.file.poll()
    await follower.until(new=("serving", 50))
    other = [{"reference": "org/new", "weight": 60}]
    for method, path, body in (
        ("POST", "/mine/rollout", {"versions": other}),
        ("POST", "", {"name": "mine", "versions": other}),
        ("DELETE", "/mine/rollout", {}),
        ("POST", "/mine/promote", {}),
    ):
        answer = await call(follower.router, method, path, **body)
        assert answer.status_code == 409, (path, answer.text)
        assert "the adapters file" in answer.text
    assert (await call(follower.router, "POST", "/mine/rollback")).status_code == 200
    assert follower.states == {"org/new": ("rolled_back", 0)}
    write(follower.path, entry(("org/new", 50)))
    await follower.file.poll()
    assert follower.states == {"org/new": ("rolled_back", 0)}, "the file says what it said"
    write(follower.path, entry(("org/new", 50), ("org/next", 10)))
    await follower.file.poll()
    await follower.until(new=("rolled_back", 0), next=("serving", 10))
    write(follower.path, entry(("org/new", 20), ("org/next", 10)))
    await follower.file.poll()
    await follower.until(new=("serving", 20), next=("serving", 10))


async def test_a_version_that_cannot_be_had_changes_nothing_else(
    follower: Follower, worker: FakeWorker
) -> None:
    write(follower.path, entry(("org/new", 5)))
    await follower.file.poll()
    await follower.until(new=("serving", 5))
    write(follower.path, entry(("org/missing", 5), pin=True))
    await follower.file.poll()
    assert "no repository" in follower.file.errors[MINE]
    assert follower.admin.get(MINE).pinned
    assert follower.states == {"org/new": ("serving", 5)}
    write(follower.path, entry(("org/next", 5)))
    follower.now += RETRY_S
    await follower.file.poll()
    assert follower.file.errors == {}
    await follower.until(next=("serving", 5))


async def test_a_name_does_not_wait_for_its_versions(
    follower: Follower, worker: FakeWorker
) -> None:
    come = asyncio.Event()

    async def load(load: AdapterLoad) -> AdapterManifest:
        if load.ref.name == NEW.name:
            await come.wait()
        return make_manifest(load.ref.name)

    worker.loader = load
    write(follower.path, entry(("org/new", 5)))
    polling = asyncio.create_task(follower.file.poll())
    await follower.file.applied.wait()
    assert follower.admin.get(MINE).ref == OLD
    assert not polling.done()
    come.set()
    await polling
    await follower.until(new=("serving", 5))


async def test_versions_of_a_name_that_is_declared_elsewhere(follower: Follower) -> None:
    pirate = follower.admin.get(PIRATE)
    assert pirate.origin == "option"
    write(follower.path, {**entry(("org/new", 5)), "name": "pirate", "ref": "hub:org/pirate"})
    await follower.file.poll()
    assert "--adapter" in follower.file.errors[PIRATE]
    with pytest.raises(AdapterError):
        await follower.rollouts.end(PIRATE, "test")


async def test_routers_that_follow_the_same_file_carry_it_out_once(tmp_path: Path) -> None:
    worker = FakeWorker()
    path = tmp_path / "adapters.json"
    async with running_redis() as redis, running_worker(worker):
        options: dict[str, Any] = {"redis": redis.url, "redis_timeout_s": 30.0, "adapters": ()}
        async with (
            running_router(tmp_path / "one", worker, **options) as one,
            running_router(tmp_path / "two", worker, **options) as two,
        ):
            both = [Follower(router, path) for router in (one, two)]
            for said in ((("org/new", 5),), (("org/new", 50), ("org/next", 1)), ()):
                write(path, entry(*said) if said else {"name": "mine", "ref": "org/old"})
                await asyncio.gather(*(follower.file.poll() for follower in both))
                for follower in both:
                    assert follower.file.errors == {}

                    async def agree(follower: Follower = follower, said: Any = said) -> bool:
                        there = follower.states
                        return {name: live for name, (_, live) in there.items()} == dict(said)

                    await poll(agree)
            [_, *changes] = both[0].admin.get(MINE).history
            assert [change.action for change in changes] == ["rollout"] * 3
