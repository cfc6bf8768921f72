"""Steady streams, and what new requests and loads of adapters beside them do to their tokens."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import httpx

from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.adapter_orders import absent_first, client, order, order_all
from loraplex.launcher.bench.load.scrape import growth, read_counters
from loraplex.launcher.bench.load.serve import send, with_base_model
from loraplex.launcher.bench.load.stream_client import StreamProtocol, open_stream
from loraplex.launcher.bench.load.target import Target, body_of, model_of
from loraplex.launcher.bench.load.windows import Observed, Window
from loraplex.launcher.bench.load.workload import Call, Popularity, arrivals
from loraplex.launcher.bench.report import Outcome
from loraplex.launcher.refusals import error_text
from loraplex.router.http.client import http_client

_BEGIN_S = 120.0
_SCRAPE_S = 5.0
_TOKEN_IDS = (100, 1000)
_ORDERS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class StreamsPlan:
    """Steady streams are begun anew for each window, each with its own of `stream_adapters` (none:
    the base). Times in seconds, lengths in tokens. settle_s: from the streams' first tokens to the
    window. worker_url: whose counters are read."""

    target: Target
    names: tuple[str, ...]
    stream_adapters: tuple[str, ...]
    streams: int
    seconds: float
    settle_s: float
    stream_prompt: int
    stream_output: int
    new_prompt: int
    new_output: int
    seed: int
    worker_url: str | None = None
    registered: bool = True

    def model_of(self, name: str) -> str:
        return model_of(name, self.registered)


async def run_window(plan: StreamsPlan, window: Window) -> Observed:
    """Raises BenchError, ValueError for a window without adapters."""
    adapters = window.adapters(plan.names)
    if window.preload:
        orders = await order_all(plan.target, "load", adapters, _ORDERS_AT_ONCE)
        if orders.failed:
            examples = "; ".join(
                f"{name}: {why}" for name, why in itertools.islice(orders.errors.items(), 3)
            )
            raise BenchError(f"{orders.failed} adapters were not loaded, such as {examples}")
    # Prompts of one window are not in another's prefix cache.
    random = Random(f"{plan.seed} {window.label}")
    async with (
        client(plan.target, 4 * _ORDERS_AT_ONCE) as http,
        http_client(_SCRAPE_S) as worker,  # which is shown no key
        _steady(plan, random) as steady,
    ):
        await asyncio.sleep(plan.settle_s)
        before = await read_counters(worker, plan.worker_url)
        begin = time.monotonic()
        end = begin + plan.seconds
        new, failed, after = await asyncio.gather(
            _send_new(plan, window, adapters, random, end),
            _order_loads(plan, window, adapters, http, end),
            _counters_at(end, worker, plan.worker_url),
        )
        broken = [stream for stream in steady if stream.done.done()]
        if broken:
            fault = broken[0].answer.fault
            raise BenchError(
                f"{len(broken)} of {len(steady)} steady streams ended within window "
                f"{window.label}: {'raise --stream-output' if fault is None else fault[1]}"
            )
        times = [list(stream.answer.token_s) for stream in steady]
    return Observed(window, begin, end, times, new, failed, growth(before, after))


async def _counters_at(when: float, http: httpx.AsyncClient, url: str | None) -> dict[str, float]:
    await asyncio.sleep(max(0.0, when - time.monotonic()))
    return await read_counters(http, url)


@asynccontextmanager
async def _steady(plan: StreamsPlan, random: Random) -> AsyncIterator[list[StreamProtocol]]:
    """The streams, each after its first token; they are left at the end."""
    names = itertools.cycle([plan.model_of(name) for name in plan.stream_adapters] or [None])
    calls = [
        Call(i, 0.0, next(names), _prompt(random, plan.stream_prompt), plan.stream_output)
        for i in range(plan.streams)
    ]
    target = plan.target if plan.stream_adapters else await with_base_model(plan.target)
    opened: list[StreamProtocol] = []

    async def begin(call: Call) -> None:
        stream = await open_stream(target.address, body_of(target, call), target.headers)
        opened.append(stream)
        await stream.began.wait()

    try:
        async with asyncio.timeout(_BEGIN_S):
            await asyncio.gather(*map(begin, calls))
        ended = [stream for stream in opened if stream.done.done()]
        if ended:
            raise BenchError(
                f"{len(ended)} of {len(opened)} steady streams ended at once "
                f"(status {ended[0].status}): {_fault(ended[0])}"
            )
        yield opened
    except TimeoutError:
        raise BenchError(f"steady streams had no token within {_BEGIN_S:g} s") from None
    except OSError as error:
        raise BenchError(f"the server cannot be reached: {error}") from error
    finally:
        for stream in opened:
            stream.abandon()


def _fault(stream: StreamProtocol) -> str:
    return error_text(stream.head) if stream.answer.fault is None else stream.answer.fault[1]


async def _send_new(
    plan: StreamsPlan, window: Window, adapters: Sequence[str], random: Random, end: float
) -> list[Outcome]:
    """Poisson arrivals until `end`, each waited for. Adapters are drawn uniformly."""
    outcomes: list[Outcome] = []
    popularity = Popularity.zipf(len(adapters), 0.0)
    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(_times(window.new, random)):
            if begin + at >= end:
                break
            await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
            name = plan.model_of(adapters[popularity.draw(random)])
            prompt = _prompt(random, plan.new_prompt)
            outcomes.append(Outcome(name, False, 0.0))
            call = Call(number, at, name, prompt, plan.new_output)
            group.create_task(send(plan.target, call, outcomes[-1]))
    return outcomes


async def _order_loads(
    plan: StreamsPlan, window: Window, adapters: Sequence[str], http: httpx.AsyncClient, end: float
) -> list[str]:
    """Evenly, one adapter after the other, those first that are not on the device. Returns what was
    said of those that were refused."""
    if not window.loads:
        return []
    absent = await absent_first(http, adapters)
    errors: list[str] = []

    async def load(name: str) -> None:
        error = await order(http, "load", name)
        if error is not None:
            errors.append(error)

    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, name in enumerate(itertools.cycle(absent)):
            at = begin + number / window.loads
            if at >= end:
                break
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            group.create_task(load(name))
    return errors


def _times(rate: float, random: Random) -> Iterable[float]:
    """Of arrivals; none without a rate."""
    return arrivals(random, rate, 1.0) if rate else ()


def _prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(*_TOKEN_IDS) for _ in range(length)]
