"""The actions of `loraplex bench` that load a running server."""

import argparse
import asyncio
import math
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.target import PATHS, Target, model_of
from loraplex.launcher.bench.load.windows import Window
from loraplex.launcher.bench.load.workload import Lengths, Workload
from loraplex.launcher.bench.output import print_fields
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import (
    above,
    burstiness,
    number,
    rate,
    shown,
    whole,
    worded,
)
from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import server_url

T = TypeVar("T")

WINDOW_HELP = (
    "LABEL or LABEL:KEY=NUMBER,…; keys: new (requests a second), loads (adapters a second), first "
    "and count (which adapters), preload=1 (those are loaded before)"
)


def add_load_commands(actions: "argparse._SubParsersAction[Parser]") -> None:
    """`serve`, `streams` and `adapters`."""
    serve = actions.add_parser("serve", help="load on a running server")
    _add_server(serve)
    _add_callers(serve)
    add_folders(serve)
    _add_load(serve)
    serve.set_defaults(run=run_serve)
    streams = actions.add_parser("streams", help="steady streams, and loads beside them")
    _add_server(streams)
    _add_callers(streams)
    _add_operator(streams)
    add_folders(streams)
    _add_streams(streams)
    streams.set_defaults(run=run_streams)
    orders = actions.add_parser("adapters", help="registers, loads or unloads many adapters")
    orders.add_argument("action", choices=("register", "load", "unload"))
    _add_server(orders)
    _add_operator(orders)
    add_folders(orders, required=True)
    orders.add_argument("--concurrency", type=whole(1), default=16)
    orders.set_defaults(run=run_adapters)


# ---- the server and its adapters


def _extra(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise ValueError(f"expected a JSON object, got {shown(text)}") from None


def _add_server(parser: Parser) -> None:
    parser.add_argument(
        "--url", type=worded(server_url), required=True, help="of the server: http://127.0.0.1:8080"
    )


def _add_callers(parser: Parser) -> None:
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


def _add_operator(parser: Parser) -> None:
    parser.add_argument(
        "--admin-key-file", metavar="PATH", help="file with the key [LORAPLEX_ADMIN_KEY]"
    )


def add_folders(parser: Parser, required: bool = False, count: int = 0) -> None:
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


def _target(arguments: argparse.Namespace) -> Target:
    """Raises OptionError."""
    given = vars(arguments)
    keys = {name: given.get(name, "") for name in ("api_key", "admin_key")}
    if not all(key.isascii() for key in keys.values()):
        raise OptionError("keys must be ASCII, as they are sent in a header")
    callers = {name: given[name] for name in ("api", "extra") if name in given}
    return Target(arguments.url, given.get("base_model", ""), **callers, **keys)


def names_in(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Of adapter folders. Raises BenchError."""
    if arguments.adapters_in is None:
        return ()
    folder, first, count = arguments.adapters_in, arguments.first, arguments.count
    found = sorted(path.parent.name for path in folder.glob("*/adapter_config.json"))
    names = tuple(found[first : first + count if count else None])
    if not names or (count and len(names) < count):
        raise BenchError(f"{folder} has {len(found)} adapters, too few for this")
    return names


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# ---- serve


def add_draws(parser: Parser) -> None:
    """What a workload's calls are drawn from."""
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


def drawn(arguments: argparse.Namespace, adapters: tuple[str | None, ...]) -> Workload:
    """As the options of `add_draws` say, all at once."""
    return Workload(
        requests=arguments.requests,
        adapters=adapters,
        zipf=arguments.zipf,
        prompt=arguments.prompt,
        output=arguments.output,
        seed=arguments.seed,
    )


def _add_load(parser: Parser) -> None:
    parser.add_argument("--adapter", action="append", default=[], help="most popular first")
    parser.add_argument("--base-too", action="store_true", help="requests without adapter as well")
    add_draws(parser)
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


def run_serve(arguments: argparse.Namespace) -> None:
    """Raises OptionError, BenchError."""
    from loraplex.launcher.bench.load.serve import run_load
    from loraplex.launcher.bench.report import Slo, summarise, table, why_none

    made = (model_of(name, arguments.registered) for name in names_in(arguments))
    named = (*arguments.adapter, *made)
    adapters: tuple[str | None, ...] = named
    if arguments.base_too or not adapters:
        adapters = (*adapters, None)
    concurrency, processes = arguments.concurrency, arguments.processes
    if concurrency is not None and concurrency < processes:
        raise OptionError("--processes must be at most --concurrency")
    pace = {"rate": arguments.rate, "burstiness": arguments.burstiness}
    workload = replace(drawn(arguments, adapters), **pace)
    outcomes = _run(run_load(_target(arguments), workload, concurrency, processes))
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


# ---- streams


def _add_streams(parser: Parser) -> None:
    window = worded(Window.parse)
    parser.add_argument(
        "--window", type=window, action="append", required=True, metavar="SPEC", help=WINDOW_HELP
    )
    parser.add_argument("--streams", type=whole(1), default=64, help="steady ones")
    parser.add_argument(
        "--stream-adapters",
        type=whole(0),
        default=64,
        help="they have the first N adapters (0 = base)",
    )
    parser.add_argument("--seconds", type=above(0), default=20.0, help="of a window")
    parser.add_argument("--settle", type=number(0), default=1.0, help="seconds before it")
    parser.add_argument("--stream-prompt", type=whole(1), default=128, help="tokens")
    parser.add_argument("--stream-output", type=whole(1), default=3000, help="tokens, if not left")
    parser.add_argument("--new-prompt", type=whole(1), default=512, help="tokens of new requests")
    parser.add_argument("--new-output", type=whole(1), default=16, help="tokens of new requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--worker-url",
        type=worded(server_url),
        help="whose metrics are read, e.g. http://127.0.0.1:8090",
    )


def run_streams(arguments: argparse.Namespace) -> None:
    """Raises OptionError, BenchError."""
    from loraplex.launcher.bench.load.streams import StreamsPlan, run_window
    from loraplex.launcher.bench.load.windows import summarise_window, window_table

    names = names_in(arguments)
    try:
        for window in arguments.window:
            window.adapters(names)
    except ValueError as error:
        raise OptionError(str(error)) from None
    plan = StreamsPlan(
        target=_target(arguments),
        names=names,
        stream_adapters=names[: arguments.stream_adapters],
        streams=arguments.streams,
        seconds=arguments.seconds,
        settle_s=arguments.settle,
        stream_prompt=arguments.stream_prompt,
        stream_output=arguments.stream_output,
        new_prompt=arguments.new_prompt,
        new_output=arguments.new_output,
        seed=arguments.seed,
        worker_url=arguments.worker_url,
        registered=arguments.registered,
    )
    summaries = []
    for window in arguments.window:
        summaries.append(summarise_window(_run(run_window(plan, window))))
        if arguments.json:
            print(msgspec.json.encode(summaries[-1]).decode(), flush=True)
    if not arguments.json:
        print(window_table(summaries))


def run_adapters(arguments: argparse.Namespace) -> None:
    """Raises OptionError, BenchError."""
    from loraplex.launcher.bench.load.adapter_orders import order_all

    names = names_in(arguments)
    orders = _run(order_all(_target(arguments), arguments.action, names, arguments.concurrency))
    if not orders.done:
        why = next(iter(orders.errors.values()))
        raise BenchError(f"none of {len(names)} adapters: {orders.action} failed: {why}")
    print_fields(orders, arguments.json)
    if orders.failed:
        raise BenchError(f"{orders.action} failed for {orders.failed} of {len(names)} adapters")
