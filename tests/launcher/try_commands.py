"""Runs commands one after the other in this process: argument lists as JSON on stdin, exit codes
and output as JSON on stdout, behind the help of every command."""

import argparse
import contextlib
import io
import json
import sys
import traceback
from collections.abc import Iterator

from loraplex.launcher.__main__ import _parser, main


def every_help(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from every_help(inner)


def run(arguments: list[str]) -> tuple[list[str], int, str]:
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            said.write(end.code if isinstance(end.code, str) else "")
        except BaseException:
            code = -1
            traceback.print_exc(file=said)
    return arguments, code, said.getvalue()


answers = [run(arguments) for arguments in json.load(sys.stdin)]
print(json.dumps([[*every_help(_parser())], answers]))
