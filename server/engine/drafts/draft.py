"""What may come next: a draft, whose texts it may come from, how likely each token is. Pure."""

from typing import NamedTuple

from server.engine.drafts.places import CONTEXT, Place

LONGEST = 16  # tokens; a longer match says nothing more
# How often the only continuation of a match of so many tokens is right.
_TRUST = [0.0] * CONTEXT + [0.45, 0.5, 0.55, 0.6, 0.65] + [0.75] * 4 + [0.85] * 4 + [0.93]


class DraftOwner(NamedTuple):
    """adapter: its digest, "" for the base. A draft never leaves its owner."""

    adapter: str
    tenant: str


class Draft(NamedTuple):
    """chances: of each token, given that those before it are right."""

    token_ids: list[int]
    chances: list[float]


NO_DRAFT = Draft([], [])


def common_length(tail: list[int], place: Place) -> int:
    """How many tokens before the place equal the end of `tail`, the known text's last LONGEST."""
    other, position = place
    before = other[max(0, position - LONGEST) : position]
    if before == tail:
        return len(tail)
    length = 0
    for one, another in zip(reversed(tail), reversed(before), strict=False):
        if one != another:
            break
        length += 1
    return length


def vote(continuations: list[list[int]], length: int) -> Draft:
    """What most continuations of a match of `length` tokens say, token by token.

    The first decides a draw. Of a token that v of n continuations say, the chance is
    (v + trust) / (n + 1): as if one more had been seen, that is right as often as usual.
    """
    token_ids: list[int] = []
    chances: list[float] = []
    trust = _TRUST[length]
    while continuations:
        first, many = continuations[0], len(continuations)
        if continuations.count(first) == many:
            rest = first[len(token_ids) :]
            return Draft(token_ids + rest, chances + [(many + trust) / (many + 1)] * len(rest))
        index = len(token_ids)
        said = [tokens[index] for tokens in continuations if len(tokens) > index]
        token = max(said, key=said.count)
        token_ids.append(token)
        chances.append((said.count(token) + trust) / (len(said) + 1))
        continuations = [
            tokens for tokens in continuations if len(tokens) > index + 1 and tokens[index] == token
        ]
    return Draft(token_ids, chances)
