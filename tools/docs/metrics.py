"""The page docs/reference/metrics.md, made from the declared metrics."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from loraplex.adapters.common.meters import DeclaredMetric, Meters
from loraplex.adapters.sources.enabled import open_hub
from loraplex.router.build import build_service
from loraplex.router.config import RouterConfig
from loraplex.router.operations.compat_metrics import COMPAT_PREFIX, CompatMetrics
from loraplex.server.worker.metrics import WorkerMetrics

_HEAD = """\
# Metrics

<!-- Written by `python -m tools.docs`; a test holds it fresh. -->

Routers and workers answer `GET /metrics` in Prometheus' text format, or in OpenMetrics if the
request asks for it. Every series whose labels have listed values is there from the start, at zero.
Histograms end in `_bucket`, `_sum` and `_count`.

- Seconds are seconds, bytes are bytes. Counters count from the start of the process; a worker's
  outlive its engine.
- No label holds a digest, a request's id, a key or anything that a caller chose.
- A label whose values are known lists them where it is declared. Others (workers, routes,
  registered adapters) come as they go. [Add a metric](../guides/add-a-metric.md) shows how.
"""
_COMPAT = """\
With `--metrics-compat` a router also answers with the names that llm-d, the Gateway API
Inference Extension, dashboards and autoscalers read from vLLM's model servers. Gateways can then
pick among routers as they pick among those servers: `loraplex serve` in a pod, or a router with
workers of its own. Most names show a metric of this page once more; `engine` is always `0`.

- An adapter that requests name by reference is listed as they wrote it, while they run, after the
  registered ones. A comma in it is `%2C`. At most 512 names are listed.
- `vllm:lora_adapter_loaded` has devices (`level="gpu"`) alone: host memory changes too much to be
  reported twice a second.

"""
_USE = """\
[monitoring.md](../operations/monitoring.md) describes the dashboards, alerts and traces.
"""
_COLUMNS = "| name | kind | labels | meaning |\n| --- | --- | --- | --- |\n"


def router_meters() -> Meters:
    """Metrics that a router declares."""
    config = RouterConfig(workers=())
    return build_service(config, CollectorRegistry(), open_hub()).metrics.meters


def compat_meters() -> Meters:
    """Metrics that `--metrics-compat` adds to a router's."""
    service = build_service(RouterConfig(workers=()), CollectorRegistry(), open_hub())
    meters = Meters(CollectorRegistry(), COMPAT_PREFIX)
    aliases = service.catalog.rules.aliases
    compat = CompatMetrics(service.bases, aliases, service.admin.use)
    compat.declare(meters, service.metrics)
    return meters


def worker_meters() -> Meters:
    """Metrics that a worker declares."""
    return WorkerMetrics().meters


def render() -> str:
    """The whole page."""
    return "\n".join(
        [
            _HEAD,
            _USE,
            _section("Router", router_meters().declared),
            _section("Worker", worker_meters().declared),
            _section("For gateways", compat_meters().declared, _COMPAT),
        ]
    )


def _section(title: str, families: Iterable[DeclaredMetric], text: str = "") -> str:
    lines = (
        f"| `{family.name}` | {family.kind} | {_labels(family)} | {family.text} |\n"
        for family in families
    )
    return f"## {title}\n\n{text}{_COLUMNS}{''.join(lines)}"


def _labels(family: DeclaredMetric) -> str:
    return "; ".join(
        f"`{label}`: {', '.join(values)}" if values else f"`{label}`"
        for label, values in family.labels.items()
    )
