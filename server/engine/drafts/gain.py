"""How much of a draft pays. Pure."""

from collections.abc import Sequence

_SURE = 0.98  # no token is surer
_LEAST = 0.05  # a token that is right more seldom is not worth the host's time


def worth(chances: Sequence[float], trust: float, price: float) -> tuple[int, float]:
    """How many tokens of a draft give more than they cost, and how many of them will be right.

    chances: of each token, given that those before it are right. trust: how often drafts were right
    beside what their chances promised. price: what a token costs, see `StepTimes.price`.
    """
    count, reached, promised = 0, 1.0, 0.0
    for chance in chances:
        reached *= min(_SURE, chance * trust)
        if reached <= max(price, _LEAST):
            break
        count += 1
        promised += reached
    return count, promised
