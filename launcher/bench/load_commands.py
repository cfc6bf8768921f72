"""The actions of `loraplex bench` that load a running server, and what they need to do it."""

import argparse
import asyncio
import json
import math
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from launcher.command_line import Parser

T = TypeVar("T")

DTYPES = ("bfloat16", "float16", "float32")
WINDOW_HELP = (
    "LABEL or LABEL:KEY=NUMBER,…; keys: new (requests a second), loads (adapters a second), first "
    "and count (which adapters), preload=1 (those are loaded before)"
)


def add_load_commands(actions: "argparse._SubParsersAction[Parser]") -> None:
    """`serve`, `streams`, `adapters`, `make-model`, `adapter-copies` and `cold-adapters`."""
    serve = actions.add_parser("serve", help="load on a running server")
    _add_target(serve)
    _add_load(serve)
    serve.set_defaults(run=run_serve)
    streams = actions.add_parser("streams", help="steady streams, and loads beside them")
    _add_target(streams)
    _add_streams(streams)
    streams.set_defaults(run=run_streams)
    orders = actions.add_parser("adapters", help="registers, loads or unloads many adapters")
    orders.add_argument("action", choices=("register", "load", "unload"))
    _add_target(orders)
    orders.add_argument("--concurrency", type=int, default=16)
    orders.set_defaults(run=run_adapters)
    make = actions.add_parser("make-model", help="a model and adapters with random weights")
    _add_make(make)
    make.set_defaults(run=run_make)
    copies = actions.add_parser("adapter-copies", help="adapters from host memory to the device")
    _add_copies(copies)
    copies.set_defaults(run=run_copies)
    cold = actions.add_parser("cold-adapters", help="adapters from a folder to host memory")
    _add_cold(cold)
    cold.set_defaults(run=run_cold)


# ---- the server and its adapters


def _url(text: str) -> str:
    from launcher.router_client import HTTP_URL, is_http_url

    if not is_http_url(text):
        raise argparse.ArgumentTypeError(f"expected {HTTP_URL}, got {text[:200]!r}")
    return text


def _add_target(parser: Parser) -> None:
    parser.add_argument(
        "--url", type=_url, required=True, help="of the server, e.g. http://127.0.0.1:8080"
    )
    parser.add_argument("--base-model", default="base", help="what `model` says for the base")
    parser.add_argument(
        "--adapters-in",
        type=Path,
        metavar="DIR",
        help="adapter folders in it, by name: `local:NAME` for a server with --adapter-root DIR",
    )
    parser.add_argument("--first", type=int, default=0, help="from this one of them")
    parser.add_argument("--count", type=int, default=0, help="so many of them (0 = all)")
    parser.add_argument(
        "--registered", action="store_true", help="they are registered by their names"
    )


def _target(arguments: argparse.Namespace) -> Any:
    from launcher.bench.serve import Target

    return Target(arguments.url.rstrip("/"), arguments.base_model)


