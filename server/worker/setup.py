"""Everything a worker decides before its loop runs: device, dtype, memory, card, adapter store."""

import hashlib
import logging
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.common import extras
from loraplex.adapters.errors import CommandError
from loraplex.adapters.manifest import SlabDtype
from loraplex.adapters.ref import RefSource
from loraplex.adapters.store.store import AdapterStore
from loraplex.server.config import ConfigError, EngineConfig, WorkerConfig
from loraplex.server.engine.memory.residency import AdapterArena
from loraplex.server.engine.shared_memory import HostMemory
from loraplex.server.model.card import model_card, read_base_spec
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, check_folder
from loraplex.server.model.devices.sharding import sharded
from loraplex.server.model.ops.memory import state_bytes
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.served_as import served_as
from loraplex.server.model.spec.vector_forms import PairWishes, VectorWishes
from loraplex.server.protocol import ModelCard
from loraplex.server.worker.adapters.adapter_orders import AdapterOrders
from loraplex.server.worker.adapters.adapter_service import AdapterService
from loraplex.server.worker.adapters.adapter_store import open_store, received_uploads
from loraplex.server.worker.adapters.host_tier import HostTier
from loraplex.server.worker.adapters.merging import Merger
from loraplex.server.worker.adapters.slab_saver import SlabSaver
from loraplex.server.worker.app import UploadFace
from loraplex.server.worker.known_engine import KnownEngine
from loraplex.server.worker.metrics import WorkerMetrics
from loraplex.server.worker.pictures.decoder import PictureDecoder
from loraplex.server.worker.pictures.segments import PatchMemory, memory_bytes
from loraplex.server.worker.pictures.service import PictureService
from loraplex.server.worker.process.device import (
    ChosenDevice,
    DeviceError,
    choose_device,
    cuda_devices,
    torch_build,
)
from loraplex.server.worker.process.engine_process import spawn_engine, start_group
from loraplex.server.worker.process.engine_supervisor import EngineSupervisor
from loraplex.server.worker.process.model_source import ModelError, ModelFolder, find_model
from loraplex.server.worker.process.sizing import (
    choose_dtype,
    choose_extent_bytes,
    choose_sizes,
    heavy_threads,
)
from loraplex.server.worker.worker import Worker

log = logging.getLogger(__name__)

_MERGE_TIMEOUT_S = 600.0  # ties and dare take long
_LEAST_WAITING = 16
_NO_PICTURES = "the worker has --picture-memory 0"
LOAD_THREADS = 16
READ_THREADS = 4


class WorkerStartError(CommandError):
    """The worker cannot start; str() is one sentence for a person."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A worker that is ready to run; `supervisor.run` starts its engine process. name: of the
    model. syncing: a thread with work that need not be done before the process ends."""

    worker: Worker
    supervisor: EngineSupervisor
    worker_id: str
    name: str
    engine: EngineConfig
    memory: HostMemory
    merger: Merger
    syncing: ThreadPoolExecutor
    uploads: UploadFace


def prepare(config: WorkerConfig) -> Prepared:
    """Find model and device, and make the worker. Blocks: it may download the model. Raises
    WorkerStartError, ModuleNotFoundError.
    """
    try:
        device = _device(config)
        model = find_model(config.model, config.revision)
        return _prepare(config, device, model)
    except (CheckpointError, ConfigError, DeviceError, ModelError) as error:
        raise WorkerStartError(str(error)) from error
    except OSError as error:
        raise WorkerStartError(f"the worker cannot be set up: {error}") from error


def _device(config: WorkerConfig) -> ChosenDevice:
    if config.executor != "torch":
        if config.tp > 1:
            raise DeviceError(f"--tp {config.tp}: the executor {config.executor} has one process")
        return ChosenDevice("cpu", True)
    extras.require("torch")
    devices = cuda_devices()
    chosen = choose_device(config.device, devices, torch_build())
    if chosen.kind == "cuda" and config.tp > len(devices):
        raise DeviceError(f"--tp {config.tp}: this machine shows {len(devices)} GPUs")
    return chosen


def _root(config: WorkerConfig, model: ModelFolder) -> str:
    """The model's Hub id; of a folder that has none the name that people gave it first."""
    hub_ids = (name for name in model.names if "/" in name)
    return next(hub_ids, (*config.model_names, *model.names)[0])


