"""The `loraplex` command."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from loraplex.adapters.common import extras
from loraplex.adapters.common.logs import log_to_stderr, say_last
from loraplex.adapters.common.loopback import is_loopback
from loraplex.adapters.errors import AdapterError, CommandError
from loraplex.launcher import config
from loraplex.launcher.batch import command as batch_command
from loraplex.launcher.bench import commands as bench_commands
from loraplex.launcher.command_line import Parser, add_options, flags_of
from loraplex.launcher.commands import cache as cache_commands
from loraplex.launcher.commands import keys as key_commands
from loraplex.launcher.commands import lifecycle as lifecycle_commands
from loraplex.launcher.convert import command as convert_command
from loraplex.launcher.evaluation import command as eval_command
from loraplex.launcher.moved_line import Moved, move
from loraplex.launcher.options import OptionError, build, options_of
from loraplex.launcher.parity import command as parity_command
from loraplex.launcher.router_client import json_text
from loraplex.launcher.standard_streams import open_streams, written_to_the_end
from loraplex.router.config import RouterConfig
from loraplex.server.config import WorkerConfig

ABOUT = """\
Serve thousands of LoRA fine-tunes of one base model from the same GPUs.

  loraplex serve                                   the demo model and its adapters, offline
  loraplex serve meta-llama/Llama-3.1-8B-Instruct --adapter sql=hub:org/sql-lora@main
  loraplex serve ./llama --adapter-root ./adapters  adapters by local: names at run time
  loraplex adapter check ./my-lora --base ./llama   what is wrong with this adapter?
  loraplex adapter convert ./mlx-lora --out ./lora  of mlx-lm's format, or of a pickle
  loraplex adapter register sql hub:org/sql-lora    give it a name while the server runs
  loraplex batch in.jsonl --out out.jsonl          a file of requests, adapter by adapter
  loraplex eval ./run --data lines.jsonl --score exact --out ./results   all its checkpoints
  loraplex info                                    what this machine can do, and why not

Every option is also a variable: --kv-memory 2GB is LORAPLEX_KV_MEMORY=2GB; a flag wins.
Secrets come from variables or files only, as others can see a process's flags.
"""
SERVE = """\
Start a router and a worker on this machine. Without MODEL: the demo model and its adapters.

  loraplex serve
  loraplex serve Qwen/Qwen2.5-0.5B-Instruct --adapter pirate=./pirate-lora --port 9000
  curl http://127.0.0.1:8080/generate -H 'Content-Type: application/json' \\
    -d '{"inputs": "Hello", "parameters": {"adapter_id": "pirate"}}'

Options of vLLM, SGLang and LoRAX work, too: docs/guides/move-over.md says what each is.
Ctrl-C once finishes what runs and stops; twice stops at once.
"""
ROUTER = """\
Start a router: HTTP for clients, text and tokens; needs no GPU and no torch.

  LORAPLEX_SECRET=... loraplex router --worker ws://gpu-1:8090 --worker ws://gpu-2:8090
  LORAPLEX_SECRET=... LORAPLEX_ADMIN_KEY=... loraplex router --host 0.0.0.0 --worker ws://gpu-1:8090

Where others can reach it, callers need keys (`loraplex key create`), unless --auth is none.
"""
WORKER = """\
Start a worker: one copy of MODEL on this machine's device, for routers to connect to.

  LORAPLEX_SECRET=... loraplex worker meta-llama/Llama-3.1-8B --host 0.0.0.0 --kv-memory 40GB

