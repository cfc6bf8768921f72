"""Watched folders: their sub-folders are adapters, and come, change and go."""

import asyncio
import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import invalid
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef, path_of_local
from loraplex.router.names.registration import Origin, Registration, RegistrationRequest
from loraplex.router.names.served import OwnedName
from loraplex.router.operations import folder_watch
from loraplex.router.operations.admin import AdapterAdmin
from loraplex.router.operations.declarations import POLL_S, RETRY_S
from loraplex.router.operations.folder_watch import WatchedFolders, look_into, stamp_of_files
from loraplex.router.operations.watched_folders import (
    FolderEntry,
    Look,
    Stamp,
    is_whole,
    name_folders,
    plan,
    settle,
)
from loraplex.server.protocol import AdapterLoad, GenerateRequest
from tests.router.fake_worker import FakeWorker, make_manifest
from tests.router.serving import Running, events_of, poll, running_router

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


# The policy


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        ((CONFIG, WEIGHTS), True),
        ((CONFIG,), False),
        ((WEIGHTS,), False),
        ((), False),
        (("checkpoint-500", "trainer_state.json"), False),
        ((CONFIG, "adapter_model-00001-of-00002.safetensors"), False),
        (
            (CONFIG, "adapter_model-00001-of-00002.safetensors", f"{WEIGHTS}.index.json"),
            True,
        ),
        # Refused, and by the worker, which says why.
        ((CONFIG, "adapter_model.bin"), True),
        ((CONFIG, "adapters.safetensors"), True),
    ],
)
def test_what_can_be_judged(files: Collection[str], whole: bool) -> None:
    assert is_whole(files) is whole


PATHS = ["/w/a", "/w/b", "/w/c"]
STAMP = st.one_of(st.none(), st.sampled_from([((0,),), ((1,),)]))
LOOKS = st.lists(st.dictionaries(st.sampled_from(PATHS), STAMP), max_size=8)


@given(LOOKS)
def test_what_counts_is_what_two_looks_agree_on(looks: list[Look]) -> None:
    settled: dict[str, Stamp] = {}
    before: Look = {}
    for now in looks:
        after = settle(settled, before, now)
        for path in PATHS:
            seen, agree = now.get(path), now.get(path) == before.get(path)
            is_gone = path not in now and path not in before
            if seen is not None and agree:
                assert after[path] == seen
            elif is_gone:
                assert path not in after
            else:
                assert after.get(path) == settled.get(path), "as it was"
        assert settle(after, now, now) == settle(settle(after, now, now), now, now)
        settled, before = after, now


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".run", "begins with '.'"),
        ("tmp", "begins with '.' or 'tmp'"),
        ("tmp-checkpoint-500", "rename the folder"),
        ("my adapter", "' ' is not allowed"),
        ("naïve", "is not allowed"),
        ("a\ud800", "is not allowed"),
        ("_x", "begins with a letter"),
        ("a" * 97, "at most 96"),
        ("a..b", "no '..'"),
        ("run", "/first/run has the name already"),
    ],
)
def test_what_cannot_be_a_name_is_a_problem(name: str, words: str) -> None:
    settled: list[dict[str, Stamp]] = [{"/first/run": ((0,),)}, {f"/w/{name}": ((1,),)}]
    wanted, errors = name_folders(settled)
    run = AdapterRef("local", "/first/run")
    assert wanted == {OwnedName("run"): FolderEntry(run, ((0,),))}
    ((path, why),) = errors.items()
    assert path.name.startswith("/w/")
    assert str(path).encode().isascii()
    assert words in why


def test_a_path_is_spelled_as_references_spell_it() -> None:
    wanted, _ = name_folders([{"/my loras/one": ((0,),)}])
    (declared,) = wanted.values()
    assert declared.ref == AdapterRef("local", "/my%20loras/one")


