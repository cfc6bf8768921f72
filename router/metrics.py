"""What a router measures, in a registry of its own. Labels come from fixed, short lists only."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Seconds. Finer than a decode step at the low end, as long as a request may last at the high end.
_LATENCY_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)


class RouterMetrics:
    """Counters and histograms; gauges read their value when scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter(
            "loraplex_requests",
            "Requests by route and HTTP status",
            ("route", "status"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "loraplex_prompt_tokens", "Prompt tokens of started sequences", registry=registry
        )
        self.generated_tokens = Counter(
            "loraplex_generated_tokens", "Tokens received from workers", registry=registry
        )
        self.first_token_s = Histogram(
            "loraplex_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.token_gap_s = Histogram(
            "loraplex_inter_token_latency_seconds",
            "Between two arrivals of tokens of one sequence",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.queue_wait_s = Histogram(
            "loraplex_queue_wait_seconds",
            "From a sequence's readiness to its placement on a worker",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.adapter_load_s = Histogram(
            "loraplex_adapter_load_seconds",
            "From naming an adapter to its digest, kept answers included, by outcome",
            ("outcome",),
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._placements = Counter(
            "loraplex_placements", "Sequences placed, by reason", ("reason",), registry=registry
        )
        self._resumes = Counter(
            "loraplex_resumes", "Attempts after the first, by cause", ("cause",), registry=registry
        )
        self.given_up = Counter(
            "loraplex_generations_given_up",
            "Generations whose client left before the answer was whole",
            registry=registry,
        )

    def request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def placed(self, reason: str, waited_s: float) -> None:
        self._placements.labels(reason).inc()
        self.queue_wait_s.observe(waited_s)

    def resumed(self, cause: str) -> None:
        self._resumes.labels(cause).inc()

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A gauge `loraplex_<name>` whose value is read at each scrape."""
        Gauge(f"loraplex_{name}", help_text, registry=self._registry).set_function(read)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)
