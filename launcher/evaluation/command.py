"""`loraplex eval WHAT… --data F --score S --out FOLDER`: its options, and what runs."""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from loraplex.adapters.errors import CommandError
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.launcher.batch import command as batch_command
from loraplex.launcher.command_line import Parser
from loraplex.launcher.evaluation import questions, report
from loraplex.launcher.evaluation.scores import OF_TEXT
from loraplex.launcher.option_types import worded
from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import json_text

ABOUT = """\
Put the same lines to many adapters, and compare their answers in one table:

  {"prompt": "Two and two?", "answer": "4"}
  {"messages": [{"role": "user", "content": "Two and two?"}], "choices": ["3", "4"], "answer": 1}

  loraplex eval ./run --data lines.jsonl --score exact --out ./results --model ./llama
  loraplex eval sql json --data lines.jsonl --score judge:demo --out ./results --url http://gpu:8080

WHAT is a server's name; or an adapter's folder, or a training run's with checkpoint-*, written
with / in front or at the end, or with ./
The lines run as `loraplex batch` runs them. Started again, it goes on.
"""
_KINDS = (*OF_TEXT, "choice", "judge")
_STEP = re.compile(r"checkpoint-([0-9]+)")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("what", metavar="WHAT", nargs="+", help="folders, or names on the server")
    parser.add_argument("--data", metavar="F", type=Path, required=True, help="lines, in JSON")
    parser.add_argument(
        "--score", type=worded(_score), required=True, help=f"{', '.join(_KINDS)}:NAME"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="for answers and the report"
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, default=256, help="of an answer [256]"
    )
    parser.add_argument("--json", action="store_true", help="print the report for programs")
    batch_command.add_server_arguments(parser)


def run(arguments: argparse.Namespace, api_key: str, environ: Mapping[str, str]) -> int:
    """Evaluates, and writes the report. Returns the exit code. Raises CommandError, OptionError,
    KeyboardInterrupt, and what `serve` raises."""
    kind, _, judge = arguments.score.partition(":")
    cases = questions.read_cases(arguments.data, kind)
    names = _names(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    ask = partial(answers, arguments, api_key, environ)
    texts = ask("answers", questions.questions(kind, names, cases, arguments.max_tokens))
    said = ask("judge", questions.verdicts(judge, names, cases, texts)) if judge else {}
    found = report.report_of(
        arguments.score, [report.row_of(kind, name, cases, texts, said) for name in names]
    )
    written = json_text(found)
    (arguments.out / "report.json").write_bytes(written.encode())
    sys.stdout.write(written if arguments.json else report.as_text(found))
    return 0


def answers(
    arguments: argparse.Namespace,
    api_key: str,
    environ: Mapping[str, str],
    stem: str,
    requests: Iterable[questions.Request],
) -> dict[str, questions.LineAnswer]:
    """Runs requests as `loraplex batch` does. stem: of the names of its files. Raises
    CommandError, and what a batch raises.
    """
    source, out, errors = (
        arguments.out / f"{stem}{end}.jsonl" for end in (".requests", "", ".errors")
    )
    questions.write_requests(source, requests)
    files = {"input": source, "out": out, "errors": errors, "strict": False}
    batch = argparse.Namespace(**vars(arguments) | files)
    with redirect_stdout(sys.stderr):  # lines of the command's own server
        code = batch_command.run(batch, api_key, environ)
    if code:
        raise CommandError(f"{out} is not complete, so there is no report yet")
    return questions.read_answers(out, errors)


def _score(text: str) -> str:
    """A kind of score. Raises ValueError."""
    kind, _, judge = text.partition(":")
    if kind not in _KINDS or (kind == "judge") != bool(judge):
        raise ValueError(f"expected {', '.join(_KINDS)}:NAME, got {text[:80]!r}")
    return text


def _names(arguments: argparse.Namespace) -> list[str]:
    """Names to ask. Folders go to the command's own server. Raises OptionError, CommandError."""
    names: list[str] = []
    folders: dict[str, Path] = {}
    for what in arguments.what:
        is_folder = what.startswith((".", "/")) or what.endswith("/")
        found = _folders(Path(what)) if is_folder else {}
        folders |= found
        names += found or [what]
    if len(set(names)) < len(names):
        raise OptionError("WHAT names an adapter twice")
    if folders and arguments.url:
        raise OptionError(
            "WHAT must be names with --url: `loraplex adapter push` brings folders to a server"
        )
    refs = [f"{name}={folder}" for name, folder in folders.items()]
    arguments.adapters = [*(arguments.adapters or ()), *refs] or None
    return names


def _folders(folder: Path) -> dict[str, Path]:
    """Adapters by name: a folder's, or a run's checkpoints in order. Raises CommandError."""
    folder = folder.resolve()
    if (folder / CONFIG_FILE).exists():
        return {folder.name: folder}
    steps = {
        int(match[1]): each
        for each in folder.glob("*")
        if (match := _STEP.fullmatch(each.name)) and (each / CONFIG_FILE).exists()
    }
    if not steps:
        raise CommandError(f"{folder} has neither {CONFIG_FILE} nor checkpoint-* with one")
    return {f"{folder.name}-{steps[step].name}": steps[step] for step in sorted(steps)}
