"""The worker's adapter store, as its configuration wants it."""

from adapters.base import BaseSpec
from adapters.sources.hub import HubSource
from adapters.sources.local import LocalSource
from adapters.store import AdapterStore
from adapters.validate import AdapterLimits
from server.config import WorkerConfig


def open_store(config: WorkerConfig, base: BaseSpec) -> AdapterStore:
    """Raises AdapterError when the cache folder cannot be used."""
    return AdapterStore(
        config.cache_dir,
        base,
        {"hub": HubSource(owners=config.hub_owners), "local": LocalSource(config.adapter_roots)},
        adapter_limits(config),
    )


def adapter_limits(config: WorkerConfig) -> AdapterLimits:
    return AdapterLimits(
        max_bytes=config.max_adapter_bytes,
        max_lora_rank=config.max_lora_rank,
        allow_other_base=config.allow_other_base,
        max_store_bytes=config.adapter_disk,
    )
