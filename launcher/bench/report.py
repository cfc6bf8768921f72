"""From the times of single requests to percentiles and rates. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Outcome:
    """What one request met. Times are seconds on one monotonic clock.

    first_use: no earlier request of the run named its adapter. token_s: when each event came.
    output_tokens: as the server counted them. error: status or exception, None = complete.
    retry_after_s: what a refusal said.
    start: what the server says of the adapter (`x-loraplex-start`), None if it says nothing.
    """

    adapter: str | None
    first_use: bool
    sent_s: float
    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    retry_after_s: float | None = None
    start: str | None = None

    @property
    def missed(self) -> bool:
        """Whether it waited for its adapter, or is taken to have where the server does not say."""
        return self.first_use if self.start is None else self.start == "cold"

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation between order statistics; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": round(percentile(values, p) * 1e3, 3) for p in PERCENTILES}


def latencies(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """TTFT, ITL and E2E in milliseconds over complete requests."""
    done = [outcome for outcome in outcomes if outcome.error is None and outcome.token_s]
    return {
        "requests": len(done),
        "ttft_ms": milliseconds([outcome.ttft_s for outcome in done]),
        "itl_ms": milliseconds([gap for outcome in done for gap in outcome.gaps_s]),
        "e2e_ms": milliseconds([outcome.end_s - outcome.sent_s for outcome in done]),
    }


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good when its first token and its mean gap come in time. None = any."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def met(self, outcome: Outcome) -> bool:
        if outcome.error is not None or not outcome.token_s:
            return False
        gaps = outcome.gaps_s
        mean_gap = sum(gaps) / len(gaps) if gaps else 0.0
        return (self.ttft_s is None or outcome.ttft_s <= self.ttft_s) and (
            self.itl_s is None or mean_gap <= self.itl_s
        )


def summarise(outcomes: Sequence[Outcome], slo: Slo) -> dict[str, object]:
    """One JSON object of a run; `hit` and `miss` tell whether it waited for its adapter."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    start = min((outcome.sent_s for outcome in outcomes), default=0.0)
    seconds = max((outcome.end_s for outcome in outcomes), default=0.0) - start
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    per_s = 1.0 / seconds if seconds > 0 else 0.0
    return {
        "seconds": round(seconds, 3),
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": errors,
        "requests_per_s": round(len(done) * per_s, 3),
        "output_tokens_per_s": round(sum(o.output_tokens for o in done) * per_s, 1),
        "prompt_tokens_per_s": round(sum(o.prompt_tokens for o in done) * per_s, 1),
        "goodput_per_s": round(sum(map(slo.met, outcomes)) * per_s, 3),
        "adapters": len({outcome.adapter for outcome in outcomes}),
        "all": latencies(outcomes),
        "hit": latencies([outcome for outcome in outcomes if not outcome.missed]),
        "miss": latencies([outcome for outcome in outcomes if outcome.missed]),
    }


def table(summary: dict[str, object]) -> str:
    """The same for a person."""
    lines = [
        f"{summary['completed']} requests in {summary['seconds']} s, {summary['failed']} failed"
        f" {summary['errors'] or ''}",
        f"{summary['output_tokens_per_s']} output tokens/s, {summary['prompt_tokens_per_s']} "
        f"prompt tokens/s, {summary['requests_per_s']} requests/s, "
        f"goodput {summary['goodput_per_s']} requests/s",
        f"{'':18}" + "".join(f"{f'p{p} ms':>12}" for p in PERCENTILES),
    ]
    for group in ("all", "hit", "miss"):
        part = summary[group]
        assert isinstance(part, dict)
        for metric in ("ttft", "itl", "e2e"):
            values = part[f"{metric}_ms"]
            cells = "".join(f"{values[f'p{p}']:>12.2f}" for p in PERCENTILES)
            title = f"{group} ({part['requests']}) {metric}"
            lines.append(f"{title:18}" + cells)
    return "\n".join(lines)
