"""`loraplex batch IN --out OUT`: its options, and what runs."""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from loraplex.launcher.command_line import Parser, add_options
from loraplex.launcher.config import batch_options, resolve
from loraplex.launcher.option_types import above, whole, worded
from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import server_url
from loraplex.router.lines.errors import BatchError

if TYPE_CHECKING:
    from loraplex.launcher.batch.job import BatchJob, BatchPlan
    from loraplex.launcher.batch.progress import Progress
    from loraplex.launcher.serve import Serve
    from loraplex.router.lines.index import BatchInput
    from loraplex.router.lines.journal import Journal

ABOUT = """\
Run a file of requests, one JSON object a line, in the format of OpenAI's batch API:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

  loraplex batch in.jsonl --out out.jsonl --url http://127.0.0.1:8080
  loraplex batch in.jsonl --out out.jsonl --model ./llama --adapter sql=hub:org/sql-lora

Without --url it starts a server for as long as it runs, by the options of `loraplex serve`.
Lines are sent adapter by adapter; answers come in any order. Started again, it goes on.
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("input", metavar="IN", type=Path, help="requests, one a line")
    parser.add_argument(
        "--out", metavar="OUT", type=Path, required=True, help="file of the answers"
    )
    parser.add_argument(
        "--errors", metavar="ERR", type=Path, help="of failed lines [OUT with .errors.jsonl]"
    )
    parser.add_argument("--url", type=worded(server_url), help="of a server that runs already")
    parser.add_argument(
        "--api-key-file", metavar="PATH", help="file with a caller's key [LORAPLEX_API_KEY]"
    )
    parser.add_argument(
        "--concurrency", type=whole(1, 4096), default=256, help="lines in flight [256]"
    )
    parser.add_argument(
        "--adapters-at-once", type=whole(1), default=32, help="adapters with lines in flight [32]"
    )
    parser.add_argument(
        "--retries", type=whole(0, 1000), default=10, help="of a line that finds no answer [10]"
    )
    parser.add_argument(
        "--timeout-s", type=above(0), default=900.0, help="longest wait for an answer [900]"
    )
    parser.add_argument(
        "--restart", action="store_true", help="write both files anew instead of going on"
    )
    parser.add_argument(
        "--strict", action="store_true", help="the exit code is 1 if lines failed, too"
    )
    parser.add_argument("--model", metavar="MODEL", help="Hub id or folder, to be served")
    add_options(parser, batch_options())


def run(arguments: argparse.Namespace, api_key: str, environ: Mapping[str, str]) -> int:
    """Runs a batch. Returns the exit code: 0 if every line has an answer; with --strict, if none
    failed.

    Raises BatchError, KeyboardInterrupt, and what `serve` raises.
    """
    from loraplex.router.lines.index import BatchInput
    from loraplex.router.lines.journal import Journal

    out, errors = _files(arguments)
    _check_void(arguments)
    plan = _plan(arguments, api_key)
    server = None if arguments.url else _own_server(arguments, environ)
    with (
        closing(BatchInput(arguments.input)) as source,
        closing(Journal(out, errors, source, arguments.restart)) as journal,
    ):
        until_over = partial(_until_over, arguments.url, server)
        progress = _run_lines(plan, source, journal, until_over)
    return 1 if progress.open or (arguments.strict and progress.failed) else 0


def _run_lines(
    plan: "BatchPlan",
    source: "BatchInput",
    journal: "Journal",
    until_over: Callable[["BatchJob"], Coroutine[Any, Any, bool]],
) -> "Progress":
    """Run the open lines. until_over: returns False if it was stopped at once."""
    from loraplex.launcher.batch.job import BatchJob
    from loraplex.launcher.batch.progress import Progress

    total, done = source.requests, journal.skipped
    progress = Progress(sys.stderr, total, done, journal.failed)
    skipped = f"; {done:,} have an answer already and are skipped" if done else ""
    progress.say(f"{total:,} lines, {source.adapters:,} adapters{skipped}")
    job = BatchJob(plan, source, journal, progress)
    in_peace = True
    if progress.open:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            in_peace = runner.run(until_over(job))
    progress.say(progress.summary(time.monotonic()))
    if isinstance(job.failure, BatchError):
        progress.say(str(job.failure))
    elif job.failure is not None:
        raise job.failure
    if progress.open:
        progress.say(f"{progress.open:,} lines have no answer: the same command goes on with them")
    if not in_peace:
        raise KeyboardInterrupt
    return progress


def _files(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The files of answers and of failed lines. Raises OptionError."""
    out: Path = arguments.out
    errors: Path = arguments.errors or out.parent / f"{out.stem}.errors{out.suffix}"
    real = {Path(path).resolve() for path in (arguments.input, out, errors)}
    if len(real) < 3:
        raise OptionError("IN, --out and --errors must be three files")
    return out, errors


def _plan(arguments: argparse.Namespace, api_key: str) -> "BatchPlan":
    """Makes the plan of a batch from the command's arguments. Raises OptionError."""
    from loraplex.launcher.batch.job import BatchPlan

    if not api_key.isascii():
        raise OptionError("the key must be ASCII, as it is sent in a header")
    return BatchPlan(
        concurrency=arguments.concurrency,
        adapters=arguments.adapters_at_once,
        retries=arguments.retries,
        timeout_s=arguments.timeout_s,
        api_key=api_key,
    )


def _check_void(arguments: argparse.Namespace) -> None:
    """Refuse options of a server that is not started. Raises OptionError."""
    given = [option for option in batch_options() if getattr(arguments, option.field, None)]
    if arguments.url and given:
        name = given[0].flag
        raise OptionError(f"--{name} is of a server that batch starts; with --url it starts none")


def _own_server(arguments: argparse.Namespace, environ: Mapping[str, str]) -> "Serve":
    """A server on a port of its own, for this machine alone. Raises what `serve` raises."""
    from loraplex.launcher.plan import LOOPBACK
    from loraplex.launcher.serve import Serve, checked_plan

    values = resolve(batch_options(), arguments, environ, optional=("model",))
    return Serve(checked_plan({**values, "host": LOOPBACK, "port": 0}), environ)


async def _until_over(url: str | None, server: "Serve | None", job: "BatchJob") -> bool:
    """Run the job to its end. False = it was stopped at once. Raises ChildFailed."""
    from loraplex.launcher.until_signal import run_services

    if server is not None:
        return await server.run(job)

    async def announce() -> None:
        job.server_ready(url or "")

    return await run_services((job,), announce, job.stop)
