"""Merges through the real worker: computed in a process of their own, bounded, ended with it."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from loraplex.adapters.merge.job import MergeJob, write_job
from loraplex.adapters.merge.recipe import MergeMember, MergeRecipe, MergeStrategy, make_recipe
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.store.store import AdapterStore
from loraplex.server import protocol
from loraplex.server.worker.adapters.merging import MERGE_MODULE, Merger
from tests.adapter_folders import write_adapter
from tests.adapters.refusals import refusal
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.server.worker.worker_process import (
    VOCAB,
    Router,
    Worker,
    base,
    connected,
    request,
    running,
)

OPTIONS = CertifyOptions(vocab_size=VOCAB, eos_token_ids=(2,))
TIMEOUT_S = 240.0
TOKEN = "hf_thisIsNobodysToken"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(4):
        write_adapter(folder / f"a{number}", base(), rank=2 + number, seed=number)
    write_adapter(folder / "wide", base(), rank=20)
    return folder


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Worker]:
    options = ("--adapter-root", str(root), "--max-lora-rank", "24")
    with running(tmp_path_factory.mktemp("worker"), *options) as worker:
        yield worker


async def digests_of(router: Router, *names: str) -> list[str]:
    found = []
    for name in names:
        load = protocol.AdapterLoad(f"load {name}", AdapterRef("local", name))
        await router.send(load)
        async with asyncio.timeout(TIMEOUT_S):
            while load.load_id not in {state.load_id for state in router.final_loads}:
                await router.receive()
        (state,) = (s for s in router.final_loads if s.load_id == load.load_id)
        assert state.manifest is not None, state
        found.append(state.manifest.digest)
    router.loads.clear()
    return found


def merge_frame(
    load_id: str, names: list[str], digests: list[str], strategy: MergeStrategy = "linear"
) -> protocol.AdapterMerge:
    members = [MergeMember(digest, 0.5) for digest in digests]
    recipe = make_recipe(members, strategy, 0.5, "total")
    sources = (protocol.MemberSource(AdapterRef("local", name), TOKEN) for name in names)
    return protocol.AdapterMerge(load_id, recipe, tuple(sources))


@pytest.mark.parametrize("strategy", ["linear", "dare_ties"])
async def test_a_merge_is_made_and_answers_for_itself(
    worker: Worker, strategy: MergeStrategy
) -> None:
    async with connected(worker) as router:
        digests = await digests_of(router, "a0", "a1")
        frames = [merge_frame(f"m{n}", ["a0", "a1"], digests, strategy) for n in range(10)]
        await router.send(*frames)
        states = await router.until_loaded(10)
        assert {state.stage for state in states} == {"ready"}, states[0]
        (digest,) = {state.manifest.digest for state in states if state.manifest}
        assert digest == frames[0].recipe.digest
        name = f"merged {strategy}"
        await router.send(request(name, 6, digest))
        await router.until_finished(name)
        assert router.tokens_of(name) == certified_output(digest, [1, 5, 9], 6, OPTIONS, 6)


async def test_members_that_the_worker_lacks_are_brought(tmp_path: Path, root: Path) -> None:
    source = LocalSource((root,))
    elsewhere = AdapterStore(tmp_path / "elsewhere", base(), {"local": source})
    digests = [elsewhere.admit(AdapterRef("local", n), None).digest for n in ("a0", "a2")]
    with running(tmp_path, "--adapter-root", str(root)) as fresh:
        async with connected(fresh) as router:
            await router.send(merge_frame("m", ["a0", "a2"], digests))
            (state,) = await router.until_loaded(1)
            assert state.stage == "ready", state
            await router.send(merge_frame("n", ["a0", "a1"], [digests[0], "f" * 64]))
            state = (await router.until_loaded(2))[1]
            assert (state.stage, state.error) == ("failed", "invalid"), "other content"
        assert TOKEN not in fresh.log.read_text()


async def test_refusals_name_the_reason(worker: Worker) -> None:
    async with connected(worker) as router:
        wide, small = await digests_of(router, "wide", "a3")
        frame = merge_frame("m", ["wide", "a3"], [wide, small])
        await router.send(frame)
        (state,) = await router.until_loaded(1)
        assert (state.stage, state.error) == ("failed", "invalid")
        assert "20 + 5 = 25; at most 24" in (state.message or "")
        member = MergeMember(wide, 1.0)
        bad = [
            MergeRecipe((member,) * 17),
            MergeRecipe((member,), "ties", 7.0),
            MergeRecipe((MergeMember("../../etc", 1.0),)),
            MergeRecipe(()),
        ]
        for number, recipe in enumerate(bad, 2):
            sources = frame.sources[:1] * len(recipe.members)
            await router.send(protocol.AdapterMerge(f"bad {number}", recipe, sources))
            states = await router.until_loaded(number)
            assert (states[-1].stage, states[-1].error) == ("failed", "invalid")
        await router.send(protocol.AdapterMerge("bad", frame.recipe, ()))
        assert (await router.until_loaded(6))[-1].error == "invalid"


@pytest.fixture
def store(tmp_path: Path, root: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "store", base(), {"local": LocalSource((root,))})


def a_merge(store: AdapterStore) -> protocol.AdapterMerge:
    digests = [store.admit(AdapterRef("local", name), None).digest for name in ("a0", "a1")]
    return merge_frame("m", ["a0", "a1"], digests, "ties")


def merge_processes() -> list[psutil.Process]:
    """Those that run. Children of other tests may be over, and have no words."""
    found = psutil.process_iter(["ppid", "cmdline"])
    return [
        child
        for child in found
        if child.info["ppid"] == os.getpid() and MERGE_MODULE in (child.info["cmdline"] or ())
    ]


def ignore(stage: protocol.LoadStage) -> None:
    """Nobody waits for the stages here."""


def test_a_merge_that_takes_too_long_is_ended(store: AdapterStore) -> None:
    merger = Merger(store, timeout_s=0.0)
    error = refusal(lambda: merger.merge(a_merge(store), ignore))
    assert error is not None
    assert (error.code, "longer than 0 s" in error.message) == ("too_large", True)
    assert not merge_processes()


def test_a_merge_that_fails_may_be_tried_again(store: AdapterStore, tmp_path: Path) -> None:
    merger = Merger(store, TIMEOUT_S)
    recipe = MergeRecipe((MergeMember("a" * 64, 1.0),))
    write_job(tmp_path, MergeJob(recipe, base(), AdapterLimits()), [])
    error = refusal(lambda: merger.run(tmp_path))
    assert error is not None
    assert (error.code, error.retry_after_s) == ("unavailable", 10.0)


def test_closing_ends_what_runs_and_starts_nothing(store: AdapterStore, tmp_path: Path) -> None:
    merger = Merger(store, TIMEOUT_S)
    folder = tmp_path / "job"
    folder.mkdir()
    # A job whose description never comes keeps its process.
    os.mkfifo(folder / "job.json")
    with ThreadPoolExecutor(1) as threads:
        running_merge = threads.submit(lambda: refusal(lambda: merger.run(folder)))
        deadline = time.monotonic() + TIMEOUT_S
        while not merge_processes():
            assert time.monotonic() < deadline
            time.sleep(0.01)  # polls a condition, bounded by the deadline
        merger.close()
        error = running_merge.result(TIMEOUT_S)
    assert error is not None
    assert error.code == "unavailable"
    again = refusal(lambda: merger.run(folder))
    assert again is not None
    assert "being stopped" in again.message
    assert not merge_processes()


def test_linear_merges_do_not_wait_behind_the_others(store: AdapterStore) -> None:
    merger = Merger(store, TIMEOUT_S)
    members = (MergeMember("a" * 64, 1.0), MergeMember("b" * 64, 1.0))
    dense = MergeRecipe(members, "ties", 0.5)
    release = threading.Event()
    blocked = [merger.threads(dense).submit(release.wait, TIMEOUT_S) for _ in range(8)]
    linear = MergeRecipe(members)
    assert merger.threads(linear).submit(lambda: True).result(TIMEOUT_S)
    release.set()
    assert all(future.result(TIMEOUT_S) for future in blocked)
