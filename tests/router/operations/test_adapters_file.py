"""The operator's file of adapters: what it says, what is done, and what its faults cost."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef
from loraplex.router.names.registration import Origin, Registration
from loraplex.router.names.served import OwnedName
from loraplex.router.operations import declarations
from loraplex.router.operations.adapters_file import (
    MAX_FILE_BYTES,
    WHOLE,
    FileContents,
    NameEntry,
    plan,
    read,
)
from loraplex.router.operations.declarations import RETRY_S, AdaptersFile
from loraplex.server.protocol import AdapterLoad
from tests.router.fake_worker import FakeWorker, make_manifest, running_worker
from tests.router.operations.test_declared_check import load
from tests.router.serving import Running, poll, running_router

YAML = b"""
adapters:
  - name: sql
    ref: hub:org/sql@main
    pin: true
  - {name: tone, ref: "local:/srv/tone", tool_format: hermes}
"""


def test_yaml_and_json_say_the_same() -> None:
    expected = {
        OwnedName("sql"): NameEntry(AdapterRef("hub", "org/sql", "main"), True),
        OwnedName("tone"): NameEntry(AdapterRef("local", "/srv/tone"), False, None, "hermes"),
    }
    assert read(YAML, "hub") == FileContents(expected, {})
    entries = [
        {"name": "sql", "ref": "org/sql@main", "pin": True},
        {"name": "tone", "ref": "/srv/tone", "tool_format": "hermes"},
    ]
    assert read(json.dumps({"adapters": entries}).encode(), "hub") == FileContents(expected, {})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"adapters: [", "line"),
        (b"", "one key"),
        (b"[]", "one key"),
        (b"adapters: {}", "one key"),
        (b"adapters: []\nmore: 1", "one key"),
        (b"\xff\xfe\x00", ""),
        (b"!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        (b" " * (MAX_FILE_BYTES + 1), "at most"),
    ],
)
def test_a_file_that_cannot_be_understood(data: bytes, words: str) -> None:
    contents = read(data, "hub")
    assert not contents.is_readable
    assert words in contents.errors[WHOLE]
    there = [Registration("sql", AdapterRef("hub", "org/sql"), "file")]
    assert plan(contents, there) == plan(contents, [])


@pytest.mark.parametrize(
    ("entry", "name", "words"),
    [
        ({"name": "a|b", "ref": "org/one"}, "a|b", "not allowed in a name"),
        ({"name": "x"}, "x", "ref"),
        ({"ref": "org/one"}, "entry 2", "name"),
        ({"name": "x", "ref": "plain"}, "x", "no source"),
        ({"name": "x", "ref": "./tone"}, "x", "begins with '/'"),
        ({"name": "x", "ref": "org/one", "pn": True}, "x", "pn"),
        ({"name": "x", "ref": "org/one", "pin": "yes!"}, "x", "bool"),
        ({"name": "x", "ref": "org/one", "tool_format": "none"}, "x", "expected one of auto"),
        ("text", "entry 2", "object"),
        ({"name": "good", "ref": "org/two"}, "good", "twice"),
    ],
)
def test_a_wrong_entry_costs_itself_only(entry: Any, name: str, words: str) -> None:
    good = {"name": "good", "ref": "org/one"}
    contents = read(json.dumps({"adapters": [good, entry]}).encode(), "hub")
    assert contents.wanted == {OwnedName("good"): NameEntry(AdapterRef("hub", "org/one"), False)}
    assert words in contents.errors[OwnedName(name)]
    kept = [Registration(name, AdapterRef("hub", "org/old"), "file")]
    assert plan(contents, kept).delete == ()


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    contents = read(data, "hub")
    assert contents.is_readable or contents.errors[WHOLE]


REFS = [AdapterRef("hub", "org/one"), AdapterRef("hub", "org/two")]
FORMAT = st.sampled_from(["", "hermes"])
WANTED = st.builds(NameEntry, st.sampled_from(REFS), st.booleans(), st.none(), FORMAT)
NAMES = [OwnedName(name, tenant) for name in "abcd" for tenant in ("", "acme")]
ORIGINS: list[Origin] = ["file", "api", "option"]


@given(
    st.dictionaries(st.sampled_from(NAMES[:6]), WANTED),
    st.dictionaries(
        st.sampled_from(NAMES),
        st.tuples(st.sampled_from(REFS), st.sampled_from(ORIGINS), st.booleans()),
    ),
)
def test_carried_out_the_plan_leaves_nothing_to_do(
    wanted: dict[OwnedName, NameEntry], before: dict[OwnedName, tuple[AdapterRef, Origin, bool]]
) -> None:
    contents = FileContents(wanted, {})
    table = {
        name: Registration(name.name, ref, origin, pinned, tenant=name.tenant)
        for name, (ref, origin, pinned) in before.items()
    }
    foreign = {
        name: r
        for name, r in table.items()
        if r.origin == "option" or (r.origin == "api" and name not in wanted)
    }
    todo = plan(contents, table.values())
    for request in todo.register:
        assert request.replace == (request.name in table)
        table[request.name] = Registration(
            *(request.name.name, request.ref, "file", bool(request.pin)),
            state="ready",
            tenant=request.name.tenant,
            tool_format=request.tool_format or "",
        )
    for name in (*todo.pin, *todo.unpin):
        table[name] = msgspec.structs.replace(table[name], pinned=name in todo.pin)
    for name in todo.delete:
        del table[name]
    assert {name: table[name] for name in foreign} == foreign, "names of the API go over"
    again = plan(contents, table.values())
    assert (again.register, again.pin, again.unpin, again.delete) == ((), (), (), ())
    for name, entry in wanted.items():
        if name not in todo.errors:
            there = table[name]
            assert (there.ref, there.pinned) == (entry.ref, entry.pin)
            assert there.tool_format == entry.tool_format
        else:
            there = foreign[name]
            said = (there.ref, there.pinned, there.tool_format)
            assert said != (entry.ref, entry.pin, entry.tool_format)
    assert {r.key for r in table.values() if r.origin == "file"} <= set(wanted)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Followed:
    """A router's table, and the file that it reads on demand."""

    def __init__(self, router: Running, path: Path) -> None:
        self.admin = router.service.admin
        self.aliases = router.service.catalog.rules.aliases
        self.path = path
        self.clock = Clock()
        self.rollouts = router.service.rollouts
        self.file = AdaptersFile(path, self.admin, self.rollouts, "hub", self.clock)
        self.writes = 0

    def write(self, *entries: dict[str, Any]) -> None:
        self.path.write_text(json.dumps({"adapters": entries}))
        self.writes += 1
        os.utime(self.path, ns=(self.writes, self.writes))

    @property
    def names(self) -> list[str]:
        return [r.name for r in self.aliases.all() if r.origin == "file"]


