"""The first process of a group: what it sends on, and what it makes of the others' answers."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest

from loraplex.server.engine.executor import (
    AdapterCopy,
    CopyNews,
    CopyOver,
    CopySums,
    CopyUsable,
    Masks,
    PageCopies,
    PagesCopied,
    PictureCopy,
    PictureIn,
)
from loraplex.server.engine.framing import receive_frame, send_frame
from loraplex.server.engine.group.group import (
    Answer,
    Command,
    Constrain,
    Encode,
    GroupExecutor,
    GroupLost,
    UseCopy,
    decode_command,
    encode,
)
from loraplex.server.engine.plan import StepPlan
from tests.server.engine.harness import layout

N = TypeVar("N")

TIMEOUT_S = 60.0
PLAN = StepPlan(7, [], [], [], [])


class Alone:
    """An executor that notes its calls, and reports what it is given."""

    limits: Any = None
    summary = ()
    memory = ()
    stored_pages = (b"stored",)
    stored_snapshots = (b"saved",)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.news: list[CopyNews] = []
        self.offered: list[CopySums] = []
        self.pictures: list[PictureIn] = []

    def launch(self, plan: StepPlan, meanwhile: Any = None) -> str:
        self.calls.append(f"launch {plan.step}")
        return "ticket"

    def constrain(self, ticket: str, masks: Masks) -> None:
        self.calls.append(f"constrain {masks.slices}")

    def start_copy(self, copy: AdapterCopy) -> None:
        self.calls.append(f"copy {copy.adapter_slot}")

    def copy_pages(self, copies: PageCopies) -> None:
        self.calls.append(f"pages {copies.number}")

    def poll_copies(self) -> list[CopyNews]:
        told, self.news = self.news, []
        return told

    def sums_offered(self) -> list[CopySums]:
        offered, self.offered = self.offered, []
        return offered

    def add_sums(self, sums: CopySums) -> None:
        self.calls.append(f"add {sums.digest} {np.frombuffer(sums.numbers, np.float32).tolist()}")

    def start_picture(self, copy: PictureCopy) -> None:
        self.calls.append(f"picture {copy.picture}")

    def poll_pictures(self) -> list[PictureIn]:
        told, self.pictures = self.pictures, []
        return told

    def encode(self, pictures: int) -> None:
        self.calls.append(f"encode {pictures}")

    def close(self) -> None:
        self.calls.append("close")


class Pair:
    """A leader, and the other end of its link."""

    def __init__(self) -> None:
        ours, self.link = socket.socketpair()
        self.alone = Alone()
        executor: Any = self.alone
        self.leader: GroupExecutor[Any] = GroupExecutor(executor, [ours])

    def told(self) -> Command:
        frame = receive_frame(self.link)
        assert frame is not None
        command: Command = decode_command(frame)
        return command

    def answer(self, answer: Answer) -> None:
        send_frame(self.link, encode(answer))

    def poll_until(self, call: str) -> None:
        """Polls that give nothing, until the executor has been called so."""
        deadline = time.monotonic() + TIMEOUT_S
        while call not in self.alone.calls:
            assert time.monotonic() < deadline
            assert self.leader.poll_copies() == []
            time.sleep(0.001)  # polls a condition, bounded by the deadline

    def until_told(self) -> list[CopyNews]:
        return first_news(self.leader.poll_copies)


def first_news(poll: Callable[[], list[N]]) -> list[N]:
    """The result of a poll, once there is any."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if found := poll():
            return found
        time.sleep(0.001)  # polls a condition, bounded by the deadline
    raise TimeoutError("no news")


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.leader.close()
    found.link.close()


def test_what_it_does_the_others_do(pair: Pair) -> None:
    assert pair.leader.launch(PLAN) == "ticket"
    assert pair.told() == PLAN
    bits = np.array([[3, -1]], dtype=np.int32)
    pair.leader.constrain("ticket", Masks([4], bits))
    told = pair.told()
    assert isinstance(told, Constrain)
    masks = told.masks(np.zeros((1, 2), dtype=np.int32))
    assert masks.slices == [4]
    assert (masks.bits == bits).all()
    copy = AdapterCopy(2, layout("a", (1, 2)), (0, 1), (5, 6))
    pair.leader.start_copy(copy)
    assert pair.told() == copy
    assert pair.alone.calls == ["launch 7", "constrain [4]", "copy 2"]


def test_a_picture_is_in_once_all_have_its_patches(pair: Pair) -> None:
    copies = [PictureCopy(name, (1, 2, 2), 64, 4, 6, (n,)) for n, name in enumerate("ab")]
    for copy in copies:
        pair.leader.start_picture(copy)
        assert pair.told() == copy
    pair.alone.pictures = [PictureIn(0), PictureIn(1, "no memory")]
    assert pair.leader.poll_pictures() == []
    pair.answer(PictureIn(0))
    assert first_news(pair.leader.poll_pictures) == [PictureIn(0)]
    pair.leader.encode(3)
    assert pair.told() == Encode(3)
    pair.answer(CopyOver(2, "of nobody"))
    pair.answer(PictureIn(1, "no memory"))
    assert first_news(pair.leader.poll_pictures) == [PictureIn(1, "no memory")]
    assert pair.alone.calls == ["picture a", "picture b", "encode 3"]


