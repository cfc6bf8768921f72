"""Arithmetic of a worker's start: default sizes, dtype of slabs, size of extents, threads. Pure."""

from dataclasses import dataclass
from typing import Literal

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.manifest import ITEM_BYTES, SlabDtype
from loraplex.server.config import ServeMode, WorkerConfig

MIN_EXTENT = 64 << 10
MAX_EXTENT = 4 << 20
# An extent holds the largest B of an adapter of this rank.
TYPICAL_LORA_RANK = 16
# An arena is cut into at least so many extents, however small it is.
MIN_EXTENTS = 64
MAX_HEAVY_THREADS = 16

_CPU_ADAPTERS, _CPU_HOST_ADAPTERS, _CPU_KV = 256 << 20, 512 << 20, 256 << 20
_CPU_RUNNING, _CPU_STEP_TOKENS = 64, 512
_GPU_ADAPTER_SHARE = 10  # one part of so many
_GPU_HOST_SHARE = 4
_STATES_SHARE, _SNAPSHOTS_SHARE = 8, 16
# So many snapshots for each sequence at once, or so many in all, whichever is more.
_SNAPSHOTS_EACH, _FEW_SNAPSHOTS = 4, 16
# Sequences at once of a mode for few users, the most tokens of its steps, and for how many times
# its sequences there are keys and values: earlier conversations are kept.
_FEW: dict[ServeMode, int] = {"local": 4, "interactive": 1}
_FEW_STEP_TOKENS, _KEPT = 2048, 2
_MAX_DRAFT = 8  # where steps are short of sequences, or cost little more with more tokens
# From so much memory on: sequences at once, tokens a step. What a step needs beside weights grows
# with both, and is to leave most of a small GPU to keys and values.
_GPU_LOADS = ((64 << 30, 512, 8192), (32 << 30, 256, 4096), (0, 128, 2048))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a worker allocates, and how much it runs at once.

    kv_memory, kv_contexts: as in EngineConfig.
    """

    adapter_memory: int
    host_adapter_memory: int
    kv_memory: int
    kv_contexts: int
    max_running: int
    max_step_tokens: int
    max_draft: int
    snapshot_memory: int


def choose_sizes(
    config: WorkerConfig,
    device: Literal["cpu", "cuda"],
    gpu_bytes: int,
    host_bytes: int,
    state_bytes: int = 0,
) -> Sizes:
    """The sizes asked for, else those that fit the device. gpu_bytes, host_bytes: memory there is.
    state_bytes: of one sequence's states; 0 = it has none.
    """
    on_gpu = device == "cuda"
    adapters = config.adapter_memory or (
        gpu_bytes // _GPU_ADAPTER_SHARE if on_gpu else _CPU_ADAPTERS
    )
    # A packed adapter has the parts of all devices.
    beside = max(min(adapters * config.tp, host_bytes // _GPU_HOST_SHARE), _CPU_HOST_ADAPTERS)
    on_host = beside if on_gpu else _CPU_HOST_ADAPTERS
    running, step_tokens = _CPU_RUNNING, _CPU_STEP_TOKENS
    if on_gpu:
        running, step_tokens = next(of for least, *of in _GPU_LOADS if gpu_bytes >= least)
    few = _FEW.get(config.mode)
    if few is not None:
        running, step_tokens = few, min(step_tokens, _FEW_STEP_TOKENS)
    memory = gpu_bytes if on_gpu else host_bytes
    if state_bytes:
        running = max(1, min(running, memory // _STATES_SHARE // state_bytes))
    running, step_tokens = config.max_running or running, config.max_step_tokens or step_tokens
    max_draft = _MAX_DRAFT if few is not None or not on_gpu else 0
    if config.batch_invariant:
        max_draft = 0
    return Sizes(
        adapter_memory=adapters,
        host_adapter_memory=config.host_adapter_memory or on_host,
        kv_memory=config.kv_memory or (0 if on_gpu else _CPU_KV),
        kv_contexts=0 if few is None else _KEPT * running,
        max_running=min(running, step_tokens),  # each has one token a step at least
        max_step_tokens=step_tokens,
        max_draft=max_draft if config.max_draft is None else config.max_draft,
        snapshot_memory=_snapshots(running, memory, state_bytes)
        if config.snapshot_memory is None
        else config.snapshot_memory,
    )


def _snapshots(running: int, memory: int, state_bytes: int) -> int:
    most = max(_FEW_SNAPSHOTS, _SNAPSHOTS_EACH * running) * state_bytes
    return min(most, memory // _SNAPSHOTS_SHARE)


def choose_dtype(
    asked: Literal["auto", "float32", "float16", "bfloat16"],
    device: Literal["cpu", "cuda"],
    checkpoint: str | None,
    has_bfloat16: bool,
) -> SlabDtype:
    """dtype of weights, activations and slabs. checkpoint: the dtype in the model's config.json."""
    if asked != "auto":
        return asked
    if device == "cpu":
        return "float32"
    if checkpoint == "float16":
        return "float16"
    return "bfloat16" if has_bfloat16 else "float16"


def choose_extent_bytes(base: BaseSpec, dtype: SlabDtype, adapter_memory: int) -> int:
    """Bytes of an extent: a power of two in 64 KiB .. 4 MiB.

    Tensors above one extent need a contiguous run, and what a tensor leaves free of an extent is
    lost. So an extent is the smallest size that holds the largest layer tensor of a rank-16 adapter
    (Llama-3.1-8B in bf16: 512 KiB). A small arena gets smaller extents, so as to hold many
    adapters.
    """
    widest = max(
        max(module.in_features, module.out_features)
        for layer in base.layers
        for module in layer.modules.values()
    )
    largest_tensor = widest * TYPICAL_LORA_RANK * ITEM_BYTES[dtype]
    extent = MIN_EXTENT
    while extent < min(largest_tensor, MAX_EXTENT) and extent * 2 * MIN_EXTENTS <= adapter_memory:
        extent *= 2
    return extent


def heavy_threads(cores: int) -> int:
    """How many adapters are hashed, or converted, at once. The other cores are the engine's, the
    event loop's and the router's."""
    return min(MAX_HEAVY_THREADS, max(2, cores // 2))
