"""Differences of log-probabilities, by where their tokens stand. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from loraplex.launcher.router_client import table

_FIRST_BUCKET = 16
_GROWTH = 4


class Difference(msgspec.Struct, frozen=True):
    """One token's. position: from 0, the prompt's first. nats: the server's less the other's.

    family: of the base. rank: of the adapter, from the least to the greatest; "" = it has none.
    """

    position: int
    is_output: bool
    nats: float
    family: str = ""
    rank: str = ""


class Spread(msgspec.Struct, frozen=True):
    """Absolute differences of some tokens, in nats."""

    tokens_at: str
    tokens: int
    mean: float
    max: float


def bucket(position: int) -> tuple[int, int]:
    """The first position of a token's bucket, and the one after its last."""
    low, high = 0, _FIRST_BUCKET
    while position >= high:
        low, high = high, high * _GROWTH
    return low, high


def spreads(differences: Sequence[Difference]) -> list[Spread]:
    """Spreads of all tokens, prompts, answers, each family and rank, and filled buckets."""
    parts = {
        "all": list(differences),
        "prompt": [one for one in differences if not one.is_output],
        "answer": [one for one in differences if one.is_output],
    }
    for what in ("family", "rank"):
        for name in dict.fromkeys(getattr(one, what) for one in differences):
            if name:
                parts[f"{what} {name}"] = [o for o in differences if getattr(o, what) == name]
    for low, high in sorted({bucket(one.position) for one in differences}):
        here = [one for one in differences if low <= one.position < high]
        parts[f"{low}-{high - 1}"] = here
    return [_spread(name, [abs(one.nats) for one in part]) for name, part in parts.items()]


def _spread(name: str, nats: Sequence[float]) -> Spread:
    return Spread(name, len(nats), sum(nats) / max(1, len(nats)), max(nats, default=0.0))


def as_text(found: Iterable[Spread]) -> str:
    rows = [["tokens at", "tokens", "mean", "max"]]
    rows += [[one.tokens_at, str(one.tokens), f"{one.mean:.2e}", f"{one.max:.2e}"] for one in found]
    return "\n".join(table(rows)) + "\n"
