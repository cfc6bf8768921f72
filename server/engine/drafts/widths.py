"""How many draft tokens a step carries: as many as give the most tokens a second. Pure.

A step verifies the drafts of its rows together and takes as long as its widest row makes it.
"""

from bisect import bisect_left
from collections.abc import Sequence

from server.engine.drafts.draft import Draft

_FADING = 0.95  # of what was expected and accepted, from step to step
_PRIOR = 2.0  # tokens, expected and accepted, before the first


class WidthTimes:
    """Milliseconds of a step by rows and width: draft tokens of its widest row, 0 = plain."""

    def __init__(
        self, rows: Sequence[int], widths: Sequence[int], ms: Sequence[Sequence[float]]
    ) -> None:
        """ms: for each of `rows`, for each of `widths`; both rise, and widths begin at 0."""
        self._rows = list(rows)
        self.widths = list(widths)
        self._ms = [list(of_row) for of_row in ms]

    def of(self, rows: int) -> list[float]:
        """For each width. A number of rows between two counts by its distance to them."""
        above = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        below = max(0, above - 1)
        if rows >= self._rows[above] or above == below:
            return self._ms[above]
        span = self._rows[above] - self._rows[below]
        part = (rows - self._rows[below]) / span
        pairs = zip(self._ms[below], self._ms[above], strict=True)
        return [low + part * (high - low) for low, high in pairs]


class Acceptance:
    """How many draft tokens of one sequence were accepted, of those that chances let expect.

    A draft that was not verified counts as well: what came in its place says what was right.
    """

    def __init__(self) -> None:
        self._expected = self._accepted = _PRIOR

    def saw(self, expected: float, accepted: int) -> None:
        self._expected = _FADING * self._expected + expected
        self._accepted = _FADING * self._accepted + accepted

    @property
    def ratio(self) -> float:
        return self._accepted / self._expected


def expected_by_length(draft: Draft) -> list[float]:
    """How many tokens of the draft are likely accepted if so many of it are verified: from one."""
    total, chance, sums = 0.0, 1.0, []
    for each in draft.chances:
        chance *= each
        total += chance
        sums.append(total)
    return sums


def choose_width(
    rows: int, drafts: Sequence[tuple[Sequence[float], float]], times: WidthTimes
) -> int:
    """Draft tokens that each row gets at most; 0 = a plain step is best.

    drafts: of rows that have one, expected_by_length and their Acceptance's ratio.
    """
    best, best_rate = 0, 0.0
    for width, ms in zip(times.widths, times.of(rows), strict=True):
        likely = float(rows)
        if width:
            for sums, ratio in drafts:
                if sums:
                    length = min(width, len(sums))
                    likely += min(length, ratio * sums[length - 1])
        if likely / ms > best_rate:
            best, best_rate = width, likely / ms
    return best
