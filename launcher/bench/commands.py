"""`loraplex bench …`: the options of `serve`, `decode` and `prefill`, and their runs."""

import argparse
import asyncio
import json
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvloop

from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.target import PATHS, Target, model_of
from loraplex.launcher.bench.load.workload import Lengths, Workload
from loraplex.launcher.command_line import Parser
from loraplex.launcher.config import secret_value
from loraplex.launcher.option_types import (
    above,
    burstiness,
    lora_ranks,
    number,
    rate,
    shown,
    whole,
    wholes,
    worded,
)
from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import server_url
from loraplex.server.engine.admission import bad_sampling
from loraplex.server.protocol import SamplingParams

if TYPE_CHECKING:
    from loraplex.launcher.bench.engine.grid import Grid

T = TypeVar("T")
ABOUT = """\
Measure. `serve` loads a running server. `decode` and `prefill` run the engine in this process on
random weights, over a grid of batches and adapters.

  loraplex bench serve --url http://127.0.0.1:8080 --adapter a --adapter b --rate 20
  loraplex bench decode --config llama-3.1-8b --dummy-weights --batch 1,8,32 --adapters 0,1,8

`python -m tools.bench` has the others, in a checkout.
"""
DTYPES = ("bfloat16", "float16", "float32")
_STEP_TOKENS = 8192


def print_points(points: Iterable[Any], as_json: bool) -> None:
    """Prints dataclasses, as JSON each as soon as it is there, else a table of all."""
    results = []
    for point in points:
        results.append(point)
        if as_json:
            print(json.dumps(asdict(point)), flush=True)
    if not as_json:
        print(table(results))


def table(results: Sequence[Any]) -> str:
    """Makes a column of each field; results: dataclasses of one kind."""
    if not results:
        return "nothing to measure"
    head = list(asdict(results[0]))
    rows = [[_cell(value) for value in asdict(result).values()] for result in results]
    widths = [max(map(len, column)) + 2 for column in zip(head, *rows, strict=True)]
    return "\n".join("".join(map(str.rjust, line, widths)) for line in (head, *rows))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None else str(value)


