"""`loraplex bench throughput`: the load of `bench serve` through the engine in this process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from loraplex.adapters.manifest import SlabDtype
from loraplex.launcher.bench.engine.offline import (
    ADAPTER_SLOTS,
    PAGE_SIZE,
    EngineSizes,
    Load,
    OfflineEngine,
    adapter_digest,
    submit,
)
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.workload import Call, Workload
from loraplex.launcher.bench.report import Outcome, Slo, summarise, table
from loraplex.server.engine.loop import Phase
from loraplex.server.engine.messages import StepOutput
from loraplex.server.model.checkpoint.checkpoint import read_config


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
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


class MeasuredRun:
    """What the clients of a run would have met, and what the step loop did meanwhile."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """They are sent now."""
        now = time.monotonic()
        self.outcomes = [
            Outcome(call.adapter, False, now, prompt_tokens=len(call.prompt)) for call in calls
        ]
        self._steps = 0
        self._phases_s = [0.0] * len(Phase)

    def note(self, output: StepOutput) -> None:
        now = time.monotonic()
        if output.work is not None:
            self._steps += 1
            self._phases_s = [
                a + b for a, b in zip(self._phases_s, output.work.phases_s, strict=True)
            ]
        for key, event in ((e.key, e.event) for e in output.events):
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


def summary_text(summary: dict[str, Any]) -> str:
    """For a person."""
    phases = ", ".join(f"{name} {seconds} s" for name, seconds in summary["loop_s"].items())
    return f"{table(summary)}\n{summary['steps']} steps; the loop's time: {phases}"


def measure(engine: MeasuredEngine, workload: Workload) -> MeasuredRun:
    """All calls at once, with as many of the most popular adapters on the device as there is room
    for. Raises BenchError, CheckpointError, ConfigError."""
    model = read_config(engine.folder)
    calls = replace(workload, token_ids=(0, model.vocab_size)).calls()
    longest = max(len(call.prompt) + call.output_tokens for call in calls)
    if longest > model.max_context:
        raise BenchError(
            f"{longest} tokens of a prompt and its output, a context of {model.max_context}"
        )
    named = sum(adapter is not None for adapter in workload.adapters)
    room = min(engine.room or ADAPTER_SLOTS, named)
    sizes = EngineSizes(
        adapters=room,
        lora_rank=engine.rank,
        tokens=longest,
        cached=None if engine.device == "cuda" else min(engine.max_running, len(calls)),
        max_running=engine.max_running,
        max_waiting=max(len(calls), room),
        step_tokens=engine.step_tokens,
    )
    config = sizes.config(engine.folder, engine.device, engine.dtype)
    offline = OfflineEngine(engine.folder, config, None)
    offline.run(Load(1, 0, engine.rank, PAGE_SIZE, 2))  # whatever the first step takes longer
    offline.load_adapters(room, engine.rank)
    requests = [submit(c.number, c.adapter, c.prompt, c.output_tokens) for c in calls]
    run = MeasuredRun(calls)
    offline.serve(requests, engine.rank, run.note)
    offline.close()
    return run
