"""`loraplex bench …`: what the commands take, and what they print."""

import argparse
import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from launcher.bench.load_commands import add_load_commands
from launcher.bench.local_commands import DTYPES, add_config, add_local_commands
from launcher.bench.option_types import above, lora_ranks, number, whole, wholes
from launcher.bench.output import print_fields, print_points
from launcher.bench.placement_command import add_fairness, add_placement
from launcher.command_line import Parser
from launcher.options import OptionError
from server.engine.validation import bad_sampling
from server.protocol import SamplingParams

if TYPE_CHECKING:
    from launcher.bench.grid import Grid

_STEP_TOKENS = 8192
ABOUT = """\
Measure. `decode` and `prefill` run the engine in this process on random weights; `lora-kernels`
times LoRA alone and over the base; `placement` compares placement policies on simulated fleets,
`fairness` floods them; `router` measures a router before a worker without an engine; `overload`
asks a fleet of processes for more than it can do; `serve` loads a running server, `streams` watches
steady streams while adapters are loaded beside them, `adapters` registers, loads and unloads many,
and `make-model` writes a model and adapters to do that with. `cold-adapters` times adapters from
their folder to host memory, `adapter-copies` from there to the device.

  loraplex bench decode --config llama-3.1-8b --dummy-weights --batch 1,8,32 --adapters 0,1,8
  loraplex bench placement --adapters 512,1024,4096 --shape zipf --shape drift
  loraplex bench serve --url http://127.0.0.1:8080 --adapter a --adapter b --rate 20
  loraplex bench make-model --config llama-3.1-8b --model DIR --adapters-in DIR --adapters 400
"""


def add_commands(actions: "argparse._SubParsersAction[Parser]") -> None:
    """The actions of `bench`; each sets `run` to a function of the parsed arguments."""
    for name, about, run in (
        ("decode", "time of a decode step", run_decode),
        ("prefill", "prompt tokens a second", run_prefill),
    ):
        parser = actions.add_parser(name, help=about)
        _add_grid(parser, name == "decode")
        parser.set_defaults(run=run)
    kernels = actions.add_parser("lora-kernels", help="LoRA's share of a decode step")
    kernels.add_argument("--rank", action="append", choices=("16", "64", "mix"))
    kernels.add_argument("--replays", type=whole(1), default=20)
    kernels.set_defaults(run=run_lora_kernels)
    add_placement(actions.add_parser("placement", help="placement policies on simulated fleets"))
    add_fairness(actions.add_parser("fairness", help="a flooding tenant on simulated fleets"))
    router = actions.add_parser("router", help="CPU time and latency of a router")
    router.add_argument("--streams", type=whole(1), default=256)
    router.add_argument("--tokens", type=whole(1), default=128, help="of each stream")
    router.add_argument("--requests", type=whole(1), default=4000, help="that are not streamed")
    router.set_defaults(run=run_router)
    _add_overload(actions.add_parser("overload", help="a fleet asked for more than it can do"))
    add_load_commands(actions)
    add_local_commands(actions)
    for parser in actions.choices.values():
        parser.add_argument("--json", action="store_true", help="one JSON object a line")


def _add_grid(parser: Parser, is_decode: bool) -> None:
    add_config(parser)
    parser.add_argument(
        "--dummy-weights", action="store_true", required=True, help="random weights (the only kind)"
    )
    batches = (1, 8, 32) if is_decode else (4, 16)
    parser.add_argument("--batch", type=wholes(1), metavar="N,…", default=batches)
    parser.add_argument("--adapters", type=wholes(0), metavar="N,…", default=(0, 1))
    parser.add_argument("--rank", type=lora_ranks, metavar="N,…", default=(16,))
    parser.add_argument("--prompt-tokens", type=whole(1), default=128 if is_decode else 2048)
    if is_decode:
        parser.add_argument("--output-tokens", type=whole(1), default=144)
    else:
        parser.add_argument("--step-tokens", type=whole(1), default=_STEP_TOKENS, help="at most")
    parser.add_argument(
        "--sampling",
        default="{}",
        metavar="JSON",
        help='how tokens are chosen, such as \'{"temperature": 0.8, "top_p": 0.95}\' (default:'
        " greedily)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def _grid(arguments: argparse.Namespace, output_tokens: int, step_tokens: int) -> "Grid":
    """Raises OptionError, BenchError."""
    from launcher.bench.grid import Grid
    from launcher.bench.offline import check_device, model_folder

    check_device(arguments.device)
    grid = Grid(
        folder=model_folder(arguments.config),
        device=arguments.device,
        dtype=arguments.dtype,
        batches=arguments.batch,
        adapters=arguments.adapters,
        ranks=arguments.rank,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=output_tokens,
        step_tokens=step_tokens,
        sampling=_sampling(arguments.sampling),
    )
    if not any(grid.points()):
        raise OptionError("no --batch is as large as one of --adapters")
    return grid


def _sampling(text: str) -> SamplingParams:
    """Greedy where it does not say. Raises OptionError."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        unknown = given.keys() - set(SamplingParams.__struct_fields__)
        if unknown:
            raise OptionError(f"--sampling: {', '.join(sorted(unknown))}: not known")
        untyped = SamplingParams(**{"temperature": 0.0, **given})
        params = msgspec.convert(msgspec.to_builtins(untyped), SamplingParams)  # checks types
    except msgspec.MsgspecError as error:
        raise OptionError(f"--sampling: {error}") from error
    if problem := bad_sampling(params):
        raise OptionError(f"--sampling: {problem}")
    return params


def run_decode(arguments: argparse.Namespace) -> None:
    from launcher.bench.grid import SHORT_OUTPUT, decode, table

    if arguments.output_tokens <= SHORT_OUTPUT:
        raise OptionError(f"--output-tokens must be more than {SHORT_OUTPUT}")
    grid = _grid(arguments, arguments.output_tokens, _STEP_TOKENS)
    print_points(decode(grid), arguments.json, table)


def run_prefill(arguments: argparse.Namespace) -> None:
    from launcher.bench.grid import prefill, table

    print_points(prefill(_grid(arguments, 1, arguments.step_tokens)), arguments.json, table)


def run_lora_kernels(arguments: argparse.Namespace) -> None:
    from launcher.bench.lora_kernels import POINTS, RANKS, measure, table
    from launcher.bench.offline import require_cuda

    require_cuda("bench lora-kernels needs one")
    results = measure(POINTS, arguments.rank or [*RANKS], arguments.replays)
    if arguments.json:
        for result in results:
            rank = int(result.r) if result.r.isdigit() else result.r
            print(json.dumps(asdict(result) | {"r": rank}))
    else:
        print(table(results))


def run_router(arguments: argparse.Namespace) -> None:
    from launcher.bench.router_cost import measure

    cost = asyncio.run(measure(arguments.streams, arguments.tokens, arguments.requests))
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

    from launcher.bench.overload import Scene, measure, table

    times = arguments.times or [2.0, 10.0]
    scene = Scene(
        *(arguments.workers, arguments.rows, arguments.tokens, arguments.step_ms / 1e3),
        *(arguments.queue_s, arguments.seconds, arguments.slo_ttft_ms / 1e3),
        arguments.recovery_s,
    )
    result = uvloop.run(measure(scene, times))  # the generator's CPU time is taken from the fleet
    print(json.dumps(asdict(result)) if arguments.json else table(result))
