"""Requests for simulated fleets: four shapes of load, drawn from a seed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from loraplex.launcher.bench.load.workload import Lengths, zipf

Shape = Literal["zipf", "flash", "drift", "diurnal"]
SHAPES: tuple[Shape, ...] = ("zipf", "flash", "drift", "diurnal")

PROMPT = Lengths.parse("lognormal(4.8,0.7) in 16..1024")
OUTPUT = Lengths.parse("lognormal(4.0,0.6) in 8..256")
# A flash crowd: one unknown adapter takes so much of the load in the middle third of the run.
_FLASH_SHARE = 0.3
# Drift: so many times in a run the popular adapters have become others.
_DRIFTS = 4
# Diurnal: the rate swings by so much of its mean, twice in a run.
_SWING = 0.35


class Arrival(NamedTuple):
    """adapter: its number; 0 is the most popular at the start."""

    at_s: float
    tenant: str
    adapter: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """rate: mean requests a second. adapters: how many there are. zipf: exponent of popularity.

    tenant: who sends it all; its adapters are its own.
    """

    shape: Shape
    requests: int
    rate: float
    adapters: int
    zipf: float = 1.0
    prompt: Lengths = PROMPT
    output: Lengths = OUTPUT
    seed: int = 0
    tenant: str = ""

    @property
    def seconds(self) -> float:
        return self.requests / self.rate

    def mean_tokens(self) -> tuple[float, float]:
        """Draws the mean tokens of prompts and outputs."""
        random = Random(self.seed)
        draws = 2000
        return (
            sum(self.prompt.draw(random) for _ in range(draws)) / draws,
            sum(self.output.draw(random) for _ in range(draws)) / draws,
        )

    def arrivals(self) -> Iterator[Arrival]:
        random = Random(self.seed)
        weights = zipf(self.adapters, self.zipf)
        now = 0.0
        for _ in range(self.requests):
            now += random.expovariate(self._rate_at(now))
            (drawn,) = random.choices(range(self.adapters), cum_weights=weights)
            number = self._adapter_at(now, drawn, random)
            yield Arrival(
                now, self.tenant, number, self.prompt.draw(random), self.output.draw(random)
            )

    def _rate_at(self, now: float) -> float:
        if self.shape != "diurnal":
            return self.rate
        return self.rate * (1.0 + _SWING * math.sin(4.0 * math.pi * now / self.seconds))

    def _adapter_at(self, now: float, number: int, random: Random) -> int:
        done = now / self.seconds
        if self.shape == "flash" and 1 / 3 < done < 2 / 3 and random.random() < _FLASH_SHARE:
            return self.adapters  # nobody asked for it before
        if self.shape == "drift":
            return (number + int(done * _DRIFTS * 64)) % self.adapters
        return number
