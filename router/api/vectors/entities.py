"""Entities of a text from the classes of its tokens, as LoRAX and transformers' pipelines have
them. Pure."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

# The label of tokens of no entity.
_OUTSIDE = "O"
_BEGIN, _INSIDE = "B", "I"


class Entity(msgspec.Struct, frozen=True):
    """Neighbouring tokens with one class. entity_group: the class without `B-` or `I-`. score: the
    mean over tokens. start, end: characters of the text.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int


def rows_of(numbers: Sequence[float], labels: int) -> list[Sequence[float]]:
    """Divides the numbers of a text into those of its tokens."""
    return [numbers[at : at + labels] for at in range(0, len(numbers), labels)]


def likeliest_of(row: Sequence[float]) -> int:
    return max(range(len(row)), key=row.__getitem__)


def entities(
    text: str, spans: Iterable[tuple[int, int]], tokens: Iterable[tuple[str, float]]
) -> list[Entity]:
    """Finds the entities of a text. spans: characters of each token; what stands for none is left
    out. tokens: label and score of each.
    """
    groups: list[tuple[str, list[tuple[int, int, float]]]] = []
    for (start, stop), (label, score) in zip(spans, tokens, strict=True):
        if start == stop:
            continue
        kind, dash, name = label.partition("-")
        has_kind = bool(dash) and kind in (_BEGIN, _INSIDE)
        group = name if has_kind else label
        begins = has_kind and kind == _BEGIN
        if begins or not groups or groups[-1][0] != group:
            groups.append((group, []))
        groups[-1][1].append((start, stop, score))
    return [_entity(text, group, found) for group, found in groups if group != _OUTSIDE]


def _entity(text: str, group: str, found: Sequence[tuple[int, int, float]]) -> Entity:
    start, end = found[0][0], found[-1][1]
    return Entity(group, fmean(score for *_, score in found), text[start:end], start, end)
