"""`loraplex info MODEL`: what a base model is and needs on this machine, or the sentence that a
worker refuses it with. Imports neither torch nor a kernel."""

import dataclasses
import os
from collections import Counter
from functools import cache
from pathlib import Path

import msgspec

from adapters.base import BaseSpec
from adapters.manifest import SlabDtype
from launcher.demo import model_path
from server.config import ConfigError, EngineConfig, WorkerConfig
from server.engine.memory.room import tokens_together
from server.model.base_spec import base_spec
from server.model.ops.kernel_limits import unsupported
from server.model.ops.memory import (
    DeviceMemory,
    executor_limits,
    fill_device,
    page_bytes,
    weights_bytes,
)
from server.model.page_groups import page_groups
from server.model.quantised_at_load import quantised_at_load
from server.model.sharding import shard_counts, sharded
from server.model.spec import ModelSpec
from server.protocol import Gift
from server.worker.process.device import ChosenDevice, choose_device, cuda_devices, torch_build
from server.worker.process.model_source import describe_model
from server.worker.process.sizing import choose_dtype
from server.worker.setup import engine_config

# Of a GPU that has what any GPU here may have, where this machine has none.
_USUAL_GPU = (9, 0)
_GIB = 1 << 30
_USUAL_COUNTS = (1, 2, 4, 8)


class Needs(msgspec.Struct, frozen=True):
    """On this machine. weights, kv_memory: bytes. kv_bytes: keys and values of one token.

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
    problem: str | None = None


class ModelFacts(msgspec.Struct, frozen=True):
    """A model that can be served. max_context: tokens that it reaches. dtype: of its weights.

    weights: how they are quantised, "" = not. gives: what may be asked of it. windows: tokens ->
    layers that see no more.
    adapters: modules that adapters may change. reference: why plain torch computes it on a GPU, or
    None. shared: number of devices that can share it -> bytes of weights of each. fits: the fewest
    of them that hold it with devices like this machine's; None = none do.
    """

    model: str
    family: str
    gives: tuple[Gift, ...]
    weights: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    windows: dict[int, int]
    dtype: str
    adapters: tuple[str, ...]
    reference: str | None
    shared: dict[int, int]
    fits: int | None
    needs: Needs

    def written(self, *, for_programs: bool) -> str:
        if for_programs:
            return msgspec.json.format(msgspec.json.encode(self)).decode() + "\n"
        problem = self.needs.problem
        head = f"{self.model} can be served"
        lines = [head if problem is None else f"{head}, but not here: {problem}"]
        lines += [f"  {name:<11} {text}" for name, text in self._rows()]
        lines.append(f"on this machine ({self.needs.device}, {self.needs.dtype})")
        lines += [f"  {name:<11} {text}" for name, text in _need_rows(self.needs)]
        return "\n".join(lines) + "\n"

    def _rows(self) -> list[tuple[str, str]]:
        seen = (f"{window:,} tokens in {n} layers" for window, n in self.windows.items())
        rows = [
            ("family", self.family),
            ("gives", ", ".join(self.gives)),
            ("weights", self.weights and f"{self.weights}, computed in the dtype"),
            ("layers", f"{self.layers}, of {self.hidden_size:,} features"),
            ("vocabulary", f"{self.vocab_size:,} tokens"),
            ("context", f"{self.max_context:,} tokens"),
            ("windows", ", ".join(seen)),
            ("dtype", self.dtype),
            ("adapters", " ".join(self.adapters)),
            ("on a GPU", self.reference or "the project's kernels"),
            ("--tp", self._shares()),
        ]
        return [row for row in rows if row[1]]

    def _shares(self) -> str:
        each = ", ".join(f"{count}: {n / _GIB:.2f} GiB" for count, n in self.shared.items())
        fits = "none of these fits" if self.fits is None else f"{self.fits} fits"
        return f"weights of each device by their number: {each}; {fits} here"


def _gives(model: ModelSpec) -> tuple[Gift, ...]:
    if model.classes is not None:
        return ("classes",)
    return ("text", "vectors") if model.writes else ("vectors",)


def describe(config: WorkerConfig) -> ModelFacts:
    """Of a model of the Hub only small files are fetched.

    Raises ModelError, CheckpointError, ConfigError, DeviceError, WorkerStartError.
    """
    place = str(model_path()) if config.model == "demo" else config.model
    model = quantised_at_load(describe_model(place, config.revision), config.quantize)
    devices = cuda_devices()
    device = choose_device(config.device, devices, torch_build())
    dtype = choose_dtype(config.dtype, device.kind, model.dtype, device.has_bfloat16)
    base = base_spec(model, "", ())
    on_gpu = device.kind == "cuda"
    capability = devices[0].capability if on_gpu else _USUAL_GPU

    @cache
    def needs(count: int) -> Needs:
        options = dataclasses.replace(config, tp=count)
        return _needs(options, device, sharded(model, count), base, dtype)

    return ModelFacts(
        model=config.model,
        family=model.family,
        gives=_gives(model),
        weights="" if model.quantisation is None else model.quantisation.scheme,
        layers=model.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        windows=dict(Counter(window for window in model.windows if window is not None)),
        dtype=model.dtype,
        adapters=(*base.layer_modules, *base.model_modules),
        reference=_reference(model, dtype if on_gpu else "bfloat16", capability),
        shared={
            count: weights_bytes(sharded(model, count), dtype, packed=on_gpu)
            for count in _counts(model)
        },
        fits=next((count for count in _counts(model) if needs(count).problem is None), None),
        needs=needs(config.tp),
    )


def _counts(model: ModelSpec) -> tuple[int, ...]:
    """Usual numbers of devices that can share it."""
    return tuple(count for count in shard_counts(model) if count in _USUAL_COUNTS)


def _reference(model: ModelSpec, dtype: str, capability: tuple[int, int]) -> str | None:
    reason = unsupported(model, dtype, capability)
    return None if reason is None else f"plain torch, which is slower: {reason}"


def _needs(
    config: WorkerConfig, device: ChosenDevice, model: ModelSpec, base: BaseSpec, dtype: SlabDtype
) -> Needs:
    engine = engine_config(config, device, Path(config.model), base, dtype)
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
    """With the device's memory divided, as if nothing else ran there. Raises ConfigError."""
    if device.kind == "cuda":
        total = device.memory_bytes
        return fill_device(model, engine, DeviceMemory(total, total, total - weights))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    taken = weights + engine.kv_memory + engine.adapter_memory + engine.host_arena_bytes
    if taken > total:
        raise ConfigError(
            f"weights, keys and values and adapters take {taken / _GIB:.1f} GiB of"
            f" {total / _GIB:.1f} GiB of memory"
        )
    return engine


def _need_rows(needs: Needs) -> list[tuple[str, str]]:
    rows = [
        ("weights", f"{needs.weights / _GIB:.2f} GiB"),
        ("a token", f"{needs.kv_bytes:,} bytes of keys and values"),
    ]
    if needs.problem is None:
        of_each = f"of one sequence at most {needs.max_context:,}"
        in_all = f"{needs.kv_tokens:,} tokens in {needs.kv_memory / _GIB:.2f} GiB"
        if needs.long_tokens > needs.kv_tokens:
            of_each += f", and {needs.long_tokens:,} in sequences so long"
        rows.append(("cache", f"{in_all}; {of_each}"))
    return rows
