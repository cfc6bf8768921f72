"""Regular expressions that end an answer, over a stream of text. A match is known once the text
contains one; the end of the text so far counts as its end.

Searches are bounded in time: each, and all of a request's answers by how often these were searched.
"""

import time
from functools import lru_cache
from typing import Any, NamedTuple

import regex

from loraplex.router.call import RequestError

# Characters before the end of the text at which a match may begin.
MAX_HELD = 1024
# Characters before those that a pattern may look back at.
_CONTEXT = 256
_SEARCH_S = 0.004
# What a request's searches may take at first, and what each piece of text adds.
_FIRST_S = 0.1
_EACH_S = 0.0002


class StopMatch(NamedTuple):
    """A match of a stop pattern. start, end: characters of text before it, and to its end."""

    end: int
    minus_length: int
    start: int
    stop: str


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """Compiles a pattern. Raises ValueError for one that is wrong or matches an empty text."""
    try:
        found = regex.compile(pattern)
        is_empty = found.search("", timeout=_SEARCH_S) is not None
    except (regex.error, RecursionError, OverflowError, TimeoutError) as error:
        raise ValueError(f"expected a regular expression: {error}") from error
    if is_empty:
        raise ValueError("it matches an empty text")
    return found


class _SearchTime:
    """Seconds that searches may still take, of all answers of a request."""

    __slots__ = ("left_s",)

    def __init__(self) -> None:
        self.left_s = _FIRST_S


class PatternView:
    """Several patterns over one text. certain: characters where no match will begin. A copy is for
    another answer of the request, before any text: both share the time."""

    __slots__ = ("_before", "_from", "_patterns", "_text", "_time", "certain")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        # Not looked up again: others' patterns may fill the cache, and the time is this request's.
        self._patterns = {pattern: compiled(pattern) for pattern in patterns}
        self._text = ""
        self._before = 0
        self._from = 0
        self._time = _SearchTime()
        self.certain = 0

    def push(self, text: str) -> StopMatch | None:
        """The match that begins first. Raises RequestError where a search takes too long."""
        self._text += text
        self._time.left_s += _EACH_S
        starts, matches = [len(self._text)], []
        for pattern in self._patterns:
            found = self._search(pattern, partial=False)
            if found is not None:
                start, end = (self._before + place for place in found.span())
                matches.append(StopMatch(end, start - end, start, pattern))
            elif (begun := self._search(pattern, partial=True)) is not None:
                starts.append(begun.start())
        self._move(max(min(starts), len(self._text) - MAX_HELD))
        return min(matches, key=lambda match: (match.start, match.end), default=None)

    def _search(self, pattern: str, *, partial: bool) -> Any:
        began = time.thread_time()
        try:
            limit_s = min(_SEARCH_S, max(self._time.left_s, 1e-6))
            return self._patterns[pattern].search(
                self._text, self._from, partial=partial, timeout=limit_s
            )
        except TimeoutError:
            message = f"`stop_regex`: {pattern!r} takes too long to look for in this answer"
            raise RequestError("invalid", message, param="stop_regex") from None
        finally:
            self._time.left_s -= time.thread_time() - began

    def _move(self, start: int) -> None:
        """Lets go of text in which no match can begin any more. start: the first character of
        `_text` in which a match may begin.
        """
        self.certain = self._before + start
        cut = max(start - _CONTEXT, 0)
        self._text, self._from = self._text[cut:], start - cut
        self._before += cut
