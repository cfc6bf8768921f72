"""`loraplex bench placement` and `fairness`, on simulated fleets: what they take and print."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product

from launcher.bench.simulation.fairness_bench import flood
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


def add_fairness(parser: Parser) -> None:
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rows", type=_counts, default=(128,), metavar="N,…", help="a worker")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--others", type=float, default=0.8, help="of their share, that they send")
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated; 3 are warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run_fairness)


def run_fairness(arguments: argparse.Namespace) -> None:
    too_few = arguments.workers < 1 or arguments.tenants < 2
    if too_few or arguments.others <= 0 or arguments.seconds <= 3:
        raise SystemExit(
            "loraplex: expected --workers >= 1, --tenants >= 2, --others > 0, --seconds > 3"
        )
    for rows in arguments.rows:
        result = flood(
            *(arguments.workers, rows, arguments.tenants, arguments.others, arguments.seconds),
            seed=arguments.seed,
        )
        if arguments.json:
            print(json.dumps(asdict(result)), flush=True)
        else:
            print(
                f"{rows} rows: the others' p99 to the first token {result.alone_ms:.1f} ms alone, "
                f"{result.beside_ms:.1f} ms beside the flood; Jain's index {result.jain:.4f}",
                flush=True,
            )
