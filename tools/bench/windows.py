"""Windows of a run with steady streams: other load, and its effect on the streams. Pure."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraplex.launcher.bench.report import Outcome, first_errors, milliseconds

_LABEL = re.compile(r"[A-Za-z0-9_.-]+")
_RATE, _NUMBER = re.compile(r"\d+(\.\d+)?"), re.compile(r"\d+")
WINDOW_HELP = (
    "LABEL or LABEL:KEY=NUMBER,…; keys: new (requests a second), loads (adapters a second), first "
    "and count (which adapters), preload=1 (those are loaded before)"
)
_KEYS = ("new", "loads", "first", "count", "preload")


@dataclass(frozen=True, slots=True)
class Window:
    """new, loads: new requests, and loads of adapters to the device, a second. Their adapters are
    `count` from the `first` on. preload: those are brought to the device before."""

    label: str
    new: float = 0.0
    loads: float = 0.0
    first: int = 0
    count: int = 0
    preload: bool = False

    @classmethod
    def parse(cls, text: str) -> "Window":
        """`LABEL` or `LABEL:new=20,loads=0,first=64,count=336,preload=1`. Raises ValueError."""
        label, _, rest = text.partition(":")
        values: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            is_rate = key in ("new", "loads")
            if not (_RATE if is_rate else _NUMBER).fullmatch(value) or key not in _KEYS:
                raise ValueError(f"{text!r} is no window: {part!r} is not KEY=NUMBER of {_KEYS}")
            values[key] = float(value)
        if _LABEL.fullmatch(label) is None:
            raise ValueError(f"{text!r} is no window: expected LABEL or LABEL:KEY=NUMBER,…")
        return cls(
            label,
            values.get("new", 0.0),
            values.get("loads", 0.0),
            int(values.get("first", 0)),
            int(values.get("count", 0)),
            bool(values.get("preload", 0)),
        )

    def adapters(self, names: Sequence[str]) -> tuple[str, ...]:
        """Chooses among all names; count 0 = to the end. Raises ValueError when the window has none
        but wants some."""
        chosen = tuple(names[self.first : self.first + self.count if self.count else None])
        if not chosen and (self.new or self.loads or self.preload):
            raise ValueError(f"window {self.label}: there is no adapter from {self.first} on")
        return chosen


def gaps_within(token_s: Sequence[float], begin: float, end: float) -> list[float]:
    """Returns gaps between two tokens that both came in the window; seconds."""
    inside = [at for at in token_s if begin <= at <= end]
    return [b - a for a, b in zip(inside, inside[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Observed:
    """One window. streams: when each steady stream's events with text came; a stream that is left
    before its end reports no usage. order_errors: words of refused loads. counts: growth of
    the worker's counters, nothing if they were not read."""

    window: Window
    begin: float
    end: float
    streams: Sequence[Sequence[float]]
    new: Sequence[Outcome]
    order_errors: Sequence[str]
    counts: Mapping[str, float]


def summarise_window(observed: Observed) -> dict[str, object]:
    """Makes one JSON object: gaps of the steady streams, first tokens of new requests, loads."""
    seconds = observed.end - observed.begin
    streams = [gaps_within(times, observed.begin, observed.end) for times in observed.streams]
    gaps = [gap for stream in streams for gap in stream]
    done = [outcome for outcome in observed.new if outcome.error is None]
    failed = [outcome.error for outcome in observed.new if outcome.error is not None]
    groups = {
        "hit": [outcome for outcome in done if outcome.missed is False],
        "miss": [outcome for outcome in done if outcome.missed],
    }
    return {
        "window": observed.window.label,
        "seconds": round(seconds, 2),
        "streams": len(streams),
        "tokens_per_s": round(len(gaps) / seconds, 1),
        "itl_ms": milliseconds(gaps),
        "new": len(observed.new),
        "new_failed": dict(Counter(failed)),
        "first_errors": first_errors(observed.new) | _first_of(observed.order_errors),
        **{
            f"{name}_ttft_ms": {"requests": len(group)}
            | milliseconds([outcome.ttft_s for outcome in group])
            for name, group in groups.items()
        },
        "orders_failed": len(observed.order_errors),
        **_loads(observed.counts, seconds),
    }


def _first_of(order_errors: Sequence[str]) -> dict[str, str]:
    return {"load": order_errors[0]} if order_errors else {}


def _loads(counts: Mapping[str, float], seconds: float) -> dict[str, object]:
    """Sums up adapters that came to the device, means in milliseconds."""
    if not counts:
        return {}

    def mean_ms(stage: str) -> float | None:
        number = counts.get(f"{stage}_count", 0.0)
        return round(1e3 * counts[f"{stage}_sum"] / number, 3) if number else None

    copies = counts.get("copy_count", 0.0)
    nbytes = counts.get("copied_bytes", 0.0)
    return {
        "loads_per_s": round(copies / seconds, 2),
        "load_mb": round(nbytes / copies / 1e6, 2) if copies else None,
        **{f"{stage}_ms": mean_ms(stage) for stage in ("stage", "copy", "transfer")},
        "lookups": {
            tier: int(counts.get(f"lookups_{tier}", 0.0))
            for tier in ("device", "loading", "host", "disk")
        },
        "steps_per_s": round(counts.get("steps", 0.0) / seconds, 1),
        "reloads": int(counts.get("reloads", 0.0)),
    }


def window_table(summaries: Sequence[Mapping[str, object]]) -> str:
    """Writes summaries for a person; times in milliseconds."""
    head = ("window", "tok/s", "itl p50", "p90", "p99", "hits", "ttft p50", "p99", "misses")
    lines = ["".join(f"{name:>10}" for name in (*head, "ttft p50", "p99", "loads/s", "transfer"))]
    for summary in summaries:
        itl, hit, miss = (_group(summary, name) for name in ("itl", "hit_ttft", "miss_ttft"))
        cells = [
            summary["window"],
            summary["tokens_per_s"],
            *(itl[p] for p in ("p50", "p90", "p99")),
            *(hit[p] for p in ("requests", "p50", "p99")),
            *(miss[p] for p in ("requests", "p50", "p99")),
            summary.get("loads_per_s", ""),
            summary.get("transfer_ms") or "",
        ]
        lines.append("".join(f"{cell!s:>10}" for cell in cells))
        if summary["new_failed"] or summary["orders_failed"]:
            failed = f"{summary['new_failed']}, {summary['orders_failed']} loads"
            lines.append(f"    failed: {failed}, such as {summary['first_errors']}")
    return "\n".join(lines)


def _group(summary: Mapping[str, object], name: str) -> dict[str, float]:
    group = summary[f"{name}_ms"]
    assert isinstance(group, dict)
    return group
