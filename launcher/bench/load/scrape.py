"""A worker's counters of adapters and steps, read over HTTP."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loraplex.launcher.bench.errors import BenchError

_LOADS = "loraplex_worker_adapter_load_seconds"
_COUNTERS = {
    "loraplex_worker_adapter_copied_bytes_total": "copied_bytes",
    "loraplex_worker_adapter_reloads_total": "reloads",
    "loraplex_worker_steps_total": "steps",
}
_LOOKUPS = "loraplex_worker_adapter_lookups_total"


def parse_counters(text: str) -> dict[str, float]:
    """From an exposition: `copy_sum`, `copy_count` and so for each stage of a load, `lookups_host`
    for each tier, `steps`, `copied_bytes`, `reloads`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels, value = sample.name, sample.labels, sample.value
            if name in (f"{_LOADS}_sum", f"{_LOADS}_count"):
                found[f"{labels['stage']}_{name.removeprefix(_LOADS + '_')}"] = value
            elif name == _LOOKUPS:
                found[f"lookups_{labels['tier']}"] = value
            elif name in _COUNTERS:
                found[_COUNTERS[name]] = value
    return found


async def read_counters(http: httpx.AsyncClient, url: str | None) -> dict[str, float]:
    """url: of the worker; None = nothing is read. Raises BenchError."""
    if url is None:
        return {}
    try:
        answer = await http.get(f"{url}/metrics")
        answer.raise_for_status()
        return parse_counters(answer.text)
    except (httpx.HTTPError, ValueError) as error:
        raise BenchError(f"{url}/metrics has no counters: {error!r}") from None


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
