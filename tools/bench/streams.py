"""Tokens of steady streams, while new requests and loads of adapters come beside them."""

import argparse
import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from loraplex.launcher.bench.commands import (
    add_callers,
    add_folders,
    add_server,
    names_in,
    run_async,
    target_of,
)
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.serve import StreamProtocol, open_stream, send, with_base_model
from loraplex.launcher.bench.load.target import Target, body_of, model_of
from loraplex.launcher.bench.load.workload import Call, arrivals
from loraplex.launcher.bench.report import Outcome
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import above, number, whole, worded
from loraplex.launcher.options import OptionError
from loraplex.launcher.refusals import error_text
from loraplex.launcher.router_client import server_url
from loraplex.router.http.client import http_client
from tools.bench.adapters import absent_first, add_operator, client, order, order_all
from tools.bench.windows import WINDOW_HELP, Observed, Window, summarise_window, window_table

_BEGIN_S = 120.0
_SCRAPE_S = 5.0
_TOKEN_IDS = (100, 1000)
_ORDERS_AT_ONCE = 16
_LOADS = "loraplex_worker_adapter_load_seconds"
_COUNTERS = {
    "loraplex_worker_adapter_copied_bytes_total": "copied_bytes",
    "loraplex_worker_adapter_reloads_total": "reloads",
    "loraplex_worker_steps_total": "steps",
}
_LOOKUPS = "loraplex_worker_adapter_lookups_total"


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
        steady(plan, random) as streams,
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
        broken = [stream for stream in streams if stream.done.done()]
        if broken:
            fault = broken[0].answer.fault
            raise BenchError(
                f"{len(broken)} of {len(streams)} steady streams ended within window "
                f"{window.label}: {'raise --stream-output' if fault is None else fault[1]}"
            )
        times = [list(stream.answer.token_s) for stream in streams]
    return Observed(window, begin, end, times, new, failed, growth(before, after))


async def _counters_at(when: float, http: httpx.AsyncClient, url: str | None) -> dict[str, float]:
    await asyncio.sleep(max(0.0, when - time.monotonic()))
    return await read_counters(http, url)


@asynccontextmanager
async def steady(plan: StreamsPlan, random: Random) -> AsyncIterator[list[StreamProtocol]]:
    """Yields the streams, each after its first token; they are left at the end."""
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
    """Sends requests at Poisson arrivals until `end`, and waits for each. Adapters are drawn
    uniformly."""
    outcomes: list[Outcome] = []
    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(_times(window.new, random)):
            if begin + at >= end:
                break
            await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
            name = plan.model_of(random.choices(adapters)[0])
            prompt = _prompt(random, plan.new_prompt)
            outcomes.append(Outcome(name, False, 0.0))
            call = Call(number, at, name, prompt, plan.new_output)
            group.create_task(send(plan.target, call, outcomes[-1]))
    return outcomes


async def _order_loads(
    plan: StreamsPlan, window: Window, adapters: Sequence[str], http: httpx.AsyncClient, end: float
) -> list[str]:
    """Orders loads evenly, adapters first that are not on the device. Returns the words of
    refusals."""
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
    """Draws times of arrivals; none without a rate."""
    return arrivals(random, rate, 1.0) if rate else ()


def _prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(*_TOKEN_IDS) for _ in range(length)]


# ---- counters of the worker


def parse_counters(text: str) -> dict[str, float]:
    """Reads an exposition: `copy_sum`, `copy_count` and so for each stage of a load, `lookups_host`
    for each tier, `steps`, `copied_bytes`, `reloads`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels, value = sample.name, sample.labels, sample.value
            if name in (f"{_LOADS}_sum", f"{_LOADS}_count"):
                found[f"{labels['stage']}_{name.removeprefix(_LOADS + '_')}"] = value
            elif name == _LOOKUPS:
                found[f"lookups_{labels['tier']}"] = value
            elif name in _COUNTERS:
                found[_COUNTERS[name]] = value
    return found


async def read_counters(http: httpx.AsyncClient, url: str | None) -> dict[str, float]:
    """Reads a worker's counters. url: None = nothing is read. Raises BenchError."""
    if url is None:
        return {}
    try:
        answer = await http.get(f"{url}/metrics")
        answer.raise_for_status()
        return parse_counters(answer.text)
    except (httpx.HTTPError, ValueError) as error:
        raise BenchError(f"{url}/metrics has no counters: {error!r}") from None


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


# ---- the command


def add_arguments(parser: Parser) -> None:
    """Adds the server, the windows and the lengths."""
    add_server(parser)
    add_callers(parser)
    add_operator(parser)
    add_folders(parser)
    window = worded(Window.parse)
    parser.add_argument(
        "--window", type=window, action="append", required=True, metavar="SPEC", help=WINDOW_HELP
    )
    parser.add_argument("--streams", type=whole(1), default=64, help="steady ones")
    parser.add_argument(
        "--stream-adapters",
        type=whole(0),
        default=64,
        help="they have the first N adapters (0 = base)",
    )
    parser.add_argument("--seconds", type=above(0), default=20.0, help="of a window")
    parser.add_argument("--settle", type=number(0), default=1.0, help="seconds before it")
    parser.add_argument("--stream-prompt", type=whole(1), default=128, help="tokens")
    parser.add_argument("--stream-output", type=whole(1), default=3000, help="tokens, if not left")
    parser.add_argument("--new-prompt", type=whole(1), default=512, help="tokens of new requests")
    parser.add_argument("--new-output", type=whole(1), default=16, help="tokens of new requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--worker-url",
        type=worded(server_url),
        help="whose metrics are read, e.g. http://127.0.0.1:8090",
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises OptionError, BenchError."""
    names = names_in(arguments)
    try:
        for window in arguments.window:
            window.adapters(names)
    except ValueError as error:
        raise OptionError(str(error)) from None
    plan = StreamsPlan(
        target=target_of(arguments),
        names=names,
        stream_adapters=names[: arguments.stream_adapters],
        streams=arguments.streams,
        seconds=arguments.seconds,
        settle_s=arguments.settle,
        stream_prompt=arguments.stream_prompt,
        stream_output=arguments.stream_output,
        new_prompt=arguments.new_prompt,
        new_output=arguments.new_output,
        seed=arguments.seed,
        worker_url=arguments.worker_url,
        registered=arguments.registered,
    )
    summaries = []
    for window in arguments.window:
        summaries.append(summarise_window(run_async(run_window(plan, window))))
        if arguments.json:
            print(msgspec.json.encode(summaries[-1]).decode(), flush=True)
    if not arguments.json:
        print(window_table(summaries))
