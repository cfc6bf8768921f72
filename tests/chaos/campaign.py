"""Faults under load, in a random order, and what clients saw of them."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import Done, Faults
from tests.chaos.load import Answer, Certifier, Clients
from tests.chaos.processes import Fleet, Shape
from tests.router.shared.redis_server import running_redis


@dataclass(frozen=True)
class Plan:
    """How many of which fault, under which load. calm_s: longest quiet time between two faults.
    longest_s: of a fault that heals by itself.
    """

    faults: Mapping[str, int]
    seed: int
    shape: Shape = Shape()
    clients: int = 16
    min_tokens: int = 10
    max_tokens: int = 120
    calm_s: float = 1.5
    longest_s: float = math.inf


@dataclass(frozen=True)
class Report:
    """The course of a plan. faults: in order. answers: of all requests."""

    plan: Plan
    faults: list[Done]
    answers: list[Answer]

    def count(self, result: str) -> int:
        return sum(answer.result == result for answer in self.answers)

    def problems(self) -> list[str]:
        return [f"{a.name}: {a.detail}" for a in self.answers if a.result in ("wrong", "failed")]

    def felt(self) -> bool:
        """Whether any client waited longer than for a token, or lost its connection."""
        waits = [self._longest(done) for done in self.faults]
        return max(waits, default=0.0) > 0.2 or self.count("broken") > 0

    def pauses(self, fault: str) -> list[float]:
        """The longest pause that any stream had in each fault of this kind, in seconds."""
        return [self._longest(done) for done in self.faults if done.fault == fault]

    def _longest(self, done: Done) -> float:
        return max(
            (
                end - max(start, done.at)
                for answer in self.answers
                if answer.ended >= done.at and answer.started <= done.healed
                for start, end in answer.pauses
                if end >= done.at and start <= done.healed
            ),
            default=0.0,
        )

    def slowest(self, count: int) -> list[str]:
        """The longest pauses, each with the fault that it fell into."""
        lines = []
        for answer in self.answers:
            for start, end in answer.pauses:
                during = [done for done in self.faults if done.at <= end and start <= done.healed]
                for done in during[:1]:
                    after = f"{start - done.at:+.2f} s after {done.fault} began"
                    whole = f"(over after {done.healed - done.at:.2f} s)"
                    line = f"{end - start:.2f} s: {answer.name}, {after} {whole}"
                    lines.append((end - start, line))
        return [line for _, line in sorted(lines, reverse=True)[:count]]

    def summary(self) -> "Summary":
        return Summary(
            {fault: self.pauses(fault) for fault in self.plan.faults},
            Counter(answer.result for answer in self.answers),
            sum(len(answer.pauses) for answer in self.answers),
            [done.orphans_s for done in self.faults if done.orphans_s is not None],
        )


@dataclass
class Summary:
    """The sum of a report; those of several runs add up. pauses: by fault, in seconds.

    orphans: seconds from each router's death until workers had freed what they ran for it.
    """

    pauses: dict[str, list[float]]
    results: Counter[str]
    events: int
    orphans: list[float]

    def add(self, other: "Summary") -> None:
        for fault, pauses in other.pauses.items():
            self.pauses.setdefault(fault, []).extend(pauses)
        self.results.update(other.results)
        self.events += other.events
        self.orphans += other.orphans

    def table(self) -> str:
        """In Markdown: a line a kind of fault."""
        lines = ["| fault | times | longest pause p50 | p99 | max |"]
        lines.append("| --- | --: | --: | --: | --: |")
        for fault, pauses in self.pauses.items():
            lines.append(_row(fault, pauses))
        if self.orphans:
            lines.append(_row("(router killed: until its sequences were freed)", self.orphans))
        lines += ["", f"{self.results.total()} requests, {self.events} streamed events: "]
        lines[-1] += ", ".join(f"{count} {result}" for result, count in self.results.items())
        return "\n".join(lines)


def _row(name: str, seconds: list[float]) -> str:
    shown = [f"{_quantile(sorted(seconds), q):.2f} s" for q in (0.5, 0.99, 1.0)]
    return f"| {name} | {len(seconds)} | {' | '.join(shown)} |"


def _quantile(values: list[float], share: float) -> float:
    """Nearest rank."""
    return values[max(0, -(-int(share * 1000) * len(values) // 1000) - 1)] if values else 0.0


async def run(plan: Plan, folder: Path, certifier: Certifier | None = None) -> Report:
    """Raises what a process or a check of the fleet itself raised. certifier: of what the plan's
    fleet serves; None = of the demo."""
    dice = random.Random(plan.seed)
    order = [fault for fault, count in plan.faults.items() for _ in range(count)]
    dice.shuffle(order)
    async with running_redis() as redis:
        fleet = Fleet(folder, plan.shape, redis)
        clients = Clients(fleet.routers, certifier or Certifier(), plan.seed)
        return await _run_at(fleet, clients, plan, order, dice)


async def _run_at(
    fleet: Fleet, clients: Clients, plan: Plan, order: list[str], dice: random.Random
) -> Report:
    try:
        await fleet.start_all()
        await clients.learn()
        load = asyncio.create_task(clients.run(plan.clients, plan.min_tokens, plan.max_tokens))
        done = await _do(order, Faults(fleet, dice, plan.longest_s), dice, plan, load)
        clients.stop()
        await load
    finally:
        await clients.close()
        await fleet.close()
    return Report(plan, done, clients.answers)


async def _do(
    order: list[str], faults: Faults, dice: random.Random, plan: Plan, load: "asyncio.Task[None]"
) -> list[Done]:
    done = []
    for fault in order:
        await asyncio.sleep(dice.uniform(0.0, plan.calm_s))
        if load.done():
            load.result()
        done.append(await faults.do(fault))
    await asyncio.sleep(plan.calm_s)
    return done
