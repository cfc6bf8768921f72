"""Pictures from routers to the engine: each decoded once, none left in shared memory."""

import asyncio
import fcntl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from loraplex.server.engine.messages import EncodePicture, PictureFailed, PictureTaken, ToEngine
from loraplex.server.protocol import GenerateRequest, Grid, PictureSpan, SamplingParams
from loraplex.server.worker.metrics import WorkerMetrics
from loraplex.server.worker.pictures import service as service_module
from loraplex.server.worker.pictures.decoder import NoPatches, PictureDecoder
from loraplex.server.worker.pictures.segments import PatchSegment, remove_stale
from loraplex.server.worker.pictures.service import PictureService
from tests.server.pictures.cards import QWEN

GRID = (1, 2, 2)
FOLDER = Path("/dev/shm")


class Decoder(PictureDecoder):
    """Decodes nothing. asked: files whose patches were wanted; each waits until `go` is set."""

    def __init__(self) -> None:
        super().__init__(QWEN)
        self.asked: list[bytes] = []
        self.go = asyncio.Event()

    async def patches(self, data: bytes, grid: Grid, tenant: str, is_batch: bool) -> PatchSegment:
        self.asked.append(data)
        await self.go.wait()
        if data == b"bad":
            raise NoPatches("invalid_image", "no picture")
        segment = PatchSegment(4, 3)
        segment.fill(lambda patches: patches.fill(len(data)))
        if data == b"strange":
            segment.remove()
            raise RuntimeError("nobody knows why")
        return segment

    async def close(self) -> None:
        self.go.set()
        await super().close()


class Bench:
    def __init__(self) -> None:
        self.decoder = Decoder()
        self.sent: list[ToEngine] = []
        self.metrics = WorkerMetrics()
        self.service = PictureService(self.decoder, self.sent.append, self.metrics)

    async def settle(self) -> None:
        """Lets all tasks run that can."""
        for _ in range(20):
            await asyncio.sleep(0)

    def names(self) -> list[str]:
        return [frame.segment for frame in self.sent if isinstance(frame, EncodePicture)]


def request(*pictures: str) -> GenerateRequest:
    spans = tuple(PictureSpan(i, 1, picture, GRID) for i, picture in enumerate(pictures))
    return GenerateRequest(
        "r", 0, 0, None, [0] * len(spans), [], SamplingParams(), 0, pictures=spans
    )


