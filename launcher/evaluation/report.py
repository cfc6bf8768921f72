"""The report of an evaluation: as JSON and as a table with bars. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import msgspec

from loraplex.launcher.evaluation import scores as scoring
from loraplex.launcher.evaluation.questions import LineAnswer, likelihoods, question_id
from loraplex.launcher.router_client import table

_BAR = 24


class AdapterResult(msgspec.Struct, frozen=True):
    """An adapter's results. score: the mean of `scores`, which has null for a line that failed.

    low, high: bounds at 95 %. seconds: from the start of its first answer to that of its last.
    cost, device_s: of its answers, without a judge's; null where the server has no prices.
    """

    adapter: str
    score: float | None
    low: float
    high: float
    failed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: int
    scores: list[float | None]
    first_fault: str | None
    cost: float | None = None
    device_s: float | None = None


class Pair(msgspec.Struct, frozen=True):
    """The first adapter's wins over the second, line by line. p: of the sign test."""

    first: str
    second: str
    wins: int
    losses: int
    ties: int
    p: float


class Evaluation(msgspec.Struct, frozen=True):
    score: str
    lines: int
    adapters: list[AdapterResult]
    pairs: list[Pair]


def row_of(
    kind: str,
    name: str,
    cases: Sequence[scoring.EvalLine],
    answers: Mapping[str, LineAnswer],
    verdicts: Mapping[str, LineAnswer],
) -> AdapterResult:
    """Scores one adapter's answers. verdicts: a judge's, by the answers' names."""
    counts = [len(case.choices) if kind == "choice" else 1 for case in cases]
    found = [
        [answers[question_id(name, number, at)] for at in range(count)]
        for number, count in enumerate(counts, 1)
    ]
    said = [verdicts.get(question_id(name, number)) for number in range(1, len(cases) + 1)]
    scores = [_score(kind, *one) for one in zip(cases, found, said, strict=True)]
    there = [score for score in scores if score is not None]
    low, high = scoring.interval(there)
    own = [answer for one in found for answer in one]
    starts = [answer.created for answer in own if answer.created is not None]
    faults = (answer.fault for answer in (*own, *said) if answer is not None and answer.fault)
    return AdapterResult(
        adapter=name,
        score=sum(there) / len(there) if there else None,
        low=low,
        high=high,
        failed=len(scores) - len(there),
        prompt_tokens=sum(answer.prompt_tokens for answer in own),
        completion_tokens=sum(answer.completion_tokens for answer in own),
        seconds=max(starts) - min(starts) if starts else 0,
        scores=scores,
        first_fault=next(faults, None),
        cost=_sum(answer.cost for answer in own),
        device_s=_sum(answer.device_s for answer in own),
    )


def _sum(amounts: Iterable[float | None]) -> float | None:
    there = [amount for amount in amounts if amount is not None]
    return sum(there) if there else None


def _score(
    kind: str, case: scoring.EvalLine, found: Sequence[LineAnswer], said: LineAnswer | None
) -> float | None:
    if any(answer.fault for answer in (*found, *filter(None, [said]))):
        return None
    if kind == "choice":
        return scoring.choice(likelihoods(found), case)
    return scoring.judged(said.text) if said else scoring.OF_TEXT[kind](found[0].text, case)


def report_of(score: str, rows: Sequence[AdapterResult]) -> Evaluation:
    pairs = [_pair(*both) for both in combinations(rows, 2)]
    return Evaluation(score, len(rows[0].scores), list(rows), pairs)


def _pair(first: AdapterResult, second: AdapterResult) -> Pair:
    wins, losses, ties = scoring.compare(first.scores, second.scores)
    return Pair(first.adapter, second.adapter, wins, losses, ties, scoring.sign_test(wins, losses))


def as_text(report: Evaluation) -> str:
    """The table, each adapter beside the best, then one fault of each that has some."""
    best = max(report.adapters, key=lambda row: -1.0 if row.score is None else row.score)
    head = ["adapter", report.score, "95 %", "failed", "tokens in", "out", "seconds", "cost", ""]
    rows = [[*head, f"wins-losses against {best.adapter}"]]
    for row in report.adapters:
        score = "-" if row.score is None else f"{row.score:.3f}"
        counts = (row.failed, row.prompt_tokens, row.completion_tokens, row.seconds)
        found = _pair(row, best)
        beside = "" if row is best else f"{found.wins}-{found.losses} (p {found.p:.2g})"
        cells = [row.adapter, score, f"{row.low:.3f}-{row.high:.3f}", *map(str, counts)]
        cost = "-" if row.cost is None else f"{row.cost:.4g}"
        rows.append([*cells, cost, _bar(row), beside])
    faults = [f"{row.adapter}: {row.first_fault}" for row in report.adapters if row.first_fault]
    return "\n".join([*table(rows), *faults]) + "\n"


def _bar(row: AdapterResult) -> str:
    """The score between 0 and 1 as `o`, with its interval."""
    if row.score is None:
        return ""
    low, at, high = (round(value * (_BAR - 1)) for value in (row.low, row.score, row.high))
    cells = ["-" if low <= cell <= high else "." for cell in range(_BAR)]
    cells[at] = "o"
    return "".join(cells)