With --redis it announces its address to routers itself (--advertise).
"""

VLLM_API_KEY = "VLLM_API_KEY"

T = TypeVar("T")
Command = Callable[[argparse.Namespace, Mapping[str, str]], None]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Exit codes: 0 done, 1 failed (one sentence on stderr), 2 misused, 130 by
    Ctrl-C, 141 where nobody reads stdout any more.
    """
    open_streams()
    try:
        with written_to_the_end():
            _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        where = "" if error.filename is None else f"{str(error.filename)[:200]}: "
        fail(f"{where}{error.strerror or error or type(error).__name__}", 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(words: list[str]) -> None:
    """Runs a command. Raises OSError, and ends the process where the command fails otherwise."""
    moved = Moved()
    if words[:1] == ["serve"]:
        try:
            moved = move(words[1:], flags_of(config.serve_options()))
        except OptionError as error:
            fail(str(error), 2)
        words[1:] = moved.words
    arguments = _parser().parse_args(words)
    arguments.moved = moved
    command: Command = arguments.command
    try:
        environ = config.environment(moved.environ)
        config.check_variables(environ)
        command(arguments, environ)
    except OptionError as error:
        fail(str(error), 2)
    except (AdapterError, CommandError) as error:
        fail(str(error), 1)
    except ModuleNotFoundError as error:
        lacking = extras.sentence(error, arguments.extra)
        if lacking is None:
            raise
        fail(lacking, 1)


def fail(sentence: str, code: int) -> None:
    say_last(f"loraplex: {sentence}")
    sys.exit(code)


def _parser() -> Parser:
    parser = Parser(prog="loraplex", description=ABOUT)
    release = extras.installed("loraplex") or "(from a checkout)"
    parser.add_argument("--version", action="version", version=f"loraplex {release}")
    parser.set_defaults(extra="serve")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="router and worker on this machine",
        description=SERVE,
        usage="loraplex serve [MODEL] [OPTIONS]",
    )
    serve.add_argument("model", metavar="MODEL", nargs="?", help="Hub id or folder")
    add_options(serve, config.serve_options())
    serve.set_defaults(command=_serve)
    router = commands.add_parser(
        "router", help="a router of a fleet", description=ROUTER, usage="loraplex router [OPTIONS]"
    )
    router.add_argument("--one-of-several", action="store_true", help=argparse.SUPPRESS)
    router.add_argument("--started-as", metavar="NAME", help=argparse.SUPPRESS)
    add_options(router, config.ROUTER_OPTIONS)
    router.set_defaults(command=_router, extra="router")
    worker = commands.add_parser(
        "worker",
        help="a worker of a fleet",
        description=WORKER,
        usage="loraplex worker MODEL [OPTIONS]",
    )
    worker.add_argument("model", metavar="MODEL", nargs="?", help="Hub id or folder")
    worker.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    worker.add_argument("--metrics-fd", type=int, help=argparse.SUPPRESS)
    worker.add_argument("--started-as", metavar="NAME", help=argparse.SUPPRESS)
    add_options(worker, config.WORKER_OPTIONS)
    worker.set_defaults(command=_worker, extra="server")
    _add_adapter(commands)
    key = commands.add_parser("key", help="keys of a running router's callers")
    key_actions = key.add_subparsers(metavar="ACTION", required=True)
    for name, key_parser in key_commands.add_commands(key_actions).items():
        key_parser.set_defaults(command=_key, action=name)
    cache = commands.add_parser("cache", help="compiled kernels for other machines")
    cache_commands.add_commands(cache.add_subparsers(metavar="ACTION", required=True))
    cache.set_defaults(command=_cache, extra="server")
    _add_lines(commands)
    bench = commands.add_parser("bench", help="measure", description=bench_commands.ABOUT)
    bench_commands.add_commands(bench.add_subparsers(metavar="ACTION", required=True))
    bench.set_defaults(command=_bench)
    info = commands.add_parser("info", help="what this machine can do, and why not; or a model")
    info.add_argument("model", metavar="MODEL", nargs="?", help="Hub id, folder or config.json")
    info.add_argument("--json", action="store_true", help="for programs")
    add_options(info, config.info_options())
    info.set_defaults(command=_info)
    return parser


