"""Load on any server with OpenAI's completions API, and what its clients see."""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

from launcher.bench.report import Outcome
from launcher.bench.stream_client import StreamProtocol, post_stream
from launcher.bench.workload import Call, Workload

# Processes import and draw before the first call leaves.
_START_DELAY_S = 3.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server. base_model: what `model` says for the base. extra: fields added to each body."""

    url: str
    base_model: str
    api_key: str = field(default="", repr=False)
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Job:
    """One process's part: every `parts`-th call, from `part` on. concurrency: callers of a closed
    loop. start_s: on the monotonic clock; None = at once."""

    target: Target
    workload: Workload
    concurrency: int | None = None
    part: int = 0
    parts: int = 1
    start_s: float | None = None


def body_of(target: Target, call: Call) -> bytes:
    """Token ids as prompt and `ignore_eos`, so that both lengths are as drawn."""
    return msgspec.json.encode(
        {
            "model": call.adapter or target.base_model,
            "prompt": call.prompt,
            "max_tokens": call.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **target.extra,
        }
    )


def count_tokens(outcome: Outcome, answer: StreamProtocol) -> None:
    """Takes counts from the usage event, which brought no token; without one, counts events."""
    outcome.token_s = answer.event_s
    outcome.output_tokens = len(answer.event_s)
    outcome.start = answer.start
    if not answer.last_events:
        outcome.error = "no tokens"
        return
    last = json.loads(answer.last_events[-1])
    if "error" in last:
        outcome.error = "error event"
    elif last.get("usage"):
        outcome.prompt_tokens = last["usage"]["prompt_tokens"]
        outcome.output_tokens = last["usage"]["completion_tokens"]
        if not last.get("choices"):
            outcome.token_s = answer.event_s[:-1]


async def send(target: Target, call: Call, outcome: Outcome) -> None:
    outcome.sent_s = time.monotonic()
    try:
        answer = await post_stream(
            f"{target.url}/v1/completions", body_of(target, call), target.headers, target.timeout_s
        )
        if answer.status == 200:
            count_tokens(outcome, answer)
        else:
            outcome.error = str(answer.status)
            outcome.retry_after_s = answer.retry_after_s
    except (OSError, TimeoutError, httptools.HttpParserError) as error:
        outcome.error = type(error).__name__
    outcome.end_s = time.monotonic()


async def run_job(job: Job) -> list[Outcome]:
    """Open loop: each call leaves at its time. Closed loop: `concurrency` callers, back to back."""
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
    """processes: to send from, where one is too slow to keep up; at most `concurrency`."""
    if processes == 1:
        return await run_job(Job(target, workload, concurrency))
    start = time.monotonic() + _START_DELAY_S
    jobs = [
        Job(target, workload, _part(concurrency, i, processes), i, processes, start)
        for i in range(processes)
    ]
    parts = await asyncio.gather(*map(_in_process, jobs))
    return [outcome for part in parts for outcome in part]


def _part(total: int | None, index: int, parts: int) -> int | None:
    return None if total is None else total // parts + (index < total % parts)


async def _in_process(job: Job) -> list[Outcome]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "launcher.bench.load_process"),
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
        raise RuntimeError(f"a process of the load left with code {process.returncode}")
    return msgspec.msgpack.decode(output, type=list[Outcome])
