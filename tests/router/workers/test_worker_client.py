"""The connection to a worker: hello, card, credits, frames that are none, coming back."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from loraplex.adapters.chat.template import MAX_TEMPLATE_CHARS
from loraplex.server.protocol import (
    PROTOCOL_VERSION,
    ErrorCode,
    GenerateRequest,
    StepEvents,
    TokenEvent,
    encode,
)
from tests.router.fake_worker import (
    BASE_NAME,
    EOS,
    FakeWorker,
    ids_of,
    make_card,
    running_worker,
)
from tests.router.serving import Running, poll, running_router

BODY = {"model": BASE_NAME, "prompt": "x"}


async def complete(router: Running) -> str:
    answer = await router.client.post("/v1/completions", json={**BODY, "max_tokens": 99})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def until_problem(router: Running, words: str) -> None:
    async def told() -> bool:
        return words in (router.service.roster.clients[0].problem or "")

    await poll(told)


async def test_the_card_is_fetched_once(tmp_path: Path) -> None:
    async with running_worker(FakeWorker()) as worker:
        for _ in range(2):
            async with running_router(tmp_path, worker) as router:
                assert await complete(router) == "base says hello 0"
        assert worker.card_fetches == 1
        saved = next((tmp_path / "cache" / "cards").iterdir())
        saved.write_bytes(b"{}")  # not what its name says: fetched again
        async with running_router(tmp_path, worker) as router:
            assert await complete(router) == "base says hello 0"
        assert worker.card_fetches == 2


async def test_comes_back_after_a_restart(router: Running, worker: FakeWorker) -> None:
    assert await complete(router) == "base says hello 0"
    await worker.stop()

    async def gone() -> bool:
        return (await router.client.get("/health/ready")).status_code == 503

    await poll(gone)
    await worker.start()
    await router.until_ready()
    assert await complete(router) == "base says hello 0"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\x93\xa2se\x01",
        b"\xff" * 1000,
        "text",
        msgspec.msgpack.encode(["zz", 1]),
        msgspec.msgpack.encode(["se", "not a number", []]),
        msgspec.msgpack.encode({"type": "se"}),
        msgspec.msgpack.encode(["wh", "again", 1, "d" * 64, 3, PROTOCOL_VERSION]),
        msgspec.msgpack.encode(["as", "l0", "ready", None]),
    ],
)
async def test_frames_that_are_none(
    router: Running, worker: FakeWorker, message: bytes | str
) -> None:
    """They cost the connection, never the router; what ran is resumed."""
    sent = asyncio.Event()

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if request.attempt == 0 and index == 3 and not sent.is_set():
            sent.set()
            await worker.send_raw(message)
            await asyncio.Event().wait()
        return None

    worker.before_token = before_token
    is_late_load = message == msgspec.msgpack.encode(["as", "l0", "ready", None])
    if is_late_load:  # about a load that nobody asked for: no fault, and no effect
        worker.before_token = FakeWorker().before_token
        await worker.send_raw(message)
    assert await complete(router) == "base says hello 0"
    assert len(worker.requests) == (1 if is_late_load else 2)


async def test_events_of_unknown_sequences_are_dropped(router: Running, worker: FakeWorker) -> None:
    stray = TokenEvent("nobody", 0, 0, 5, (1, 2, 3), finish="stop")

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        late = TokenEvent(request.request_id, 7, 0, index, (33,))
        await worker.send_raw(encode(StepEvents(1, (stray, late))))
        return None

    worker.before_token = before_token
    assert await complete(router) == "base says hello 0"


async def test_a_wrong_secret(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, wait=False, secret="wrong") as router,
    ):
        await until_problem(router, "401")
        assert not worker.connected


async def test_another_protocol_version(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.version = PROTOCOL_VERSION + 1
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, wait=False) as router,
    ):
        await until_problem(router, f"protocol version {PROTOCOL_VERSION + 1}")


async def test_another_base_model_is_not_mixed_in(tmp_path: Path) -> None:
    other = FakeWorker(make_card(base_digest="f" * 64, names=("other",)), worker_id="b")
    async with (
        running_worker(FakeWorker(worker_id="a")) as first,
        running_router(tmp_path, first, other, wait=False) as router,
    ):
        await router.until_ready()
        await other.start()
        try:

            async def refused() -> bool:
                return "this router serves fake-base" in (
                    router.service.roster.clients[1].problem or ""
                )

            await poll(refused)
            assert await complete(router) == "base says hello 0"
            assert not other.requests
        finally:
            await other.stop()


async def test_workers_of_one_base_may_differ_in_options(tmp_path: Path) -> None:
    """As while they are started anew one by one: all names, and a context that each has."""
    first = FakeWorker(make_card(names=("old",), max_context=100), worker_id="a")
    second = FakeWorker(make_card(names=("new", "old"), max_context=200), worker_id="b")

    async def told(router: Running) -> tuple[set[str], int]:
        info = (await router.client.get("/info")).json()
        return set(router.service.bases.first.limits.base_names), info["max_total_tokens"]

    async with running_router(tmp_path, first, second, wait=False) as router:

        async def until(names: set[str], context: int) -> None:
            async def so() -> bool:
                return await told(router) == (names, context)

            await poll(so)

        async with running_worker(first):
            await router.until_ready()
            await until({"old"}, 100)
            async with running_worker(second):
                await until({"old", "new"}, 100)
                third = FakeWorker(make_card(names=("new",), max_context=300), worker_id="a")
                third.port = first.port
                await first.stop()
                first.drop_connections()
                await until({"new", "old"}, 200)
                async with running_worker(third):
                    await until({"new", "old"}, 200)
                    second.drop_connections()
                    await second.stop()
                    await until({"new"}, 300)
                    answer = await router.client.post(
                        "/v1/completions", json={"model": "new", "prompt": "x" * 250}
                    )
                    assert answer.status_code == 200, answer.text


async def test_cards_are_not_kept_where_no_folder_can_be(tmp_path: Path) -> None:
    """Which only costs a fetch at each connection."""
    (tmp_path / "file").write_text("")
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, cache_dir=tmp_path / "file") as router,
    ):
        assert await complete(router) == "base says hello 0"


async def test_of_two_base_models_at_once_one_is_served(tmp_path: Path) -> None:
    other = FakeWorker(make_card(base_digest="f" * 64, names=("other",)), worker_id="b")
    async with (
        running_worker(FakeWorker(worker_id="a")) as first,
        running_worker(other),
        running_router(tmp_path, first, other) as router,
    ):

        async def one_refused() -> bool:
            problems = [client.problem or "" for client in router.service.roster.clients]
            return any("this router serves" in problem for problem in problems)

        await poll(one_refused)
        assert len(router.service.bases.first.fleet.views) == 1


async def test_what_waits_for_its_base_model_does_not_go_on_with_another(tmp_path: Path) -> None:
    first = FakeWorker()
    other = FakeWorker(make_card(base_digest="f" * 64, names=("other",)))
    other.port = first.port
    gate = asyncio.Event()

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        await gate.wait()
        return None

    first.before_token = before_token
    async with running_router(tmp_path, first, wait=False) as router:
        async with running_worker(first):
            await router.until_ready()
            asking = asyncio.create_task(router.client.post("/v1/completions", json=BODY))
            await first.until(lambda: len(first.requests) == 1)
        async with running_worker(other):
            await until_problem(router, "this router serves fake-base")
            assert not other.requests
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await router.until_ready()  # nothing waits any more: the other base is welcome
            answer = await router.client.post("/v1/completions", json={**BODY, "model": "other"})
            assert answer.status_code == 200


async def test_a_card_that_no_tokenizer_can_read(tmp_path: Path) -> None:
    worker = FakeWorker(make_card(tokenizer_json="{}"))
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, wait=False) as router,
    ):
        await until_problem(router, "tokenizer")
        assert (await router.client.get("/health/ready")).status_code == 503


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}", "cannot be compiled"),
        ("{{ messages | no_filter }}", "cannot be compiled"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "characters"),
    ],
)
async def test_a_chat_template_that_cannot_be_used_costs_chats_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, says: str
) -> None:
    worker = FakeWorker(make_card(chat_template=template))
    async with running_worker(worker), running_router(tmp_path, worker) as router:
        chat = {"model": BASE_NAME, "messages": [{"role": "user", "content": "hi"}]}
        for _ in range(2):
            answer = await router.client.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "template_error"
            assert says in error["message"]
        assert (await router.client.post("/v1/completions", json=BODY)).status_code == 200
        body = {"inputs": "hi", "parameters": {"max_new_tokens": 2}}
        assert (await router.client.post("/generate", json=body)).status_code == 200
        assert (await router.client.get("/v1/fleet")).json()["base"]["chat"] is False
    (warning,) = [r.getMessage() for r in caplog.records if "cannot chat" in r.getMessage()]
    assert says in warning


async def test_credits_are_kept(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.credits = 3
    running: set[tuple[str, int]] = set()
    most = 0
    three = asyncio.Barrier(3)

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        nonlocal most
        running.add((request.request_id, request.choice))
        most = max(most, len(running))
        if index == 0:
            await three.wait()  # it takes three at once to get any further
        else:
            running.discard((request.request_id, request.choice))
        return None

    worker.before_token = before_token
    worker.script = lambda request: [*ids_of("a"), EOS]
    async with running_worker(worker), running_router(tmp_path, worker) as router:
        answers = await asyncio.gather(
            *(router.client.post("/v1/completions", json={**BODY, "n": 2}) for _ in range(9))
        )
        assert {answer.status_code for answer in answers} == {200}
    assert most == 3
    assert len(worker.requests) == 18


async def test_of_two_workers_with_one_name_the_later_is_believed(tmp_path: Path) -> None:
    """The other is refused for as long as both are there; nothing is sent to it."""
    old, new = FakeWorker(worker_id="same"), FakeWorker(worker_id="same")
    new.epoch = old.epoch + 1
    async with running_worker(old), running_router(tmp_path, old, new) as router:
        answer = await router.client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        assert len(old.requests) == 1
        async with running_worker(new):

            async def fenced() -> bool:
                clients = router.service.roster.clients
                return [client.session is not None for client in clients] == [False, True]

            await poll(fenced)
            answer = await router.client.post("/v1/completions", json=BODY)
            assert answer.status_code == 200
            assert (len(old.requests), len(new.requests)) == (1, 1)

            async def told() -> bool:
                return "--worker-id" in (router.service.roster.clients[0].problem or "")

            await poll(told)
