"""`loraplex bench placement`: what it takes, and what it prints."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product

from launcher.bench.simulation.placement_bench import Scene, compare, table
from launcher.bench.simulation.policies import POLICIES
from launcher.bench.simulation.traffic import SHAPES
from launcher.bench.simulation.worker import WorkerModel
from launcher.command_line import Parser


def add_placement(parser: Parser) -> None:
    """Lists make a run of each combination."""
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: zipf")
    parser.add_argument("--policy", action="append", choices=[*POLICIES], help="default: all")
    parser.add_argument("--workers", type=_counts, default=(16,), metavar="N,…")
    parser.add_argument("--adapters", type=_counts, default=(4000,), metavar="N,…")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of popularity")
    parser.add_argument("--use", type=float, default=0.7, help="load, as a share of what fits")
    parser.add_argument("--slots", type=int, default=64, help="adapters a worker")
    parser.add_argument("--load-ms", type=float, default=30.0, help="an adapter's way to a device")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run_placement)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 1:
        raise ValueError(text)
    return counts


def run_placement(arguments: argparse.Namespace) -> None:
    if min(arguments.requests, arguments.slots) < 1 or min(arguments.use, arguments.load_ms) <= 0:
        raise SystemExit("loraplex: --requests, --slots, --use and --load-ms must be more than 0")
    results = []
    for result in compare(_scenes(arguments), arguments.policy or [*POLICIES]):
        results.append(result)
        if arguments.json:
            print(json.dumps(asdict(result)), flush=True)
    if not arguments.json:
        print(table(results))


def _scenes(arguments: argparse.Namespace) -> Iterator[Scene]:
    model = WorkerModel(slots=arguments.slots, load_s=arguments.load_ms / 1e3)
    for shape, workers, adapters in product(
        arguments.shape or ["zipf"], arguments.workers, arguments.adapters
    ):
        yield Scene(
            *(shape, workers, adapters, arguments.requests),
            zipf=arguments.zipf,
            use=arguments.use,
            model=model,
            seed=arguments.seed,
        )
