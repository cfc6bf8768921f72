"""The real worker process with the certifying engine: routers, credits, aborts, faults."""

import asyncio
import hashlib
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from websockets.exceptions import InvalidStatus

from loraplex.server import protocol
from loraplex.server.model.checkpoint.checkpoint import base_digest
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.certifying.factory import certify
from tests.server.worker.worker_process import (
    LONG,
    SECRET,
    TIMEOUT_S,
    VOCAB,
    Router,
    Worker,
    connected,
    dial,
    request,
    running,
    start,
    write_model,
)

OPTIONS = CertifyOptions(vocab_size=VOCAB, eos_token_ids=(2,))
CREDITS = 24


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    with running(folder, "--max-running", "8") as worker:
        yield worker


async def idle(router: Router) -> None:
    await router.until_status(running=0, waiting=0)


async def test_hello_and_card_agree(worker: Worker, tmp_path: Path) -> None:
    async with connected(worker) as router:
        assert router.hello.credits == CREDITS
    answer = worker.get("/card")
    assert answer.status_code == 200
    assert hashlib.sha256(answer.content).hexdigest() == router.hello.card_digest
    assert answer.headers["etag"] == f'"{router.hello.card_digest}"'
    card = msgspec.json.decode(answer.content, type=protocol.ModelCard)
    assert card.vocab_size == VOCAB
    assert card.names[0] == "org/base"
    real = base_digest(write_model(tmp_path / "model"))
    assert card.base_digest != real, "what is invented goes beside nothing that is computed"


@pytest.mark.parametrize("secret", [None, "wrong", SECRET + "x", SECRET[:-1]])
async def test_a_wrong_secret_is_refused(worker: Worker, secret: str | None) -> None:
    assert worker.get("/card", secret).status_code == 401
    with pytest.raises(InvalidStatus) as caught:
        async with dial(worker, secret):
            raise AssertionError("came in")
    assert caught.value.response.status_code == 401


async def test_answers_are_the_certified_ones_and_steps_are_frames(worker: Worker) -> None:
    names = [f"r{number}" for number in range(6)]
    async with connected(worker) as router:
        await router.send(*(request(name, 8, prompt=(3, 4, len(name))) for name in names))
        await router.until_finished(*names)
        for name in names:
            expected = certified_output(None, [3, 4, len(name)], 8, OPTIONS, min_tokens=8)
            assert router.tokens_of(name) == expected
            assert router.finished[name].finish == "length"
        steps = [frame.step for frame in router.frames]
        assert len(steps) == len(set(steps)), "one frame a step"
        assert any(len(frame.events) > 1 for frame in router.frames)


async def test_two_routers_may_use_the_same_names(worker: Worker) -> None:
    async with connected(worker, "a") as first, connected(worker, "b") as second:
        await first.send(request("same", 5))
        await second.send(request("same", 7))
        await first.until_finished("same")
        await second.until_finished("same")
        assert (len(first.tokens_of("same")), len(second.tokens_of("same"))) == (5, 7)


async def test_a_request_beyond_the_credits_is_refused_and_the_rest_goes_on(
    worker: Worker,
) -> None:
    names = [f"long{number}" for number in range(CREDITS)]
    async with connected(worker) as router, connected(worker) as other:
        await idle(router)
        await router.send(*(request(name, LONG) for name in names))
        await router.until_status(running=8, waiting=CREDITS - 8)
        await other.send(request("one more"))
        ended = await other.until_finished("one more")
        assert (ended["one more"].finish, ended["one more"].error) == ("error", "overloaded")
        await router.send(*(protocol.Abort(name, 0) for name in names))
        ended = await router.until_finished(*names)
        assert {event.finish for event in ended.values()} == {"abort"}
        await other.send(request("again"))
        assert (await other.until_finished("again"))["again"].finish == "length"


async def test_a_vanished_router_frees_its_sequences(worker: Worker) -> None:
    async with connected(worker) as watcher:
        async with connected(worker) as router:
            await router.send(*(request(f"gone{n}", LONG) for n in range(8)))
            await router.until_started("gone7")
            router.socket.transport.abort()
        async with asyncio.timeout(TIMEOUT_S):
            while worker.metric("sequences"):
                await watcher.receive()


async def test_bad_values_end_the_request_only(worker: Worker) -> None:
    bad = {
        "ids": request("ids", prompt=(VOCAB,)),
        "digest": request("digest", adapter="../../x"),
        "unknown": request("unknown", adapter="0a" * 32),
        "seed": msgspec.structs.replace(request("seed"), seed=-1),
    }
    async with connected(worker) as router:
        await router.send(*bad.values(), request("good"))
        ended = await router.until_finished(*bad, "good")
        assert ended["good"].finish == "length"
        assert ended["unknown"].error == "adapter_unavailable"
        for name in ("ids", "digest", "seed"):
            assert (ended[name].finish, ended[name].error) == ("error", "invalid_request")
            assert ended[name].message


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1 no such type",
        b"\x93\xa2gr\x01",
        b"\xff" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        protocol.encode(protocol.RouterHello("again")),
        protocol.encode(protocol.Abort("x" * 10_000, 0)),
        protocol.encode(protocol.Abort("x", -1)),
        protocol.encode(request("\ud7ff" * 10_000)),
        "text",
    ],
)
async def test_a_bad_frame_costs_its_connection_only(worker: Worker, frame: bytes | str) -> None:
    async with connected(worker, "good") as good:
        await good.send(request("before", LONG))
        await good.until_started("before")
        async with connected(worker, "bad") as bad:
            await bad.socket.send(frame)
            assert await bad.until_closed()
        await good.send(protocol.Abort("before", 0), request("after"))
        ended = await good.until_finished("before", "after")
        assert (ended["before"].finish, ended["after"].finish) == ("abort", "length")