@pytest.fixture
def followed(router: Running, tmp_path: Path) -> Followed:
    return Followed(router, tmp_path / "adapters.json")


async def test_added_changed_and_removed(followed: Followed, worker: FakeWorker) -> None:
    followed.write({"name": "one", "ref": "org/one", "pin": True}, {"name": "two", "ref": "org/2"})
    assert not followed.file.applied.is_set()
    await followed.file.poll()
    assert followed.file.applied.is_set()
    assert followed.names == ["one", "two"]
    one = followed.admin.get(OwnedName("one"))
    assert one.pinned
    await worker.until(lambda: worker.pins == {one.digest})
    followed.write({"name": "one", "ref": "org/other"})
    await followed.file.poll()
    assert followed.names == ["one"]
    assert followed.admin.get(OwnedName("one")).ref.name == "org/other"
    await worker.until(lambda: not worker.pins)
    loads = len(worker.loads)
    await followed.file.poll()
    assert len(worker.loads) == loads, "nothing changed"


async def test_first_requests_wait_for_the_operators_names(tmp_path: Path) -> None:
    """A name of the file is not unknown only because the router has just begun."""
    file = tmp_path / "adapters.json"
    file.write_text(json.dumps({"adapters": [{"name": "one", "ref": "org/one"}]}))
    worker = FakeWorker()
    options: dict[str, Any] = {"adapters_file": file, "worker_wait_s": 30.0}
    async with running_router(tmp_path, worker, wait=False, **options) as router:
        body = {"model": "one", "prompt": "x"}
        asking = asyncio.create_task(router.client.post("/v1/completions", json=body))
        ready = await router.client.get("/health/ready")
        assert ready.json()["error"] == "no worker is ready"
        async with running_worker(worker):
            answer = await asking
            assert answer.status_code == 200, answer.text
            assert (await router.client.get("/health/ready")).status_code == 200


async def test_a_slow_source_holds_up_its_own_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declarations, "NAMES_WAIT_S", 0.05)
    file = tmp_path / "adapters.json"
    entries = [{"name": name, "ref": f"org/{name}"} for name in ("slow", "quick")]
    file.write_text(json.dumps({"adapters": entries}))
    gate = asyncio.Event()

    async def load(order: AdapterLoad) -> AdapterManifest:
        if order.ref.name == "org/slow":
            await gate.wait()
        return make_manifest(order.ref.name)

    async def ask(router: Running, model: str) -> httpx.Response:
        return await router.client.post("/v1/completions", json={"model": model, "prompt": "x"})

    worker = FakeWorker()
    worker.loader = load
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, adapters_file=file) as router,
    ):
        for model, status in (("fake-base", 200), ("quick", 200), ("slow", 503)):
            answer = await ask(router, model)
            assert answer.status_code == status, answer.text
        assert "'slow' is still being checked" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "2"
        gate.set()

        async def there() -> bool:
            return (await ask(router, "slow")).status_code == 200

        await poll(there)


