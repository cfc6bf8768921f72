"""Load on any server with one of OpenAI's APIs or LoRAX's, and the answers of its clients."""

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass, replace

import httptools
import httpx
import msgspec
import uvloop

from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.stream_client import StreamProtocol, post_stream
from loraplex.launcher.bench.load.target import Target, body_of
from loraplex.launcher.bench.load.workload import Call, Workload
from loraplex.launcher.bench.report import Outcome
from loraplex.launcher.refusals import error_text, one_line
from loraplex.router.http.client import http_client

# Processes import and draw before the first call leaves.
_START_DELAY_S = 3.0
_LIST_S = 10.0  # of models


@dataclass(frozen=True, slots=True)
class LoadPart:
    """One process's part of a load. Every `parts`-th call, from `part` on, for one process.
    concurrency: callers of a closed loop. start_s: on the monotonic clock; None = at once.
    """

    target: Target
    workload: Workload
    concurrency: int | None = None
    part: int = 0
    parts: int = 1
    start_s: float | None = None


class _Model(msgspec.Struct):
    """A model that a server lists. parent: an adapter's base; None = it is one itself."""

    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def with_base_model(target: Target) -> Target:
    """Adds the base's name as the server lists it; `base` where no list says. LoRAX needs none."""
    if target.base_model or target.api == "lorax":
        return target
    name = "base"
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError):
        async with http_client(_LIST_S) as http:
            answer = await http.get(f"{target.url}/v1/models", headers=target.headers)
        listed = msgspec.json.decode(answer.content, type=_Models).data
        name = next((model.id for model in listed if model.parent is None), name)
    return replace(target, base_model=name)


def settle(outcome: Outcome, got: StreamProtocol) -> None:
    """Copies what an ended answer contained."""
    answer = got.answer
    outcome.start = got.start
    outcome.token_s = answer.token_s
    if got.status != 200:
        outcome.retry_after_s = got.retry_after_s
        outcome.error, outcome.message = str(got.status), error_text(got.head)
    elif answer.fault is not None:
        outcome.error, outcome.message = answer.fault
    elif not answer.token_s:
        outcome.error, outcome.message = "no tokens", one_line(got.head)
    if answer.prompt_tokens is not None:
        outcome.prompt_tokens = answer.prompt_tokens
    outcome.output_tokens = len(answer.token_s)
    outcome.counted_by_events = answer.output_tokens is None
    if answer.output_tokens is not None:
        outcome.output_tokens = answer.output_tokens
    outcome.short = outcome.output_tokens < outcome.asked_tokens and not answer.filled


async def send(target: Target, call: Call, outcome: Outcome) -> None:
    outcome.sent_s = time.monotonic()
    outcome.prompt_tokens, outcome.asked_tokens = len(call.prompt), call.output_tokens
    try:
        body = body_of(target, call)
        settle(outcome, await post_stream(target.address, body, target.headers, target.timeout_s))
    except (OSError, httptools.HttpParserError) as error:
        outcome.error, outcome.message = type(error).__name__, one_line(str(error).encode())
    outcome.end_s = time.monotonic()


async def run_job(job: LoadPart) -> list[Outcome]:
    """Sends one process's calls: each at its time, or by `concurrency` callers, back to back."""
    seen: set[str | None] = set()
    share: list[tuple[Call, Outcome]] = []
    for call in job.workload.calls():
        if call.number % job.parts == job.part:
            share.append((call, Outcome(call.adapter, call.adapter not in seen, 0.0)))
        seen.add(call.adapter)
    pending = iter(share)
    start = time.monotonic() if job.start_s is None else job.start_s

    async def at(when: float, call: Call, outcome: Outcome) -> None:
        await asyncio.sleep(max(0.0, when - time.monotonic()))
        await send(job.target, call, outcome)

    async def caller() -> None:
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        for call, outcome in pending:
            await send(job.target, call, outcome)

    async with asyncio.TaskGroup() as group:
        if job.concurrency is None:
            for call, outcome in pending:
                group.create_task(at(start + call.at_s, call, outcome))
        else:
            for _ in range(job.concurrency):
                group.create_task(caller())
    return [outcome for _, outcome in share]


async def run_load(
    target: Target, workload: Workload, concurrency: int | None = None, processes: int = 1
) -> list[Outcome]:
    """Sends a workload to a server and returns the outcome of each request. processes: to send
    from, where one is too slow to keep up; at most `concurrency`.
    """
    if None in workload.adapters:
        target = await with_base_model(target)
    if processes == 1:
        return await run_job(LoadPart(target, workload, concurrency))
    start = time.monotonic() + _START_DELAY_S
    jobs = [
        LoadPart(target, workload, _part(concurrency, i, processes), i, processes, start)
        for i in range(processes)
    ]
    parts = await asyncio.gather(*map(_in_process, jobs))
    return [outcome for part in parts for outcome in part]


def _part(total: int | None, index: int, parts: int) -> int | None:
    return None if total is None else total // parts + (index < total % parts)


async def _in_process(job: LoadPart) -> list[Outcome]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loraplex.launcher.bench.load.serve",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate(msgspec.msgpack.encode(job))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise BenchError(f"a process of the load left with code {process.returncode}")
    return msgspec.msgpack.decode(output, type=list[Outcome])


def main() -> None:
    """Runs one process of a load: a `LoadPart` on stdin, its outcomes on stdout, as msgpack."""
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LoadPart)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(run_job(job))
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcomes))


if __name__ == "__main__":
    main()