def _names(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Of adapter folders."""
    if arguments.adapters_in is None:
        return ()
    folder, first, count = arguments.adapters_in, arguments.first, arguments.count
    found = sorted(path.parent.name for path in folder.glob("*/adapter_config.json"))
    names = tuple(found[first : first + count if count else None])
    if not names or (count and len(names) < count):
        raise SystemExit(f"loraplex: {folder} has {len(found)} adapters, too few for this")
    return names


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# ---- serve


def _add_load(parser: Parser) -> None:
    parser.add_argument("--adapter", action="append", default=[], help="most popular first")
    parser.add_argument("--base-too", action="store_true", help="requests without adapter as well")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of adapter popularity")
    parser.add_argument("--prompt", default="lognormal(5.0,0.8) in 16..1024", help="tokens")
    parser.add_argument("--output", default="lognormal(4.8,0.7) in 8..512", help="tokens")
    parser.add_argument("--rate", type=float, default=math.inf, help="requests a second")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1 = Poisson arrivals")
    parser.add_argument("--concurrency", type=int, help="callers of a closed loop")
    parser.add_argument("--processes", type=int, default=1, help="that send")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slo-ttft-ms", type=float, help="goodput: time to the first token")
    parser.add_argument("--slo-itl-ms", type=float, help="goodput: mean gap between tokens")


def run_serve(arguments: argparse.Namespace) -> None:
    from launcher.bench.report import Slo, summarise, table
    from launcher.bench.serve import run_load
    from launcher.bench.workload import Lengths, Workload

    prefix = "" if arguments.registered else "local:"
    named = (*arguments.adapter, *(f"{prefix}{name}" for name in _names(arguments)))
    adapters: tuple[str | None, ...] = named
    if arguments.base_too or not adapters:
        adapters = (*adapters, None)
    if arguments.processes < 1 or (arguments.concurrency or math.inf) < arguments.processes:
        raise SystemExit("loraplex: --processes must be at least 1 and at most --concurrency")
    try:
        workload = Workload(
            requests=arguments.requests,
            adapters=adapters,
            zipf=arguments.zipf,
            prompt=Lengths.parse(arguments.prompt),
            output=Lengths.parse(arguments.output),
            rate=arguments.rate,
            burstiness=arguments.burstiness,
            seed=arguments.seed,
        )
    except ValueError as error:
        raise SystemExit(f"loraplex: {error}") from None
    load = run_load(_target(arguments), workload, arguments.concurrency, arguments.processes)
    slo = Slo(_seconds(arguments.slo_ttft_ms), _seconds(arguments.slo_itl_ms))
    summary = summarise(_run(load), slo)
    print(msgspec.json.encode(summary).decode() if arguments.json else table(summary))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


# ---- streams


def _add_streams(parser: Parser) -> None:
    parser.add_argument(
        "--window", action="append", required=True, metavar="SPEC", help=WINDOW_HELP
    )
    parser.add_argument("--streams", type=int, default=64, help="steady ones")
    parser.add_argument(
        "--stream-adapters", type=int, default=64, help="they have the first N adapters (0 = base)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds before it")
    parser.add_argument("--stream-prompt", type=int, default=128, help="tokens")
    parser.add_argument("--stream-output", type=int, default=3000, help="tokens, if not left")
    parser.add_argument("--new-prompt", type=int, default=512, help="tokens of new requests")
    parser.add_argument("--new-output", type=int, default=16, help="tokens of new requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--worker-url", type=_url, help="whose metrics are read, e.g. http://127.0.0.1:8090"
    )


def run_streams(arguments: argparse.Namespace) -> None:
    import httpx

    from launcher.bench.streams import Plan, StreamsError, run_window
    from launcher.bench.windows import Window, summarise_window, window_table

    names = _names(arguments)
    plan = Plan(
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
    try:
        for window in [Window.parse(text) for text in arguments.window]:
            summaries.append(summarise_window(_run(run_window(plan, window))))
            if arguments.json:
                print(msgspec.json.encode(summaries[-1]).decode(), flush=True)
    except (StreamsError, ValueError, httpx.HTTPError) as error:
        raise SystemExit(f"loraplex: {error}") from None
    if not arguments.json:
        print(window_table(summaries))


def run_adapters(arguments: argparse.Namespace) -> None:
    from launcher.bench.adapter_orders import order_all

    names = _names(arguments)
    orders = asdict(
        _run(order_all(_target(arguments), arguments.action, names, arguments.concurrency))
    )
    if arguments.json:
        print(json.dumps(orders))
    else:
        print("\n".join(f"{name:20} {value}" for name, value in orders.items()))


# ---- what is served


def _add_make(parser: Parser) -> None:
    parser.add_argument(
        "--config",
        required=True,
        metavar="FOLDER",
        help="folder with a config.json, or a name that ships with the project (llama-3.1-8b)",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="write the model into it")
    parser.add_argument("--adapters-in", type=Path, metavar="DIR", help="and adapter folders here")
    parser.add_argument("--adapters", type=int, default=0, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--base-name", default="base", help="base that the adapters name")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the model")
    parser.add_argument("--adapter-dtype", choices=(*DTYPES, "float8"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=8, help="that write")


def run_make(arguments: argparse.Namespace) -> None:
    from launcher.bench.made_model import Maker
    from launcher.bench.offline import model_folder

    folder = model_folder(arguments.config)
    made, how = {}, (arguments.device, arguments.threads)
    try:
        if arguments.model is not None:
            made["model"] = Maker(folder, arguments.dtype, *how).model(arguments.model)
        if arguments.adapters_in is not None:
            maker = Maker(folder, arguments.adapter_dtype, *how)
            numbers = range(arguments.first, arguments.first + arguments.adapters)
            names = [f"a{number:04}" for number in numbers]
            base, rank = arguments.base_name, arguments.rank
            made["adapters"] = maker.adapters(arguments.adapters_in, names, base, rank)
    except OSError as error:
        raise SystemExit(f"loraplex: {error}") from None
    for what, written in made.items():
        rate = round(written.gb_per_s, 2)
        if arguments.json:
            print(json.dumps({"made": what, **asdict(written), "gb_per_s": rate}))
        else:
            size = f"{written.nbytes / 1e9:.2f} GB in {written.files} files"
            print(f"{what}: {size}, {written.seconds:.1f} s, {rate} GB/s")


def _add_copies(parser: Parser) -> None:
    parser.add_argument("--config", required=True, metavar="FOLDER", help="as of make-model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=32, help="that lie in host memory")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def run_copies(arguments: argparse.Namespace) -> None:
    from launcher.bench.adapter_copies import measure
    from launcher.bench.offline import model_folder

    folder = model_folder(arguments.config)
    device, dtype = arguments.device, arguments.dtype
    _print_times(measure(folder, device, dtype, arguments.rank, arguments.adapters), arguments.json)


def _add_cold(parser: Parser) -> None:
    parser.add_argument("--config", required=True, metavar="FOLDER", help="as of make-model")
    parser.add_argument(
        "--adapters-in", type=Path, required=True, metavar="DIR", help="adapter folders in it"
    )
    parser.add_argument("--first", type=int, default=0, help="from this one of them")
    parser.add_argument("--count", type=int, default=4, help="so many of them (0 = all)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the slabs")
    parser.add_argument("--rounds", type=int, default=5, help="the best counts")


def run_cold(arguments: argparse.Namespace) -> None:
    from launcher.bench.cold_adapters import measure
    from launcher.bench.offline import model_folder

    folder, names = model_folder(arguments.config), _names(arguments)
    times = measure(folder, arguments.adapters_in, names, arguments.dtype, arguments.rounds)
    _print_times(times, arguments.json)


def _print_times(times: Any, as_json: bool) -> None:
    """times: a dataclass of numbers."""
    values = asdict(times)
    lines = (f"{name:20} {value:10.3f}" for name, value in values.items())
    print(json.dumps(values) if as_json else "\n".join(lines))
