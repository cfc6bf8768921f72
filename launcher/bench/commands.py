"""`loraplex bench …`: the commands' options and output."""

import argparse
import asyncio
import json
from dataclasses import asdict

from loraplex.launcher.bench.drafts.command import add_drafts
from loraplex.launcher.bench.engine.commands import add_engine_commands
from loraplex.launcher.bench.engine.local_commands import add_local_commands
from loraplex.launcher.bench.load.commands import add_load_commands
from loraplex.launcher.bench.output import print_fields
from loraplex.launcher.bench.simulation.command import add_fairness, add_placement
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import above, number, whole

ABOUT = """\
Measure. `decode`, `prefill`, `vectors` and `throughput` run the engine in this process on random
weights; `vectors` reads prompts for vectors, by turns with the same prompts for prefill;
`lora-kernels` times LoRA alone and over the base, `prompt-attention` one layer's attention of
prompts, `masks` what grammars cost the host; `placement` compares placement policies on simulated
fleets, `fairness` floods them; `router` measures a router before a worker without an engine;
`overload` asks a fleet of processes for more than it can do; `serve` loads a running server,
`streams` watches steady streams while adapters are loaded beside them, `adapters` registers, loads
and unloads many, and `make-model` writes a model and adapters to do that with. `cold-adapters`
times adapters from their folder to host memory, `adapter-copies` from there to the device. `drafts`
replays answers over real texts: how many tokens a step gives.

  loraplex bench decode --config llama-3.1-8b --dummy-weights --batch 1,8,32 --adapters 0,1,8
  loraplex bench placement --adapters 512,1024,4096 --shape zipf --shape drift
  loraplex bench serve --url http://127.0.0.1:8080 --adapter a --adapter b --rate 20
  loraplex bench make-model --config llama-3.1-8b --model DIR --adapters-in DIR --adapters 400
"""


def add_commands(actions: "argparse._SubParsersAction[Parser]") -> None:
    """The actions of `bench`; each sets `run` to a function of the parsed arguments."""
    add_engine_commands(actions)
    add_placement(actions.add_parser("placement", help="placement policies on simulated fleets"))
    add_fairness(actions.add_parser("fairness", help="a flooding tenant on simulated fleets"))
    router = actions.add_parser("router", help="CPU time and latency of a router")
    router.add_argument("--streams", type=whole(1), default=256)
    router.add_argument("--tokens", type=whole(1), default=128, help="of each stream")
    router.add_argument("--requests", type=whole(1), default=4000, help="that are not streamed")
    router.add_argument("--burst", type=whole(1), default=1000, help="streams asked for at once")
    router.set_defaults(run=run_router)
    _add_overload(actions.add_parser("overload", help="a fleet asked for more than it can do"))
    add_drafts(actions.add_parser("drafts", help="drafts of answers, replayed over texts"))
    add_load_commands(actions)
    add_local_commands(actions)
    for parser in actions.choices.values():
        parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run_router(arguments: argparse.Namespace) -> None:
    from loraplex.launcher.bench.load.router_cost import measure

    sizes = (arguments.streams, arguments.tokens, arguments.requests, arguments.burst)
    cost = asyncio.run(measure(*sizes))
    print_fields(cost, arguments.json, "10.2f")


def _add_overload(parser: Parser) -> None:
    parser.add_argument(
        "--times", action="append", type=above(0), help="of what it can do; default: 2, 10"
    )
    parser.add_argument("--workers", type=whole(1), default=2)
    parser.add_argument("--rows", type=whole(1), default=16, help="sequences at once of a worker")
    parser.add_argument("--tokens", type=whole(1), default=16, help="of each answer")
    parser.add_argument("--step-ms", type=above(0), default=50.0, help="of a decode step")
    parser.add_argument("--queue-s", type=above(0), default=1.0, help="of work that may wait")
    parser.add_argument("--seconds", type=number(2), default=10.0, help="of overload")
    parser.add_argument("--slo-ttft-ms", type=above(0), default=2000.0, help="of a good answer")
    parser.add_argument("--recovery-s", type=above(0), default=10.0, help="until all is as before")
    parser.set_defaults(run=run_overload)


def run_overload(arguments: argparse.Namespace) -> None:
    import uvloop

    from loraplex.launcher.bench.load.overload import OverloadScene, measure, table

    times = arguments.times or [2.0, 10.0]
    scene = OverloadScene(
        workers=arguments.workers,
        rows=arguments.rows,
        tokens=arguments.tokens,
        step_s=arguments.step_ms / 1e3,
        queue_s=arguments.queue_s,
        seconds=arguments.seconds,
        slo_s=arguments.slo_ttft_ms / 1e3,
        recovery_s=arguments.recovery_s,
    )
    result = uvloop.run(measure(scene, times))  # the generator's CPU time is taken from the fleet
    print(json.dumps(asdict(result)) if arguments.json else table(result))
