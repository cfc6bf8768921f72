"""Metrics under vLLM's names, for gateways in front of routers, dashboards and autoscalers.

As of llm-d's metric protocol, the Gateway API Inference Extension's model server protocol, vLLM's
gauges of LoRA residency and its dashboards. This router and its workers are shown as one server.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from prometheus_client.registry import Collector

from loraplex.adapters.common.meters import NO_LABELS, Kind, Meters, NamedSample, Row
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.use import AdapterUse
from loraplex.router.policy.rollout import HeldContent
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.workers.bases import BaseModel, Bases
from loraplex.router.workers.fleet import Fleet
from loraplex.server.protocol import WorkerStatus

COMPAT_PREFIX = "vllm:"
MAX_NAMES = 512
# Of names in one label; 512 registered names fit.
MAX_LABEL_CHARS = 1 << 16
_MODEL = {"model_name": (), "engine": ()}
_REASONS = {"finished_reason": ("stop", "length", "abort", "error")}
_KEPT = {"le": "le", "finish": "finished_reason"}


def same_meters(metrics: RouterMetrics) -> dict[str, Collector]:
    """Lists meters by vLLM's names for them; counters go without `_total`."""
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "generation_tokens": metrics.generated_tokens,
        "prompt_tokens_cached": metrics.cached_tokens,
        "prefix_cache_queries": metrics.prompt_tokens,
        "prefix_cache_hits": metrics.cached_tokens,
        "request_success": metrics.choices_ended,
        "time_to_first_token_seconds": metrics.first_token_s,
        "inter_token_latency_seconds": metrics.token_gap_s,
        "time_per_output_token_seconds": metrics.token_gap_s,
        "request_time_per_output_token_seconds": metrics.output_token_s,
        "e2e_request_latency_seconds": metrics.request_s,
        "request_queue_time_seconds": metrics.queue_wait_s,
        "request_prefill_time_seconds": metrics.prefill_s,
        "request_decode_time_seconds": metrics.decode_s,
        "request_inference_time_seconds": metrics.inference_s,
        "request_prompt_tokens": metrics.sizes["prompt_tokens"],
        "request_generation_tokens": metrics.sizes["generated_tokens"],
        "request_max_num_generation_tokens": metrics.sizes["longest_choice_tokens"],
        "request_params_max_tokens": metrics.sizes["max_tokens"],
        "request_params_n": metrics.sizes["choices"],
    }


