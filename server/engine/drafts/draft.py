"""Guesses at the next tokens: drafts, the texts that they may come from, and each token's chance.
Pure.
"""

from functools import cache
from typing import NamedTuple

from loraplex.server.engine.drafts.places import Place

LEAST_CHANCE = 0.1  # of all tokens of a draft together
MOST_TOKENS = 64  # of a draft
LONGEST = 16  # tokens; a longer match says nothing more
# How often what followed a match of so many tokens follows again: docs/internals/drafts.md.
_TRUST = [0.0, 0.4, 0.47, 0.58, 0.65, 0.7, 0.74, 0.8, 0.8, 0.8, 0.85, 0.85] + [0.9] * 4 + [0.98]


class DraftOwner(NamedTuple):
    """Owner of answers that drafts are made of. adapter: its digest, "" for the base. A draft never
    leaves its owner.
    """

    adapter: str
    tenant: str
    scale: float = 1.0


class Draft(NamedTuple):
    """Tokens proposed to follow a sequence. chances: of each token, given that those before it are
    right. is_forced: a grammar forces its text.
    """

    token_ids: list[int]
    chances: list[float]
    is_forced: bool = False


NO_DRAFT = Draft([], [])
# Of a token of forced text: a model seldom cuts the text into other tokens.
_FORCED = 0.95


def under_grammar(draft: Draft, allowed: int, forced: list[int]) -> Draft:
    """The part of a draft that is left where a grammar forces text and allows `allowed` tokens of
    it.

    Forced text goes first, but a draft that begins with it says more.
    """
    if forced and (allowed < len(forced) or draft.token_ids[: len(forced)] != forced):
        return Draft(forced, [_FORCED] * len(forced), is_forced=True)
    return Draft(draft.token_ids[:allowed], draft.chances[:allowed], is_forced=bool(forced))


def common_length(tail: list[int], place: Place) -> int:
    """How many tokens before the place equal the end of `tail`, the known text's last LONGEST."""
    other, position = place
    most = min(len(tail), position)
    if most > 4 and other[position - 4] == tail[-4] and other[position - most : position] == tail:
        return most
    length = 0
    while length < most and other[position - 1 - length] == tail[-1 - length]:
        length += 1
    return length


def vote(continuations: list[list[int]], length: int) -> Draft:
    """The draft that most continuations of a match of `length` tokens agree on, token by token.

    It goes on as long as all of it together has a chance of LEAST_CHANCE. Where v of n
    continuations have a token, its chance is (v - 1 + trust) / n: one alone is right as often as
    its match is long, many as often as they agree. With each token that is right the match is
    longer.
    """
    first, many = continuations[0], len(continuations)
    if many == 1 or continuations.count(first) == many:
        agreed = _agreed(length, many)
        return Draft(first[: len(agreed)], agreed[: len(first)])
    return _mixed(continuations, length)


def _mixed(continuations: list[list[int]], length: int) -> Draft:
    """The draft of continuations that differ. Those with another token do not vote again.

    The first decides a draw.
    """
    token_ids: list[int] = []
    chances: list[float] = []
    index, product = 0, 1.0
    while said := [tokens[index] for tokens in continuations if len(tokens) > index]:
        token = max(said, key=said.count)
        votes = said.count(token)
        chance = _chance(votes, len(said), length + index)
        product *= chance
        if product < LEAST_CHANCE:
            break
        token_ids.append(token)
        chances.append(chance)
        if votes < len(continuations):
            continuations = [t for t in continuations if len(t) > index and t[index] == token]
        index += 1
    return Draft(token_ids, chances)


def _chance(votes: int, count: int, length: int) -> float:
    return (votes - 1 + _TRUST[min(length, LONGEST)]) / count


@cache
def _agreed(length: int, many: int) -> list[float]:
    """Chances of tokens that all of so many continuations say."""
    chances: list[float] = []
    product = 1.0
    while len(chances) < MOST_TOKENS:
        chance = _chance(many, many, length + len(chances))
        product *= chance
        if product < LEAST_CHANCE:
            break
        chances.append(chance)
    return chances
