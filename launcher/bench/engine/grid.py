"""`loraplex bench decode` and `prefill`: the offline engine over a grid of loads."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from loraplex.adapters.base import CHOOSERS
from loraplex.adapters.manifest import ITEM_BYTES, SlabDtype
from loraplex.launcher.bench.engine.offline import (
    GREEDY,
    PLAIN,
    EngineSizes,
    Load,
    MadeForm,
    OfflineEngine,
    adapted_modules,
)
from loraplex.launcher.bench.errors import BenchError
from loraplex.server.config import KvDtype
from loraplex.server.engine.loop import Phase
from loraplex.server.engine.messages import StepOutput
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.devices.sharding import sharded
from loraplex.server.model.lora.arena_weights import DTYPES
from loraplex.server.model.ops.memory import layer_token_bytes, state_bytes, weights_bytes
from loraplex.server.model.spec.base_spec import base_spec
from loraplex.server.model.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.protocol import SamplingParams

T = TypeVar("T")

# Tokens of the shorter of the two runs whose difference is a step's time.
SHORT_OUTPUT = 16
PREFILL_ROUNDS = 4
# Large enough to keep a device busy; a CPU may take seconds for a product of 1,024 in float16.
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
MATRIX = {"cuda": 8192, "cpu": 256}
_REPEATS = 10


class Point(NamedTuple):
    """A point of a grid: sequences at once, distinct adapters, their rank (0 without any)."""

    batch: int
    adapters: int
    rank: int


def drive(
    points: Iterable[Point],
    bring: Callable[[int, int], object],
    measure: Callable[[Point], Iterable[T]],
) -> Iterator[T]:
    """Measures each point of a grid. bring: gets the adapters of a point, as a number and a rank,
    before the first point that has them."""
    brought = set()
    for point in points:
        key = (point.adapters, point.rank)
        if point.adapters and key not in brought:
            brought.add(key)
            bring(point.adapters, point.rank)
        yield from measure(point)


@dataclass(frozen=True, slots=True)
class Grid:
    """Combines batches, adapters and ranks; no point has more adapters than sequences.

    step_tokens: the most of a step. constrained: for each point, sequences that write JSON of a
    schema each, all different; more than there are sequences are left out. drafts: for each point,
    tokens of every sequence's draft. form: of adapters. shards: devices that share the model.
    """

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
    batch_invariant: bool = False

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Lists the tokens of decode steps."""
        return tuple(sorted({b * (1 + draft) for b in self.batches for draft in self.drafts}))

    @property
    def model(self) -> ModelSpec:
        """The part of one device."""
        return sharded(read_config(self.folder), self.shards)

    def points(self) -> Iterator[Point]:
        """Yields rank by rank; the base comes with the first."""
        for lora_rank, batch, distinct in product(self.ranks, self.batches, self.adapters):
            if distinct <= batch and (distinct or lora_rank == self.ranks[0]):
                yield Point(batch, distinct, lora_rank if distinct else 0)

    def load(self, point: Point) -> Load:
        """Makes the load of a point, with one token of output each."""
        return Load(*point, self.prompt_tokens, 1, self.sampling)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Times of one point, in milliseconds. B, D, r: the point. C: sequences with a schema. draft:
    tokens of each sequence's draft; all are wrong, so a step gives a sequence one token.

    step_ms: of a step on average; median_ms, p90_ms: of single ones. masks_ms: the wait of the
    engine's thread for masks in a step, median. schema_ms: from a schema never seen to its first
    mask, median. floor_ms: of reading a step's bytes (weights, adapters, keys and values) at the
    bandwidth of this run, each device its part.
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
    """The rate of prefill. tokens_per_s of prompts alone; step_ms: a step of up to `step_tokens` of
    them, on average; matrix_share: of the matrix rate measured in this run.
    """

    B: int
    D: int
    r: int
    tokens_per_s: float
    step_ms: float
    matrix_share: float


def engine_for(grid: Grid) -> OfflineEngine:
    """Starts an engine with room for the grid's largest point. Raises BenchError, CheckpointError,
    and ConfigError where the device's memory is too small."""
    model = read_config(grid.folder)
    tokens = grid.prompt_tokens + grid.output_tokens
    if tokens > model.max_context:
        raise BenchError(
            f"{grid.prompt_tokens} tokens of prompt and {grid.output_tokens} of output are more "
            f"than the model's context of {model.max_context}"
        )
    most = max(grid.batches)
    sizes = EngineSizes(
        adapters=max(point.adapters for point in grid.points()),
        lora_rank=max(grid.ranks),
        tokens=tokens,
        cached=most,
        max_running=max(grid.step_sizes),
        max_waiting=2 * most,
        step_tokens=grid.step_tokens,
        form=grid.form,
        kv_dtype=grid.kv_dtype,
        batch_invariant=grid.batch_invariant,
        shards=grid.shards,
        has_drafts=any(grid.drafts),
    )
    config = sizes.config(grid.folder, grid.device, grid.dtype)
    return OfflineEngine(grid.folder, config, grid.step_sizes, grid.form)


