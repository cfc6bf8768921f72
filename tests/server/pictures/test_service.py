"""Pictures from routers to the engine: each decoded once, none left in host memory."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from loraplex.server.engine.messages import EncodePicture, PictureFailed, PictureTaken, ToEngine
from loraplex.server.engine.shared_memory import HostMemory
from loraplex.server.protocol import GenerateRequest, Grid, PictureSpan, SamplingParams
from loraplex.server.worker.metrics import WorkerMetrics
from loraplex.server.worker.pictures import service as service_module
from loraplex.server.worker.pictures.decoder import NoPatches, PictureDecoder
from loraplex.server.worker.pictures.jobs import DecodeJob
from loraplex.server.worker.pictures.segments import (
    MAX_SEGMENTS,
    PatchMemory,
    PatchSegment,
    memory_bytes,
)
from loraplex.server.worker.pictures.service import PictureService
from tests.server.pictures.cards import QWEN

GRID = (1, 2, 2)
ARENA_BYTES = 1 << 16


class Decoder(PictureDecoder):
    """Decodes nothing. jobs: what was wanted; each waits until `go` is set."""

    def __init__(self, memory: PatchMemory) -> None:
        super().__init__(QWEN, memory)
        self.jobs: list[DecodeJob] = []
        self.go = asyncio.Event()

    async def pixels(self, job: DecodeJob) -> bytes:
        self.jobs.append(job)
        await self.go.wait()
        if job.data == b"bad":
            raise NoPatches("invalid_image", "no picture")
        return job.data

    @property
    def asked(self) -> list[bytes]:
        """Files whose patches were wanted."""
        return [job.data for job in self.jobs]

    async def patches(self, pixels: bytes, grid: Grid) -> PatchSegment:
        segment = self._memory.segment(4, 3)
        segment.fill(lambda patches: patches.fill(len(pixels)))
        if pixels == b"strange":
            segment.remove()
            raise RuntimeError("nobody knows why")
        return segment

    async def close(self) -> None:
        self.go.set()
        await super().close()


class Bench:
    def __init__(self) -> None:
        self.memory = HostMemory(memory_bytes(ARENA_BYTES, QWEN))
        self.decoder = Decoder(PatchMemory(self.memory, ARENA_BYTES, QWEN))
        self.sent: list[ToEngine] = []
        self.metrics = WorkerMetrics()
        self.service = PictureService(self.decoder, self.sent.append, self.metrics)

    def wants(self, key: int, wanted: GenerateRequest) -> tuple[str, ...]:
        """A sequence waits for all of its pictures."""
        return self.service.wanted(key, wanted, wanted.pictures)

    async def settle(self) -> None:
        """Lets all tasks run that can."""
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the machine that host memory takes."""
        return os.fstat(self.memory.fd).st_blocks * 512

    def segments(self) -> list[int]:
        return [frame.segment for frame in self.sent if isinstance(frame, EncodePicture)]


def request(*pictures: str, tenant: str = "") -> GenerateRequest:
    spans = tuple(PictureSpan(i, 1, picture, GRID) for i, picture in enumerate(pictures))
    ids = [0] * len(spans)
    return GenerateRequest(
        "r", 0, 0, None, ids, [], SamplingParams(), 0, pictures=spans, tenant=tenant
    )