async def test_faults_are_reported_once_and_keep_what_works(
    followed: Followed, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    followed.write({"name": "one", "ref": "org/one"})
    await followed.file.poll()
    followed.write({"name": "one", "ref": "org/missing"}, {"name": "pirate", "ref": "org/x"})
    await followed.file.poll()
    assert "no repository" in followed.file.errors[OwnedName("one")]
    assert "--adapter" in followed.file.errors[OwnedName("pirate")]
    assert followed.admin.get(OwnedName("one")).ref.name == "org/one"
    told = len(caplog.records)
    followed.clock.now += RETRY_S
    await followed.file.poll()
    assert len(caplog.records) == told
    followed.path.write_text("adapters: [")
    await followed.file.poll()
    assert WHOLE in followed.file.errors
    assert followed.names == ["one"]
    followed.path.unlink()
    await followed.file.poll()
    assert "cannot be read" in followed.file.errors[WHOLE]
    assert followed.names == ["one"]
    followed.write({"name": "one", "ref": "org/two"})
    await followed.file.poll()
    assert not followed.file.errors
    assert followed.admin.get(OwnedName("one")).ref.name == "org/two"


async def test_what_could_not_be_had_is_tried_again(followed: Followed, worker: FakeWorker) -> None:
    followed.write({"name": "one", "ref": "org/down"})
    await followed.file.poll()
    assert followed.admin.get(OwnedName("one")).is_broken
    calls = len(worker.loads)
    await followed.file.poll()
    assert len(worker.loads) == calls, "not at every look"
    followed.clock.now += RETRY_S
    followed.admin.get(OwnedName("pirate"))
    await followed.file.poll()
    assert "does not answer" in followed.file.errors[OwnedName("one")]
    followed.write({"name": "one", "ref": "org/up"})
    await followed.file.poll()
    assert followed.admin.get(OwnedName("one")).shown_state == "ready"
    assert not followed.file.errors


# Name -> its entry, the status of who names it, and words of the answer.
BROKEN: dict[str, tuple[dict[str, Any], int, str]] = {
    "qalora": ({"ref": "org/qalora"}, 422, "use_qalora=True changes the maths"),
    "large": ({"ref": "org/large"}, 422, "at most 1"),
    "missing": ({"ref": "org/missing"}, 422, "no repository org/missing"),
    "private": ({"ref": "org/private"}, 401, "org/private is private"),
    "down": ({"ref": "org/down"}, 503, "the Hub does not answer"),
    "wrong": ({"ref": "no source"}, 422, "`ref`"),
    "unknown": ({"ref": "org/one", "pn": True}, 422, "pn"),
}


async def test_what_cannot_be_had_is_known_by_its_reason(tmp_path: Path) -> None:
    """To callers, in the list, in the list of models as no good one, and in a metric."""
    file = tmp_path / "adapters.json"
    entries = [{"name": name, **entry} for name, (entry, _, _) in BROKEN.items()]
    written = {"adapters": [*entries, {"name": "good", "ref": "org/good"}, {"name": "a|b"}]}
    file.write_text(json.dumps(written))
    worker = FakeWorker()
    worker.loader = load
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, adapters_file=file) as router,
    ):

        async def ask(name: str, status: int) -> dict[str, Any]:
            body = {"model": name, "prompt": "x"}
            answer = await router.client.post("/v1/completions", json=body)
            assert answer.status_code == status, (name, answer.text)
            told: dict[str, Any] = answer.json()
            return told

        await ask("good", 200)
        for name, (_, status, words) in BROKEN.items():
            assert words in (await ask(name, status))["error"]["message"]
        told = (await router.client.get("/v1/adapters")).json()
        states = {one["id"]: (one["state"], one["error"]) for one in told["data"]}
        assert states.pop("good") == ("ready", None)
        assert {name: state for name, (state, _) in states.items()} == dict.fromkeys(
            BROKEN, "broken"
        )
        for name, (_, _, words) in BROKEN.items():
            assert words in states[name][1]
        assert len(told["file_errors"]) == len(BROKEN) + 1
        models = (await router.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in models] == ["fake-base", "good"]
        one = await router.client.get("/v1/models/qalora")
        assert (one.status_code, one.json()["error"]["code"]) == (422, "adapter_invalid")
        assert await router.metric('loraplex_adapters_broken{origin="file"}') == len(BROKEN) + 1
        for operation in ("load", "refresh"):
            answer = await router.client.post(f"/v1/adapters/wrong/{operation}", json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "adapter_invalid")
        own = await router.client.post(
            "/generate",
            json={
                "inputs": "x",
                "parameters": {
                    "adapter_id": "private",
                    "adapter_source": "hub",
                    "api_token": "let-me-in",
                },
            },
        )
        assert own.status_code == 200, own.text


async def test_a_base_keeps_its_name(followed: Followed, worker: FakeWorker) -> None:
    followed.write({"name": "fake-base", "ref": "org/missing"})
    await followed.file.poll()
    assert "name of the base model" in followed.file.errors[OwnedName("fake-base")]
    assert followed.names == []
