"""Guesses the word that a person may have meant. Pure."""

import difflib
from collections.abc import Callable, Iterable, Iterator

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789-_."
_LONGEST = 64
_ALIKE = 0.75


def nearest(word: str, known: Iterable[str]) -> str | None:
    """A known word that is one edit away, else one that is alike; None where none is."""
    if len(word) > _LONGEST:
        return None
    spelled = {other.lower(): other for other in known}
    close = one_edit_away(word.lower(), spelled.__contains__)
    alike = [close] if close else difflib.get_close_matches(word.lower(), spelled, 1, _ALIKE)
    return spelled[alike[0]] if alike else None


def one_edit_away(word: str, is_known: Callable[[str], bool]) -> str | None:
    """A known word; the time it takes does not depend on how many are known."""
    if len(word) > _LONGEST:
        return None
    return next((other for other in _one_edit(word) if other != word and is_known(other)), None)


def did_you_mean(other: str | None) -> str:
    """The end of a sentence about an unknown word."""
    return "" if other is None else f"; did you mean {other}?"


def _one_edit(word: str) -> Iterator[str]:
    yield word.lower()
    for place in range(len(word) + 1):
        head, tail = word[:place], word[place:]
        if len(tail) > 1:
            yield head + tail[1] + tail[0] + tail[2:]
        if tail:
            yield head + tail[1:]
        for letter in _LETTERS:
            yield head + letter + tail
            if tail:
                yield head + letter + tail[1:]
