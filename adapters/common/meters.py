"""Prometheus families in a registry of their own: what routers and workers measure with.

It owns how families are declared and rendered; what they mean is `metrics.py`'s of either.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

# Seconds. Waits of people: a millisecond at the low end, as long as a request may last at the high.
LATENCY_BUCKETS_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
# Seconds of a decode step, and of the gap between two tokens: a millisecond apart where they lie.
STEP_BUCKETS_S = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01, 0.012, 0.014, 0.016),
    *(0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
COUNT_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
LOOP_LAG_INTERVAL_S = 0.25

Kind = Literal["counter", "gauge", "histogram"]
# A label's values, all of which have a series from the start; or none, where they come as they go.
Labels = Mapping[str, Sequence[str]]
# Label values and the value of one series.
Row = tuple[tuple[str, ...], float]
# What follows a family's name, labels and value of one sample.
NamedSample = tuple[str, Mapping[str, str], float]
NO_LABELS: Labels = {}
M = TypeVar("M", Counter, Gauge, Histogram)


class DeclaredMetric(NamedTuple):
    """A family as the documentation lists it. name: as PromQL spells it."""

    name: str
    kind: Kind
    text: str
    labels: Labels


class Meters(Collector):
    """Makes the metrics of one process, and keeps what it declared. prefix: of every name. The
    registry is the caller's, and has nothing else in it.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        # When a series was born is of no use to PromQL, and doubles the number of series.
        disable_created_metrics()
        self.declared: list[DeclaredMetric] = []
        self._registry = registry
        self._prefix = prefix
        self._sampled: list[tuple[DeclaredMetric, Callable[[], Iterable[NamedSample]]]] = []
        self._read: list[tuple[DeclaredMetric, Callable[[], Iterable[Row]]]] = []
        self._settle: Callable[[], None] = lambda: None
        registry.register(self)  # before all families, so that it is read first

    def counter(self, name: str, text: str, labels: Labels = NO_LABELS) -> Counter:
        """Declares a counter. name: without `_total`."""
        full = self._declare(f"{name}_total", "counter", text, labels)
        metric = Counter(full, text, tuple(labels), registry=self._registry)
        return _begun(metric, labels)

    def gauge(self, name: str, text: str, labels: Labels = NO_LABELS) -> Gauge:
        full = self._declare(name, "gauge", text, labels)
        return _begun(Gauge(full, text, tuple(labels), registry=self._registry), labels)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Labels = NO_LABELS
    ) -> Histogram:
        full = self._declare(name, "histogram", text, labels)
        metric = Histogram(full, text, tuple(labels), buckets=buckets, registry=self._registry)
        return _begun(metric, labels)

    def settle_by(self, settle: Callable[[], None]) -> None:
        """Sets what brings families up to date at each scrape, before they are read."""
        self._settle = settle

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge whose value is read at each scrape."""
        self.rows(name, "gauge", text, NO_LABELS, lambda: (((), read()),))

    def rows(
        self,
        name: str,
        kind: Literal["counter", "gauge"],
        text: str,
        labels: Labels,
        read: Callable[[], Iterable[Row]],
    ) -> None:
        """A family whose series are read at each scrape: what is not read is not there."""
        suffix = "_total" if kind == "counter" else ""
        self._declare(f"{name}{suffix}", kind, text, labels)
        self._read.append((self.declared[-1], read))

    def samples(
        self,
        name: str,
        kind: Kind,
        text: str,
        labels: Labels,
        read: Callable[[], Iterable[NamedSample]],
    ) -> None:
        """A family of any kind whose samples are read at each scrape. name: without `_total`."""
        self._declare(f"{name}{'_total' * (kind == 'counter')}", kind, text, labels)
        self._sampled.append((self.declared[-1], read))

    def collect(self) -> Iterator[Metric]:
        self._settle()
        for declared, read in self._read:
            family = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
            metric = family(declared.name, declared.text, labels=tuple(declared.labels))
            for labels, value in read():
                metric.add_metric(labels, value)
            yield metric
        for declared, sampled in self._sampled:
            name = declared.name.removesuffix("_total" if declared.kind == "counter" else "")
            made = Metric(name, declared.text, declared.kind)
            for ending, named, sample in sampled():
                made.add_sample(f"{name}{ending}", dict(named), sample)
            yield made

    def describe(self) -> Iterator[Metric]:
        """Describes nothing: a registration would ask for families that are declared later."""
        return iter(())

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type. accept: the request's header. Only OpenMetrics has
        exemplars. It is written for scrapers that ask for it."""
        # Else a `:` in a name would be written as `_` there.
        accept = accept.replace("openmetrics-text", "openmetrics-text;escaping=allow-utf-8")
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _declare(self, name: str, kind: Kind, text: str, labels: Labels) -> str:
        self.declared.append(DeclaredMetric(f"{self._prefix}{name}", kind, text, dict(labels)))
        return f"{self._prefix}{name.removesuffix('_total')}"


def _begun(metric: M, labels: Labels) -> M:
    """Creates every series that is known beforehand: a rate needs a zero to rise from."""
    if labels and all(labels.values()):
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    """Measures, for ever, how much later than due the event loop runs its callbacks."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + LOOP_LAG_INTERVAL_S
        await asyncio.sleep(LOOP_LAG_INTERVAL_S)
        observe(max(0.0, clock() - due))
