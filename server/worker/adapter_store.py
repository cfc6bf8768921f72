"""The worker's adapter store, as its configuration wants it."""

from adapters.base import BaseSpec
from adapters.sources.enabled import open_sources
from adapters.store import AdapterStore
from adapters.validate import AdapterLimits
from server.config import WorkerConfig


def open_store(config: WorkerConfig, base: BaseSpec) -> AdapterStore:
    """Raises AdapterError when the cache folder cannot be used, or a source has what is no host."""
    return AdapterStore(
        config.cache_dir,
        base,
        open_sources(
            config.hub_owners, config.adapter_roots, config.s3_buckets, config.https_hosts
        ),
        adapter_limits(config),
    )


def adapter_limits(config: WorkerConfig) -> AdapterLimits:
    return AdapterLimits(
        max_bytes=config.max_adapter_bytes,
        max_lora_rank=config.max_lora_rank,
        allow_other_base=config.allow_other_base,
        max_store_bytes=config.adapter_disk,
    )
