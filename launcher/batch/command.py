"""`loraplex batch IN --out OUT`: its options, and what runs."""

import argparse
import asyncio
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from loraplex.launcher.command_line import Parser, add_options
from loraplex.launcher.config import batch_options, resolve
from loraplex.launcher.option_types import worded
from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import server_url
from loraplex.router.lines.errors import BatchError

if TYPE_CHECKING:
    from loraplex.launcher.batch.job import BatchJob
    from loraplex.launcher.serving.serve import Serve
    from loraplex.router.lines.line_files import BatchInput, Journal

ABOUT = """\
Run a file of requests, one JSON object a line, in the format of OpenAI's batch API:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

  loraplex batch in.jsonl --out out.jsonl --url http://127.0.0.1:8080
  loraplex batch in.jsonl --out out.jsonl --model ./llama --adapter sql=hub:org/sql-lora

The lines become batches of the server (/v1/files, /v1/batches). Without --url the command starts
one for as long as it runs, by the options of `loraplex serve`.
Lines run adapter by adapter; answers come in any order. Started again, it goes on.
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("input", metavar="IN", type=Path, help="requests, one a line")
    parser.add_argument(
        "--out", metavar="OUT", type=Path, required=True, help="file of the answers"
    )
    parser.add_argument(
        "--errors", metavar="ERR", type=Path, help="of failed lines [OUT with .errors.jsonl]"
    )
    parser.add_argument(
        "--strict", action="store_true", help="the exit code is 1 if lines failed, too"
    )
    add_server_arguments(parser)


def add_server_arguments(parser: Parser) -> None:
    """Options of any command that runs lines: the server, which it may start, and a new start."""
    parser.add_argument("--url", type=worded(server_url), help="of a server that runs already")
    parser.add_argument(
        "--api-key-file", metavar="PATH", help="file with a caller's key [LORAPLEX_API_KEY]"
    )
    parser.add_argument(
        "--restart", action="store_true", help="write all files anew instead of going on"
    )
    parser.add_argument("--model", metavar="MODEL", help="Hub id or folder, to be served")
    add_options(parser, batch_options())


def run(arguments: argparse.Namespace, api_key: str, environ: Mapping[str, str]) -> int:
    """Runs a batch. Returns the exit code: 0 if every line has an answer; with --strict, if none
    failed.

    Raises BatchError, KeyboardInterrupt, and what `serve` raises.
    """
    from loraplex.router.lines.line_files import BatchInput, Journal

    if not api_key.isascii():
        raise OptionError("the key must be ASCII, as it is sent in a header")
    out, errors = _files(arguments)
    work = out.with_name(f"{out.name}.work")
    _check_void(arguments)
    server = None if arguments.url else _own_server(arguments, environ, work)
    with (
        closing(BatchInput(arguments.input)) as source,
        closing(Journal(out, errors, source, arguments.restart)) as journal,
    ):
        if arguments.restart:
            shutil.rmtree(work, ignore_errors=True)
        work.mkdir(exist_ok=True)
        _run_lines(arguments.url, server, source, journal, work, api_key)
        if source.requests == journal.skipped:
            shutil.rmtree(work, ignore_errors=True)
        is_failed = source.requests > journal.skipped or (arguments.strict and journal.failed)
    return 1 if is_failed else 0


def _run_lines(
    url: str | None,
    server: "Serve | None",
    source: "BatchInput",
    journal: "Journal",
    work: Path,
    api_key: str,
) -> None:
    """Runs the open lines. work: folder for what a later run goes on with. Raises KeyboardInterrupt
    if the run was stopped at once, and what ends it but a BatchError.
    """
    from loraplex.launcher.batch.job import BatchJob, say

    total, done = source.requests, journal.skipped
    skipped = f"; {done:,} have an answer already and are skipped" if done else ""
    say(f"{total:,} lines, {source.adapters:,} adapters{skipped}")
    job = BatchJob(source, journal, work / "running", api_key)
    in_peace = True
    if done < total:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            in_peace = runner.run(_until_over(url, server, job))
    done = journal.skipped
    failed = f"{journal.failed:,} of them in the error file"
    say(f"{done:,} of {total:,} lines have an answer, {failed}")
    if isinstance(job.failure, BatchError):
        say(str(job.failure))
    elif job.failure is not None:
        raise job.failure
    if done < total:
        say(f"{total - done:,} lines have no answer: the same command goes on with them")
    if not in_peace:
        raise KeyboardInterrupt


def _files(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The files of answers and of failed lines. Raises OptionError."""
    out: Path = arguments.out
    errors: Path = arguments.errors or out.parent / f"{out.stem}.errors{out.suffix}"
    real = {Path(path).resolve() for path in (arguments.input, out, errors)}
    if len(real) < 3:
        raise OptionError("IN, --out and --errors must be three files")
    return out, errors


def _check_void(arguments: argparse.Namespace) -> None:
    """Refuse options of a server that is not started. Raises OptionError."""
    given = [option for option in batch_options() if getattr(arguments, option.field, None)]
    if arguments.url and given:
        name = given[0].flag
        raise OptionError(f"--{name} is of a server that batch starts; with --url it starts none")


def _own_server(arguments: argparse.Namespace, environ: Mapping[str, str], work: Path) -> "Serve":
    """A server on a port of its own, for this machine alone. work: folder for its files, unless
    --files-dir names one. Raises what `serve` raises.
    """
    from loraplex.launcher.serving.plan import LOOPBACK
    from loraplex.launcher.serving.serve import Serve, checked_plan

    values = resolve(batch_options(), arguments, environ, optional=("model",))
    values |= {"host": LOOPBACK, "port": 0, "files_dir": values["files_dir"] or work / "files"}
    return Serve(checked_plan(values), environ)


async def _until_over(url: str | None, server: "Serve | None", job: "BatchJob") -> bool:
    """Run the job to its end. False = it was stopped at once. Raises ChildFailed."""
    from loraplex.launcher.serving.until_signal import run_services

    if server is not None:
        return await server.run(job)

    async def announce() -> None:
        job.server_ready(url or "")

    return await run_services((job,), announce, job.stop)
