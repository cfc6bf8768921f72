"""`loraplex bench throughput`: the load of `bench serve` through the engine in this process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from adapters.manifest import SlabDtype
from launcher.bench.errors import BenchError
from launcher.bench.grid import ADAPTER_SLOTS, PAGE_SIZE, slab_bytes, token_bytes
from launcher.bench.offline import EXTENT_BYTES, GREEDY, Load, OfflineEngine, adapter_digest
from launcher.bench.report import Outcome, Slo, summarise, table
from launcher.bench.workload import Call, Workload
from server.config import EngineConfig
from server.engine.loop import Phase
from server.engine.messages import StepOutput, Submit
from server.model.checkpoint import read_config
from server.model.config import ModelConfig
from server.protocol import GenerateRequest


@dataclass(frozen=True, slots=True)
class Engine:
    """rank: of every adapter. room: adapters that the device has room for; None = all, but no more
    than a server has slots."""

    folder: Path
    device: Literal["cpu", "cuda"]
    dtype: SlabDtype
    rank: int
    room: int | None
    max_running: int
    step_tokens: int


def adapters_of(rank: int, count: int) -> tuple[str | None, ...]:
    """For a workload, the most popular first; the base alone without any."""
    return tuple(adapter_digest(rank, number) for number in range(count)) or (None,)


class Run:
    """What the clients of a run would have met, and what the step loop did meanwhile."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """They are sent now."""
        now = time.monotonic()
        self.outcomes = [
            Outcome(call.adapter, False, now, prompt_tokens=len(call.prompt)) for call in calls
        ]
        self._steps = 0
        self._phases_s = [0.0] * len(Phase)

    def note(self, told: StepOutput) -> None:
        now = time.monotonic()
        if told.work is not None:
            self._steps += 1
            self._phases_s = [
                a + b for a, b in zip(self._phases_s, told.work.phases_s, strict=True)
            ]
        for key, event in ((e.key, e.event) for e in told.events):
            outcome = self.outcomes[key]
            if not outcome.token_s:
                outcome.start = "warm" if event.load_s is None else "cold"
            if event.token_ids:
                outcome.token_s.append(now)
            outcome.output_tokens += len(event.token_ids)
            outcome.end_s = now

    def summary(self) -> dict[str, Any]:
        """As of `bench serve`, with steps, and seconds that the step loop gave to them by what it
        did: `wait` is for the device."""
        phases = {phase.name.lower(): round(self._phases_s[phase], 3) for phase in Phase}
        return summarise(self.outcomes, Slo()) | {"steps": self._steps, "loop_s": phases}


def told(summary: dict[str, Any]) -> str:
    """For a person."""
    phases = ", ".join(f"{name} {seconds} s" for name, seconds in summary["loop_s"].items())
    return f"{table(summary)}\n{summary['steps']} steps; the loop's time: {phases}"


def measure(engine: Engine, workload: Workload) -> Run:
    """All calls at once, with as many of the most popular adapters on the device as there is room
    for. Raises BenchError, CheckpointError, ConfigError."""
    model = read_config(engine.folder)
    calls = replace(workload, token_ids=(0, model.vocab_size)).calls()
    named = sum(adapter is not None for adapter in workload.adapters)
    room = min(engine.room or ADAPTER_SLOTS, named)
    offline = _start(engine, model, room, calls)
    offline.run(Load(1, 0, engine.rank, PAGE_SIZE, 2))  # whatever the first step takes longer
    offline.load_adapters(room, engine.rank)
    requests = [_submit(call) for call in calls]
    run = Run(calls)
    offline.serve(requests, engine.rank, run.note)
    offline.close()
    return run


def _submit(call: Call) -> Submit:
    sampling = msgspec.structs.replace(GREEDY, max_tokens=call.output_tokens, ignore_eos=True)
    request = GenerateRequest(
        str(call.number), 0, 0, call.adapter, call.prompt, [], sampling, call.number
    )
    return Submit(call.number, request)


def _start(engine: Engine, model: ModelConfig, room: int, calls: Sequence[Call]) -> OfflineEngine:
    slab = slab_bytes(model, engine.dtype, engine.rank)
    context = _context(model, calls)
    # Every sequence at full length, and as much again: an admission keeps pages in reserve.
    at_once = min(engine.max_running, len(calls))
    kv_memory = 2 * at_once * context * token_bytes(model, engine.dtype)
    config = EngineConfig(
        model_path=str(engine.folder),
        device=engine.device,
        dtype=engine.dtype,
        page_size=PAGE_SIZE,
        kv_memory=0 if engine.device == "cuda" else kv_memory,
        adapter_memory=room * slab + EXTENT_BYTES,
        host_arena_bytes=slab,
        extent_bytes=EXTENT_BYTES,
        max_context=context,
        max_running=engine.max_running,
        max_waiting=max(len(calls), room),
        max_step_tokens=engine.step_tokens,
        adapter_slots=max(ADAPTER_SLOTS, room) if room else 0,
    )
    return OfflineEngine(engine.folder, config, None)


def _context(model: ModelConfig, calls: Sequence[Call]) -> int:
    """In whole pages, and one more, as an admission keeps some in reserve."""
    longest = max(len(call.prompt) + call.output_tokens for call in calls)
    if longest > model.max_context:
        raise BenchError(
            f"{longest} tokens of a prompt and its output, a context of {model.max_context}"
        )
    return min((-(-longest // PAGE_SIZE) + 1) * PAGE_SIZE, model.max_context)
