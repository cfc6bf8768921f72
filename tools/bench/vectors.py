"""Prompts read for vectors, by turns with the same prompts and one token of output each; of an
encoder vectors alone."""

import argparse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from loraplex.launcher.bench.commands import add_grid, add_step_tokens, grid_of, print_points
from loraplex.launcher.bench.engine.grid import PREFILL_ROUNDS, Grid, Point, drive, engine_for
from loraplex.launcher.command_line import Parser
from loraplex.server.protocol import TextPooling, VectorParams


@dataclass(frozen=True, slots=True)
class VectorRate:
    """Tokens a second of one point (B, D, r); ratio: of vectors to prefill, in one run. An encoder
    has no prefill: there the ratio is that to the base alone.
    """

    B: int
    D: int
    r: int
    vectors_per_s: float
    vector_tokens_per_s: float
    prefill_tokens_per_s: float
    ratio: float


def measure(grid: Grid, pooling: TextPooling) -> Iterator[VectorRate]:
    """Measures each point of the grid."""
    writes, alone = grid.model.writes, list[float]()
    with closing(engine_for(grid)) as engine:

        def rates(point: Point) -> Iterator[VectorRate]:
            prompts = grid.load(point)
            read = replace(prompts, vector=VectorParams(pooling=pooling))
            loads = (prompts, read) if writes else (read,)
            for load in loads:
                engine.run(load)
            rounds = [[engine.run(load) for load in loads] for _ in range(PREFILL_ROUNDS)]
            *prefills_s, vector_s = map(sum, zip(*rounds, strict=True))
            alone.append(vector_s)
            prefill_s = prefills_s[0] if writes else alone[0]
            count = PREFILL_ROUNDS * point.batch
            tokens = count * grid.prompt_tokens
            yield VectorRate(
                *point,
                vectors_per_s=round(count / vector_s, 1),
                vector_tokens_per_s=round(tokens / vector_s, 1),
                prefill_tokens_per_s=round(tokens / prefill_s, 1) if writes else 0.0,
                ratio=round(prefill_s / vector_s, 3),
            )

        yield from drive(grid.points(), engine.load_adapters, rates)


def add_arguments(parser: Parser) -> None:
    """Adds the grid and the pooling."""
    add_grid(parser, batches=(64,), prompt_tokens=512)
    add_step_tokens(parser)
    parser.set_defaults(adapters=(0, 16))
    pooling = ("last", "mean", "first")
    parser.add_argument("--pooling", choices=pooling, default="last", help="of tokens [last]")


def run(arguments: argparse.Namespace) -> None:
    """Raises OptionError, BenchError."""
    print_points(measure(grid_of(arguments), arguments.pooling), arguments.json)