NAMES = [OwnedName(name) for name in "abcd"]
REFS = [AdapterRef("local", f"/{root}/x") for root in "vw"]
ENTRY = st.builds(FolderEntry, st.sampled_from(REFS), st.sampled_from([((0,),), ((1,),)]))
ORIGINS: list[Origin] = ["folder", "file", "api", "option"]


@given(
    st.dictionaries(st.sampled_from(NAMES), ENTRY),
    st.dictionaries(
        st.sampled_from(NAMES), st.tuples(st.sampled_from(REFS), st.sampled_from(ORIGINS))
    ),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([((0,),), ((1,),)])),
    st.sets(st.sampled_from(NAMES)),
)
def test_carried_out_the_plan_leaves_nothing_to_do(
    wanted: dict[OwnedName, FolderEntry],
    before: dict[OwnedName, tuple[AdapterRef, Origin]],
    stamps: Mapping[OwnedName, Stamp],
    failing: set[OwnedName],
) -> None:
    table = {n: Registration(n.name, ref, origin) for n, (ref, origin) in before.items()}
    others = {name: r for name, r in table.items() if r.origin != "folder"}
    todo = plan(wanted, table.values(), stamps, {}, is_due=True)
    asked = {request.name for request in todo.register}
    for name, declared in wanted.items():
        must = name not in others and (
            name not in table
            or table[name].ref != declared.ref
            or stamps.get(name) != declared.stamp
        )
        assert (name in asked) is must
    failed = dict.fromkeys(failing & asked, "bad")
    for request in todo.register:
        if request.name not in failing:
            table[request.name] = Registration(request.name.name, request.ref, "folder")
    for name in todo.delete:
        del table[name]
    assert {name: table[name] for name in others} == others
    assert todo.errors.keys() == others.keys() & wanted.keys()
    errors = todo.errors | failed
    again = plan(wanted, table.values(), todo.stamps, errors, is_due=False)
    assert (again.register, again.delete, again.errors) == ((), (), errors)
    later = plan(wanted, table.values(), todo.stamps, errors, is_due=True)
    assert {request.name for request in later.register} == failed.keys()


# What is looked at


def fill(folder: Path, text: str = "one", *, config: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS).write_text(text)
    if config:
        (folder / CONFIG).write_text("{}")
    return folder


def test_a_look_sees_sub_folders_and_their_files_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    fill(root / "one")
    (root / "one" / "latest").symlink_to(root / "one")
    (root / "run").mkdir()
    fill(root / "run" / "checkpoint-500")
    (root / "file").write_text("")
    fill(tmp_path / "elsewhere")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "nowhere").symlink_to(tmp_path / "missing")
    (root / "loop").symlink_to(root / "loop")
    looked = look_into(str(root))
    whole = {Path(path).name: stamp is not None for path, stamp in looked.items()}
    assert whole == {"one": True, "link": True, "run": False}
    (root / "run" / CONFIG).symlink_to(tmp_path / "missing")
    assert stamp_of_files(str(root / "run")) == ((2,),), "the worker says what is wrong"


def test_new_content_has_a_new_stamp_whatever_its_times(tmp_path: Path) -> None:
    folder = fill(tmp_path / "one", "one")
    before, times = stamp_of_files(str(folder)), (folder / WEIGHTS).stat()
    assert stamp_of_files(str(folder)) == before
    (folder / "notes.txt").write_text("of no concern")
    assert stamp_of_files(str(folder)) == before
    (folder / "new").write_text("two")
    os.utime(folder / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "new").rename(folder / WEIGHTS)
    assert stamp_of_files(str(folder)) != before


