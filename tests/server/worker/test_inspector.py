"""The adapters' places, as the real worker and the certifying engine report them."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server import protocol
from loraplex.server.engine.memory.residency import Span
from loraplex.server.engine.messages import AdapterPlaced
from loraplex.server.worker.inspector import DevicePlaces
from tests.server.worker.small_memory import admit_all, running_small
from tests.server.worker.worker_process import LONG, Worker, connected, request

ADAPTERS = 9
RESIDENT = 6


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with running_small(tmp_path_factory, ADAPTERS) as worker:
        yield worker


def check_arenas(picture: protocol.WorkerPicture) -> None:
    """No extent belongs to two adapters, and none lies outside."""
    assert picture.places is not None
    for extents, spans_of in (
        (picture.device_extents, [p.device_spans for p in picture.places]),
        (picture.host_extents, [p.host_spans for p in picture.places]),
    ):
        taken = [x for spans in spans_of for first, n in spans for x in range(first, first + n)]
        assert len(taken) == len(set(taken))
        assert all(0 <= x < extents for x in taken)


def on_device(picture: protocol.WorkerPicture) -> set[str]:
    assert picture.places is not None
    return {place.digest for place in picture.places if place.device_spans}


async def test_the_picture_follows_loads_evictions_and_use(worker: Worker) -> None:
    async with connected(worker) as router:
        empty = await router.inspect()
        assert empty.places == () or not on_device(empty)
        assert (empty.extent_bytes > 0, empty.page_size > 0) == (True, True)
        digests = await admit_all(router, ADAPTERS)
        for number, digest in enumerate(digests):  # nine go through the room of six
            await router.send(request(f"r{number}", 4, digest))
            await router.until_finished(f"r{number}")
            check_arenas(await router.inspect())
        status = await router.until_status(running=0)
        full = await router.inspect()
        assert on_device(full) == set(status.resident)
        assert len(status.resident) == RESIDENT
        assert full.evictions == ADAPTERS - RESIDENT
        assert full.output_tokens >= 4 * ADAPTERS
        assert full.places is not None
        assert all(place.load_s is not None for place in full.places if place.device == "ready")
        same = await router.inspect(full.version)
        assert (same.places, same.version) == (None, full.version)
        await router.send(protocol.AdapterPins((digests[-1],)), request("long", LONG, digests[-1]))
        await router.until_started("long")
        busy = await router.inspect(full.version)
        assert busy.in_use == ((digests[-1], 1),)
        assert busy.places is not None
        assert [place.digest for place in busy.places if place.pinned] == [digests[-1]]
        await router.send(protocol.Abort("long", 0))
        await router.until_finished("long")
        await router.order("evict", "evict", digests[-2])
        assert on_device(await router.inspect()) == set(status.resident) - {digests[-2]}


@pytest.mark.parametrize(
    ("there", "new", "stays"),
    [
        (((0, 2),), ((2, 2),), True),
        (((0, 2),), ((1, 2),), False),
        (((0, 2), (6, 2)), ((2, 4), (8, 1)), True),
        (((0, 2), (6, 2)), ((2, 4), (7, 1)), False),
    ],
)
def test_what_is_overwritten_is_forgotten(
    there: tuple[Span, ...], new: tuple[Span, ...], stays: bool
) -> None:
    device = DevicePlaces()
    device.placed(AdapterPlaced("old", there))
    device.placed(AdapterPlaced("new", new))
    assert device.spans("old") == (there if stays else ())
    assert device.spans("new") == new


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sets(st.integers(0, 9), min_size=1))))
def test_each_extent_is_the_last_ones_that_was_placed_there(
    placings: list[tuple[str, set[int]]],
) -> None:
    device, model = DevicePlaces(), dict[str, set[int]]()
    for digest, extents in placings:
        device.placed(AdapterPlaced(digest, tuple((x, 1) for x in sorted(extents))))
        model = {d: there for d, there in model.items() if not there & extents}
        model[digest] = extents
        for each in "abcd":
            assert {x for x, _ in device.spans(each)} == model.get(each, set())
    for digest in "abcd":
        device.left(digest)
    assert not device._owners