def _add_lines(commands: "argparse._SubParsersAction[Parser]") -> None:
    batch = commands.add_parser(
        "batch",
        help="a file of requests, as fast as a server can",
        description=batch_command.ABOUT,
        usage="loraplex batch IN --out OUT [OPTIONS]",
    )
    batch_command.add_arguments(batch)
    batch.set_defaults(command=_lines, run_lines=batch_command.run)
    evaluation = commands.add_parser(
        "eval",
        help="many adapters on the same lines, in one table",
        description=eval_command.ABOUT,
        usage="loraplex eval WHAT... --data F --score SCORE --out FOLDER [OPTIONS]",
    )
    eval_command.add_arguments(evaluation)
    evaluation.set_defaults(command=_lines, run_lines=eval_command.run)
    parity = commands.add_parser(
        "parity",
        help="log-probabilities of a server beside PEFT's",
        description=parity_command.ABOUT,
        usage="loraplex parity MODEL ADAPTER… --prompts F [OPTIONS]",
    )
    parity_command.add_arguments(parity)
    parity.set_defaults(command=_lines, run_lines=parity_command.run)
    parity.set_defaults(api_key_file=None, extra="convert")


def _add_adapter(commands: "argparse._SubParsersAction[Parser]") -> None:
    adapter = commands.add_parser(
        "adapter", help="check and fetch adapters; register them with a running router"
    )
    actions = adapter.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser("check", help="everything that is wrong with an adapter, at once")
    pull = actions.add_parser("pull", help="fetch an adapter into the store")
    pack = actions.add_parser("pack", help="write an adapter's packed weights to a file")
    convert = actions.add_parser(
        "convert",
        help="make an adapter of mlx-lm's format or of a pickle",
        description=convert_command.ABOUT,
    )
    for parser in (check, pull, pack, convert):
        parser.add_argument(
            "ref",
            metavar="FOLDER" if parser is convert else "REF",
            help="a folder" if parser is convert else "folder, hub:org/name[@rev] or local:path",
        )
        parser.add_argument(
            "--base",
            metavar="MODEL",
            required=parser in (pull, pack),
            help="base model: Hub id, folder, or demo",
        )
        parser.add_argument(
            "--model-name",
            dest="model_names",
            metavar="NAME",
            action="append",
            default=[],
            help="another name of the base, as its worker has it; may be repeated",
        )
        parser.add_argument(
            "--allow-other-base", action="store_true", help="accept one that names another base"
        )
        parser.add_argument(
            "--text-part-only",
            action="store_true",
            help="leave out what it changes in a part for images",
        )
    convert_command.add_arguments(convert)
    for parser in (check, convert):
        parser.add_argument("--json", action="store_true", help="for programs")
    for parser in (pull, pack):
        parser.add_argument(
            "--cache-dir",
            metavar="PATH",
            help="the store [default: ~/.cache/loraplex; LORAPLEX_CACHE_DIR]",
        )
    pack.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    pack.add_argument("--out", metavar="FILE", required=True, help="where the slab goes")
    for parser, name in ((check, "check"), (pull, "pull"), (pack, "pack"), (convert, "convert")):
        extra = "convert" if parser is convert else "router"
        parser.set_defaults(command=_adapter, action=name, extra=extra)
    for name, talker in lifecycle_commands.add_commands(actions).items():
        talker.set_defaults(command=_lifecycle, action=name)


# Commands import what they need when they run: --help is quick, and a router needs no torch.


