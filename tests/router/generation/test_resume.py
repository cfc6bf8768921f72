"""Workers that fail under a sequence: the client sees every token once, or one clear error."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.router.policy.placement.attempts import MAX_LOSSES
from loraplex.server.protocol import (
    ErrorCode,
    Evidence,
    GenerateRequest,
    StepEvents,
    TokenEvent,
    encode,
)
from tests.network import running_link
from tests.router.fake_worker import BASE_NAME, EOS, FakeWorker, ids_of, running_worker
from tests.router.serving import Running, events_of, poll, running_router

TEXT = "every token exactly once, in order"
BODY = {"model": BASE_NAME, "prompt": "x", "max_tokens": 99, "seed": 3}
Fault = Callable[[FakeWorker, GenerateRequest, int], ErrorCode | None]


def scripted(worker: FakeWorker, fault: Fault) -> None:
    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        await asyncio.sleep(0)
        return fault(worker, request, index)

    worker.script = lambda request: [*ids_of(TEXT), EOS]
    worker.before_token = before_token


def disconnect_once_at(at: int) -> Fault:
    def fault(worker: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        if request.attempt == 0 and index == at:
            worker.drop_connections()
        return None

    return fault


def error_at(at: int, code: ErrorCode, attempts: int = 1) -> Fault:
    def fault(worker: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        return code if request.attempt < attempts and index == at else None

    return fault


async def text_of(router: Running, *, stream: bool) -> str:
    answer = await router.client.post("/v1/completions", json={**BODY, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    events = events_of(answer.text)
    assert all("error" not in event for event in events), answer.text
    return "".join(event["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        disconnect_once_at(0),
        disconnect_once_at(1),
        disconnect_once_at(20),
        disconnect_once_at(len(TEXT)),
        error_at(0, "engine_lost"),
        error_at(20, "engine_lost"),
        error_at(3, "engine_lost", attempts=2),
        error_at(0, "draining", attempts=4),
        error_at(5, "overloaded", attempts=4),
    ],
)
async def test_no_token_is_lost_or_repeated(
    router: Running, worker: FakeWorker, fault: Fault, stream: bool
) -> None:
    scripted(worker, fault)
    assert await text_of(router, stream=stream) == TEXT
    requests = worker.requests
    assert [request.attempt for request in requests] == list(range(len(requests)))
    assert len({request.seed for request in requests}) == 1
    for request in requests:
        assert bytes(request.accepted_ids) == TEXT.encode()[: len(request.accepted_ids)]
    assert worker.finished[-1] == (requests[-1].request_id, len(requests) - 1, 0)


async def test_another_worker_goes_on(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker(worker_id="a")) as first,
        running_worker(FakeWorker(worker_id="b")) as second,
        running_router(tmp_path, first, second) as router,
    ):
        await second.until(lambda: second.connected)

        def fault(worker: FakeWorker, request: GenerateRequest, index: int) -> None:
            if request.attempt == 0 and index == 7:
                worker.ready = False  # it comes back, but takes no work
                worker.drop_connections()

        scripted(first, fault)
        scripted(second, fault)
        assert await text_of(router, stream=True) == TEXT
        attempts = [(w.worker_id, r.attempt) for w in (first, second) for r in w.requests]
        assert sorted(attempts, key=lambda pair: pair[1]) in (
            [("a", 0), ("b", 1)],
            [("b", 0), ("a", 1)],
        )


@pytest.mark.parametrize(("evidence", "deaths"), [("strong", 3), ("weak", 5)])
async def test_a_request_that_kills_workers_is_never_run_again(
    router: Running, worker: FakeWorker, evidence: Evidence | None, deaths: int
) -> None:
    worker.evidence = evidence
    scripted(worker, error_at(3, "engine_lost", attempts=99))
    for _ in range(2):  # its caller's retry, whatever the seed, is refused before it is sent
        answer = await router.client.post("/v1/completions", json={**BODY, "seed": None})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "request_quarantined"
        assert answer.headers["x-should-retry"] == "false"
        assert [request.attempt for request in worker.requests] == list(range(deaths))
    scripted(worker, error_at(0, "engine_lost", attempts=0))
    other = await router.client.post("/v1/completions", json={**BODY, "prompt": "another"})
    assert other.status_code == 200
    assert await router.metric("loraplex_requests_quarantined_total") == 1
    await router.until_idle()


async def test_a_request_that_dead_engines_had_not_begun_is_answered(
    router: Running, worker: FakeWorker
) -> None:
    worker.evidence = "none"
    scripted(worker, error_at(0, "engine_lost", attempts=MAX_LOSSES))
    assert await text_of(router, stream=True) == TEXT
    assert len(worker.requests) == MAX_LOSSES + 1


async def test_the_innocent_beside_a_killer_are_answered(
    router: Running, worker: FakeWorker
) -> None:
    """The killer takes its worker with it whenever it runs; the others only run beside it."""

    prompts = ["killer", *(f"innocent {number}" for number in range(12))]

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        await worker.until(lambda: len(worker.requests) >= len(prompts))
        if bytes(request.prompt_ids).endswith(b"killer"):
            worker.drop_connections()
        return None

    worker.script = lambda request: [*ids_of(TEXT), EOS]
    worker.before_token = before_token

    async def ask(prompt: str) -> int:
        answer = await router.client.post("/v1/completions", json={**BODY, "prompt": prompt})
        return answer.status_code

    statuses = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    assert statuses == [500, *[200] * 12]
    deaths = [r for r in worker.requests if bytes(r.prompt_ids).endswith(b"killer")]
    assert len(deaths) == MAX_LOSSES, "nothing is known of a worker's end"
    await router.until_idle()


async def test_streams_of_a_silent_worker_go_on_elsewhere(tmp_path: Path) -> None:
    """And when it is heard again, what it still ran is stopped and what it says is not believed."""
    async with (
        running_worker(FakeWorker(worker_id="a")) as first,
        running_worker(FakeWorker(worker_id="b")) as second,
        running_router(tmp_path, first, second, worker_silence_s=0.6) as router,
    ):
        await second.until(lambda: second.connected)

        def fault(worker: FakeWorker, request: GenerateRequest, index: int) -> None:
            worker.silent = worker.silent or (request.attempt == 0 and index == 7)

        scripted(first, fault)
        scripted(second, fault)
        assert await text_of(router, stream=True) == TEXT
        frozen = first if first.silent else second
        assert {first.silent, second.silent} == {True, False}
        frozen.silent = False
        await frozen.until(lambda: bool(frozen.aborts))
        assert [abort.attempt for abort in frozen.aborts] == [0]
        assert await router.metric("loraplex_sequences_handed_over_total") == 1


async def test_what_a_worker_never_heard_of_runs_elsewhere(tmp_path: Path) -> None:
    """It speaks, and what runs there goes on; but nothing reaches it any more."""
    first, second = FakeWorker(worker_id="a"), FakeWorker(worker_id="b")
    async with (
        running_worker(first),
        running_worker(second),
        running_link(first.port) as near,
        running_link(second.port) as far,
        running_router(tmp_path, near, far, worker_silence_s=0.6) as router,
    ):
        await second.until(lambda: first.connected and second.connected)
        gate, running = asyncio.Event(), asyncio.Event()

        async def before_token(
            worker: FakeWorker, request: GenerateRequest, index: int
        ) -> ErrorCode | None:
            if index == 7 and request.attempt == 0 and not running.is_set():
                running.set()
                await gate.wait()
            return None

        for worker in (first, second):
            worker.script = lambda request: [*ids_of(TEXT), EOS]
            worker.before_token = before_token
        old = asyncio.create_task(text_of(router, stream=True))
        await running.wait()
        deaf, link = (first, near) if first.requests else (second, far)
        other = second if deaf is first else first
        await other.announce(ready=False)
        await poll(lambda: _able(router, 1))
        link.there.stall()
        new = asyncio.create_task(text_of(router, stream=True))
        await poll(lambda: _able(router, 0))
        await other.announce(ready=True)
        assert await new == TEXT
        assert [len(worker.requests) for worker in (deaf, other)] == [1, 1]
        gate.set()
        assert await old == TEXT  # it was not disturbed
        link.heal()
        await poll(lambda: _able(router, 2))
        await deaf.until(lambda: len(deaf.aborts) == 1)  # the one that came too late


async def _able(router: Running, count: int) -> bool:
    """Whether so many workers take new work."""
    return sum(view.able for view in router.service.bases.first.fleet.views) == count


async def test_a_lone_worker_may_be_silent(router: Running, worker: FakeWorker) -> None:
    """There is nobody else to go on with its streams: they wait for it."""
    heard = asyncio.Event()

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if index == 7 and not heard.is_set():
            worker.silent = True
            await heard.wait()
        return None

    worker.script = lambda request: [*ids_of(TEXT), EOS]
    worker.before_token = before_token
    asking = asyncio.create_task(text_of(router, stream=True))

    async def noticed() -> bool:
        return worker.silent and not router.service.bases.first.fleet.ready

    await poll(noticed)
    worker.silent = False
    heard.set()
    assert await asking == TEXT
    assert len(worker.requests) == 1


async def test_streams_wait_for_the_return_of_the_only_engine(
    router: Running, worker: FakeWorker
) -> None:
    """However often it is refused meanwhile, nothing is held against them."""

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if request.attempt == 0 and index == 7:
            await worker.announce(ready=False)
            return "engine_lost"
        return None

    worker.script = lambda request: [*ids_of(TEXT), EOS]
    worker.before_token = before_token
    asking = asyncio.create_task(text_of(router, stream=True))

    async def waits() -> bool:
        return len(router.service.bases.first.fleet.queue) == 1

    await poll(waits)
    assert not router.service.bases.first.fleet.ready
    await worker.announce(ready=True)
    assert await asking == TEXT
    assert [len(request.accepted_ids) for request in worker.requests] == [0, 7]


async def test_the_resumed_go_first(tmp_path: Path) -> None:
    """Their clients have waited already. (The credit itself goes to whoever waits for it.)"""
    worker = FakeWorker()
    worker.credits = 1
    async with running_worker(worker), running_router(tmp_path, worker) as router:
        queued = asyncio.Event()

        async def before_token(
            worker: FakeWorker, request: GenerateRequest, index: int
        ) -> ErrorCode | None:
            await queued.wait()
            return "engine_lost" if request.attempt == 0 and request is worker.requests[0] else None

        worker.script = lambda request: [*ids_of(TEXT), EOS]
        worker.before_token = before_token
        asking = [asyncio.create_task(text_of(router, stream=False)) for _ in range(3)]

        async def waiting() -> bool:
            return len(router.service.bases.first.fleet.queue) == 2

        await poll(waiting)
        queued.set()
        assert await asyncio.gather(*asking) == [TEXT] * 3
        assert [request.attempt for request in worker.requests] == [0, 0, 1, 0]


async def test_an_error_after_the_first_token_is_an_event(
    router: Running, worker: FakeWorker
) -> None:
    scripted(worker, error_at(3, "internal"))
    answer = await router.client.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.status_code == 200
    *tokens, last = events_of(answer.text)
    assert "".join(event["choices"][0]["text"] for event in tokens) == TEXT[:3]
    assert last["error"]["code"] == "internal_error"
    lorax = {"inputs": "x", "parameters": {"max_new_tokens": 99}}
    answer = await router.client.post("/generate_stream", json=lorax)
    assert set(events_of(answer.text)[-1]) == {"error", "error_type"}


@pytest.mark.parametrize(
    ("code", "status"),
    [("invalid_request", 400), ("out_of_memory", 503), ("deadline", 504), ("internal", 500)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_a_status(
    router: Running, worker: FakeWorker, code: ErrorCode, status: int, stream: bool
) -> None:
    scripted(worker, error_at(0, code))
    answer = await router.client.post("/v1/completions", json={**BODY, "stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert len(worker.requests) == 1


async def test_a_gap_in_the_tokens_is_mended(router: Running, worker: FakeWorker) -> None:
    """A worker that skips a token is not believed: the rest is asked for again."""

    def fault(worker: FakeWorker, request: GenerateRequest, index: int) -> None:
        worker.skip_index = 5 if request.attempt == 0 else None

    scripted(worker, fault)
    assert await text_of(router, stream=True) == TEXT
    assert len(worker.requests[1].accepted_ids) == 5
    assert worker.aborts[0].attempt == 0


async def test_an_end_without_what_came_before_is_no_end(
    router: Running, worker: FakeWorker
) -> None:
    """Tokens 5 to 8 were lost, and the last event has none by which that shows."""

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if request.attempt == 0 and index == 5:
            end = TokenEvent(request.request_id, 0, 0, 9, (), finish="length")
            await worker.send_raw(encode(StepEvents(9, (end,))))
        return None

    scripted(worker, error_at(0, "internal", attempts=0))
    worker.before_token = before_token
    assert await text_of(router, stream=True) == TEXT
    assert len(worker.requests[1].accepted_ids) == 5


async def test_a_lost_last_event_is_no_lost_answer(router: Running, worker: FakeWorker) -> None:
    """All tokens came, the word that they were all did not."""

    def fault(worker: FakeWorker, request: GenerateRequest, index: int) -> None:
        worker.hold_finish = request.attempt == 0

    scripted(worker, fault)
    pending = asyncio.create_task(
        router.client.post("/v1/completions", json={**BODY, "max_tokens": 4})
    )
    await worker.until(lambda: worker.held == 1)
    worker.drop_connections()
    answer = await pending
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT[:4], "length")
