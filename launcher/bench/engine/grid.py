"""`loraplex bench decode`, `prefill` and `vectors`: the offline engine over a grid of loads."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Literal

import torch

from loraplex.adapters.manifest import ITEM_BYTES, SlabDtype
from loraplex.launcher.bench.engine.made_schemas import endless_json
from loraplex.launcher.bench.engine.offline import (
    GREEDY,
    PLAIN,
    EngineSizes,
    Load,
    MadeForm,
    OfflineEngine,
    adapted_modules,
    token_bytes,
)
from loraplex.launcher.bench.engine.step_times import StepTimes
from loraplex.launcher.bench.errors import BenchError
from loraplex.server.config import KvDtype
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.devices.sharding import sharded
from loraplex.server.model.lora.arena_weights import DTYPES
from loraplex.server.model.ops.memory import weights_bytes
from loraplex.server.model.spec.base_spec import base_spec
from loraplex.server.model.spec.model_spec import LayerSpec, ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.protocol import Pooling, SamplingParams, VectorParams

# Of the shorter of the two runs whose difference is a step's time.
SHORT_OUTPUT = 16
_PREFILL_ROUNDS = 4
# Large enough to keep a device busy; a CPU may take seconds for a product of 1,024 in float16.
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
MATRIX = {"cuda": 8192, "cpu": 256}
_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Grid:
    """batches x adapters x ranks; a point with more adapters than sequences is left out.
    step_tokens: the most of a step. constrained: for each point, sequences that write JSON of a
    schema each, all different; more than there are sequences are left out. drafts: for each point,
    tokens of every sequence's draft. form: of adapters. shards: devices that share the model."""

    folder: Path
    device: Literal["cpu", "cuda"]
    dtype: SlabDtype
    batches: tuple[int, ...]
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    step_tokens: int
    sampling: SamplingParams = GREEDY
    constrained: tuple[int, ...] = (0,)
    drafts: tuple[int, ...] = (0,)
    form: MadeForm = PLAIN
    kv_dtype: KvDtype = "auto"
    shards: int = 1

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Tokens of decode steps."""
        return tuple(sorted({b * (1 + draft) for b in self.batches for draft in self.drafts}))

    @property
    def model(self) -> ModelSpec:
        """The part of one device."""
        return sharded(read_config(self.folder), self.shards)

    def points(self) -> Iterator[tuple[int, int, int]]:
        for lora_rank in self.ranks:
            for batch in self.batches:
                for distinct in self.adapters:
                    if distinct <= batch and (distinct or lora_rank == self.ranks[0]):
                        yield batch, distinct, lora_rank


@dataclass(frozen=True, slots=True)
class StepTime:
    """One point: sequences, distinct adapters, their rank (0 without), sequences with a schema,
    tokens of each sequence's draft. All of these are wrong, so a step gives a sequence one token.

    Milliseconds: step_ms: of a step on average; median_ms, p90_ms: of single ones. masks_ms: for
    which the engine's thread waits for masks in a step, median. schema_ms: from a schema never seen
    to its first mask, median. floor_ms: of reading a step's bytes (weights, adapters, keys and
    values) at the bandwidth of this run, each device its part.
    """

    B: int
    D: int
    r: int
    C: int
    draft: int
    step_ms: float
    median_ms: float
    p90_ms: float
    masks_ms: float
    schema_ms: float
    floor_ms: float


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """tokens_per_s of prompts alone; step_ms: a step of up to `step_tokens` of them, on average;
    matrix_share: of the matrix rate measured in this run."""

    B: int
    D: int
    r: int
    tokens_per_s: float
    step_ms: float
    matrix_share: float


@dataclass(frozen=True, slots=True)
class VectorRate:
    """Tokens a second of prompts that are read for vectors, and of the same prompts with one token
    of output each, by turns in one run; ratio: of the former to the latter."""

    B: int
    D: int
    r: int
    vectors_per_s: float
    vector_tokens_per_s: float
    prefill_tokens_per_s: float
    ratio: float


def engine_for(grid: Grid) -> OfflineEngine:
    """An engine with room for the grid's largest point. Raises BenchError, CheckpointError, and
    ConfigError where the device's memory is too small."""
    model = read_config(grid.folder)
    tokens = grid.prompt_tokens + grid.output_tokens
    if tokens > model.max_context:
        raise BenchError(
            f"{grid.prompt_tokens} tokens of prompt and {grid.output_tokens} of output are more "
            f"than the model's context of {model.max_context}"
        )
    most = max(grid.batches)
    sizes = EngineSizes(
        adapters=max(distinct for _, distinct, _ in grid.points()),
        lora_rank=max(grid.ranks),
        tokens=tokens,
        cached=most,
        max_running=max(grid.step_sizes),
        max_waiting=2 * most,
        step_tokens=grid.step_tokens,
        form=grid.form,
        kv_dtype=grid.kv_dtype,
        shards=grid.shards,
        has_drafts=any(grid.drafts),
    )
    config = sizes.config(grid.folder, grid.device, grid.dtype)
    return OfflineEngine(grid.folder, config, grid.step_sizes, grid.form)


