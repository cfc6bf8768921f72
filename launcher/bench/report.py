"""Percentiles and rates, from the times of single requests. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Outcome:
    """Fate of one request. Times are seconds on one monotonic clock.

    first_use: no earlier request of the run named its adapter. token_s: when each event with text
    came; one may bring several tokens. prompt_tokens, output_tokens: as the server counted them,
    else the length that was drawn, and events (counted_by_events). short: it ended before the
    tokens that were asked for. error: status or kind of failure, None = complete; message: what was
    said of it. retry_after_s: what a refusal said.
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
    message: str = ""
    asked_tokens: int = 0
    short: bool = False
    counted_by_events: bool = False

    @property
    def missed(self) -> bool | None:
        """Says whether the request waited for its adapter; None = it has none. Where the server is
        silent, the first use counts as a wait."""
        if self.adapter is None:
            return None
        return self.first_use if self.start is None else self.start == "cold"

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between events."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def token_gap_s(self) -> float | None:
        """Mean time from a token to the next; None for fewer than two."""
        if self.output_tokens < 2 or not self.token_s:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1)


def percentile(values: Sequence[float], p: float) -> float:
    """A percentile, linear between order statistics; NaN without values."""
    return float(np.percentile(values, p)) if values else float("nan")


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": round(percentile(values, p) * 1e3, 3) for p in PERCENTILES}


def latencies(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Summarises latencies. Milliseconds over complete requests: time to the first token, gaps
    between events, a request's mean gap between tokens, time to the end.
    """
    done = [outcome for outcome in outcomes if outcome.error is None and outcome.token_s]
    token_gaps = [gap for outcome in done if (gap := outcome.token_gap_s) is not None]
    return {
        "requests": len(done),
        "ttft_ms": milliseconds([outcome.ttft_s for outcome in done]),
        "itl_ms": milliseconds([gap for outcome in done for gap in outcome.gaps_s]),
        "tpot_ms": milliseconds(token_gaps),
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
        return (self.ttft_s is None or outcome.ttft_s <= self.ttft_s) and (
            self.itl_s is None or (outcome.token_gap_s or 0.0) <= self.itl_s
        )


def first_errors(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Finds the words of the first failure of each kind."""
    found: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            found.setdefault(outcome.error, outcome.message)
    return found


def why_none(outcomes: Sequence[Outcome]) -> str | None:
    """Returns a sentence if no request was answered, else None."""
    if any(outcome.error is None for outcome in outcomes):
        return None
    first = outcomes[0]
    return f"none of {len(outcomes)} requests was answered: {first.error} {first.message}".rstrip()


def summarise(outcomes: Sequence[Outcome], slo: Slo) -> dict[str, object]:
    """One JSON object of a run. `hit`, `miss`: whether a request of an adapter waited for it."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    start = min((outcome.sent_s for outcome in outcomes), default=0.0)
    seconds = max((outcome.end_s for outcome in outcomes), default=0.0) - start
    per_s = 1.0 / seconds if seconds > 0 else 0.0
    return {
        "seconds": round(seconds, 3),
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None)),
        "first_errors": first_errors(outcomes),
        "short": sum(outcome.short for outcome in done),
        "counted_by_events": sum(outcome.counted_by_events for outcome in done),
        "requests_per_s": round(len(done) * per_s, 3),
        "output_tokens_per_s": round(sum(o.output_tokens for o in done) * per_s, 1),
        "prompt_tokens_per_s": round(sum(o.prompt_tokens for o in done) * per_s, 1),
        "goodput_per_s": round(sum(map(slo.met, outcomes)) * per_s, 3),
        "adapters": len({outcome.adapter for outcome in outcomes} - {None}),
        "all": latencies(outcomes),
        "hit": latencies([outcome for outcome in outcomes if outcome.missed is False]),
        "miss": latencies([outcome for outcome in outcomes if outcome.missed]),
    }


def table(summary: Mapping[str, Any]) -> str:
    """Writes a summary for a person."""
    lines = [
        f"{summary['completed']} requests in {summary['seconds']} s, {summary['failed']} failed"
        f" {summary['errors'] or ''}".rstrip(),
        *(f"  {kind}: {text}" for kind, text in summary["first_errors"].items()),
        f"{summary['output_tokens_per_s']} output tokens/s, {summary['prompt_tokens_per_s']} "
        f"prompt tokens/s, {summary['requests_per_s']} requests/s, "
        f"goodput {summary['goodput_per_s']} requests/s",
    ]
    if summary["short"]:
        lines.append(f"answers shorter than asked for: {summary['short']}")
    if summary["counted_by_events"]:
        lines.append(
            "answers without usage, whose output tokens are events with text: "
            f"{summary['counted_by_events']}"
        )
    lines.append(f"{'':18}" + "".join(f"{f'p{p} ms':>12}" for p in PERCENTILES))
    for group in ("all", "hit", "miss"):
        part = summary[group]
        if not part["requests"]:
            continue
        for metric in ("ttft", "itl", "tpot", "e2e"):
            values = part[f"{metric}_ms"]
            cells = "".join(f"{values[f'p{p}']:>12.2f}" for p in PERCENTILES)
            title = f"{group} ({part['requests']}) {metric}"
            lines.append(f"{title:18}" + cells)
    return "\n".join(lines)
