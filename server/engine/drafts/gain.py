"""How much of a draft pays, and what a token more costs a step. Pure."""

from collections.abc import Sequence

_SURE = 0.98  # no token is surer
_LEAST = 0.05  # a token that is right more seldom is not worth the host's time
_FADING = 0.95  # of what was expected and accepted, from draft to draft
_PRIOR = 2.0  # tokens, expected and accepted, before the first
_LEAST_TRUST = 0.5  # of an answer's first drafts
_LONGEST_WAIT = 8  # tokens
_KEPT = 0.98  # the weight that a step keeps with each that follows
# Variance of token counts from which a slope says something.
_LEAST_VARIANCE = 0.5


class Acceptance:
    """How many draft tokens of one sequence were right, of those that chances let expect.

    before: the ratio of earlier answers of its owner.
    """

    def __init__(self, before: float = 1.0) -> None:
        self._expected, self._accepted = _PRIOR, _PRIOR * min(max(before, _LEAST_TRUST), 1.0)

    def saw(self, expected: float, accepted: int) -> None:
        self._expected = _FADING * self._expected + expected
        self._accepted = _FADING * self._accepted + accepted

    @property
    def ratio(self) -> float:
        return self._accepted / self._expected


class Patience:
    """Decide when a sequence looks for a draft again. Each look in vain doubles the wait, since
    looks take the host's time.
    """

    def __init__(self) -> None:
        self._wait = self._until = 0

    def is_over(self, tokens: int) -> bool:
        """Say whether the sequence may look again. tokens: that are known of the sequence."""
        return tokens >= self._until

    def looked(self, tokens: int, *, found: bool) -> None:
        self._wait = 0 if found else min(2 * self._wait, _LONGEST_WAIT) or 1
        self._until = tokens + self._wait


def worth(
    chances: Sequence[float], ratio: float, price: float, least: float = 1.0
) -> tuple[int, float]:
    """How many tokens of a draft give more than they cost, and how many of these are expected to
    be right by their chances alone.

    chances: of each token, given that those before it are right. ratio: of an `Acceptance`. price:
    what a token costs, see `TokenPrice.of`. least: tokens that the step must be likely to give, its
    own included; else the draft is worth nothing.
    """
    count, reached, expected = 0, 1.0, 0.0
    for chance in chances:
        reached *= min(_SURE, chance)
        if reached * ratio <= max(price, _LEAST):
            break
        count += 1
        expected += reached
    return (count, expected) if 1 + expected * ratio >= least else (0, 0.0)


class TokenPrice:
    """A line through the times of steps by their tokens; later steps weigh more."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """A step without a prompt."""
        self._weight = _KEPT * self._weight + 1
        self._x = _KEPT * self._x + tokens
        self._y = _KEPT * self._y + seconds
        self._xx = _KEPT * self._xx + tokens * tokens
        self._xy = _KEPT * self._xy + tokens * seconds

    def of(self, tokens: int) -> float:
        """The price of a token more in a step of `tokens` tokens.

        It is the number of tokens that other steps would give in the time that the token takes. 0
        while nothing is known, so that the token is tried.
        """
        if not self._weight:
            return 0.0
        mean, seconds = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean * mean
        if variance < _LEAST_VARIANCE:
            return 0.0
        slope = max(0.0, (self._xy / self._weight - mean * seconds) / variance)
        # A step takes no less than its tokens do.
        step = max(seconds + slope * (tokens - mean), slope * tokens)
        return tokens * slope / step if step > 0 else 0.0