def decode(grid: Grid) -> Iterator[StepTime]:
    """A step's time is the difference of two output lengths over the tokens between: prefill
    cancels out."""
    engine = engine_for(grid)
    bandwidth = copy_bandwidth(grid.device)
    rng, seen = Random(0), set()
    if any(grid.constrained):  # starts all that tries grammars out
        for _ in range(engine.config.grammar.threads):
            engine.run(Load(1, 0, 1, 1, 1, grammars=(endless_json(rng),)))
    for batch, distinct, lora_rank in grid.points():
        if distinct and (distinct, lora_rank) not in seen:
            seen.add((distinct, lora_rank))
            engine.load_adapters(distinct, lora_rank)
        point = (batch, distinct, lora_rank)
        floor = step_bytes(grid, point) / bandwidth
        shown = (batch, distinct, lora_rank if distinct else 0)
        for constrained, draft in product(grid.constrained, grid.drafts):
            if constrained <= batch:
                grammars = tuple(endless_json(rng) for _ in range(constrained))
                load = Load(*point, grid.prompt_tokens, 1, grid.sampling, grammars)
                load = replace(load, draft_tokens=draft)
                times = (*_step_times(engine, load, grid.output_tokens), floor)
                yield StepTime(*shown, constrained, draft, *(round(1e3 * t, 3) for t in times))
    engine.close()


def _step_times(
    engine: OfflineEngine, load: Load, output_tokens: int
) -> tuple[float, float, float, float, float]:
    """Seconds, as in a StepTime, without the floor."""
    times = StepTimes(load.requests, load.requests * (1 + load.draft_tokens))

    def seconds(output: int) -> float:
        return engine.run(replace(load, output_tokens=output), times)

    seconds(4)
    short, long = seconds(SHORT_OUTPUT), seconds(output_tokens)
    mean = (long - short) / (output_tokens - SHORT_OUTPUT)
    return mean, times.step_s(50), times.step_s(90), times.masks_s(), times.new_grammar_s()


