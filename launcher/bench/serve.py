"""Load on any server with OpenAI's completions API, and what its clients see."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

from launcher.bench.report import Outcome
from launcher.bench.stream_client import StreamProtocol, post_stream
from launcher.bench.workload import Call, Workload


@dataclass(frozen=True, slots=True)
class Target:
    """The server. base_model: what `model` says for the base. extra: fields added to each body."""

    url: str
    base_model: str
    api_key: str = field(default="", repr=False)
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)


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
    loop = asyncio.get_running_loop()
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    outcome.sent_s = loop.time()
    try:
        answer = await post_stream(
            f"{target.url}/v1/completions", body_of(target, call), headers, target.timeout_s
        )
        if answer.status == 200:
            count_tokens(outcome, answer)
        else:
            outcome.error = str(answer.status)
            outcome.retry_after_s = answer.retry_after_s
    except (OSError, TimeoutError, httptools.HttpParserError) as error:
        outcome.error = type(error).__name__
    outcome.end_s = loop.time()


async def run_load(
    target: Target, workload: Workload, concurrency: int | None = None
) -> list[Outcome]:
    """Open loop: each call leaves at its time. Closed loop: `concurrency` callers, back to back."""
    calls = workload.calls()
    seen: set[str | None] = set()
    outcomes: list[Outcome] = []
    for call in calls:
        outcomes.append(Outcome(call.adapter, call.adapter not in seen, 0.0))
        seen.add(call.adapter)
    pending = iter(zip(calls, outcomes, strict=True))
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def caller() -> None:
        for call, outcome in pending:
            await send(target, call, outcome)

    async def at_its_time(call: Call, outcome: Outcome) -> None:
        await asyncio.sleep(max(0.0, start + call.at_s - loop.time()))
        await send(target, call, outcome)

    async with asyncio.TaskGroup() as group:
        if concurrency is None:
            for call, outcome in pending:
                group.create_task(at_its_time(call, outcome))
        else:
            for _ in range(concurrency):
                group.create_task(caller())
    return outcomes