def _vector_wishes(config: WorkerConfig) -> VectorWishes:
    normalises = None if config.normalize is None else config.normalize == "yes"
    pairs = PairWishes(config.rerank_tokens, config.rerank_template, config.rerank_instruction)
    return VectorWishes(config.pooling, normalises, config.prompts, config.default_prompt, pairs)


def _cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_base(config: WorkerConfig, folder: Path, names: tuple[str, ...]) -> BaseSpec:
    base = read_base_spec(folder, names)
    if config.text_part_only or not config.picture_memory:
        base = base.text_part
    return msgspec.structs.replace(base, shards=config.tp, quantize=config.quantize or "")


def _prepare(config: WorkerConfig, device: ChosenDevice, model: ModelFolder) -> Prepared:
    names = tuple(dict.fromkeys([*config.model_names, *model.names]))
    model_config = check_folder(model.path, with_tensors=config.executor == "torch")
    quantised = served_as(model_config, config.quantize, config.activations).quantisation
    if device.note is not None:
        log.warning("%s", device.note)
    base = _read_base(config, model.path, names)
    dtype = choose_dtype(config.dtype, device.kind, model_config.dtype, device.has_bfloat16)
    part = sharded(model_config, config.tp)
    engine = engine_config(config, device, model.path, base, dtype, part)
    card = model_card(
        model.path,
        names=names,
        dtype=dtype,
        device=device.kind,
        max_lora_rank=config.max_lora_rank,
        max_context=config.max_context,
        created=int(time.time()),
        wishes=_vector_wishes(config),
    )
    root = _root(config, model)
    listed = tuple(dict.fromkeys([*config.model_names, root]))
    card = msgspec.structs.replace(card, listed=listed, root=root)
    if card.vision is not None and not config.picture_memory:
        card = msgspec.structs.replace(card, vision=None, blind=_NO_PICTURES)
    for remark in card.remarks:
        log.warning("%s", remark)
    if quantised is not None:
        card = msgspec.structs.replace(card, weights=quantised.text)
    card = _apart_by_options(card, config)
    engine = _for_card(engine, card)
    try:
        memory = HostMemory(memory_bytes(engine.host_arena_bytes, card.vision))
    except OSError as error:
        what = f"--host-adapter-memory: {engine.host_arena_bytes} bytes cannot be had"
        raise WorkerStartError(f"{what}: {error.strerror}") from error
    worker_id = config.worker_id or f"worker-{secrets.token_hex(4)}"
    syncing = ThreadPoolExecutor(1, "store-sync")
    store = open_store(config, base, engine, syncing, heavy_threads(_cores()))
    merger = Merger(store, _MERGE_TIMEOUT_S)
    make = spawn_engine if engine.shards == 1 else start_group
    start = partial(make, config.executor, engine, memory.fd)
    supervisor = EngineSupervisor(start, config.step_timeout_s)
    known = KnownEngine(supervisor, memory.begun)
    worker = _worker(worker_id, card, store, merger, engine, memory, known)
    uploads = UploadFace(received_uploads(config), config.max_adapter_bytes)
    return Prepared(
        worker, supervisor, worker_id, names[0], engine, memory, merger, syncing, uploads
    )


def _for_card(engine: EngineConfig, card: ModelCard) -> EngineConfig:
    """The engine's configuration, with what the card says."""
    most = 0 if card.vision is None else card.vision.most_tokens
    return msgspec.structs.replace(engine, base_digest=card.base_digest, picture_tokens=most)


def _apart_by_options(card: ModelCard, config: WorkerConfig) -> ModelCard:
    """Return the card as that of another model for each option that makes other answers."""
    if config.quantize is not None:
        card = _apart(card, config.quantize)
    if config.activations != "auto":
        card = _apart(card, f"activations in {config.activations}")
    if config.kv_dtype != "auto":
        card = _apart(card, f"keys and values in {config.kv_dtype}")
    if config.batch_invariant:
        card = _apart(card, "the same bits in any batch")
    if config.executor != "torch":  # what it invents never goes beside what is computed
        card = _apart(card, config.executor.partition(":")[0])
    return card


def _apart(card: ModelCard, kind: str) -> ModelCard:
    """Return the card as that of another model: routers never mix the answers of the two."""
    digest = hashlib.sha256(f"{kind} {card.base_digest}".encode()).hexdigest()
    return msgspec.structs.replace(card, base_digest=digest)


