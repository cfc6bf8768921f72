"""Pictures over a real socket pair: they are asked for, taken, and computed between steps."""

import time
from collections.abc import Callable

import pytest

from loraplex.server.engine.messages import (
    EncodePicture,
    PictureFailed,
    PicturesWanted,
    PictureTaken,
)
from loraplex.server.engine.plan import StepPlan
from tests.certifying.certificates import CertifyOptions, certified_output, pictured_ids
from tests.certifying.executor import CertifyingExecutor, FakeTicket
from tests.certifying.pictures import CHUNKS, SECONDS, Encoded
from tests.server.engine.harness import limits, make_request
from tests.server.engine.scheduling.test_pictures import GRIDS, PICTURES, pictured
from tests.server.engine.test_loop import running
from tests.server.engine.worker_end import TIMEOUT_S

LIMITS = limits(pictures=PICTURES, num_pages=64, max_context=200, max_step_tokens=32)
OPTIONS = CertifyOptions(LIMITS.vocab_size, LIMITS.eos_token_ids)


class Noting(CertifyingExecutor):
    """launched: in order, S = a step, C = a chunk of a tower. The fifth step waits for `has_come`,
    which says whether the pictures' messages are there."""

    def __init__(self) -> None:
        super().__init__(LIMITS, OPTIONS)
        self.launched = ""
        self.has_come: Callable[[], bool] = lambda: True

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        self.launched += "S"
        until = time.monotonic() + TIMEOUT_S
        while len(self.launched) == 5 and not self.has_come() and time.monotonic() < until:
            time.sleep(0.001)  # polls a condition, bounded by the deadline
        return super().launch(plan, meanwhile)

    def encode(self, pictures: int) -> Encoded:
        self.launched += "C"
        return super().encode(pictures)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_goes_on_between_chunks(depth: int) -> None:
    executor = Noting()
    with running(executor, depth) as engine:
        entries = engine.scheduler.pictures.cache._entries
        inbox = engine.channel._inbox
        executor.has_come = lambda: (
            inbox.qsize() + sum(entry.has_patches for entry in entries.values()) == 2
        )
        request = pictured([4, "d", "a", 7], max_tokens=5)
        engine.worker.submit(2, request)
        wanted = engine.worker.expect(PicturesWanted)
        assert (wanted.key, wanted.spans) == (2, request.pictures)
        engine.worker.submit(1, make_request([5, 6], 60))
        for picture, grid in ((span.picture, span.grid) for span in wanted.spans):
            patches = (grid[1] * grid[2], PICTURES.columns)
            engine.worker.send(EncodePicture(picture, grid, ord(picture), *patches))
        taken = [engine.worker.expect(PictureTaken) for _ in wanted.spans]
        assert [(each.segment, each.error) for each in taken] == [
            (ord("d"), None),
            (ord("a"), None),
        ]
        expected = certified_output(
            None, pictured_ids(request.prompt_ids, request.pictures), 5, OPTIONS
        )
        assert engine.worker.answer(2) == expected
        assert engine.worker.answer(1) == certified_output(None, [5, 6], 60, OPTIONS)
        use = engine.scheduler.shares.use
    chunks = executor.launched.count("C")
    assert chunks in (CHUNKS, 2 * CHUNKS)
    # All of the tower's time is charged, and none of it to steps.
    assert use.pictures == pytest.approx(chunks * SECONDS)
    assert use.late == 0.0
    assert "CC" not in executor.launched[: executor.launched.rindex("C")]


def test_what_fails_ends_alone() -> None:
    executor = Noting()
    executor.pictures.bad.add("c")
    with running(executor) as engine:
        for key, name in enumerate("ac", start=1):
            engine.worker.submit(key, pictured([4, name, 7]))
            engine.worker.expect(PicturesWanted)
        engine.worker.send(PictureFailed("a", GRIDS["a"], "no picture"))
        engine.worker.send(EncodePicture("c", GRIDS["c"], ord("c"), 4, PICTURES.columns))
        assert engine.worker.expect(PictureTaken).error == "it is bad"
        ends = ((1, "invalid_image", "a: no picture"), (2, "internal", "it is bad"))
        for key, error, message in ends:
            assert engine.worker.answer(key) == []
            last = engine.worker.events[key][-1]
            assert (last.error, last.message) == (error, message)
