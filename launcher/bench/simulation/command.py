"""`loraplex bench placement` and `fairness`, on simulated fleets: what they take and print."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product

from loraplex.launcher.bench.output import print_points
from loraplex.launcher.bench.simulation.fairness_bench import flood
from loraplex.launcher.bench.simulation.placement_bench import PlacementScene, compare, table
from loraplex.launcher.bench.simulation.policies import POLICIES
from loraplex.launcher.bench.simulation.traffic import SHAPES
from loraplex.launcher.bench.simulation.worker import WorkerModel
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import above, number, whole, wholes


def add_placement(parser: Parser) -> None:
    """Lists make a run of each combination."""
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: zipf")
    parser.add_argument("--policy", action="append", choices=[*POLICIES], help="default: all")
    parser.add_argument("--workers", type=wholes(1), default=(16,), metavar="N,…")
    parser.add_argument("--adapters", type=wholes(1), default=(4000,), metavar="N,…")
    parser.add_argument("--requests", type=whole(1), default=20_000)
    parser.add_argument("--zipf", type=number(0), default=1.0, help="exponent of popularity")
    parser.add_argument("--use", type=above(0), default=0.7, help="load, as a share of what fits")
    parser.add_argument("--slots", type=whole(1), default=64, help="adapters a worker")
    parser.add_argument(
        "--load-ms", type=above(0), default=30.0, help="an adapter's way to a device"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run_placement)


def run_placement(arguments: argparse.Namespace) -> None:
    results = compare(_scenes(arguments), arguments.policy or [*POLICIES])
    print_points(results, arguments.json, table)


def _scenes(arguments: argparse.Namespace) -> Iterator[PlacementScene]:
    model = WorkerModel(slots=arguments.slots, load_s=arguments.load_ms / 1e3)
    for shape, workers, adapters in product(
        arguments.shape or ["zipf"], arguments.workers, arguments.adapters
    ):
        yield PlacementScene(
            shape=shape,
            workers=workers,
            adapters=adapters,
            requests=arguments.requests,
            zipf=arguments.zipf,
            use=arguments.use,
            model=model,
            seed=arguments.seed,
        )


def add_fairness(parser: Parser) -> None:
    parser.add_argument("--workers", type=whole(1), default=4)
    parser.add_argument("--rows", type=wholes(1), default=(128,), metavar="N,…", help="a worker")
    parser.add_argument("--tenants", type=whole(2), default=8)
    parser.add_argument(
        "--others", type=above(0), default=0.8, help="of their share, that they send"
    )
    parser.add_argument("--seconds", type=above(3), default=10.0, help="simulated; 3 are warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run_fairness)


def run_fairness(arguments: argparse.Namespace) -> None:
    for rows in arguments.rows:
        result = flood(
            workers=arguments.workers,
            rows=rows,
            tenants=arguments.tenants,
            others=arguments.others,
            seconds=arguments.seconds,
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
