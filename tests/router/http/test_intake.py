"""Many requests at once: they begin in order, few in an iteration of the event loop."""

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.generation.sequence import SequenceRun
from loraplex.router.http.intake import Intake
from loraplex.server.protocol import GenerateRequest
from tests.router.fake_worker import BASE_NAME, EOS, FakeWorker, ids_of
from tests.router.serving import Running


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
    st.sets(st.integers(0, 72)),
)
def test_they_begin_in_order_and_few_in_an_iteration(
    at_once: int, arrivals: list[int], leaving: set[int]
) -> None:
    """arrivals: how many come in each iteration. leaving: those that are cancelled at once."""
    total = sum(arrivals)
    begun: list[tuple[int, int]] = []

    async def request(intake: Intake, number: int, iteration: list[int]) -> None:
        await intake.enter("one caller")
        begun.append((number, iteration[0]))

    async def scenario() -> None:
        intake, iteration = Intake(at_once), [0]
        tasks: list[asyncio.Task[None]] = []

        def tick() -> None:
            iteration[0] += 1
            asyncio.get_running_loop().call_soon(tick)

        tick()
        for count in arrivals:
            new = [
                asyncio.create_task(request(intake, number, iteration))
                for number in range(len(tasks), len(tasks) + count)
            ]
            tasks += new
            await asyncio.sleep(0)
            for task in [task for task in new if tasks.index(task) in leaving]:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    numbers = [number for number, _ in begun]
    assert numbers == sorted(numbers)
    assert set(range(total)) - leaving <= set(numbers)
    assert max(Counter(iteration for _, iteration in begun).values(), default=0) <= at_once


async def test_callers_take_turns() -> None:
    """Who comes behind many of another caller begins with the next few."""
    intake, begun = Intake(2), list[tuple[str, int]]()

    async def request(caller: str, number: int) -> None:
        await intake.enter(caller)
        begun.append((caller, number))

    asked = [("many", 0), ("many", 1), *(("many", n) for n in range(2, 9)), ("few", 0), ("few", 1)]
    await asyncio.gather(*(request(*each) for each in asked))
    few = [place for place, (caller, _) in enumerate(begun) if caller == "few"]
    assert few == [3, 5]
    assert sorted(begun[:2]) == [("many", 0), ("many", 1)]
    assert [n for caller, n in begun if caller == "many"] == list(range(9))


async def test_the_first_reaches_a_worker_before_the_last_begins(
    router: Running, worker: FakeWorker
) -> None:
    under_way: list[int] = []

    def script(request: GenerateRequest) -> list[int]:
        under_way.append(router.service.dispatcher.running)
        return [*ids_of("an answer"), EOS]

    worker.script = script
    url, many = router.client.base_url, 300
    body = json.dumps({"model": BASE_NAME, "prompt": "x", "max_tokens": 9}).encode()
    fields = ("host: x", "connection: close", "content-type: application/json")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields, f"content-length: {len(body)}"))
    streams = [await asyncio.open_connection(url.host, url.port) for _ in range(many)]
    try:
        for _, writer in streams:
            writer.write(head.encode() + b"\r\n\r\n" + body)
        answers = await asyncio.gather(*(reader.read() for reader, _ in streams))
    finally:
        for _, writer in streams:
            writer.close()
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert under_way[0] < many / 2


async def test_others_have_their_turn_between_the_starts_of_many_sequences(
    router: Running, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.script = lambda request: [*ids_of("an answer"), EOS]
    started, iteration, start = Counter[int](), 0, SequenceRun.start

    def tick() -> None:
        nonlocal iteration
        iteration += 1
        asyncio.get_running_loop().call_soon(tick)

    def counted(run: SequenceRun) -> None:
        started[iteration] += 1
        start(run)

    monkeypatch.setattr(SequenceRun, "start", counted)
    tick()
    body = {"model": BASE_NAME, "prompt": ["x"] * 25, "n": 8, "max_tokens": 9}
    answer = await router.client.post("/v1/completions", json=body)
    assert len(answer.json()["choices"]) == sum(started.values()) == 200
    assert max(started.values()) <= 16