def prefill(grid: Grid) -> Iterator[PrefillRate]:
    """Prompts alone: one token of output each."""
    model = read_config(grid.folder)
    engine = engine_for(grid)
    rate = matrix_rate(grid.device, DTYPES[grid.dtype])
    flops = 2 * matrix_parameters(model)
    for batch, distinct, lora_rank in grid.points():
        if distinct:
            engine.load_adapters(distinct, lora_rank)
        load = Load(batch, distinct, lora_rank, grid.prompt_tokens, 1, grid.sampling)
        engine.run(load)
        seconds = sum(engine.run(load) for _ in range(_PREFILL_ROUNDS))
        tokens = _PREFILL_ROUNDS * batch * grid.prompt_tokens
        steps = _PREFILL_ROUNDS * -(-batch * grid.prompt_tokens // grid.step_tokens)
        yield PrefillRate(
            B=batch,
            D=distinct,
            r=lora_rank if distinct else 0,
            tokens_per_s=round(tokens / seconds, 1),
            step_ms=round(1e3 * seconds / steps, 3),
            matrix_share=round(tokens * flops / seconds / rate, 3),
        )
    engine.close()


def vectors(grid: Grid, pooling: Pooling) -> Iterator[VectorRate]:
    """As `prefill`, beside prompts that are read for vectors."""
    engine = engine_for(grid)
    for batch, distinct, lora_rank in grid.points():
        if distinct:
            engine.load_adapters(distinct, lora_rank)
        prompts = Load(batch, distinct, lora_rank, grid.prompt_tokens, 1, grid.sampling)
        read = replace(prompts, vector=VectorParams(pooling=pooling))
        for load in (prompts, read):
            engine.run(load)
        rounds = [(engine.run(prompts), engine.run(read)) for _ in range(_PREFILL_ROUNDS)]
        prefill_s, vector_s = map(sum, zip(*rounds, strict=True))
        count = _PREFILL_ROUNDS * batch
        tokens = count * grid.prompt_tokens
        yield VectorRate(
            B=batch,
            D=distinct,
            r=lora_rank if distinct else 0,
            vectors_per_s=round(count / vector_s, 1),
            vector_tokens_per_s=round(tokens / vector_s, 1),
            prefill_tokens_per_s=round(tokens / prefill_s, 1),
            ratio=round(prefill_s / vector_s, 3),
        )
    engine.close()


# ---- bytes and ceilings


def adapter_bytes(grid: Grid, lora_rank: int, rows: int) -> float:
    """Of its matrices that so many of its tokens read, without what extents leave free."""
    model = grid.model
    base = base_spec(model, "0" * 64, ("base",))
    modules = adapted_modules(base, experts=grid.form.experts).values()
    features = sum(
        (of.in_features + of.out_features) * _read(model.layers[layer], of.experts, rows)
        for of in modules
        for layer in of.layers or range(base.num_layers)
    )
    return features * lora_rank * ITEM_BYTES[grid.dtype]


def matrix_parameters(model: ModelSpec, rows: int = 1) -> float:
    """Weights of the layers' matrices that some tokens are multiplied with."""
    return sum(
        linear.out_features * linear.in_features * _read(layer, linear.experts, rows)
        for layer in model.layers
        for linear in layer.linears
    )


def matrix_bytes(model: ModelSpec, rows: int, dtype: SlabDtype) -> float:
    """Of `matrix_parameters`, as they are stored on the device."""
    quantised = weights_bytes(model, dtype, packed=True) - weights_bytes(model, dtype, packed=False)
    return matrix_parameters(model, rows) * ITEM_BYTES[dtype] + quantised


def _read(layer: LayerSpec, experts: int, rows: int) -> float:
    """Matrices, of as many as there are experts, that so many tokens read, where each expert is as
    likely as another."""
    if experts == 1 or not isinstance(layer.mlp, MoeSpec):
        return 1
    return experts * (1 - (1 - layer.mlp.top_k / experts) ** rows)


def step_bytes(grid: Grid, point: tuple[int, int, int]) -> float:
    """Read by one decode step in the middle of the measured stretch."""
    batch, distinct, lora_rank = point
    model = grid.model
    weights = matrix_bytes(model, batch, grid.dtype)
    weights += model.embedding.num_rows * model.hidden_size * ITEM_BYTES[grid.dtype]
    context = grid.prompt_tokens + (SHORT_OUTPUT + grid.output_tokens) / 2
    adapters = distinct * adapter_bytes(grid, lora_rank, batch // max(distinct, 1))
    cache = batch * _seen(model, context) * token_bytes(model, grid.dtype, grid.kv_dtype)
    return weights + adapters + cache


def _seen(model: ModelSpec, context: float) -> float:
    """Tokens of a context that a layer reads, on average."""
    seen = [context if window is None else min(context, window) for window in model.windows]
    return sum(seen) / len(seen)


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by a copy within the device's memory, uint8."""
    nbytes = COPY_BYTES[device]
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * nbytes / _seconds(lambda: target.copy_(source), device)


def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of a large product `[n, n] @ [n, n]` of random numbers in `dtype`."""
    n = MATRIX[device]
    a, b = (torch.randn((n, n), device=device).to(dtype) for _ in "ab")
    return 2 * n**3 / _seconds(lambda: a @ b, device)


def _seconds(run: Callable[[], object], device: str) -> float:
    """Mean of several calls, back to back."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    wait()
    started = time.perf_counter()
    for _ in range(_REPEATS):
        run()
    wait()
    return (time.perf_counter() - started) / _REPEATS


def table(results: Sequence[StepTime | PrefillRate | VectorRate]) -> str:
    """For a person."""
    if not results:
        return "nothing to measure"
    rows = [asdict(result) for result in results]
    widths = {name: max(15, len(name) + 2) for name in rows[0]}
    lines = ["".join(f"{name:>{width}}" for name, width in widths.items())]
    lines += ["".join(f"{row[name]:>{width}}" for name, width in widths.items()) for row in rows]
    return "\n".join(lines)