def add_commands(actions: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the actions of `bench`; each sets `run` to a function of the parsed arguments."""
    decode = actions.add_parser("decode", help="time of a decode step")
    add_grid(decode, batches=(1, 8, 32), prompt_tokens=128)
    _add_decode(decode)
    decode.set_defaults(run=run_decode)
    prefill = actions.add_parser("prefill", help="prompt tokens a second")
    add_grid(prefill, batches=(4, 16), prompt_tokens=2048)
    add_step_tokens(prefill)
    prefill.set_defaults(run=run_prefill)
    serve = actions.add_parser("serve", help="load on a running server")
    add_server(serve)
    add_callers(serve)
    add_folders(serve)
    _add_load(serve)
    serve.set_defaults(run=run_serve)
    for parser in actions.choices.values():
        parser.add_argument("--json", action="store_true", help="one JSON object a line")


def read_keys(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Sets the keys that the command's requests show. Raises OptionError."""
    for field in ("api_key", "admin_key"):
        if f"{field}_file" in arguments:
            file = getattr(arguments, f"{field}_file")
            setattr(arguments, field, secret_value(field, file, environ))


# ---- a running server


def add_server(parser: Parser) -> None:
    """Adds the server's address."""
    parser.add_argument(
        "--url", type=worded(server_url), required=True, help="of the server: http://127.0.0.1:8080"
    )


def add_callers(parser: Parser) -> None:
    """Adds options of the requests that callers send."""
    parser.add_argument(
        "--api",
        choices=[*PATHS],
        default="completions",
        help="OpenAI's completions (prompts are token ids), its chat, or LoRAX's generate_stream "
        "(both: texts of about so many tokens) [completions]",
    )
    parser.add_argument(
        "--base-model",
        default="",
        metavar="NAME",
        help="what `model` says for the base [as GET /v1/models says, else base]",
    )
    parser.add_argument(
        "--extra",
        type=worded(_extra),
        default={},
        metavar="JSON",
        help="fields of each body (LoRAX: parameters) over the bench's own; null leaves one out, "
        "such as '{\"ignore_eos\": null}' for a server that does not know it",
    )
    parser.add_argument(
        "--api-key-file", metavar="PATH", help="file with a caller's key [LORAPLEX_API_KEY]"
    )
    parser.add_argument(
        "--registered", action="store_true", help="adapters are registered by their names"
    )


def _extra(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise ValueError(f"expected a JSON object, got {shown(text)}") from None


def add_folders(parser: Parser, required: bool = False, count: int = 0) -> None:
    """Adds the choice of adapters among folders. count: how many by default, 0 = all."""
    parser.add_argument(
        "--adapters-in",
        type=Path,
        metavar="DIR",
        required=required,
        help="adapter folders in it, by name: `local:NAME` for a server with --adapter-root DIR",
    )
    parser.add_argument("--first", type=whole(0), default=0, help="from this one of them")
    parser.add_argument(
        "--count", type=whole(0), default=count, help=f"so many of them (0 = all) [{count}]"
    )


def _add_load(parser: Parser) -> None:
    parser.add_argument("--adapter", action="append", default=[], help="most popular first")
    parser.add_argument("--base-too", action="store_true", help="requests without adapter as well")
    parser.add_argument("--requests", type=whole(1), default=200)
    parser.add_argument(
        "--zipf", type=number(0), default=1.0, help="exponent of adapter popularity"
    )
    for name, default in (
        ("prompt", "lognormal(5.0,0.8) in 16..1024"),
        ("output", "lognormal(4.8,0.7) in 8..512"),
    ):
        length = worded(Lengths.parse)
        parser.add_argument(f"--{name}", type=length, default=default, help=f"tokens [{default}]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rate", type=rate, default=math.inf, help="requests a second [inf: all at once]"
    )
    parser.add_argument("--burstiness", type=burstiness, default=1.0, help="1 = Poisson arrivals")
    parser.add_argument(
        "--concurrency", type=whole(1), help="callers of a closed loop [none: an open loop]"
    )
    parser.add_argument("--processes", type=whole(1), default=1, help="that send")
    parser.add_argument("--slo-ttft-ms", type=above(0), help="goodput: time to the first token")
    parser.add_argument("--slo-itl-ms", type=above(0), help="goodput: mean gap between tokens")


def target_of(arguments: argparse.Namespace) -> Target:
    """Reads the server and its keys from the arguments. Raises OptionError."""
    given = vars(arguments)
    keys = {name: given.get(name, "") for name in ("api_key", "admin_key")}
    if not all(key.isascii() for key in keys.values()):
        raise OptionError("keys must be ASCII, as they are sent in a header")
    callers = {name: given[name] for name in ("api", "extra") if name in given}
    return Target(arguments.url, given.get("base_model", ""), **callers, **keys)


def names_in(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Lists the names of the chosen adapter folders. Raises BenchError."""
    if arguments.adapters_in is None:
        return ()
    folder, first, count = arguments.adapters_in, arguments.first, arguments.count
    found = sorted(path.parent.name for path in folder.glob("*/adapter_config.json"))
    names = tuple(found[first : first + count if count else None])
    if not names or (count and len(names) < count):
        raise BenchError(f"{folder} has {len(found)} adapters, too few for this")
    return names


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on uvloop, to its result."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def run_serve(arguments: argparse.Namespace) -> None:
    """Runs `bench serve`. Raises OptionError, BenchError."""
    from loraplex.launcher.bench.load.serve import run_load
    from loraplex.launcher.bench.report import Slo, summarise, table, why_none

    made = (model_of(name, arguments.registered) for name in names_in(arguments))
    adapters: tuple[str | None, ...] = (*arguments.adapter, *made)
    if arguments.base_too or not adapters:
        adapters = (*adapters, None)
    concurrency, processes = arguments.concurrency, arguments.processes
    if concurrency is not None and concurrency < processes:
        raise OptionError("--processes must be at most --concurrency")
    workload = Workload(
        requests=arguments.requests,
        adapters=adapters,
        zipf=arguments.zipf,
        prompt=arguments.prompt,
        output=arguments.output,
        rate=arguments.rate,
        burstiness=arguments.burstiness,
        seed=arguments.seed,
    )
    outcomes = run_async(run_load(target_of(arguments), workload, concurrency, processes))
    failure = why_none(outcomes)
    if failure is not None:
        raise BenchError(failure)
    slo = Slo(_seconds(arguments.slo_ttft_ms), _seconds(arguments.slo_itl_ms))
    summary = summarise(outcomes, slo)
    print(msgspec.json.encode(summary).decode() if arguments.json else table(summary), flush=True)
    if summary["failed"]:
        raise BenchError(f"{summary['failed']} of {len(outcomes)} requests failed")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


# ---- the engine in this process


def add_config(parser: Parser) -> None:
    """Adds the model's shape."""
    parser.add_argument(
        "--config",
        required=True,
        metavar="FOLDER",
        help="folder with a config.json, or a known model (llama-3.1-8b, gemma-2-9b)",
    )


def add_grid(parser: Parser, batches: tuple[int, ...], prompt_tokens: int) -> None:
    """Adds the options of a grid. batches, prompt_tokens: the defaults."""
    add_config(parser)
    parser.add_argument(
        "--dummy-weights", action="store_true", required=True, help="random weights (the only kind)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--batch", type=wholes(1), metavar="N,…", default=batches)
    parser.add_argument("--adapters", type=wholes(0), metavar="N,…", default=(0, 1))
    parser.add_argument("--rank", type=lora_ranks, metavar="N,…", default=(16,))
    parser.add_argument(
        "--kv-dtype", choices=("auto", "fp8", "int8"), default="auto", help="[auto]"
    )
    parser.add_argument("--adapt-experts", action="store_true", help="adapters change experts too")
    parser.add_argument("--dora", action="store_true", help="adapters are DoRA's")
    parser.add_argument("--own-heads", type=whole(0), default=0, help="adapters that have one [0]")
    parser.add_argument("--tp", type=whole(1), default=1, help="devices that share the model [1]")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="as of `loraplex serve`: what it costs"
    )
    parser.add_argument("--prompt-tokens", type=whole(1), default=prompt_tokens)
    parser.add_argument(
        "--sampling",
        default="{}",
        metavar="JSON",
        help='how tokens are chosen, such as \'{"temperature": 0.8, "top_p": 0.95}\' (default:'
        " greedily)",
    )


def _add_decode(parser: Parser) -> None:
    parser.add_argument("--output-tokens", type=whole(1), default=144)
    parser.add_argument(
        "--constrained",
        type=wholes(0),
        metavar="N,…",
        default=(0,),
        help="sequences of --batch that write JSON of a schema each, all different [0]",
    )
    parser.add_argument(
        "--draft",
        type=wholes(0, 16),
        metavar="N,…",
        default=(0,),
        help="tokens of a draft that each sequence checks in each step, all wrong [0]",
    )


def add_step_tokens(parser: Parser) -> None:
    """Adds the most tokens of a step."""
    parser.add_argument(
        "--step-tokens",
        type=whole(1),
        default=_STEP_TOKENS,
        help=f"most of a step [{_STEP_TOKENS}]",
    )


def grid_of(arguments: argparse.Namespace) -> "Grid":
    """Reads a grid from the arguments. Raises OptionError, BenchError."""
    from loraplex.launcher.bench.engine.grid import Grid
    from loraplex.launcher.bench.engine.offline import MadeForm, check_device, model_folder

    check_device(arguments.device)
    grid = Grid(
        folder=model_folder(arguments.config),
        device=arguments.device,
        dtype=arguments.dtype,
        batches=arguments.batch,
        adapters=arguments.adapters,
        ranks=arguments.rank,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=getattr(arguments, "output_tokens", 1),
        step_tokens=getattr(arguments, "step_tokens", _STEP_TOKENS),
        sampling=_sampling(arguments.sampling),
        constrained=getattr(arguments, "constrained", (0,)),
        drafts=getattr(arguments, "draft", (0,)),
        form=MadeForm(arguments.adapt_experts, arguments.dora, arguments.own_heads),
        kv_dtype=arguments.kv_dtype,
        batch_invariant=arguments.batch_invariant,
        shards=arguments.tp,
    )
    if min(grid.constrained) > max(grid.batches):
        raise OptionError("no --batch is as large as one of --constrained")
    if not any(grid.points()):
        raise OptionError("no --batch is as large as one of --adapters")
    return grid


def _sampling(text: str) -> SamplingParams:
    """Reads parameters, greedy where the text says nothing else. Raises OptionError."""
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
    """Runs `bench decode`. Raises OptionError, BenchError."""
    from loraplex.launcher.bench.engine.grid import SHORT_OUTPUT, decode

    if arguments.output_tokens <= SHORT_OUTPUT:
        raise OptionError(f"--output-tokens must be more than {SHORT_OUTPUT}")
    print_points(decode(grid_of(arguments)), arguments.json)


def run_prefill(arguments: argparse.Namespace) -> None:
    """Runs `bench prefill`. Raises OptionError, BenchError."""
    from loraplex.launcher.bench.engine.grid import prefill

    print_points(prefill(grid_of(arguments)), arguments.json)
