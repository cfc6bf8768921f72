"""The worker's adapter store, as its configuration wants it."""

from concurrent.futures import Executor, ThreadPoolExecutor

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.content_check import Run
from loraplex.adapters.peft.validate import AdapterLimits, SlabRoom
from loraplex.adapters.ref import RefSource
from loraplex.adapters.sources.base import Source
from loraplex.adapters.sources.enabled import open_sources
from loraplex.adapters.sources.upload import UploadSource
from loraplex.adapters.store.store import AdapterStore
from loraplex.adapters.uploads.shelf import UploadShelf, upload_folder
from loraplex.server.config import EngineConfig, WorkerConfig

# Uploads of the largest size that wait for their admission. They are links to what was admitted.
_RECEIVED = 4


def open_store(
    config: WorkerConfig, base: BaseSpec, engine: EngineConfig, syncing: Executor, threads: int
) -> AdapterStore:
    """Open the store of adapters. engine: which serves them. syncing: see AdapterStore. threads:
    how many copy, and how many judge and pack.
    Raises AdapterError when the cache folder cannot be used, or a source has what is no host.
    """
    # Threads of their own: a folder on a disk that stalls holds up no other work.
    sources = sources_of(config, ThreadPoolExecutor(threads, "adapter-copy").map)
    run = ThreadPoolExecutor(threads, "adapter-work").map
    limits = adapter_limits(config, engine)
    return AdapterStore(config.cache_dir, base, sources, limits, syncing=syncing, run=run)


def received_uploads(config: WorkerConfig) -> UploadShelf:
    """Open the shelf of uploads that routers send to this worker."""
    return UploadShelf(config.cache_dir / "received", _RECEIVED * config.max_adapter_bytes)


def sources_of(config: WorkerConfig, run: Run = map) -> dict[RefSource, Source]:
    """Open all sources of adapters. Raises AdapterError for an option that cannot hold."""
    sources = open_sources(
        config.hub_owners,
        config.adapter_roots,
        config.s3_buckets,
        config.https_hosts,
        config.modelscope_owners,
        config.modelscope_endpoint,
        run,
    )
    shared = UploadShelf(upload_folder(config.upload_store, config.cache_dir), 0)
    sources["upload"] = UploadSource((received_uploads(config), shared))
    return sources


def adapter_limits(config: WorkerConfig, engine: EngineConfig) -> AdapterLimits:
    return AdapterLimits(
        max_bytes=config.max_adapter_bytes,
        max_lora_rank=config.max_lora_rank,
        max_table_bytes=config.max_table_bytes,
        allow_other_base=config.allow_other_base,
        text_part_only=config.text_part_only,
        max_store_bytes=config.adapter_disk,
        room=SlabRoom(
            engine.dtype, engine.extent_bytes, engine.adapter_memory, engine.host_arena_bytes
        ),
    )
