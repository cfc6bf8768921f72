"""Loads on threads: what is here does not wait behind what has to be fetched."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loraplex.adapters.coverage import coverage_of
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.store.store import AdapterStore
from loraplex.server.protocol import AdapterLoad, AdapterState, LoadStage
from loraplex.server.worker.adapters.adapter_service import AdapterService
from loraplex.server.worker.adapters.merging import Merger
from loraplex.server.worker.metrics import WorkerMetrics
from tests.adapter_folders import small_base
from tests.router.fake_worker import make_manifest


class Store:
    """Knows `here`; everything else is fetched, once the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.fetching = threading.Event()

    def recall(self, ref: AdapterRef) -> AdapterManifest | None:
        return make_manifest(ref.name) if ref.name == "here" else None

    def admit(
        self,
        ref: AdapterRef,
        token: str | None,
        expected_digest: str | None,
        progress: Callable[[LoadStage], None],
    ) -> AdapterManifest:
        self.fetching.set()
        assert self.gate.wait(240)
        return make_manifest(ref.name)


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.gate.set()


async def test_what_is_here_does_not_wait_for_downloads(store: Store, tmp_path: Path) -> None:
    states: asyncio.Queue[AdapterState] = asyncio.Queue()
    with ThreadPoolExecutor(1) as fetching, ThreadPoolExecutor(1) as reading:
        merger = Merger(AdapterStore(tmp_path, small_base(), {}), timeout_s=1.0)
        service = AdapterService(store, {"local": fetching}, reading, merger, WorkerMetrics())
        service.load(AdapterLoad("cold", AdapterRef("local", "cold")), states.put_nowait)
        assert await asyncio.to_thread(store.fetching.wait, 240)
        service.load(AdapterLoad("here", AdapterRef("local", "here")), states.put_nowait)
        first = await asyncio.wait_for(states.get(), 240)
        assert (first.load_id, first.stage) == ("here", "ready")
        store.gate.set()
        second = await asyncio.wait_for(states.get(), 240)
        assert (second.load_id, second.stage) == ("cold", "ready")


async def test_a_source_that_stalls_holds_up_no_other(store: Store, tmp_path: Path) -> None:
    states: asyncio.Queue[AdapterState] = asyncio.Queue()
    with ThreadPoolExecutor(1) as hub, ThreadPoolExecutor(1) as s3, ThreadPoolExecutor(1) as disk:
        merger = Merger(AdapterStore(tmp_path, small_base(), {}), timeout_s=1.0)
        service = AdapterService(store, {"hub": hub, "s3": s3}, disk, merger, WorkerMetrics())
        service.load(AdapterLoad("stalled", AdapterRef("s3", "b/cold")), states.put_nowait)
        assert await asyncio.to_thread(store.fetching.wait, 240)
        store.fetching.clear()
        service.load(AdapterLoad("other", AdapterRef("hub", "org/cold")), states.put_nowait)
        assert await asyncio.to_thread(store.fetching.wait, 240)
        store.gate.set()
        names = {(await asyncio.wait_for(states.get(), 240)).load_id for _ in range(2)}
        assert names == {"stalled", "other"}


async def test_a_partial_adapter_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under however many names and however often it comes."""
    cut = make_manifest("cut", coverage=coverage_of([(0, "q_proj")], [(1, "q_proj")]))

    class Here(Store):
        def recall(self, ref: AdapterRef) -> AdapterManifest | None:
            return make_manifest("whole") if ref.name == "whole" else cut

    states: asyncio.Queue[AdapterState] = asyncio.Queue()
    caplog.set_level(logging.WARNING)
    with ThreadPoolExecutor(1) as disk:
        merger = Merger(AdapterStore(tmp_path, small_base(), {}), timeout_s=1.0)
        service = AdapterService(Here(), {"local": disk}, disk, merger, WorkerMetrics())
        for name in ("whole", "secret/cut", "cut", "cut"):
            service.load(AdapterLoad(name, AdapterRef("local", name)), states.put_nowait)
            assert (await asyncio.wait_for(states.get(), 240)).stage == "ready"
    (line,) = caplog.messages
    assert line.startswith(f"adapter {cut.digest[:12]} (cut) is partial: 1 of 2 targeted modules")
