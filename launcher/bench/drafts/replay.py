"""Drafts of known answers: what would have been accepted, without a model."""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from loraplex.server.engine.drafts.draft import NO_DRAFT, Draft, DraftOwner
from loraplex.server.engine.drafts.gain import Acceptance, Patience, worth
from loraplex.server.engine.drafts.source import Drafts, DraftSource
from loraplex.server.engine.scheduling.drafting import MANY, TO_WAIT

_TENANT = "bench"
_STEPS = 400  # of a simulated batch


class TaskTokens(NamedTuple):
    """kind: of task. adapter: whose answers may help each other."""

    kind: str
    adapter: str
    prompt: list[int]
    answer: list[int]


class StepCurve(NamedTuple):
    """Milliseconds of steps of so many rows by their tokens, which rise. The first has no
    draft."""

    tokens: list[int]
    milliseconds: list[float]

    def ms(self, tokens: int) -> float:
        """Between two points by the distance to them, beyond the last as between the last two."""
        beyond = tokens - self.tokens[-1]
        if beyond <= 0 or len(self.tokens) == 1:
            return float(np.interp(tokens, self.tokens, self.milliseconds))
        (first, last), (early, late) = self.tokens[-2:], self.milliseconds[-2:]
        return late + beyond * (late - early) / (last - first)

    def price(self, tokens: int) -> float:
        """As `TokenPrice.of`, if the step had up to twice as many."""
        return self.ms(2 * tokens) / self.ms(tokens) - 1


class DraftStep(NamedTuple):
    """drafted, accepted: tokens. host_us: to propose, and to take in what came."""

    drafted: int
    accepted: int
    host_us: float


class _Row:
    """A sequence whose answer is known."""

    def __init__(
        self, source: DraftSource, task: TaskTokens, before: Acceptance | None = None
    ) -> None:
        """before: of earlier answers of its owner."""
        before = before or Acceptance()
        self.owner = DraftOwner(task.adapter, _TENANT)
        self.drafts: Drafts = source.open(self.owner, task.prompt)
        self._before = before
        self.acceptance = Acceptance(before.ratio)
        self.patience = Patience()
        self._left = task.answer

    @property
    def is_over(self) -> bool:
        return not self._left

    def right(self, draft: Draft) -> int:
        """How many tokens of the draft the answer has. The step draws the one after them."""
        pairs = zip(draft.token_ids, self._left[:-1], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def worth(self, most: int, price: float, rows: int) -> tuple[Draft, int]:
        """As the engine does: a draft, where it looks for one, and how many tokens it accepts."""
        known = self.drafts.num_tokens
        if rows >= MANY and not self.patience.is_over(known):
            return NO_DRAFT, 0
        draft = self.drafts.propose(most)
        count, expected = worth(draft.chances, self.acceptance.ratio, price, TO_WAIT)
        self.patience.looked(known, found=count > 0)
        draft = Draft(draft.token_ids[:count], draft.chances[:count])
        right = self.right(draft)
        if count:
            for acceptance in (self.acceptance, self._before):
                acceptance.saw(expected, right)
        return draft, right

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
        if others:
            source.keep(row.owner, [*task.prompt, *task.answer], len(task.prompt))


def tokens_per_second(tasks: Sequence[TaskTokens], rows: int, curve: StepCurve, most: int) -> float:
    """Of so many rows that step together, with drafts of up to `most` tokens as far as they pay.
    They get no help from other answers, so that a task may come again."""
    source, price = DraftSource(0), curve.price(rows)
    queue = itertools.cycle(tasks)
    owners: defaultdict[str, Acceptance] = defaultdict(Acceptance)

    def begin() -> _Row:
        task = next(queue)
        return _Row(source, task, owners[task.adapter])

    running = [begin() for _ in range(rows)]
    tokens, spent_ms = 0, 0.0
    for _ in range(_STEPS):
        checked = 0
        for index, row in enumerate(running):
            draft, right = row.worth(most, price, rows)
            came = row.take(right + 1)
            row.drafts.extend(came)
            checked, tokens = checked + len(draft.token_ids), tokens + len(came)
            if row.is_over:
                running[index] = begin()
        spent_ms += curve.ms(rows + checked)
    return tokens / spent_ms * 1e3