def run(body: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await body(bench)
        await bench.service.close()
        assert bench.taken_bytes == 0

    asyncio.run(main())


def test_a_picture_is_asked_for_decoded_once_and_handed_over() -> None:
    async def body(bench: Bench) -> None:
        service = bench.service
        assert bench.wants(1, request("a", "b")) == ("a", "b")
        assert bench.wants(2, request("a")) == ("a",)
        service.arrived("a", b"data")
        service.arrived("a", b"data")
        assert bench.wants(3, request("a")) == ()
        bench.decoder.go.set()
        await bench.settle()
        assert bench.decoder.asked == [b"data"]
        (frame,) = bench.sent
        assert isinstance(frame, EncodePicture)
        assert (frame.picture, frame.grid, frame.rows, frame.columns) == ("a", GRID, 4, 3)
        held = np.frombuffer(bench.memory.view, np.float32, 12, frame.segment)
        np.testing.assert_array_equal(held, np.full(12, 4, np.float32))
        service.taken(PictureTaken("a", frame.segment))
        assert bench.taken_bytes == 0
        # Asked again, as after a preemption: the file is still here.
        assert bench.wants(4, request("a")) == ()
        await bench.settle()
        assert len(bench.segments()) == 2

    run(body)


def test_two_sizes_of_a_picture_are_made_of_one_file() -> None:
    async def body(bench: Bench) -> None:
        bench.decoder.go.set()
        first, small = request("a"), (1, 2, 1)
        span = PictureSpan(0, 1, "a", small, (0, 784))
        other = msgspec.structs.replace(first, pictures=(span,))
        assert bench.wants(1, first) == bench.wants(2, other) == ("a",)
        bench.service.arrived("a", b"data")
        await bench.settle()
        frames = [frame for frame in bench.sent if isinstance(frame, EncodePicture)]
        assert [frame.grid for frame in frames] == [GRID, small]
        assert [(job.grid, job.pixels) for job in bench.decoder.jobs] == [
            (GRID, (0, 0)),
            (small, (0, 784)),
        ]
        for segment in bench.segments():
            bench.service.taken(PictureTaken("a", segment))

    run(body)


def test_what_cannot_be_decoded_fails() -> None:
    async def body(bench: Bench) -> None:
        bench.decoder.go.set()
        bench.wants(5, request("a"))
        bench.service.arrived("a", b"bad")
        await bench.settle()
        assert bench.sent == [PictureFailed("a", GRID, "no picture", "invalid_image")]
        text, _ = bench.metrics.meters.render("")
        assert b'loraplex_worker_images_total{outcome="refused"} 1.0' in text

    run(body)


def test_what_fails_for_an_unknown_reason_fails_and_holds_no_room() -> None:
    async def body(bench: Bench) -> None:
        bench.decoder.go.set()
        for key in range(2 * MAX_SEGMENTS):
            bench.wants(key, request("a"))
            bench.service.arrived("a", b"strange")
            await bench.settle()
            failed = PictureFailed("a", GRID, "the picture could not be decoded", "internal")
            assert bench.sent == [failed] * (key + 1)

    run(body)


def test_nothing_is_kept_for_sequences_that_have_ended() -> None:
    async def body(bench: Bench) -> None:
        service = bench.service
        bench.wants(1, request("a", "b"))
        bench.wants(2, request("b", "c"))
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
        names = tuple(f"{i}" for i in range(MAX_SEGMENTS + 2))
        for name in names:
            bench.service.arrived(name, name.encode())
        bench.wants(1, request(*names))
        await bench.settle()
        bench.wants(2, request(names[-1]))
        bench.service.ended(1)
        bench.decoder.go.set()
        await bench.settle()
        for segment in bench.segments():
            bench.service.taken(PictureTaken("", segment))
        await bench.settle()
        assert names[-2].encode() not in bench.decoder.asked
        assert names[-1].encode() in bench.decoder.asked

    run(body)


def test_files_that_wait_to_be_decoded_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_WAITING_BYTES", 10)
    message = "too many bytes of pictures wait to be decoded"

    async def body(bench: Bench) -> None:
        bench.wants(1, request("a", "b", "c"))
        for name in ("a", "b", "c"):
            bench.service.arrived(name, b"12345")
        assert bench.sent == [PictureFailed("c", GRID, message, "overloaded")]
        bench.decoder.go.set()
        await bench.settle()
        bench.wants(2, request("c"))
        await bench.settle()
        assert len(bench.segments()) == 3

    run(body)


def test_the_next_engine_gets_nothing_of_the_last() -> None:
    async def body(bench: Bench) -> None:
        service = bench.service
        service.arrived("a", b"data")
        bench.wants(6, request("a"))
        await bench.settle()
        service.engine_lost()
        bench.wants(7, request("a"))
        await bench.settle()
        bench.decoder.go.set()
        await bench.settle()
        assert len(bench.decoder.asked) == 2
        assert len(bench.sent) == 1
        service.engine_lost()
        assert bench.taken_bytes == 0

    run(body)


def test_only_so_many_lie_in_host_memory() -> None:
    async def body(bench: Bench) -> None:
        bench.decoder.go.set()
        names = [f"{i}" for i in range(MAX_SEGMENTS + 3)]
        for name in names:
            bench.service.arrived(name, name.encode())
        bench.wants(8, request(*names))
        await bench.settle()
        assert len(bench.sent) == MAX_SEGMENTS
        for segment in bench.segments():
            bench.service.taken(PictureTaken("", segment))
        await bench.settle()
        assert len(bench.sent) == len(names)

    run(body)


def test_many_pictures_of_one_tenant_hold_up_no_other() -> None:
    async def body(bench: Bench) -> None:
        names = [f"{i}" for i in range(2 * MAX_SEGMENTS)]
        for name in (*names, "other"):
            bench.service.arrived(name, name.encode())
        bench.wants(1, request(*names, tenant="a"))
        bench.wants(2, request("other", tenant="b"))
        await bench.settle()
        assert bench.decoder.asked == [b"0", b"other"]

    run(body)


def test_files_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_KEPT_BYTES", 10)

    async def body(bench: Bench) -> None:
        bench.decoder.go.set()
        for name in ("a", "b", "c"):
            bench.service.arrived(name, b"12345")
        assert bench.wants(9, request("a", "b", "c")) == ("a",)
        await bench.settle()
        assert bench.decoder.asked == [b"12345"] * 2

    run(body)


def test_the_largest_pictures_lie_beside_each_other_and_the_arena() -> None:
    memory = HostMemory(memory_bytes(ARENA_BYTES, QWEN))
    memory.view[:ARENA_BYTES] = b"a" * ARENA_BYTES
    patches = PatchMemory(memory, ARENA_BYTES, QWEN)
    most = QWEN.most_seen_pixels // QWEN.patch_size**2
    segments = [patches.segment(most, QWEN.columns) for _ in range(MAX_SEGMENTS)]
    for number, segment in enumerate(segments):
        segment.fill(partial(fill, number))
    for number, segment in enumerate(segments):
        last = segment.begin + 4 * segment.rows * segment.columns - 4
        for place in (segment.begin, last):
            assert np.frombuffer(memory.view, np.float32, 1, place)[0] == number
        segment.remove()
    assert os.fstat(memory.fd).st_blocks * 512 == ARENA_BYTES
    assert bytes(memory.view[:ARENA_BYTES]) == b"a" * ARENA_BYTES
    with pytest.raises(ValueError, match="more than the largest picture"):
        patches.segment(2 * most, QWEN.columns)


def fill(number: int, patches: npt.NDArray[np.float32]) -> None:
    patches[[0, -1]] = number


def test_a_machine_without_memory_refuses_a_segment_by_itself() -> None:
    memory = HostMemory(memory_bytes(ARENA_BYTES, QWEN))
    patches = PatchMemory(memory, ARENA_BYTES, QWEN)

    def full(begin: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    memory.make, make = full, memory.make  # type: ignore[method-assign]
    for _ in range(2 * MAX_SEGMENTS):
        with pytest.raises(OSError, match="No space"):
            patches.segment(4, 3)
    memory.make = make  # type: ignore[method-assign]
    patches.segment(4, 3).remove()
