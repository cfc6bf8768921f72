"""`loraplex bench drafts`: how many tokens a step gives with drafts, replayed over texts."""

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from loraplex.launcher.bench.drafts import texts
from loraplex.launcher.bench.drafts.replay import StepCurve, TaskTokens, replay, tokens_per_second
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.output import print_points


class StepLine(msgspec.Struct):
    """A line of `loraplex bench decode --draft`: sequences, adapters, tokens of each draft, and
    milliseconds."""

    B: int
    D: int
    draft: int
    median_ms: float


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


def print_results(arguments: argparse.Namespace) -> None:
    """arguments: of `loraplex.launcher.bench.drafts.command`. Raises BenchError."""
    times = _step_times(arguments.step_times) if arguments.step_times else None
    print_points(_results(arguments, times), arguments.json, table)


def _step_times(path: Path) -> dict[int, StepCurve]:
    """By rows."""
    try:
        lines = path.read_bytes().splitlines()
        steps = [msgspec.json.decode(line, type=StepLine) for line in lines]
    except (OSError, ValueError) as error:
        raise BenchError(f"--step-times {path}: {error}") from None
    curves = {}
    for rows in sorted({step.B for step in steps}):
        of_rows = {step.draft: step.median_ms for step in steps if rows == step.B and not step.D}
        if 0 not in of_rows or len(of_rows) < 2 or min(of_rows.values()) <= 0:
            raise BenchError(
                f"--step-times {path}: {rows} rows need times without adapters, without a draft"
                " and with some"
            )
        found = sorted(of_rows.items())
        curves[rows] = StepCurve(
            [rows * (1 + draft) for draft, _ in found], [ms for _, ms in found]
        )
    if not curves:
        raise BenchError(f"--step-times {path}: no steps")
    return curves


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


def _results(
    arguments: argparse.Namespace, times: dict[int, StepCurve] | None
) -> Iterator[DraftResult]:
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


def _gain(tasks: list[TaskTokens], curves: dict[int, StepCurve], most: int) -> dict[int, float]:
    """Tokens a second with drafts over those without, by rows."""
    return {
        rows: round(tokens_per_second(tasks, rows, curve, most) / (rows / curve.ms(rows) * 1e3), 2)
        for rows, curve in curves.items()
    }


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