async def test_a_sequence_submitted_twice_costs_the_connection(worker: Worker) -> None:
    async with connected(worker) as router:
        await router.send(request("twice", LONG), request("twice", LONG))
        assert "twice" in await router.until_closed()


async def test_another_version_is_refused_with_its_reason(worker: Worker) -> None:
    async with dial(worker) as client:
        await client.send(protocol.encode(protocol.RouterHello("old", version=99)))
        async with asyncio.timeout(TIMEOUT_S):
            await client.wait_closed()
        assert client.close_code == 1002
        assert "99" in (client.close_reason or "")


@pytest.mark.exhaustive
async def test_a_router_that_does_not_read_is_cut_off_and_stalls_nobody(tmp_path: Path) -> None:
    """Its aborted sequences show that the worker gave up on it, not on the others.

    A slow machine misses the answer to a ping before the buffer is full: both cut it off.
    """
    with running(tmp_path, executor=certify()) as worker:
        async with connected(worker, "good") as good, connected(worker, "slow") as slow:
            slow.socket.transport.pause_reading()
            sampling = protocol.SamplingParams(max_tokens=LONG, ignore_eos=True, logprobs=20)
            flood = [msgspec.structs.replace(request(f"s{n}"), sampling=sampling) for n in range(8)]
            await slow.send(*flood)
            await good.until_status(running=8)
            await good.send(request("through", 4))
            await idle(good)
            await good.until_finished("through")
            assert worker.metric("routers") == 1
            slow.socket.transport.abort()
        assert worker.metric("output_tokens_total") < 8 * LONG, "it was served to the end"


async def test_only_the_declared_sockets_listen(worker: Worker) -> None:
    family = [psutil.Process(worker.process.pid)]
    family += family[0].children(recursive=True)
    listening = {
        connection.laddr.port
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {worker.port}


async def test_a_killed_engine_ends_each_sequence_once_and_comes_back(tmp_path: Path) -> None:
    names = [f"lost{number}" for number in range(8)]
    with running(tmp_path, "--max-running", "8") as worker:
        async with connected(worker) as router:
            first = await router.until_status(ready=True)
            await router.send(*(request(name, LONG) for name in names))
            await router.until_started(*names)
            await router.send(request("waiting"))
            await router.until_status(running=8, waiting=1)
            psutil.Process(worker.engine_pid).send_signal(signal.SIGKILL)
            ended = await router.until_finished(*names, "waiting")
            # Weak where the signal came while a step was planned, which may be about any sequence.
            assert ended["waiting"].evidence in ("none", "weak")
            for name in names:
                event = ended[name]
                assert (event.finish, event.error) == ("error", "engine_lost")
                assert event.index == len(router.tokens_of(name))
            await router.send(request("too early"))
            refused = (await router.until_finished("too early"))["too early"]
            assert refused.error == "overloaded"
            back = await router.until_status(ready=True)
            assert back.epoch > first.epoch
            resumed = router.tokens_of("lost0")[:5]
            await router.send(
                msgspec.structs.replace(request("lost0", 8, accepted=tuple(resumed)), attempt=1)
            )
            async with asyncio.timeout(TIMEOUT_S):
                while router.events[-1].attempt != 1 or router.events[-1].finish is None:
                    await router.receive()
            again = [t for e in router.events if e.attempt == 1 for t in e.token_ids]
            assert resumed + again == certified_output(None, [1, 5, 9], 8, OPTIONS, min_tokens=8)
        assert worker.metric("engine_restarts_total") == 1


async def test_a_stuck_engine_is_killed_and_replaced(tmp_path: Path) -> None:
    with running(tmp_path, "--step-timeout-s", "1") as worker:
        async with connected(worker) as router:
            await router.until_status(ready=True)
            stuck = worker.engine_pid
            await router.send(request("stuck", LONG))
            await router.until_started("stuck")
            psutil.Process(stuck).send_signal(signal.SIGSTOP)
            ended = await router.until_finished("stuck")
            assert ended["stuck"].error == "engine_lost"
            await router.until_status(ready=True)
            assert worker.engine_pid != stuck
        assert "makes no step" in worker.log.read_text()


async def test_a_stopped_worker_finishes_what_runs(tmp_path: Path) -> None:
    """One that takes longer than the limit ends in an error that lets the router resume."""
    worker = start(tmp_path, "--drain-timeout-s", "5")
    try:
        worker.wait_ready()
        async with connected(worker) as router:
            await router.send(request("short", 150), request("endless", LONG))
            await router.until_started("short", "endless")
            worker.process.send_signal(signal.SIGTERM)
            await router.until_status(draining=True, ready=False)
            await router.send(request("late"))
            ended = await router.until_finished("short", "late", "endless")
            assert ended["short"].finish == "length"
            assert ended["late"].error == "draining"
            assert ended["endless"].error == "draining"
            assert ended["endless"].index == len(router.tokens_of("endless"))
        assert worker.process.wait(TIMEOUT_S) == 0, worker.log.read_text()
        assert "Traceback" not in worker.log.read_text()
    finally:
        worker.process.kill()
        worker.process.wait(TIMEOUT_S)


async def test_a_killed_worker_takes_its_engine_along(tmp_path: Path) -> None:
    worker = start(tmp_path)
    try:
        worker.wait_ready()
        engine = psutil.Process(worker.engine_pid)
    finally:
        worker.process.kill()
        worker.process.wait(TIMEOUT_S)
    _, alive = psutil.wait_procs([engine], TIMEOUT_S)
    assert not alive