def test_a_picture_that_some_lack_is_the_end_of_the_group(pair: Pair) -> None:
    pair.leader.start_picture(PictureCopy("a", (1, 2, 2), 64, 4, 6, (0,)))
    pair.alone.pictures = [PictureIn(0)]
    pair.answer(PictureIn(0, "it is gone"))
    with pytest.raises(GroupLost, match="lacks a picture: it is gone"):
        first_news(pair.leader.poll_pictures)


def test_a_copy_is_over_once_all_have_it(pair: Pair) -> None:
    pair.alone.news = [CopyUsable(2, "a"), CopyOver(2, "a")]
    assert pair.leader.poll_copies() == [CopyUsable(2, "a")]
    assert pair.told() == UseCopy()
    assert pair.leader.poll_copies() == []
    pair.answer(CopyOver(2, "a"))
    assert pair.until_told() == [CopyOver(2, "a")]


def test_pages_are_copied_once_all_have_them(pair: Pair) -> None:
    """What failed in one process failed in all."""
    copies = PageCopies(3, "read", slots=(4, 5, 6), keys=(b"a", b"b", b"c"))
    pair.leader.copy_pages(copies)
    assert pair.told() == copies
    assert pair.alone.calls == ["pages 3"]
    assert pair.leader.stored_pages == (b"stored",)
    assert pair.leader.stored_snapshots == (b"saved",)
    pair.alone.news = [PagesCopied(3, (1,))]
    assert pair.leader.poll_copies() == []
    pair.answer(PagesCopied(3, (2,)))
    assert pair.until_told() == [PagesCopied(3, (1, 2))]


def test_a_slot_that_has_another_adapter_by_then(pair: Pair) -> None:
    """The other process is late with the first adapter: the second is not over with that."""
    pair.alone.news = [CopyOver(2, "a"), CopyOver(2, "b")]
    assert pair.leader.poll_copies() == []
    pair.answer(CopyOver(2, "a"))
    assert pair.until_told() == [CopyOver(2, "a")]
    assert pair.leader.poll_copies() == []
    pair.answer(CopyOver(2, "b"))
    assert pair.until_told() == [CopyOver(2, "b")]


def test_a_copy_that_fails_everywhere_is_a_refusal(pair: Pair) -> None:
    pair.alone.news = [CopyOver(2, "a", "does not fit")]
    pair.answer(CopyOver(2, "a", "does not fit"))
    assert pair.until_told() == [CopyOver(2, "a", "does not fit")]


def test_a_copy_that_fails_in_one_process_loses_the_group(pair: Pair) -> None:
    pair.alone.news = [CopyOver(2, "a")]
    assert pair.leader.poll_copies() == []
    pair.answer(CopyOver(2, "a", "no memory"))
    with pytest.raises(GroupLost, match="no memory"):
        pair.until_told()


def test_a_process_that_is_gone_loses_the_group(pair: Pair) -> None:
    pair.link.close()
    with pytest.raises(GroupLost, match="is gone"):
        pair.until_told()
    with pytest.raises(GroupLost):
        pair.leader.wait_idle()


def sums(digest: str, *numbers: float) -> CopySums:
    return CopySums(digest, np.array(numbers, np.float32).tobytes())


def test_numbers_are_added_once_all_have_offered(pair: Pair) -> None:
    pair.alone.offered = [sums("a", 1, 2)]
    assert pair.leader.poll_copies() == []
    assert pair.alone.calls == []
    pair.answer(sums("a", 3, 4))
    pair.poll_until("add a [4.0, 6.0]")
    assert pair.told() == sums("a", 4, 6)
    pair.answer(sums("a"))  # the last ones, which are none
    assert pair.leader.poll_copies() == []
    pair.alone.offered = [sums("a")]
    pair.poll_until("add a []")
    assert pair.told() == sums("a")


def test_numbers_of_what_another_process_lacks_lose_the_group(pair: Pair) -> None:
    pair.alone.offered = [sums("a", 1)]
    assert pair.leader.poll_copies() == []
    pair.answer(CopyOver(2, "a", "no memory"))
    with pytest.raises(GroupLost, match="lacks an adapter: no memory"):
        pair.until_told()


def test_other_numbers_lose_the_group(pair: Pair) -> None:
    pair.alone.offered = [sums("a", 1)]
    pair.answer(sums("a", 1, 2))
    with pytest.raises(GroupLost, match="hold different adapters"):
        pair.until_told()
