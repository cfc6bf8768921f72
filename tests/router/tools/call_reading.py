"""What a PartsReader makes of a text, whole and in pieces."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from loraplex.router.parts.parts import PartsDelta, PartsReader


class Reading(NamedTuple):
    """calls: names and arguments."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


def read(reader: PartsReader, pieces: Iterable[str]) -> Reading:
    text = reasoning = ""
    calls: list[list[str]] = []
    for parts in _all_parts(reader, pieces):
        text += parts.text
        reasoning += parts.reasoning
        for delta in parts.calls:
            if delta.name is not None:
                assert delta.index == len(calls), "calls come in order, each with its name first"
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    return Reading(text, reasoning, tuple((name, arguments) for name, arguments in calls))


def _all_parts(reader: PartsReader, pieces: Iterable[str]) -> Iterable[PartsDelta]:
    yield from map(reader.feed, pieces)
    yield reader.end()


def read_cut_anywhere(make_reader: Callable[[], PartsReader], text: str) -> Reading:
    """The reading of the whole text, which every cut and single characters give as well."""
    whole = read(make_reader(), [text])
    assert read(make_reader(), text) == whole
    for place in range(1, len(text)):
        assert read(make_reader(), [text[:place], text[place:]]) == whole, (text, place)
    return whole