class CompatMetrics:
    """Gauges are read at each scrape; nothing is kept."""

    def __init__(self, bases: Bases, aliases: Aliases, use: AdapterUse) -> None:
        self._bases = bases
        self._aliases = aliases
        self._use = use

    def declare(self, meters: Meters, metrics: RouterMetrics) -> None:
        """Declares the metrics by vLLM's names. meters: with the prefix `vllm:`. metrics: what is
        shown under those names, too.
        """
        for name, text, read in (
            ("num_requests_waiting", "Sequences that wait here or at a worker", waiting),
            ("num_requests_running", "Sequences being computed", _running),
            ("kv_cache_usage_perc", "KV pages in use, 1 = all", kv_usage),
            ("gpu_cache_usage_perc", "The same, by its former name", kv_usage),
        ):
            meters.rows(name, "gauge", text, _MODEL, partial(self._of_models, read))
        meters.rows(
            "lora_requests_info",
            "gauge",
            "Adapters of requests, by name; the value is the time of the scrape",
            {"max_lora": (), "running_lora_adapters": (), "waiting_lora_adapters": ()},
            self._requests_info,
        )
        meters.rows(
            "lora_adapter_loaded",
            "gauge",
            "1 for each adapter on a worker's device that is registered, or that requests name",
            {"adapter_name": (), "level": (), "pinned": ()},
            self._loaded,
        )
        for name, text, count in (
            ("num_gpu_loaded_lora_adapters", "Adapters on workers' devices", self._num_loaded),
            ("max_gpu_lora_adapters", "Adapters that may be there at once", self._max_loaded),
        ):
            meters.rows(name, "gauge", text, NO_LABELS, partial(_alone, count))
        self._declare_same(meters, metrics)

    def _declare_same(self, meters: Meters, metrics: RouterMetrics) -> None:
        for name, source in same_meters(metrics).items():
            (found,) = source.collect()
            labels = _MODEL | (_REASONS if source is metrics.choices_ended else {})
            kind: Kind = "histogram" if found.type == "histogram" else "counter"
            meters.samples(name, kind, f"As `{found.name}`", labels, partial(self._same, source))
        preempted = partial(self._of_models, _preempted)
        meters.rows("num_preemptions", "counter", "Sequences put back", _MODEL, preempted)
        text = "Tokens of steps, their sum and number alone"
        meters.samples("iteration_tokens_total", "histogram", text, _MODEL, self._iterations)
        labels = {**_MODEL, "block_size": (), "num_gpu_blocks": ()}
        meters.rows("cache_config_info", "gauge", "Pages of the KV cache", labels, self._cache)

    def _same(self, source: Collector) -> Iterator[NamedSample]:
        """Adds up a metric over labels that are not vLLM's, for each base."""
        (found,) = source.collect()
        sums: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for sample in found.samples:
            labels = tuple((_KEPT[k], v) for k, v in sample.labels.items() if k in _KEPT)
            base = sample.labels.get("base", "")
            sums[sample.name.removeprefix(found.name), base, labels] += sample.value
        for (ending, base, labels), value in sums.items():
            yield ending, _labels(self._bases.of(base)) | dict(labels), value

    def _iterations(self) -> Iterator[NamedSample]:
        for base in self._bases:
            known, labels = statuses([base.fleet]), _labels(base)
            steps = sum(status.step for status in known)
            yield "_bucket", labels | {"le": "+Inf"}, steps
            yield "_count", labels, steps
            yield "_sum", labels, sum(status.step_tokens for status in known)

    def _cache(self) -> Iterator[Row]:
        for base in self._bases:
            known = statuses([base.fleet])
            pages = sum(status.total_pages for status in known)
            for size in {str(status.page_size) for status in known}:
                yield (*_labels(base).values(), size, str(pages)), 1.0

    def _of_models(self, read: Callable[[list[Fleet]], float]) -> list[Row]:
        return [(tuple(_labels(base).values()), read([base.fleet])) for base in self._bases]

    @property
    def _statuses(self) -> list[WorkerStatus]:
        return statuses(self._bases.fleets)

    def _resident(self) -> Counter[str]:
        return Counter(digest for status in self._statuses for digest in status.resident)

    def _num_loaded(self) -> float:
        return len(self._resident())

    def _max_loaded(self) -> float:
        return sum(status.adapter_slots for status in self._statuses)

    def _requests_info(self) -> Iterator[Row]:
        resident = self._resident()
        names: dict[bool, list[str]] = {True: [], False: []}
        for use in self._use.in_use():
            names[use.held.digest in resident].append(use.name)
        running, waiting = (listed(names[on]) for on in (True, False))
        yield (str(int(self._max_loaded())), running, waiting), time.time()

    def _loaded(self) -> Iterator[Row]:
        for name, pinned in islice(self._on_devices().items(), MAX_NAMES):
            yield (name, "gpu", str(pinned).lower()), 1.0

    def _on_devices(self) -> dict[str, bool]:
        """Name -> whether it is pinned: the registered ones, then those by reference in use."""
        resident = self._resident()
        registered = {
            one.key: one
            for base in self._bases
            for status in statuses([base.fleet])
            for digest in status.resident
            for one in self._aliases.meaning(HeldContent(base.name, digest))
            if one.in_service
        }
        found = {str(name): registered[name].pinned for name in sorted(registered)}
        by_reference = (use for use in self._use.in_use() if use.alias is None)
        named = (use.name for use in by_reference if use.held.digest in resident)
        return found | {name: False for name in named if name not in found}


def statuses(fleets: list[Fleet]) -> list[WorkerStatus]:
    sessions = (session for fleet in fleets for session in fleet.sessions)
    return [session.status for session in sessions if session.status is not None]


def waiting(fleets: list[Fleet]) -> float:
    """Counts sequences that wait, here and at workers."""
    here = sum(len(fleet.queue) for fleet in fleets)
    return float(here + sum(status.waiting for status in statuses(fleets)))


def kv_usage(fleets: list[Fleet]) -> float:
    """Computes the share of KV pages that are in use, 1 = all."""
    total = sum(status.total_pages for status in statuses(fleets))
    return 1 - sum(status.free_pages for status in statuses(fleets)) / total if total else 0.0


def _running(fleets: list[Fleet]) -> float:
    return sum(status.running for status in statuses(fleets))


def _preempted(fleets: list[Fleet]) -> float:
    return sum(status.preemptions for status in statuses(fleets))


def _labels(base: BaseModel) -> dict[str, str]:
    return {"model_name": base.names[0], "engine": "0"}


def listed(names: Iterable[str]) -> str:
    """Writes names as one label, with commas between them; a name's own are written as in URLs."""
    kept: list[str] = []
    left = MAX_LABEL_CHARS
    for name in dict.fromkeys(name.replace(",", "%2C") for name in names):
        left -= len(name) + 1
        if len(kept) == MAX_NAMES or left < 0:
            break
        kept.append(name)
    return ",".join(kept)


def _alone(read: Callable[[], float]) -> list[Row]:
    return [((), read())]