def engine_config(
    config: WorkerConfig,
    device: ChosenDevice,
    folder: Path,
    base: BaseSpec,
    dtype: SlabDtype,
    model: ModelSpec,
) -> EngineConfig:
    """The engine's settings here. folder: the model's. model: a device's part."""
    states = state_bytes(model, dtype)
    sizes = choose_sizes(config, device.kind, device.memory_bytes, host_bytes(), states)
    extent_bytes = choose_extent_bytes(base, dtype, sizes.adapter_memory)
    host_extents = sizes.host_adapter_memory // extent_bytes
    if host_extents < 1:
        raise WorkerStartError(
            f"--host-adapter-memory must hold at least one extent of {extent_bytes} bytes, "
            f"got {sizes.host_adapter_memory}"
        )
    if config.disk_kv and not config.host_kv_memory:
        raise WorkerStartError("--disk-kv: pages reach the disk by --host-kv-memory, which is 0")
    if config.host_kv_memory > host_bytes():
        what = f"{config.host_kv_memory} bytes are asked for, of {host_bytes()} of this machine"
        raise WorkerStartError(f"--host-kv-memory: {what}")
    return EngineConfig(
        model_path=str(folder),
        device=device.kind,
        dtype=dtype,
        page_size=config.page_size,
        kv_memory=sizes.kv_memory,
        kv_contexts=sizes.kv_contexts,
        adapter_memory=sizes.adapter_memory,
        host_arena_bytes=host_extents * extent_bytes,
        extent_bytes=extent_bytes,
        max_context=config.max_context,
        max_running=sizes.max_running,
        # The worker counts credits; a burst may find all of them waiting at once.
        max_waiting=sizes.max_running + _max_waiting(config.max_waiting, sizes.max_running),
        max_step_tokens=sizes.max_step_tokens,
        batch_step_share=config.batch_step_share,
        step_target_ms=config.step_target_ms,
        prompt_share=config.prompt_share,
        max_draft=sizes.max_draft,
        snapshot_memory=sizes.snapshot_memory,
        picture_memory=config.picture_memory,
        host_kv_memory=config.host_kv_memory // config.tp,
        disk_kv=config.disk_kv // config.tp,
        kv_folder=str(config.cache_dir.expanduser() / "kv"),
        adapter_slots=config.adapter_slots,
        dora_graphs=config.dora_graphs,
        batch_invariant=config.batch_invariant,
        gpu_memory_utilization=config.gpu_memory_utilization,
        quantize=config.quantize,
        activations=config.activations,
        kv_dtype=config.kv_dtype,
        log_format=config.log_format,
        grammar=config.grammar,
        shards=config.tp,
    )


def _max_waiting(asked: int | None, max_running: int) -> int:
    """Enough to fill the next steps, and for those whose adapter is on its way."""
    return max(_LEAST_WAITING, max_running // 4) if asked is None else asked


def _worker(
    worker_id: str,
    card: ModelCard,
    store: AdapterStore,
    merger: Merger,
    engine: EngineConfig,
    memory: HostMemory,
    known: KnownEngine,
) -> Worker:
    metrics = WorkerMetrics()
    sources: tuple[RefSource, ...] = get_args(RefSource)
    loading = {name: ThreadPoolExecutor(LOAD_THREADS, f"load-{name}") for name in sources}
    staging = ThreadPoolExecutor(heavy_threads(_cores()), "slab-stage")
    saving = ThreadPoolExecutor(1, "slab-save")
    # Their own: packing takes long, and what is asked of adapters that are here must not wait.
    reading = ThreadPoolExecutor(READ_THREADS, "store-read")
    extents = engine.host_arena_bytes // engine.extent_bytes
    tier = HostTier(
        memory.view,
        AdapterArena(extents, engine.extent_bytes, extents),
        partial(store.open_slab, dtype=engine.dtype, extent_bytes=engine.extent_bytes),
        staging,
        SlabSaver(memory.view, store.save_slab, saving, metrics),
        metrics,
    )
    metrics.adapter_limit.labels("host").set(engine.host_arena_bytes)
    loads = AdapterService(store, loading, reading, merger, metrics)
    orders = AdapterOrders(tier, store.has, reading, known)
    worker = Worker(engine.max_waiting, worker_id, card, known, loads, tier, orders, metrics)
    if card.vision is not None:
        extras.require("PIL")
        decoder = PictureDecoder(
            card.vision, PatchMemory(memory, engine.host_arena_bytes, card.vision)
        )
        worker.pictures = PictureService(decoder, known.to_engine, metrics)
    return worker
