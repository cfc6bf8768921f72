"""Memory that a model needs of the devices that share it. Imports neither torch nor a
kernel."""

import dataclasses
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.manifest import SlabDtype
from loraplex.launcher.worker_groups import AskedGroups, Fit, WorkerGroups, divide, undivided
from loraplex.server.config import ConfigError, EngineConfig, WorkerConfig
from loraplex.server.engine.memory.room import tokens_together
from loraplex.server.model.devices.sharding import shard_counts, sharded
from loraplex.server.model.ops.memory import (
    WORKSPACE,
    DeviceMemory,
    executor_limits,
    fill_device,
    memory_table,
    page_bytes,
    state_bytes,
    weights_bytes,
)
from loraplex.server.model.spec.base_spec import base_spec
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.page_groups import page_groups
from loraplex.server.worker.process.device import ChosenDevice, CudaDevice
from loraplex.server.worker.process.sizing import choose_dtype
from loraplex.server.worker.setup import engine_config

_GIB = 1 << 30
_USUAL_COUNTS = (1, 2, 4, 8)
# Of a GPU, for keys and values of a server: with less it computes few sequences at once.
_KV_SHARE = 0.1


class Needs(msgspec.Struct, frozen=True):
    """Needs on this machine. weights, kv_memory: bytes. kv_bytes: keys and values of one token.

    state_bytes: of one sequence, beside keys and values.
    kv_tokens: of all sequences together, where these are short; long_tokens: where each has
    max_context tokens, since pages behind a window come free. max_context: tokens of one sequence.
    problem: why the model does not fit, or None; then these are 0.
    """

    device: str
    dtype: SlabDtype
    weights: int
    kv_bytes: int
    kv_memory: int
    kv_tokens: int
    long_tokens: int
    max_context: int
    state_bytes: int = 0
    problem: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        """The needs as rows for a person: a name and a text each."""
        rows = [
            ("weights", f"{self.weights / _GIB:.2f} GiB"),
            ("a token", f"{self.kv_bytes:,} bytes of keys and values"),
        ]
        if self.state_bytes:
            rows.append(("a sequence", f"{self.state_bytes:,} bytes of states"))
        if self.problem is None:
            of_each = f"of one sequence at most {self.max_context:,}"
            in_all = f"{self.kv_tokens:,} tokens in {self.kv_memory / _GIB:.2f} GiB"
            if self.long_tokens > self.kv_tokens:
                of_each += f", and {self.long_tokens:,} in sequences so long"
            rows.append(("cache", f"{in_all}; {of_each}" if self.kv_bytes else of_each))
        return rows


class ModelNeeds:
    """A model's needs by the number of its devices. config: its `tp` means nothing here.

    `of` raises ConfigError, WorkerStartError.
    """

    def __init__(self, config: WorkerConfig, model: ModelSpec, device: ChosenDevice) -> None:
        self.config = config
        self._model = model
        self.device = device
        self._base = base_spec(model, "", ())
        self._dtype = choose_dtype(config.dtype, device.kind, model.dtype, device.has_bfloat16)
        self.of = cache(self._of)

    @property
    def counts(self) -> tuple[int, ...]:
        """Usual numbers of devices that can share it, the least first."""
        return tuple(count for count in shard_counts(self._model) if count in _USUAL_COUNTS)

    def weights(self, count: int) -> int:
        """Bytes on each device."""
        packed = self.device.kind == "cuda"
        return weights_bytes(sharded(self._model, count), self._dtype, packed=packed)

    def fit(self, count: int) -> Fit:
        found = self.of(count)
        if found.problem is not None:
            return "no"
        chosen = self.config.kv_memory is not None or self.config.mode != "server"
        roomy = found.kv_memory >= _KV_SHARE * self.device.memory_bytes
        return "well" if chosen or roomy else "tight"

    def _of(self, count: int) -> Needs:
        config = dataclasses.replace(self.config, tp=count)
        model = sharded(self._model, count)
        return _needs(config, self.device, model, self._base, self._dtype)


def choose_groups(
    asked: AskedGroups, needs: ModelNeeds, gpus: Sequence[CudaDevice]
) -> WorkerGroups:
    """Choose groups of this machine's GPUs for `serve`. gpus: those that show. Raises OptionError,
    ConfigError, WorkerStartError."""
    if needs.device.kind == "cpu":
        return undivided(asked, "the CPU")
    if needs.config.mode != "server":  # the rest is left to other programs
        asked = dataclasses.replace(asked, worker_count=asked.worker_count or 1)
    return divide(asked, gpus, needs.counts, needs.fit)


def _needs(
    config: WorkerConfig, device: ChosenDevice, model: ModelSpec, base: BaseSpec, dtype: SlabDtype
) -> Needs:
    engine = engine_config(config, device, Path(config.model), base, dtype, model)
    weights = weights_bytes(model, dtype, packed=device.kind == "cuda")
    windows = page_groups(model).windows
    found = Needs(
        device=device.kind,
        dtype=dtype,
        weights=weights,
        kv_bytes=page_bytes(model, engine) * len(windows) // engine.page_size,
        kv_memory=engine.kv_memory,
        kv_tokens=0,
        long_tokens=0,
        max_context=0,
        state_bytes=state_bytes(model, dtype),
    )
    try:
        engine = _filled(model, engine, weights, device)
        limits = executor_limits(model, engine)
    except ConfigError as error:
        return msgspec.structs.replace(found, problem=str(error))
    room = (limits.num_pages, limits.page_size, limits.page_windows)
    return msgspec.structs.replace(
        found,
        kv_memory=engine.kv_memory,
        kv_tokens=tokens_together(*room, each=limits.page_size),
        long_tokens=tokens_together(*room, each=limits.max_context),
        max_context=limits.max_context,
    )


def _filled(
    model: ModelSpec, engine: EngineConfig, weights: int, device: ChosenDevice
) -> EngineConfig:
    """Divide the device's memory as if nothing else ran there. Raises ConfigError."""
    if device.kind == "cuda":
        total = device.memory_bytes
        return fill_device(model, engine, DeviceMemory(total, total, total - weights))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = memory_table(model, engine, weights)
    kept = (line.nbytes for line in lines if line.name != WORKSPACE and line.where != "disk")
    taken = engine.host_arena_bytes + sum(kept)
    if taken > total:
        raise ConfigError(
            f"weights, keys, values, states and adapters take {taken / _GIB:.1f} GiB of"
            f" {total / _GIB:.1f} GiB of memory"
        )
    return engine
