"""Copies of adapters: what does not fit is reported, what fits is found through the table."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from loraplex.adapters.manifest import SlabLayout
from loraplex.server.engine.executor import COPY_FAILED, AdapterCopy, CopyOver, CopyUsable
from loraplex.server.engine.memory.residency import AdapterArena
from loraplex.server.model.executor import TorchExecutor
from loraplex.server.model.lora.adapter_copies import HIDDEN_COPY_S, is_hidden
from loraplex.server.model.lora.lora import OutputVectors, Reach
from loraplex.server.model.pages.pinned import coalesce
from loraplex.server.protocol import SamplingParams
from tests.server.model.driver import (
    Driver,
    Stream,
    engine_config,
    generate,
)
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def slab() -> tuple[SlabLayout, bytes]:
    return pack(add_adapter(make_model("llama3"), "one", LORA, 1), "one")


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    found = Driver(folder)
    yield found
    found.close()


def answer(driver: Driver) -> list[int]:
    stream = Stream(driver, 0, [4, 5, 6], sampling=SamplingParams(temperature=0.0))
    generate(driver, [stream], 8, 64)
    stream.free()
    return stream.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"extent_bytes": 8192}, "8192"),
        ({"runs": (1,)}, "lacks a place"),
    ],
)
def test_copy_that_does_not_fit_is_reported(
    driver: Driver, slab: tuple[SlabLayout, bytes], changes: dict[str, Any], words: str
) -> None:
    layout, data = slab
    expected = answer(driver)
    driver.load(1, layout, data, 0)

    wrong = msgspec.structs.replace(layout, **changes)
    places = tuple(range(len(layout.runs)))
    driver.executor.start_copy(AdapterCopy(2, wrong, places, places))
    done = driver.wait_for_copy()
    assert done.digest == layout.digest
    assert words in str(done.error)
    assert answer(driver) == expected


@pytest.mark.parametrize("place", ["host", "device"])
def test_copy_outside_an_arena_is_reported(
    driver: Driver, slab: tuple[SlabLayout, bytes], place: str
) -> None:

    layout, _ = slab
    inside = tuple(range(len(layout.runs)))
    outside = (*inside[:-1], 10**6)
    host, device = (outside, inside) if place == "host" else (inside, outside)
    driver.executor.start_copy(AdapterCopy(2, layout, host, device))
    assert "outside an arena" in str(driver.wait_for_copy().error)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_coalesced_copies_move_the_same_extents(pieces: list[tuple[int, int, int]]) -> None:
    """pieces: length of a run, and the gaps before it on either side."""
    runs, sources, targets = [], [], []
    source = target = 0
    for run, source_gap, target_gap in pieces:
        source, target = source + source_gap, target + target_gap
        runs.append(run)
        sources.append(source)
        targets.append(target)
        source, target = source + run, target + run
    joined = coalesce(runs, sources, targets)

    def extents(copies: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(s + i, t + i) for length, s, t in copies for i in range(length)]

    assert extents(joined) == extents(zip(runs, sources, targets, strict=True))
    gaps = sum(1 for _, source_gap, target_gap in pieces[1:] if source_gap or target_gap)
    assert len(joined) == (gaps + 1 if pieces else 0)


def test_arenas_hand_out_what_one_copy_moves() -> None:
    """Single extents come in falling order in both arenas, also where others went before."""
    runs = (1,) * 8
    host, device = AdapterArena(32, 256, 4), AdapterArena(16, 256, 2)
    for digest in "abcd":
        held = host.place(digest, runs)
        placed = device.place(digest, runs)
        assert held is not None
        assert placed is not None
        device.finish(digest)
        assert len(coalesce(runs, held.extents, placed.extents)) == 1


def test_untargeted_sites_and_base_rows_pay_nothing(
    driver: Driver, slab: tuple[SlabLayout, bytes]
) -> None:
    driver.load(0, *slab, first=0)
    table = driver.executor._table
    assert table.batch(torch.tensor([-1, -1, -1]).numpy()) is None
    batch = table.batch(torch.tensor([-1, 0, 0, -1]).numpy())
    assert batch is not None
    assert [(s.begin, s.end) for s in batch.segments] == [(1, 3)]
    # qkv and down of three layers; no o, gate_up, embed_tokens or lm_head.
    assert sorted(batch.sites) == [0, 3, 4, 7, 8, 11]
    empty = table.batch(torch.tensor([5]).numpy())  # a slot without weights
    assert empty is not None
    assert not empty.sites


def test_device_table_says_where_the_weights_lie(
    driver: Driver, slab: tuple[SlabLayout, bytes]
) -> None:
    driver.load(2, *slab, first=7)
    table = driver.executor._table
    site = next(s for s in slab[0].sites if s.role == "qkv")
    words = table.device_table.words[2, 0]
    offset = int(words[0]) - table.arena.data_ptr()
    stored = table.arena[offset : offset + 16].numpy().tobytes()
    assert stored == slab[1][site.a_offset : site.a_offset + 16]
    assert words.view(torch.int32)[8:12].tolist() == [4, 0, 4, 8]
    assert int(words[2]) == 0
    assert words.view(torch.float32)[12:15].tolist() == [2.0, 0.0, 2.0]


def test_close_lets_go_of_the_arena(folder: Path) -> None:
    arena = bytearray(1 << 16)
    executor = TorchExecutor(engine_config(folder), memoryview(arena))
    executor.close()
    arena.append(0)  # raises BufferError while anything still holds the arena


def test_what_no_copy_expects_fails_that_copy_alone(
    driver: Driver, slab: tuple[SlabLayout, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr(driver.executor._table, "prepare", fail)
        assert driver.load(0, *slab, first=0).error == COPY_FAILED
    assert driver.load(0, *slab, first=0).error is None


def test_a_lost_device_is_told_apart_from_a_failed_copy(
    driver: Driver, slab: tuple[SlabLayout, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        def synchronize(self) -> None:
            raise RuntimeError("uncorrectable")

    def fail(*_: object) -> None:
        raise RuntimeError("the copy")

    monkeypatch.setattr(driver.executor._table, "prepare", fail)
    monkeypatch.setattr(driver.executor._copies, "_stream", Lost())
    with pytest.raises(RuntimeError, match="uncorrectable"):
        driver.load(0, *slab, first=0)


class LongCopy:
    """Of a GPU, as far as `AdapterCopies` uses it: a stream, all of whose events are done when
    told; each copy took a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
        self.done = False
        self.failure: Exception | None = None
        self.waited_for: list[object] = []
        self.copies = driver.executor._copies
        monkeypatch.setattr(self.copies, "_stream", self)
        monkeypatch.setattr(self.copies._finisher, "_stream", self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)

    def record_event(self, event: object = None) -> object:
        return event or self

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)

    def query(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return self.done

    def elapsed_time(self, end: object) -> float:
        return 1000.0


@pytest.fixture
def copy(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> LongCopy:
    return LongCopy(monkeypatch, driver)


def start(driver: Driver, slot: int, layout: SlabLayout) -> None:
    places = tuple(range(len(layout.runs)))
    driver.executor.start_copy(AdapterCopy(slot, layout, places, places))


def test_a_copy_is_usable_as_soon_as_its_rest_is_hidden(
    driver: Driver, slab: tuple[SlabLayout, bytes], copy: LongCopy
) -> None:
    """How long the first one takes, nobody knows; the second moves, and steps wait for it."""
    layout, data = slab
    copy.done = True
    assert driver.load(0, layout, data, 0).copy_s == 1.0
    copy.waited_for.clear()
    copy.done = False
    copy.copies._bytes_s = 1e12
    start(driver, 1, layout)
    assert driver.executor.poll_copies() == [CopyUsable(1, layout.digest)]
    assert copy.waited_for == [copy]
    assert driver.executor.poll_copies() == []
    copy.done = True
    assert driver.executor.poll_copies() == [CopyOver(1, layout.digest, copy_s=1.0)]


def test_the_first_copy_is_usable_when_it_is_over(
    driver: Driver, slab: tuple[SlabLayout, bytes], copy: LongCopy
) -> None:
    layout, _ = slab
    start(driver, 1, layout)
    assert driver.executor.poll_copies() == []
    copy.done = True
    assert driver.executor.poll_copies() == [CopyUsable(1, layout.digest)]
    assert driver.executor.poll_copies() == [CopyOver(1, layout.digest, copy_s=1.0)]


def test_a_copy_waits_for_those_before_it(
    driver: Driver,
    slab: tuple[SlabLayout, bytes],
    copy: LongCopy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a rate at which two would be hidden, and three are not."""
    layout, _ = slab
    nbytes = sum(layout.runs) * layout.extent_bytes
    copy.copies._bytes_s = 2.5 * nbytes / HIDDEN_COPY_S
    monkeypatch.setattr("loraplex.server.model.lora.adapter_copies.time.perf_counter", lambda: 5.0)
    for slot in range(3):
        start(driver, slot, msgspec.structs.replace(layout, digest=str(slot)))
    assert driver.executor.poll_copies() == [CopyUsable(0, "0"), CopyUsable(1, "1")]
    assert driver.executor.poll_copies() == []
    copy.done = True
    told = driver.executor.poll_copies()
    assert told == [CopyOver(0, "0", copy_s=1.0), CopyOver(1, "1", copy_s=1.0), CopyUsable(2, "2")]


def test_a_copy_that_fails_after_it_was_usable_is_the_loss_of_the_device(
    driver: Driver, slab: tuple[SlabLayout, bytes], copy: LongCopy
) -> None:
    layout, _ = slab
    copy.copies._bytes_s = 1e12
    start(driver, 1, layout)
    assert driver.executor.poll_copies() == [CopyUsable(1, layout.digest)]
    copy.failure = RuntimeError("uncorrectable")
    with pytest.raises(RuntimeError, match="uncorrectable"):
        driver.executor.poll_copies()


@pytest.fixture(scope="module")
def dora() -> tuple[SlabLayout, bytes]:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    return pack(add_adapter(make_model("llama3"), "dora", config, 1), "dora")


def test_lengths_are_made_in_pieces_and_the_next_copy_does_not_wait(
    driver: Driver,
    slab: tuple[SlabLayout, bytes],
    dora: tuple[SlabLayout, bytes],
    copy: LongCopy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One piece at each poll, once the last is over; usable behind the last one alone."""
    monkeypatch.setattr("loraplex.server.model.lora.lora._PIECE", 1)
    copy.copies._bytes_s = 1e12
    start(driver, 1, dora[0])
    start(driver, 2, slab[0])
    assert driver.executor.poll_copies() == []  # a first piece, and how long it takes nobody knows
    for _ in range(3):
        assert driver.executor.poll_copies() == []
    copy.done = True
    told = driver.executor.poll_copies()
    assert told == [CopyUsable(2, slab[0].digest)]
    assert driver.executor.poll_copies() == [CopyOver(2, slab[0].digest, copy_s=1.0)]
    pieces = 3
    while not (told := driver.executor.poll_copies()):
        pieces += 1
    assert told == [CopyUsable(1, dora[0].digest)]
    assert pieces >= 6  # two sites of three layers
    copy.done = False  # it is on its way back
    assert driver.executor.poll_copies() == []
    copy.done = True
    over = CopyOver(1, dora[0].digest, copy_s=1.0, is_finished=True)
    assert driver.executor.poll_copies() == [over]


def test_what_is_finished_goes_back_and_is_not_finished_again(
    folder: Path, dora: tuple[SlabLayout, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host block then holds what the device does, and another device needs no base for it."""
    layout, data = dora
    first = Driver(folder)
    over = first.load(1, layout, data, 0)
    assert (over.error, over.is_finished) == (None, True)
    finished, block = first.finished[data]
    monkeypatch.setattr(OutputVectors, "pieces", None)
    second = Driver(folder)
    over = second.load(1, finished, block, 0)
    assert (over.error, over.is_finished) == (None, False)
    end = layout.shard_nbytes
    arenas = [driver.devices()[0]._table.arena[:end] for driver in (first, second)]
    assert torch.equal(*arenas)
    assert block != data
    for driver in (first, second):
        driver.close()


def test_the_first_adapter_whose_steps_no_graph_has_is_remarked_on(
    driver: Driver,
    slab: tuple[SlabLayout, bytes],
    dora: tuple[SlabLayout, bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs = SimpleNamespace(reaches=frozenset({Reach.NONE, Reach.LAYERS}))
    monkeypatch.setattr(driver.executor, "_graphs", graphs)
    for slot, (layout, data) in enumerate((slab, dora, dora)):
        driver.load(slot, layout, data, 0)
    (message,) = caplog.messages
    assert "DoRA" in message
    assert "--dora-graphs" in message


def test_lengths_that_cannot_be_made_fail_that_copy_alone(
    driver: Driver, dora: tuple[SlabLayout, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "vector_norm", fail)
        assert driver.load(0, *dora, first=0).error == COPY_FAILED
    assert driver.load(0, *dora, first=0).error is None


@given(
    nbytes=st.integers(0, 1 << 32),
    bytes_s=st.floats(1.0, 1e12),
    spent_s=st.floats(0.0, 10.0),
)
def test_what_is_left_of_a_hidden_copy_is_short(
    nbytes: int, bytes_s: float, spent_s: float
) -> None:
    left_s = nbytes / bytes_s - spent_s
    assert is_hidden(nbytes, bytes_s, spent_s) == (left_s <= HIDDEN_COPY_S)
    assert is_hidden(nbytes, bytes_s, spent_s + nbytes / bytes_s)
    assert not is_hidden(nbytes, 0.0, spent_s)
