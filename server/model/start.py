"""Brings weights, caches and tables to the device at a start, as far as the memory goes; refuses
what `--batch-invariant` cannot hold."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from mmap import PAGESIZE
from pathlib import Path

import msgspec
import torch

from loraplex.adapters.base import new_ids_width
from loraplex.server.config import ConfigError, EngineConfig
from loraplex.server.engine.executor import ExecutorLimits, MemoryLine
from loraplex.server.engine.shared_memory import map_shared, pages_made
from loraplex.server.model.checkpoint.checkpoint import read_config, read_shards
from loraplex.server.model.checkpoint.tower_part import has_tower
from loraplex.server.model.devices.group import Group
from loraplex.server.model.devices.sharding import sharded
from loraplex.server.model.graphs.parts import Parts
from loraplex.server.model.graphs.start_phases import StartPhases
from loraplex.server.model.lora.arena_weights import DTYPES
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.lora.sites import Sites, TowerSites
from loraplex.server.model.ops.memory import (
    MEMORY_ADVICE,
    DeviceMemory,
    executor_limits,
    fill_device,
    memory_table,
    page_bytes,
    weights_bytes,
)
from loraplex.server.model.ops.ops import KVCache
from loraplex.server.model.ops.row_states import RowStates
from loraplex.server.model.ops.sizes import MOST_PADDING
from loraplex.server.model.pages.page_copier import PageCopier, PageFiles, PageForm
from loraplex.server.model.sampling.sampling import RowSampling
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.page_groups import page_groups, page_heads
from loraplex.server.model.spec.served_as import served_as, with_inputs_as_they_are
from loraplex.server.model.steps.rows import Rows
from loraplex.server.model.tower.tower import PictureStore
from loraplex.server.model.weights import INT8_SCALES, ModelWeights, load_weights

log = logging.getLogger(__name__)

# As CUDA, its libraries and the CPU's allocator say it.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
# From which on a GPU converts FP8.
_FP8_CAPABILITY = (8, 9)
WeightsLoader = Callable[[ModelSpec, torch.dtype, torch.device], ModelWeights]


def require_invariance(model: ModelSpec, config: EngineConfig) -> None:
    """Check that no answer's bits can depend on its batch, where that is asked for. Raises
    ConfigError, which names each reason why they would.
    """
    if not config.batch_invariant:
        return
    reasons = [*_of_options(config), *_of_model(model)]
    if config.device == "cuda":
        reasons += _of_kernels(model)
    if reasons:
        raise ConfigError(f"--batch-invariant: {'; '.join(reasons)}")


def _of_options(config: EngineConfig) -> list[str]:
    reasons = []
    if config.shards > 1:
        reasons.append(f"--tp {config.shards}: devices sum in an order that depends on the batch")
    if config.max_draft:
        reasons.append(f"--max-draft {config.max_draft}: drafts are not checked in this mode")
    return reasons


def _of_model(model: ModelSpec) -> list[str]:
    reasons = []
    if not model.is_causal:
        reasons.append("the model reads whole texts and writes no answers")
    if model.states:
        reasons.append("the model has states, whose sums depend on how a prompt is cut")
    if model.pictures is not None:
        reasons.append(
            "pictures are encoded together: --picture-memory 0 serves the model's text part"
        )
    return reasons


def _of_kernels(model: ModelSpec) -> list[str]:
    """Reasons on a GPU. On a CPU tokens are computed one by one."""
    reasons = []
    if model.quantisation is not None:
        reasons.append(f"quantised weights ({model.quantisation.scheme}) have several kernels")
    if any(isinstance(of, LatentSpec) for of in model.attentions.values()):
        reasons.append("attention to latents has several kernels")
    feeds = (feed for layer in model.layers for feed in layer.feed_forwards)
    if any(isinstance(feed, MoeSpec) for feed in feeds):
        reasons.append("mixtures of experts have several kernels")
    return reasons


def build_parts(
    config: EngineConfig,
    group: Group,
    load: WeightsLoader | None,
    device: torch.device,
    phases: StartPhases,
) -> Parts:
    """Load the model's part, and make all that its executor is built of. load: of the device's part
    of the model; None = from the model's folder. phases: of the start. Raises CheckpointError,
    ConfigError.
    """
    folder = Path(config.model_path)
    forms = (config.quantize, config.activations, config.picture_memory)
    whole = _as_the_device_multiplies(served_as(read_config(folder), *forms), device)
    if whole.pictures is not None and load is None and not has_tower(read_shards(folder)):
        log.info("the checkpoint has no part for images: the text part alone is served")
        whole = msgspec.structs.replace(whole, pictures=None)
    require_invariance(whole, config)
    if load is None:
        given, shard, read = config.quantize, group.shard, phases.count

        def load(_: ModelSpec, dtype: torch.dtype, device: torch.device) -> ModelWeights:
            of_file = (folder, whole, dtype, device)
            return load_weights(*of_file, at_load=given, shard=shard, read=read)

    parts = _build_parts(config, whole, group, load, device, phases)
    group.least(parts.limits.num_pages)  # all have come so far
    return parts


def _as_the_device_multiplies(model: ModelSpec, device: torch.device) -> ModelSpec:
    """The model, whose inputs are rounded to FP8 only where the device multiplies FP8."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        return model
    found = with_inputs_as_they_are(model, ("fp8",))
    if found != model:
        log.warning("this GPU multiplies no FP8: inputs of FP8 weights' products are not rounded")
    return found