class Table:
    """Registrations as the admin keeps them. It refuses names with `bad` in them."""

    def __init__(self) -> None:
        self.rows: dict[OwnedName, Registration] = {}
        self.calls: list[str] = []
        self.workers = SimpleNamespace(ready=True)
        self.expected: set[OwnedName] = set()

    @property
    def aliases(self) -> SimpleNamespace:
        return SimpleNamespace(changes=len(self.rows), expected=self.expected)

    def concerning(self, origin: str, names: Iterable[OwnedName]) -> list[Registration]:
        return list(self.rows.values())

    async def register(self, request: RegistrationRequest) -> None:
        self.calls.append(request.name.name)
        if "bad" in request.name.name:
            raise invalid("bad_config", CONFIG, "nonsense")
        self.rows[request.name] = Registration(request.name.name, request.ref, request.origin)

    async def delete(self, name: OwnedName) -> None:
        self.calls.append(f"-{name}")
        del self.rows[name]

    def declare_broken(self, request: RegistrationRequest, why: str) -> None: ...

    def new_calls(self) -> list[str]:
        calls, self.calls = self.calls, []
        return sorted(calls)


class Watching:
    """Watched folders whose looks a test takes. now: seconds."""

    def __init__(self, *folders: Path) -> None:
        self.table = Table()
        self.now = 0.0
        admin = cast(AdapterAdmin, self.table)
        self.watched = WatchedFolders(folders, admin, lambda: self.now)

    async def look(self, times: int = 1) -> list[str]:
        for _ in range(times):
            await self.watched.poll()
        return self.table.new_calls()


async def test_thousands_of_sub_folders_are_no_work_once_they_are_known(tmp_path: Path) -> None:
    for number in range(2000):
        fill(tmp_path / f"run-{number}")
    watching = Watching(tmp_path)
    assert await watching.look() == []
    assert len(await watching.look()) == 2000
    assert await watching.look() == []
    watching.now += 2 * RETRY_S
    assert await watching.look() == []
    fill(tmp_path / "run-7", "new")
    assert await watching.look(2) == ["run-7"]


async def test_a_long_look_is_followed_by_a_long_pause(tmp_path: Path) -> None:
    times = iter((0.0, 0.001, 1.0, 4.0))
    admin = cast(AdapterAdmin, Table())
    watched = WatchedFolders([fill(tmp_path / "root")], admin, lambda: next(times))
    await watched.poll()
    assert watched.pause_s == POLL_S
    admin.workers.ready = False  # type: ignore[misc]
    await watched.poll()
    assert watched.pause_s == pytest.approx(150.0)


async def test_written_replaced_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = Watching(tmp_path)
    assert await watching.look(2) == []
    fill(tmp_path / "slow", config=False)
    assert await watching.look(3) == [], "it waits for its config"
    fill(tmp_path / "slow")
    assert await watching.look() == []
    fill(tmp_path / "slow", "longer")
    assert await watching.look() == [], "it is still being written"
    assert await watching.look(3) == ["slow"]
    (tmp_path / "slow" / CONFIG).unlink()
    assert await watching.look(3) == [], "what is served stays"
    fill(tmp_path / "slow", "other")
    assert await watching.look(3) == ["slow"]
    (tmp_path / "slow").rename(tmp_path / "old")
    assert await watching.look() == []
    fill(tmp_path / "slow", "swapped")
    assert await watching.look(3) == ["old", "slow"], "it was never away"
    (tmp_path / "slow").rename(tmp_path / ".slow")
    assert await watching.look(3) == ["-slow"]
    problem = f"{tmp_path}/.slow: what begins with '.' or 'tmp' is not served"
    assert [line.partition(": rename")[0] for line in watching.watched.problems] == [problem]
    assert [problem in message for message in caplog.messages] == [True], "once"


async def test_what_cannot_be_had_is_tried_when_it_changes_and_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "bad")
    fill(tmp_path / "good")
    watching = Watching(tmp_path)
    assert await watching.look(3) == ["bad", "good"]
    assert watching.watched.problems == [f"bad: {CONFIG}: nonsense"]
    assert await watching.look(2) == []
    watching.now += RETRY_S
    assert await watching.look(2) == ["bad"]
    fill(tmp_path / "bad", "changed")
    assert await watching.look(3) == ["bad"]
    assert len(caplog.messages) == 1, "one fault is logged once"