class StepTimes:
    """Times of the steps in which all `batch` sequences decode, from the report of each step.

    tokens: of such a step.
    """

    def __init__(self, batch: int, tokens: int) -> None:
        self._batch, self._tokens = batch, tokens
        self._last: float | None = None
        self._steps: list[float] = []
        self._masks: list[float] = []
        self._compiled: list[float] = []

    def __call__(self, output: StepOutput) -> None:
        now = time.perf_counter()
        self._compiled += [grammar.seconds for grammar in output.compiled]
        work = output.work
        if work is None:
            return
        if work.sequences != self._batch or output.num_tokens != self._tokens:
            self._last = None
            return
        if self._last is not None:
            self._steps.append(now - self._last)
            self._masks.append(work.phases_s[Phase.MASKS])
        self._last = now

    def seconds(self) -> tuple[float, float, float, float]:
        """Returns the median and p90 from one step's results to the next one's, and the medians of
        the wait for masks in a step and of the time from a new grammar to its first mask."""
        return (
            _percentile(self._steps, 50),
            _percentile(self._steps, 90),
            _percentile(self._masks, 50),
            _percentile(self._compiled, 50),
        )


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def decode(grid: Grid) -> Iterator[StepTime]:
    """Times decode steps by the difference of two output lengths: prefill cancels out."""
    rng = Random(0)
    with closing(engine_for(grid)) as engine:
        bandwidth = copy_bandwidth(grid.device)

        def measure(point: Point) -> Iterator[StepTime]:
            floor = step_bytes(grid, point) / bandwidth
            for constrained, draft in product(grid.constrained, grid.drafts):
                if constrained > point.batch:
                    continue
                grammars = tuple(endless_json(rng) for _ in range(constrained))
                load = replace(grid.load(point), grammars=grammars, draft_tokens=draft)
                times = (*_step_times(engine, load, grid.output_tokens), floor)
                yield StepTime(*point, constrained, draft, *(round(1e3 * t, 3) for t in times))

        if any(grid.constrained):  # starts all that tries grammars out
            for _ in range(engine.config.grammar.threads):
                engine.run(Load(1, 0, 1, 1, 1, grammars=(endless_json(rng),)))
        yield from drive(grid.points(), engine.load_adapters, measure)


def _step_times(engine: OfflineEngine, load: Load, output_tokens: int) -> tuple[float, ...]:
    """Measures seconds, as in a StepTime, without the floor."""
    times = StepTimes(load.requests, load.requests * (1 + load.draft_tokens))

    def seconds(output: int) -> float:
        return engine.run(replace(load, output_tokens=output), times)

    seconds(4)
    short, long = seconds(SHORT_OUTPUT), seconds(output_tokens)
    return (long - short) / (output_tokens - SHORT_OUTPUT), *times.seconds()


def prefill(grid: Grid) -> Iterator[PrefillRate]:
    """Times prompts alone: one token of output each."""
    flops = 2 * matrix_parameters(read_config(grid.folder))
    with closing(engine_for(grid)) as engine:
        rate = matrix_rate(grid.device, DTYPES[grid.dtype])

        def measure(point: Point) -> Iterator[PrefillRate]:
            load = grid.load(point)
            engine.run(load)
            seconds = sum(engine.run(load) for _ in range(PREFILL_ROUNDS))
            tokens = point.batch * grid.prompt_tokens
            steps = PREFILL_ROUNDS * -(-tokens // grid.step_tokens)
            per_s = PREFILL_ROUNDS * tokens / seconds
            step_ms, share = 1e3 * seconds / steps, per_s * flops / rate
            yield PrefillRate(*point, round(per_s, 1), round(step_ms, 3), round(share, 3))

        yield from drive(grid.points(), engine.load_adapters, measure)


# ---- schemas

# Their number lets no answer of a benchmark end before its length.
_MOST_OBJECTS = 900
_KINDS: tuple[Callable[[Random], dict[str, Any]], ...] = (
    lambda rng: {"type": "string", "maxLength": rng.randint(4, 30)},
    lambda rng: {"type": "integer", "minimum": 0, "maximum": rng.randint(9, 10**6)},
    lambda rng: {"enum": [f"{_word(rng)}" for _ in range(rng.randint(2, 12))]},
    lambda rng: {"type": "boolean"},
    lambda rng: {"type": "string", "format": rng.choice(("date", "uuid", "email"))},
    lambda rng: {"type": "array", "items": {"type": "number"}, "maxItems": rng.randint(1, 5)},
)


def endless_json(rng: Random) -> str:
    """Writes a grammar of objects of one made-up schema, each after a `>`."""
    schema = json.dumps(_schema(rng))
    return f'start: one{{{_MOST_OBJECTS}}}\none: ">" %json {schema}\n'


def _schema(rng: Random) -> dict[str, Any]:
    """Draws an object of a few properties of any kind, one of them an object."""
    properties = {_word(rng): rng.choice(_KINDS)(rng) for _ in range(rng.randint(3, 8))}
    inner = {_word(rng): rng.choice(_KINDS)(rng) for _ in range(3)}
    properties[_word(rng)] = _object(inner)
    return _object(properties)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _word(rng: Random) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=rng.randint(3, 12)))


