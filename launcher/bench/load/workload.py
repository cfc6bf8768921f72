"""A load test's requests: arrivals, adapters and lengths, drawn from a seed. Pure."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_LENGTH = re.compile(
    rf"(?P<kind>lognormal|uniform)\((?P<a>{_NUMBER}),(?P<b>{_NUMBER})\)"
    r"(?:in(?P<low>[0-9]{1,9})\.\.(?P<high>[0-9]{1,9}))?"
)
_MOST_TOKENS = 1 << 20
# Of a logarithm and its deviation: draws beyond are too large for a number.
_MOST_LOG = 20.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, cut to `low .. high`.

    lognormal: a, b = mean and standard deviation of the logarithm. uniform: a .. b, both included.
    """

    kind: str
    a: float
    b: float
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Reads lengths from a text. The text is `128`, `uniform(10,20)` or `lognormal(5.0,0.8) in
        16..1024`; ValueError otherwise.
        """
        text = text.replace(" ", "")
        if re.fullmatch("[0-9]{1,9}", text) and 0 < int(text) <= _MOST_TOKENS:
            return cls("uniform", int(text), int(text), int(text), int(text))
        match = _LENGTH.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is no length: expected 128, uniform(10,20) or "
                "lognormal(5.0,0.8) in 16..1024"
            )
        low, high = int(match["low"] or 1), int(match["high"] or _MOST_TOKENS)
        if not 0 < low <= high <= _MOST_TOKENS:
            raise ValueError(f"{text!r}: expected 0 < low <= high <= {_MOST_TOKENS}")
        kind, a, b = match["kind"], float(match["a"]), float(match["b"])
        if kind == "uniform" and not a <= b <= _MOST_TOKENS:
            raise ValueError(f"{text!r}: expected from <= to <= {_MOST_TOKENS}")
        if kind == "lognormal" and max(a, b) > _MOST_LOG:
            raise ValueError(
                f"{text!r}: expected mean and deviation of the logarithm up to {_MOST_LOG:g}"
            )
        return cls(kind, a, b, low, high)

    def draw(self, random: Random) -> int:
        if self.kind == "lognormal":
            value = round(random.lognormvariate(self.a, self.b))
        else:
            value = random.randint(round(self.a), round(self.b))
        return min(max(value, self.low), self.high)


def zipf(count: int, exponent: float) -> list[float]:
    """Cumulative weights by Zipf's law, for `choices`: the k-th of so many weighs k^-exponent."""
    return list(itertools.accumulate((k + 1) ** -exponent for k in range(count)))


def arrivals(random: Random, rate: float, burstiness: float) -> Iterator[float]:
    """Yields times of arrival, in seconds from the start, for ever. Gaps are Gamma with mean 1/rate
    and variation `burstiness`.

    burstiness: coefficient of variation of the gaps; 1 = Poisson arrivals. rate inf = all at once.
    """
    now = 0.0
    shape = 1.0 / burstiness**2
    while True:
        yield now
        if not math.isinf(rate):
            now += random.gammavariate(shape, 1.0 / (rate * shape))


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send. prompt: token ids. adapter: its name, or None for the base."""

    number: int
    at_s: float
    adapter: str | None
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Distribution of calls. adapters may hold None for the base; the first is the most popular.
    zipf: see there.

    token_ids: range that prompt tokens are drawn from.
    """

    requests: int
    adapters: tuple[str | None, ...]
    zipf: float
    prompt: Lengths
    output: Lengths
    rate: float = math.inf
    burstiness: float = 1.0
    token_ids: tuple[int, int] = (100, 1000)
    seed: int = 0

    def calls(self) -> list[Call]:
        random = Random(self.seed)
        weights = zipf(len(self.adapters), self.zipf)
        times = arrivals(Random(self.seed + 1), self.rate, self.burstiness)
        low, high = self.token_ids
        return [
            Call(
                number,
                next(times),
                random.choices(self.adapters, cum_weights=weights)[0],
                [random.randrange(low, high) for _ in range(self.prompt.draw(random))],
                self.output.draw(random),
            )
            for number in range(self.requests)
        ]
