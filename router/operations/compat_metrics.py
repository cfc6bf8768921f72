"""Metrics under vLLM's names, for gateways in front of routers.

As of llm-d's metric protocol, the Gateway API Inference Extension's model server protocol, and
vLLM's gauges of LoRA residency. A gateway sees this router and its workers as one model server.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from adapters.common.meters import NO_LABELS, Meters, Row
from router.names.aliases import Aliases
from router.names.use import AdapterUse
from router.workers.base_model import BaseModel
from router.workers.fleet import Fleet
from server.protocol import WorkerStatus

COMPAT_PREFIX = "vllm:"
MAX_NAMES = 512
# Of names in one label; 512 registered names fit.
MAX_LABEL_CHARS = 1 << 16
_MODEL = {"model_name": ()}


class CompatMetrics:
    """Gauges are read at each scrape; nothing is kept."""

    def __init__(self, base: BaseModel, fleet: Fleet, aliases: Aliases, use: AdapterUse) -> None:
        self._base = base
        self._fleet = fleet
        self._aliases = aliases
        self._use = use

    def declare(self, meters: Meters) -> None:
        """meters: with the prefix `vllm:`."""
        fleet = self._fleet
        for name, text, read in (
            (
                "num_requests_waiting",
                "Sequences that wait here or at a worker",
                partial(waiting, fleet),
            ),
            ("num_requests_running", "Sequences being computed", self._running),
            ("kv_cache_usage_perc", "KV pages in use, 1 = all", partial(kv_usage, fleet)),
            ("gpu_cache_usage_perc", "The same, by its former name", partial(kv_usage, fleet)),
        ):
            meters.rows(name, "gauge", text, _MODEL, partial(self._of_model, read))
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

    def _of_model(self, read: Callable[[], float]) -> list[Row]:
        return [((self._model,), read())]

    @property
    def _model(self) -> str:
        return "" if self._base.text is None else self._base.text.card.names[0]

    @property
    def _statuses(self) -> list[WorkerStatus]:
        return statuses(self._fleet)

    def _running(self) -> float:
        return sum(status.running for status in self._statuses)

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
            names[use.digest in resident].append(use.name)
        running, waiting = (listed(names[on]) for on in (True, False))
        yield (str(int(self._max_loaded())), running, waiting), time.time()

    def _loaded(self) -> Iterator[Row]:
        for name, pinned in islice(self._on_devices().items(), MAX_NAMES):
            yield (name, "gpu", str(pinned).lower()), 1.0

    def _on_devices(self) -> dict[str, bool]:
        """Name -> whether it is pinned: the registered ones, then those by reference in use."""
        resident = self._resident()
        registered = (r for r in self._aliases.all() if r.in_service)
        found = {str(r.key): r.pinned for r in registered if r.digests & resident.keys()}
        by_reference = (use for use in self._use.in_use() if use.alias is None)
        named = (use.name for use in by_reference if use.digest in resident)
        return found | {name: False for name in named if name not in found}


def statuses(fleet: Fleet) -> list[WorkerStatus]:
    return [s.status for s in fleet.sessions if s.status is not None]


def waiting(fleet: Fleet) -> float:
    """Sequences, here and at workers."""
    return float(len(fleet.queue) + sum(status.waiting for status in statuses(fleet)))


def kv_usage(fleet: Fleet) -> float:
    """Of all KV pages, 1 = all."""
    total = sum(status.total_pages for status in statuses(fleet))
    return 1 - sum(status.free_pages for status in statuses(fleet)) / total if total else 0.0


def listed(names: Iterable[str]) -> str:
    """One label's names, with commas between them; a name's own are written as in URLs."""
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