async def test_a_name_that_is_taken_is_had_as_soon_as_it_is_free(tmp_path: Path) -> None:
    fill(tmp_path / "one")
    watching = Watching(tmp_path)
    one = Registration("one", AdapterRef("hub", "org/one"), "api")
    watching.table.rows[one.key] = one
    assert await watching.look(3) == []
    assert watching.watched.problems == ["one: the name is taken by the API, which comes first"]
    del watching.table.rows[one.key]
    assert await watching.look() == ["one"]
    assert watching.watched.problems == []


async def test_a_folder_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    fill(root / "one")
    watching = Watching(root)
    assert await watching.look(2) == ["one"]
    root.rename(tmp_path / "away")
    assert await watching.look(3) == []
    assert watching.watched.problems == [f"{root}: it cannot be read: No such file or directory"]
    (tmp_path / "away").rename(root)
    assert await watching.look(2) == []
    assert watching.watched.problems == []


# With a router


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder_watch, "POLL_S", 0.01)
    monkeypatch.setattr(folder_watch, "_LOOK_SHARE", 1.0)
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


async def load(order: AdapterLoad) -> AdapterManifest:
    """Its content is its weights; `cut` ones are refused."""
    if order.ref.source != "local":
        return make_manifest(order.ref.name)
    text = (Path(path_of_local(order.ref.name)) / WEIGHTS).read_text()
    if text == "cut":
        raise invalid("truncated", WEIGHTS, "the file ends too early")
    return make_manifest(text)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Asking:
    """A router, as callers and operators see it."""

    def __init__(self, router: Running) -> None:
        self.router = router

    async def ask(self, name: str) -> httpx.Response:
        body = {"model": name, "prompt": "x"}
        return await self.router.client.post("/v1/completions", json=body)

    async def listed(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        answer = (await self.router.client.get("/v1/adapters")).json()
        return {one["id"]: one for one in answer["data"]}, answer["file_errors"]

    async def until(self, name: str, **expected: Any) -> dict[str, Any]:
        """Waits until the name is listed so."""
        shown: dict[str, Any] = {}

        async def so() -> bool:
            nonlocal shown
            shown = (await self.listed())[0].get(name, {})
            return bool(shown) and all(shown[key] == value for key, value in expected.items())

        await poll(so)
        return shown

    async def until_told(self, errors: set[str]) -> None:
        """Waits until these problems are among those that are listed."""

        async def so() -> bool:
            return errors <= set((await self.listed())[1])

        await poll(so)

    async def until_answered(self, name: str, status: int, words: str = "") -> None:
        async def so() -> bool:
            answer = await self.ask(name)
            return answer.status_code == status and words in answer.text

        await poll(so)


def watching_router(tmp_path: Path, worker: FakeWorker, root: Path, **options: Any) -> Any:
    worker.loader = load
    return running_router(tmp_path, worker, watch_folders=(root,), **options)


async def test_new_changed_broken_mended_and_removed(
    tmp_path: Path, root: Path, worker: FakeWorker
) -> None:
    gate = asyncio.Event()

    async def hold(worker: FakeWorker, request: GenerateRequest, index: int) -> None:
        if request.adapter == digest_of("one") and index == 3:
            await gate.wait()

    fill(root / "first")
    async with watching_router(tmp_path, worker, root) as router:
        asking = Asking(router)
        answer = await asking.ask("first")
        assert answer.status_code == 200, "first requests wait for the names"
        assert (await asking.ask("run")).status_code == 404
        fill(root / "run", "one")
        shown = await asking.until("run", state="ready", digest=digest_of("one"))
        assert (shown["origin"], shown["ref"]) == ("folder", f"local:{root}/run")
        worker.before_token = hold
        body = {"model": "run", "prompt": "x", "stream": True}
        async with router.client.stream("POST", "/v1/completions", json=body) as old:
            await worker.until(lambda: worker.requests[-1].adapter == digest_of("one"))
            fill(root / "run", "two")
            shown = await asking.until("run", digest=digest_of("two"))
            assert [one["by"] for one in shown["history"]] == ["a watched folder"] * 2
            new = await asking.ask("run")
            assert new.headers["x-loraplex-adapter-digest"] == digest_of("two")
            (root / "run" / CONFIG).unlink()
            (root / "run" / WEIGHTS).unlink()
            (root / "run").rmdir()
            await asking.until_answered("run", 410)
            gate.set()
            events = events_of((await old.aread()).decode())
        assert "".join(e["choices"][0]["text"] for e in events if e["choices"]).startswith(
            digest_of("one")[:6]
        )
        fill(root / "run", "cut")
        await asking.until("run", state="broken")
        await asking.until_answered("run", 422, "the file ends too early")
        assert (await asking.listed())[1] == [f"run: {WEIGHTS}: the file ends too early"]
        assert await router.metric('loraplex_adapters_broken{origin="folder"}') == 1
        fill(root / "run", "whole")
        await asking.until("run", state="ready", digest=digest_of("whole"), error=None)
        assert (await asking.listed())[1] == []


async def test_other_declarations_come_first(
    tmp_path: Path, root: Path, worker: FakeWorker
) -> None:
    for name in ("pirate", "filed", "mine", "fake-base"):
        fill(root / name, f"folder-{name}")
    file = tmp_path / "adapters.json"
    file.write_text('{"adapters": [{"name": "filed", "ref": "org/filed"}]}')
    options: dict[str, Any] = {"adapters": ("pirate=hub:org/pirate",), "adapters_file": file}
    async with watching_router(tmp_path, worker, root, **options) as router:
        asking = Asking(router)
        await asking.until("mine", origin="folder")
        taken = "the name is taken by %s, which comes first"
        told = {
            "fake-base: 'fake-base' is a name of the base model",
            "filed: " + taken % "the adapters file",
            "pirate: " + taken % "--adapter",
        }
        await asking.until_told(told)
        body = {"name": "mine", "ref": "org/other"}
        refused = await router.client.post("/v1/adapters", json=body)
        assert refused.status_code == 409
        assert "declared by --watch-folder" in refused.text
        gone = await router.client.delete("/v1/adapters/mine")
        assert gone.status_code == 409
        # The file takes names over, and gives them back.
        file.write_text('{"adapters": [{"name": "mine", "ref": "org/mine"}]}')
        await asking.until("mine", origin="file", ref="hub:org/mine")
        await asking.until("filed", origin="folder", digest=digest_of("folder-filed"))
        await router.client.post("/v1/adapters", json={"name": "later", "ref": "org/later"})
        fill(root / "later")
        await asking.until_told({"later: " + taken % "the API"})
        assert (await router.client.delete("/v1/adapters/later")).status_code == 200
        await asking.until("later", origin="folder", digest=digest_of("one"))


async def test_what_operators_did_to_a_name_stays_until_it_is_gone(
    tmp_path: Path, root: Path, worker: FakeWorker
) -> None:
    fill(root / "run", "one")
    async with watching_router(tmp_path, worker, root) as router:
        asking = Asking(router)
        await asking.until("run", state="ready")
        assert (await router.client.post("/v1/adapters/run/pin")).status_code == 200
        await worker.until(lambda: worker.pins == {digest_of("one")})
        fill(root / "run", "two")
        await asking.until("run", digest=digest_of("two"), pinned=True)
        await worker.until(lambda: worker.pins == {digest_of("two")})
        assert (await router.client.post("/v1/adapters/run/unpin")).status_code == 200
        fill(root / "run", "three")
        await asking.until("run", digest=digest_of("three"), pinned=False)
        unloaded = await router.client.post("/v1/adapters/run/unload", json={})
        assert unloaded.status_code == 200, unloaded.text
        await asking.until_answered("run", 409, "is unloaded")
        fill(root / "run", "four")
        await asking.until("run", state="ready", digest=digest_of("four"))