def _serve(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    from loraplex.launcher.serving.serve import serve

    moved: Moved = arguments.moved
    values = config.resolve(config.serve_options(), arguments, environ, optional=("model",))
    inherited = {name: text for name, text in environ.items() if name != VLLM_API_KEY}
    if keys := moved.api_keys or list(filter(None, [environ.get(VLLM_API_KEY)])):
        if values["keys_file"] is not None or values["auth"] == "none":
            raise OptionError(f"--api-key ({VLLM_API_KEY}), --keys-file and --auth none: drop one")
        moved.notes.append("an API key opens all adapters; --keys-file hides keys, and limits them")
        values["keys_file"] = config.keys_file_of(keys)
    if moved.is_foreign and values["model"] is None:
        raise OptionError("MODEL is needed beside options of other servers; write it first")
    if moved.is_foreign and arguments.host is None and is_loopback(str(values["host"])):
        moved.notes.append(f"only this machine reaches {values['host']}; --host 0.0.0.0 opens it")
    serve(values, inherited, moved.notes)


def _lines(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    log_to_stderr(logging.WARNING)
    key = config.secret_value("api_key", arguments.api_key_file, environ)
    sys.exit(arguments.run_lines(arguments, key, environ))


def _router(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    chosen = _config(RouterConfig, arguments, environ)
    if not chosen.workers and not chosen.redis:
        raise OptionError("no workers: name some with --worker, or find them by --redis")
    config.check_router(chosen)
    try:
        if chosen.router_processes > 1 and not arguments.one_of_several:
            _routers(chosen, environ)
        else:
            _one_router(chosen)
    except OSError as error:
        fail(f"port {chosen.port} of {chosen.host} cannot be used: {error.strerror}", 1)


def _config(kind: type[T], arguments: argparse.Namespace, environ: Mapping[str, str]) -> T:
    """The config of a router or worker: by options, or on stdin for a child of `serve`, whose name
    `ps` shows. Raises OptionError.
    """
    if arguments.started_as:
        return config.config_of(kind, sys.stdin.buffer.read())
    chosen: T = build(kind, config.resolve(options_of(kind), arguments, environ))
    return chosen


def _routers(chosen: RouterConfig, environ: Mapping[str, str]) -> None:
    from loraplex.launcher.serving.routers import run

    run(chosen, environ)


def _one_router(chosen: RouterConfig) -> None:
    from loraplex.router.main import run
    from loraplex.router.telemetry.request import request_id

    config.encode_inline()
    log_to_stderr(written=chosen.log_format, request_id=request_id)
    run(chosen)


def _worker(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    from loraplex.launcher.serving.plan import with_demo_name
    from loraplex.server.worker.main import run

    chosen = with_demo_name(_config(WorkerConfig, arguments, environ))
    log_to_stderr(written=chosen.log_format)
    config.check_worker(chosen)
    run(chosen, arguments.listen_fd, arguments.metrics_fd)
    # A download on a thread must not hold the process back: nothing more is to be done.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def _adapter(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    from loraplex.launcher.commands import adapter as adapter_commands

    log_to_stderr(logging.WARNING)
    cache = arguments.cache_dir if "cache_dir" in arguments else None
    folder = cache or environ.get("LORAPLEX_CACHE_DIR", "~/.cache/loraplex")
    sys.exit(adapter_commands.run(arguments, folder))


def _lifecycle(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    log_to_stderr(logging.WARNING)
    key = config.secret_value("admin_key", arguments.admin_key_file, environ)
    token = None
    if getattr(arguments, "token_file", None) is not None:
        token = config.read_secret(arguments.token_file, "--token-file")
    sys.exit(lifecycle_commands.run(arguments, key, token))


def _key(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    log_to_stderr(logging.WARNING)
    file = getattr(arguments, "admin_key_file", None)
    sys.exit(key_commands.run(arguments, config.secret_value("admin_key", file, environ)))


def _cache(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    log_to_stderr(logging.WARNING)
    sys.exit(cache_commands.run(arguments))


def _bench(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    bench_commands.read_keys(arguments, environ)
    run: Callable[[argparse.Namespace], None] = arguments.run
    run(arguments)


def _info(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    from loraplex.launcher.info import gather, to_text

    if arguments.model is not None:
        _model_info(arguments, environ)
        return
    if arguments.revision is not None:
        raise OptionError("--revision is of a MODEL: name one")
    facts = gather()
    sys.stdout.write(json_text(facts) if arguments.json else to_text(facts))


def _model_info(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    from loraplex.launcher.model_info import describe

    values = config.resolve(config.WORKER_OPTIONS, arguments, environ)
    log_to_stderr(logging.WARNING)
    facts = describe(build(WorkerConfig, values))
    sys.stdout.write(facts.written(for_programs=arguments.json))


if __name__ == "__main__":
    main()
