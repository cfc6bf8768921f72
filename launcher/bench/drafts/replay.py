"""Drafts of known answers: what would have been accepted, without a model."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from server.engine.drafts.draft import Draft, DraftOwner
from server.engine.drafts.source import Drafts, DraftSource
from server.engine.drafts.widths import Acceptance, WidthTimes, choose_width, expected_by_length

_TENANT = "bench"
_STEPS = 400  # of a simulated batch


class TaskTokens(NamedTuple):
    """kind: of task. adapter: whose answers may help each other."""

    kind: str
    adapter: str
    prompt: list[int]
    answer: list[int]


class DraftStep(NamedTuple):
    """drafted, accepted: tokens. host_us: to propose, and to take in what came."""

    drafted: int
    accepted: int
    host_us: float


class _Row:
    """A sequence whose answer is known."""

    def __init__(self, source: DraftSource, task: TaskTokens) -> None:
        owner = DraftOwner(task.adapter, _TENANT)
        self.drafts: Drafts = source.open(owner, task.prompt)
        self.acceptance = Acceptance()
        self._left = task.answer

    @property
    def is_over(self) -> bool:
        return not self._left

    def right(self, draft: Draft) -> int:
        """How many tokens of the draft the answer has. The step draws the one after them."""
        pairs = zip(draft.token_ids, self._left[:-1], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def take(self, count: int) -> list[int]:
        came, self._left = self._left[:count], self._left[count:]
        return came


def replay(
    tasks: Iterable[TaskTokens], width: int, max_bytes: int, *, others: bool
) -> Iterator[DraftStep]:
    """Each task after those before it. others: whether their answers help."""
    source = DraftSource(max_bytes)
    for task in tasks:
        row = _Row(source, task)
        while not row.is_over:
            start = time.perf_counter()
            draft = row.drafts.propose(width)
            proposed = time.perf_counter()
            accepted = row.right(draft)
            came = row.take(accepted + 1)
            taken = time.perf_counter()
            row.drafts.extend(came)
            spent = proposed - start + time.perf_counter() - taken
            yield DraftStep(len(draft.token_ids), accepted, spent * 1e6)
        row.drafts.close(keep=others)


def tokens_per_second(tasks: Sequence[TaskTokens], rows: int, times: WidthTimes) -> float:
    """Of so many rows that step together, each with the width that `choose_width` gives. They get
    no help from other answers, so that a task may come again."""
    source = DraftSource(0)
    queue = itertools.cycle(tasks)
    running = [_Row(source, next(queue)) for _ in range(rows)]
    tokens, spent_ms = 0, 0.0
    for _ in range(_STEPS):
        drafts = [row.drafts.propose(times.widths[-1]) for row in running]
        sums = [expected_by_length(draft) for draft in drafts]
        ratios = [row.acceptance.ratio for row in running]
        width = choose_width(rows, list(zip(sums, ratios, strict=True)), times)
        spent_ms += times.of(rows)[times.widths.index(width)]
        for index, (row, draft, expected) in enumerate(zip(running, drafts, sums, strict=True)):
            right = row.right(draft)
            if expected:
                row.acceptance.saw(expected[-1], right)
            came = row.take(min(width, right) + 1)
            row.drafts.extend(came)
            tokens += len(came)
            if row.is_over:
                running[index] = _Row(source, next(queue))
    return tokens / spent_ms * 1e3