def _require_fp8(capability: tuple[int, int]) -> None:
    """Check that the GPU can keep an FP8 cache. Raises ConfigError where it cannot."""
    if capability < _FP8_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (_FP8_CAPABILITY, capability))
        raise ConfigError(
            f"--kv-dtype fp8 needs a GPU of compute capability {needed}, this one has {found}"
        )


def _refuse_rounded_latents(model: ModelSpec, kv_dtype: str) -> None:
    """Check that a model that keeps latents keeps them whole. Raises ConfigError."""
    if kv_dtype != "auto" and any(isinstance(of, LatentSpec) for of in model.attentions.values()):
        raise ConfigError(
            f"--kv-dtype {kv_dtype}: the model keeps latents, which are served as they are"
            " computed; take auto"
        )


def _build_parts(
    config: EngineConfig,
    whole: ModelSpec,
    group: Group,
    load: WeightsLoader,
    device: torch.device,
    phases: StartPhases,
) -> Parts:
    """Everything that lies on the device for good."""
    model = sharded(whole, group.shard.count, group.shard.index)
    dtype = DTYPES[config.dtype]
    on_gpu = device.type == "cuda"
    if on_gpu and config.kv_dtype == "fp8":
        _require_fp8(torch.cuda.get_device_capability(device))
    _refuse_rounded_latents(model, config.kv_dtype)
    free, total = torch.cuda.mem_get_info(device) if on_gpu else (0, 0)
    planned, of_weights = config, weights_bytes(model, config.dtype, packed=True)
    if on_gpu:
        planned = fill_device(model, config, DeviceMemory(total, free, free - of_weights))
    executor_limits(model, planned, of_weights)  # says what is wrong before the weights are read
    phases.begin("reading weights")
    weights = load(model, dtype, device)
    phases.begin("making caches")
    sums = (config.max_step_tokens + MOST_PADDING, model.hidden_size)
    columns = max(model.head.linear.out_features, new_ids_width(group.shard.count))
    logits = (config.max_running + MOST_PADDING, columns)
    group.reserve(sums, logits, dtype)
    memory: tuple[MemoryLine, ...] = ()
    if on_gpu:
        room = DeviceMemory(total, free, torch.cuda.mem_get_info(device)[0])
        config, memory = _filled(model, config, room, group)
    limits = executor_limits(model, config, of_weights)
    cache = _make_cache(model, config, limits.num_pages, weights, device)
    model = model.within(limits.max_context)
    table = _make_table(model, config, limits, group, device)
    size = (limits.max_rows, limits.max_context, config.page_size)
    kinds = (limits.short_context, len(cache.groups.windows), limits.pictures)
    return Parts(
        whole,
        group,
        model,
        weights,
        cache,
        RowStates(model, limits.max_rows, dtype, device, limits.num_snapshots, config.max_draft),
        table,
        Rows(*size, device, *kinds),
        RowSampling(limits.max_rows, model.vocab_size, model.eos_token_ids, device),
        limits,
        memory,
        config.dora_graphs,
        _make_pictures(model, weights, limits, table),
        config.batch_invariant,
    )


def _make_table(
    model: ModelSpec,
    config: EngineConfig,
    limits: ExecutorLimits,
    group: Group,
    device: torch.device,
) -> AdapterTable:
    pictures, tower = model.pictures, None
    if pictures is not None:
        tower = TowerSites(pictures.tower, first_layer=model.num_layers)
    return AdapterTable(
        Sites(model, group.shard),
        slots=limits.table_slots,
        extents=limits.arena_extents,
        extent_bytes=config.extent_bytes,
        dtype=DTYPES[config.dtype],
        device=device,
        tower=tower,
    )


def _make_pictures(
    model: ModelSpec, weights: ModelWeights, limits: ExecutorLimits, table: AdapterTable
) -> PictureStore | None:
    """Make what reads pictures, and warm it on a GPU."""
    if model.pictures is None or weights.tower is None or limits.pictures is None:
        return None
    store = PictureStore(model.pictures, weights.tower, limits.pictures, table)
    if store.results.is_cuda:
        store.warm()
    return store


