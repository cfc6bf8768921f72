"""Room in the queue: a request's sequences come in all or none; what was promised is kept."""

import pytest

from loraplex.router.policy.placement.placement import PlacementRequest
from loraplex.router.policy.queue.queue_limits import Promise, QueueFull, QueueLimits
from loraplex.router.policy.queue.waiting import Waiting, WaitingQueue


def push(
    queue: WaitingQueue[None], tenant: str = "", nbytes: int = 0, promise: Promise | None = None
) -> int:
    return queue.push(
        Waiting(None, tenant, PlacementRequest(""), 1, 1, nbytes, promise=promise), 0.0
    )


def with_waiting(count: int, nbytes: int) -> WaitingQueue[None]:
    queue = WaitingQueue[None](QueueLimits(90, 1000))
    for _ in range(count):
        push(queue, nbytes=nbytes)
    return queue


def fits_whole(queue: WaitingQueue[None], count: int, nbytes: int) -> bool:
    try:
        queue.check_room("", count, count * nbytes, 0.0)
    except QueueFull:
        return False
    return True


def fits_singly(queue: WaitingQueue[None], count: int, nbytes: int) -> bool:
    try:
        for _ in range(count):
            push(queue, nbytes=nbytes)
    except QueueFull:
        return False
    return True


@pytest.mark.parametrize("nbytes", [0, 10, 12])
@pytest.mark.parametrize("waiting", [1, 30, 70])
def test_a_request_fits_as_its_sequences_would(waiting: int, nbytes: int) -> None:
    for count in range(1, 92 - waiting):
        whole = fits_whole(with_waiting(waiting, nbytes), count, nbytes)
        assert whole == fits_singly(with_waiting(waiting, nbytes), count, nbytes), count


@pytest.mark.parametrize(
    ("limits", "most"),
    [(QueueLimits(1024, 100), 1024), (QueueLimits(1024, 100, tenant_count=1000), 1000)],
)
def test_an_idle_queue_takes_what_it_promises(limits: QueueLimits, most: int) -> None:
    queue = WaitingQueue[None](limits)
    assert limits.most_at_once == most
    queue.check_room("t", most, 0, 0.0)
    promise = queue.promise("t", most, 0)
    for _ in range(most):
        push(queue, "t", promise=promise)
    assert len(queue) == most


def test_promised_room_is_nobody_elses() -> None:
    queue = WaitingQueue[None](QueueLimits(4, 100))
    promise = queue.promise("t", 3, 90)
    assert queue.capacity.held.count == 0  # nothing waits
    push(queue, "u")
    with pytest.raises(QueueFull, match="4 sequences"):
        push(queue, "u")
    push(queue, "t", nbytes=30, promise=promise)
    with pytest.raises(QueueFull, match="4 sequences"):
        push(queue, "t")  # of another request


def test_what_is_left_of_a_promise_is_given_back() -> None:
    queue = WaitingQueue[None](QueueLimits(4, 100))
    promise = queue.promise("t", 3, 90)
    first = push(queue, "t", nbytes=30, promise=promise)
    for _ in range(2):
        queue.release(promise)
    queue.check_room("u", 3, 70, 0.0)
    queue.cancel(first)
    queue.check_room("u", 4, 100, 0.0)


def test_requests_that_come_at_once_keep_their_own_room() -> None:
    queue = WaitingQueue[None](QueueLimits(4, 100))
    gone, one = (queue.promise("t", 2, 10) for _ in range(2))
    queue.release(gone)
    for _ in range(2):
        push(queue, "u")
    for _ in range(2):
        push(queue, "t", nbytes=5, promise=one)
    again = queue.promise("t", 1, 0)
    queue.release(one)  # it has ended, after all of it was taken
    push(queue, "t", promise=again)