# ---- bytes and ceilings


def adapter_bytes(grid: Grid, lora_rank: int, rows: int) -> float:
    """Bytes of an adapter that `rows` of its tokens read, without extents' free room."""
    model = grid.model
    base = base_spec(model, "0" * 64, ("base",))
    features = sum(
        (of.shape.in_features + of.shape.out_features)
        * _read(model.layers[of.layer], of.shape.experts, rows)
        for of in adapted_modules(base, experts=grid.form.experts)
    )
    return features * lora_rank * ITEM_BYTES[grid.dtype]


def matrix_parameters(model: ModelSpec, rows: int = 1) -> float:
    """Weights of layers that `rows` tokens are multiplied with, but those that choose experts."""
    inputs = model.embedding.inputs
    of_all = 0 if inputs is None else inputs.linear.out_features * inputs.linear.in_features
    return of_all + sum(
        linear.out_features * linear.in_features * _read(layer, linear.experts, rows)
        for layer in model.layers
        for linear in layer.linears
        if linear.role not in CHOOSERS
    )


def matrix_bytes(model: ModelSpec, rows: int, dtype: SlabDtype) -> float:
    """Counts the bytes of `matrix_parameters`, as the device stores them."""
    quantised = weights_bytes(model, dtype, packed=True) - weights_bytes(model, dtype, packed=False)
    return matrix_parameters(model, rows) * ITEM_BYTES[dtype] + quantised


def _read(layer: LayerSpec, experts: int, rows: int) -> float:
    """Matrices that `rows` tokens read of all experts, each as likely as another."""
    top_k = (branch.top_k for branch in layer.feed_forwards if isinstance(branch, MoeSpec))
    return 1 if experts == 1 else experts * (1 - (1 - next(top_k) / experts) ** rows)


def step_bytes(grid: Grid, point: tuple[int, int, int]) -> float:
    """Counts the bytes that one decode step reads in the middle of the measured stretch, and those
    of states, which it writes, too."""
    batch, distinct, lora_rank = point
    model = grid.model
    weights = matrix_bytes(model, batch, grid.dtype)
    weights += model.embedding.num_rows * model.hidden_size * ITEM_BYTES[grid.dtype]
    context = grid.prompt_tokens + (SHORT_OUTPUT + grid.output_tokens) / 2
    adapters = distinct * adapter_bytes(grid, lora_rank, batch // max(distinct, 1))
    cache = batch * sum(_seen_bytes(grid, of, context) for of in model.attentions.values())
    return weights + adapters + cache + 2 * batch * state_bytes(model, grid.dtype)


def _seen_bytes(grid: Grid, attention: AttentionSpec, context: float) -> float:
    """Counts the bytes of keys and values that a layer reads of a context."""
    window = attention.window
    seen = context if window is None else min(context, window)
    return seen * layer_token_bytes(attention, grid.dtype, grid.kv_dtype)


def copy_bandwidth(device: str) -> float:
    """Measures bytes read and written a second by a copy within the device's memory, uint8."""
    nbytes = COPY_BYTES[device]
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * nbytes / _seconds(lambda: target.copy_(source), device)


def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Measures operations a second of a large product `[n, n] @ [n, n]` of random numbers."""
    n = MATRIX[device]
    a, b = (torch.randn((n, n), device=device).to(dtype) for _ in "ab")
    return 2 * n**3 / _seconds(lambda: a @ b, device)


def _seconds(run: Callable[[], object], device: str) -> float:
    """Measures the mean of several calls, back to back."""

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
