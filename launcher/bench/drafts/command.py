"""`loraplex bench drafts`: its options."""

import argparse
import sysconfig
from pathlib import Path

from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import whole, wholes


def add_drafts(parser: Parser) -> None:
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="of the base")
    parser.add_argument(
        "--edits", type=Path, nargs=2, metavar=("OLD", "NEW"), help="versions of Python sources"
    )
    parser.add_argument("--sql", type=Path, metavar="DIR", help="with files of SQL")
    parser.add_argument(
        "--texts",
        type=Path,
        default=Path(sysconfig.get_paths()["purelib"]),
        metavar="DIR",
        help="with JSON and prose; default: installed packages",
    )
    parser.add_argument("--tasks", type=whole(1), default=50, help="of each kind")
    parser.add_argument("--widths", type=wholes(1, 64), default=tuple(range(1, 9)), metavar="N,…")
    parser.add_argument("--kept-mb", type=whole(1), default=64, help="of other answers")
    parser.add_argument(
        "--step-times",
        type=Path,
        metavar="FILE",
        help="that `loraplex bench decode --adapters 0 --draft 0,… --json` has written",
    )
    parser.set_defaults(run=run_drafts)


def run_drafts(arguments: argparse.Namespace) -> None:
    from loraplex.launcher.bench.drafts.measure import print_results

    print_results(arguments)