def _filled(
    model: ModelSpec, config: EngineConfig, memory: DeviceMemory, group: Group
) -> tuple[EngineConfig, tuple[MemoryLine, ...]]:
    """Divide what weights leave of a device. Returns the sizes, those of all devices, and what
    fills this one.
    """
    config = fill_device(model, config, memory)
    table = memory_table(model, config, memory.free_before - memory.free_now)
    return msgspec.structs.replace(config, kv_memory=group.least(config.kv_memory)), table


def _make_cache(
    model: ModelSpec,
    config: EngineConfig,
    pages: int,
    weights: ModelWeights,
    device: torch.device,
) -> KVCache:
    groups, dtype = page_groups(model), DTYPES[config.dtype]
    # One page more than the scheduler has: padding of batches is written there.
    shape = (pages + 1, 2 * config.page_size * groups.width)
    kept = {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[config.kv_dtype]
    pool = torch.zeros(shape, dtype=kept, device=device)
    scales = tuple(layer.kv_scales for layer in weights.layers)
    token_scales = None
    if config.kv_dtype == "int8":
        rooms = 2 * config.page_size * page_heads(model)
        token_scales = torch.zeros(pages + 1, rooms, dtype=torch.float32, device=device)
        scales = (INT8_SCALES,) * model.num_layers
    return KVCache(pool, model, groups, config.page_size, dtype, scales, token_scales)


def host_pages_mapped(config: EngineConfig) -> memoryview:
    """The memory of pages below the device. Raises ConfigError."""
    try:
        return map_shared(-1, config.host_kv_memory)
    except (OSError, OverflowError) as error:
        what = f"{config.host_kv_memory} bytes a process cannot be had"
        raise ConfigError(f"--host-kv-memory: {what} ({error})") from error


def make_copiers(
    config: EngineConfig, parts: Parts, memory: memoryview
) -> tuple[PageCopier, PageCopier]:
    """Make the copiers of the cache's pages and of snapshots. memory: of `host_pages_mapped`.
    Raises ConfigError.
    """
    cache, shard, limits = parts.cache, parts.group.shard, parts.limits
    pools = [pool for pool in (cache.pool, cache.all_scales) if pool is not None]
    kept, slots = parts.states.snapshots(), limits.host_snapshots
    of_snapshot = sum(each[0].nbytes for each in kept) if slots else 0
    end = (len(memory) - slots * of_snapshot) // PAGESIZE * PAGESIZE
    form = PageForm(
        base_digest=config.base_digest,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        page_size=config.page_size,
        layers=cache.groups.layers,
        width=cache.groups.width,
        shard=shard.index,
        shards=shard.count,
        nbytes=page_bytes(parts.model, config),
    )
    of_states = msgspec.structs.replace(form, layers=(), width=0, nbytes=of_snapshot)
    files = _files(config.kv_folder, form, limits.disk_pages)
    states = _files(f"{config.kv_folder}-states", of_states, limits.disk_snapshots)
    after_steps = shard.count > 1
    return (
        _copier(pools, memory[:end], limits.host_pages, files, after_steps=after_steps),
        _copier(kept, memory[end:], slots, states, after_steps=True),
    )


def _files(folder: str, form: PageForm, count: int) -> PageFiles | None:
    """Take a folder for so many pages. Raises ConfigError."""
    try:
        return PageFiles(Path(folder), form) if count else None
    except OSError as error:
        raise ConfigError(f"--disk-kv: {folder} cannot be used ({error})") from error


def _copier(
    pools: Sequence[torch.Tensor],
    memory: memoryview,
    slots: int,
    files: PageFiles | None,
    *,
    after_steps: bool,
) -> PageCopier:
    """Make a copier, as PageCopier says. Raises ConfigError."""
    try:
        return PageCopier(pools, memory, slots, files, after_steps=after_steps)
    except MemoryError as error:
        raise ConfigError(f"--host-kv-memory: {error}") from error


@contextmanager
def host_memory_made(device: torch.device, *memories: memoryview) -> Iterator[None]:
    """A start leaves most cores idle. On the CPU nothing is pinned, and what nobody uses takes no
    memory."""
    with ExitStack() as making:
        for memory in memories if device.type != "cpu" else ():
            making.enter_context(pages_made(memory, max(1, _cores() // 4)))
        yield


@contextmanager
def advised() -> Iterator[None]:
    """Memory that runs out is reported with what to do about it."""
    try:
        yield
    except RuntimeError as error:  # torch's, or what Triton and CUDA's libraries make of theirs
        told = str(error).partition("\n")[0]
        if not any(words in told for words in _NO_MEMORY):
            raise
        raise ConfigError(
            f"the memory ran out at start: {told.rstrip('.')}. {MEMORY_ADVICE}"
        ) from error


def leave_a_core(processes: int) -> None:
    """The engine's processes share the machine with the router and the worker; never more threads
    than set."""
    own = (_cores() - 1) // processes
    torch.set_num_threads(max(1, min(torch.get_num_threads(), own)))


def _cores() -> int:
    return len(os.sched_getaffinity(0))