def run(body: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await body(bench)
        await bench.service.close()
        assert not any((FOLDER / name).exists() for name in bench.names())

    asyncio.run(main())


def test_a_picture_is_asked_for_decoded_once_and_handed_over() -> None:
    async def body(bench: Bench) -> None:
        service = bench.service
        assert service.wanted(1, request("a", "b"), ("a", "b")) == ("a", "b")
        assert service.wanted(2, request("a"), ("a",)) == ("a",)
        service.arrived("a", b"data")
        service.arrived("a", b"data")
        assert service.wanted(3, request("a"), ("a",)) == ()
        bench.decoder.go.set()
        await bench.settle()
        assert bench.decoder.asked == [b"data"]
        (frame,) = bench.sent
        assert isinstance(frame, EncodePicture)
        assert (frame.picture, frame.grid, frame.rows, frame.columns) == ("a", GRID, 4, 3)
        held = np.fromfile(FOLDER / frame.segment, np.float32)
        np.testing.assert_array_equal(held, np.full(12, 4, np.float32))
        service.taken(PictureTaken("a", frame.segment))
        assert not (FOLDER / frame.segment).exists()
        # Asked again, as after a preemption: the file is still here.
        assert service.wanted(4, request("a"), ("a",)) == ()
        await bench.settle()
        assert len(bench.names()) == 2

    run(body)


def test_what_cannot_be_decoded_fails() -> None:
    async def body(bench: Bench) -> None:
        bench.decoder.go.set()
        bench.service.wanted(5, request("a"), ("a",))
        bench.service.arrived("a", b"bad")
        await bench.settle()
        assert bench.sent == [PictureFailed("a", "no picture", "invalid_image")]
        text, _ = bench.metrics.meters.render("")
        assert b'loraplex_worker_images_total{outcome="refused"} 1.0' in text

    run(body)


def test_what_fails_for_an_unknown_reason_fails_and_holds_no_room() -> None:
    async def body(bench: Bench) -> None:
        bench.decoder.go.set()
        for key in range(2 * service_module.MAX_SEGMENTS):
            bench.service.wanted(key, request("a"), ("a",))
            bench.service.arrived("a", b"strange")
            await bench.settle()
            failed = PictureFailed("a", "the picture could not be decoded", "internal")
            assert bench.sent == [failed] * (key + 1)

    run(body)


def test_nothing_is_kept_for_sequences_that_have_ended() -> None:
    async def body(bench: Bench) -> None:
        service = bench.service
        service.wanted(1, request("a", "b"), ("a", "b"))
        service.wanted(2, request("b", "c"), ("b", "c"))
        service.ended(1)
        service.ended(1)
        service.arrived("a", b"of the first")
        service.arrived("b", b"of both")
        await bench.settle()
        assert bench.decoder.asked == [b"of both"], "nobody waits for the other one"
        service.ended(2)
        bench.decoder.go.set()
        await bench.settle()
        service.arrived("c", b"of the second")
        await bench.settle()
        assert bench.decoder.asked == [b"of both"]
        assert not service._wanted
        assert not service._asked

    run(body)


def test_what_nobody_waits_for_any_more_is_not_decoded() -> None:
    async def body(bench: Bench) -> None:
        names = tuple(f"{i}" for i in range(service_module.MAX_SEGMENTS + 2))
        for name in names:
            bench.service.arrived(name, name.encode())
        bench.service.wanted(1, request(*names), names)
        await bench.settle()
        bench.service.wanted(2, request(names[-1]), names[-1:])
        bench.service.ended(1)
        bench.decoder.go.set()
        await bench.settle()
        for name in bench.names():
            bench.service.taken(PictureTaken("", name))
        await bench.settle()
        assert names[-2].encode() not in bench.decoder.asked
        assert names[-1].encode() in bench.decoder.asked

    run(body)


def test_files_that_wait_to_be_decoded_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_WAITING_BYTES", 10)
    message = "too many bytes of pictures wait to be decoded"

    async def body(bench: Bench) -> None:
        bench.service.wanted(1, request("a", "b", "c"), ("a", "b", "c"))
        for name in ("a", "b", "c"):
            bench.service.arrived(name, b"12345")
        assert bench.sent == [PictureFailed("c", message, "overloaded")]
        bench.decoder.go.set()
        await bench.settle()
        bench.service.wanted(2, request("c"), ("c",))
        await bench.settle()
        assert len(bench.names()) == 3

    run(body)


def test_the_next_engine_gets_nothing_of_the_last() -> None:
    async def body(bench: Bench) -> None:
        service = bench.service
        service.arrived("a", b"data")
        service.wanted(6, request("a"), ("a",))
        await bench.settle()
        service.engine_lost()
        service.wanted(7, request("a"), ("a",))
        await bench.settle()
        bench.decoder.go.set()
        await bench.settle()
        assert len(bench.decoder.asked) == 2
        assert len(bench.sent) == 1
        service.engine_lost()
        assert not (FOLDER / bench.names()[0]).exists()

    run(body)


def test_only_so_many_lie_in_shared_memory() -> None:
    async def body(bench: Bench) -> None:
        bench.decoder.go.set()
        names = [f"{i}" for i in range(service_module.MAX_SEGMENTS + 3)]
        for name in names:
            bench.service.arrived(name, name.encode())
        bench.service.wanted(8, request(*names), tuple(names))
        await bench.settle()
        assert len(bench.sent) == service_module.MAX_SEGMENTS
        for name in bench.names():
            bench.service.taken(PictureTaken("", name))
        await bench.settle()
        assert len(bench.sent) == len(names)

    run(body)


def test_files_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_KEPT_BYTES", 10)

    async def body(bench: Bench) -> None:
        for name in ("a", "b", "c"):
            bench.service.arrived(name, b"12345")
        assert bench.service.wanted(9, request("a", "b", "c"), ("a", "b", "c")) == ("a",)
        await bench.settle()
        assert bench.decoder.asked == [b"12345"] * 2

    run(body)


def test_files_of_the_dead_are_removed() -> None:
    stale, held = FOLDER / "loraplex-picture-dead", PatchSegment(1, 1)
    stale.write_bytes(b"0000")
    remove_stale()
    assert not stale.exists()
    assert (FOLDER / held.name).exists()
    held.remove()


def test_files_in_the_making_are_not_those_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def late(file: int | IO[bytes], operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            remove_stale()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    made = PatchSegment(1, 1)
    assert (FOLDER / made.name).exists()
    made.remove()
