"""`loraplex bench drafts`: how many tokens a step gives with drafts, replayed over texts."""

import argparse
import itertools
import statistics
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from launcher.bench.drafts import texts
from launcher.bench.drafts.replay import StepCurve, TaskTokens, replay, tokens_per_second
from launcher.bench.errors import BenchError
from launcher.bench.option_types import whole, wholes
from launcher.bench.output import print_points
from launcher.command_line import Parser

_ROWS = (1, 8, 32, 64)


class StepTimesFile(msgspec.Struct, forbid_unknown_fields=True):
    """Milliseconds of a step, for each number of its tokens."""

    tokens: list[int]
    ms: list[float]

    def check(self) -> None:
        if not self.tokens or self.tokens != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise ValueError("`tokens` must rise from 1 or more")
        if len(self.ms) != len(self.tokens):
            raise ValueError("`ms` must have a value for each of `tokens`")
        if min(self.ms) <= 0:
            raise ValueError("a step takes more than 0 ms")


@dataclass(frozen=True, slots=True)
class DraftResult:
    """tokens_a_step: by width. drafted, accepted: tokens of the widest. host_us: of a row and step
    of the widest, median. gain: tokens a second over those of plain steps, by rows; None = no step
    times, or others help."""

    kind: str
    others: bool
    tasks: int
    tokens_a_step: dict[int, float]
    drafted: int
    accepted: int
    host_us: float
    gain: dict[int, float] | None


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
        "--step-times", type=Path, metavar="FILE", help='{"tokens": […], "ms": […]}'
    )
    parser.set_defaults(run=run_drafts)


def run_drafts(arguments: argparse.Namespace) -> None:
    times = _step_times(arguments.step_times) if arguments.step_times else None
    print_points(_results(arguments, times), arguments.json, table)


def _step_times(path: Path) -> StepCurve:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=StepTimesFile)
        found.check()
    except (OSError, ValueError) as error:
        raise BenchError(f"--step-times {path}: {error}") from None
    return StepCurve(found.tokens, found.ms)


def _tasks(arguments: argparse.Namespace) -> Iterator[TaskTokens]:
    try:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    except Exception as error:  # `tokenizers` raises no narrower class
        raise BenchError(f"--tokenizer {arguments.tokenizer}: {error}") from None
    count = arguments.tasks
    found: list[texts.TaskText] = []
    if arguments.edits:
        old, new = arguments.edits
        found += texts.sampled(texts.edits(old, new), count, f"{old} and {new}")
    found += texts.sampled(texts.extraction(arguments.texts), count, str(arguments.texts))
    if arguments.sql:
        found += texts.sampled(texts.sql(arguments.sql), count, str(arguments.sql))
    found += texts.sampled(texts.prose(arguments.texts), count, str(arguments.texts))
    found += texts.demo(count)
    for task in found:
        prompt, answer = (
            tokenizer.encode(text, add_special_tokens=False).ids
            for text in (task.prompt, task.answer)
        )
        yield TaskTokens(task.kind, task.adapter, prompt, answer)


def _results(arguments: argparse.Namespace, times: StepCurve | None) -> Iterator[DraftResult]:
    max_bytes = arguments.kept_mb << 20
    for kind, group in itertools.groupby(_tasks(arguments), lambda task: task.kind):
        tasks = list(group)
        for others in (False, True):
            by_width = {
                width: list(replay(tasks, width, max_bytes, others=others))
                for width in arguments.widths
            }
            tokens = sum(len(task.answer) for task in tasks)
            widest = by_width[max(by_width)]
            yield DraftResult(
                kind=kind,
                others=others,
                tasks=len(tasks),
                tokens_a_step={
                    width: round(tokens / len(steps), 2) for width, steps in by_width.items()
                },
                drafted=sum(step.drafted for step in widest),
                accepted=sum(step.accepted for step in widest),
                host_us=round(statistics.median(step.host_us for step in widest), 1),
                gain=_gain(tasks, times, max(by_width)) if times and not others else None,
            )


def _gain(tasks: list[TaskTokens], curve: StepCurve, most: int) -> dict[int, float]:
    """Tokens a second with drafts over those without, by rows."""
    plain = {rows: rows / curve.ms(rows) * 1e3 for rows in _ROWS}
    found = {rows: tokens_per_second(tasks, rows, curve, most) for rows in _ROWS}
    return {rows: round(found[rows] / plain[rows], 2) for rows in _ROWS}


def table(results: list[DraftResult]) -> str:
    widths = [*results[0].tokens_a_step]
    head = f"{'kind':16}{'others':>7}" + "".join(f"{f'w {width}':>6}" for width in widths)
    lines = [f"{head}{'drafted':>9}{'accepted':>9}{'host us':>8}  gain at rows"]
    for each in results:
        cells = "".join(f"{each.tokens_a_step[width]:6.2f}" for width in widths)
        gain = "".join(f"  {rows}: {ratio:.2f} x" for rows, ratio in (each.gain or {}).items())
        lines.append(
            f"{each.kind:16}{'yes' if each.others else 'no':>7}{cells}"
            f"{each.drafted:9}{each.accepted:9}{each.host_us:8.1f}{gain}"
        )
    return "\n".join(lines)
