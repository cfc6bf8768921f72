"""Stop strings over a stream of text, whatever the borders of its pieces. Pure.

The match that ends first wins; of those that end at the same character, the longest, and of equals
the one that begins first. So the outcome does not depend on how the text was cut, and is known at
the first possible character.

Stop strings are looked for in two views of the text. One is as the client sees it; the other also
spells out what is left out (special tokens, the end of the answer). What is returned is the former,
up to the match in either. Patterns see the text as the client does.
"""

import copy
import sys
from array import array

from loraplex.router.text.detokenizer import common_prefix
from loraplex.router.text.stop_patterns import PatternView, StopMatch

_CODES = sys.maxunicode + 1
# That the search for stop strings takes at most.
BYTES_A_CHARACTER = 128


class StopStrings:
    """Finds all stop strings at once (Aho, Corasick 1975): each character is one step from state to
    state, of whatever many strings.

    depth: of each state, how many characters of the text's end begin some stop string. found: the
    longest stop string that the text ends in, of each state that has one.
    """

    __slots__ = ("_fallback", "_next", "depth", "found", "longest")

    def __init__(self, stops: tuple[str, ...]) -> None:
        # By a state and a character, as one number: a map for each state takes thrice the memory.
        self._next: dict[int, int] = {}
        self._fallback = array("l", [0])
        self.depth = array("l", [0])
        self.found: dict[int, str] = {}
        self.longest = max(map(len, stops), default=0)
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, character: int) -> int:
        """The state behind one more character, of this code."""
        after = self._next.get(state * _CODES + character)
        while after is None and state:
            state = self._fallback[state]
            after = self._next.get(state * _CODES + character)
        return after or 0

    def _add(self, stop: str) -> None:
        state = 0
        for character in map(ord, stop):
            after = self._next.setdefault(state * _CODES + character, len(self.depth))
            if after == len(self.depth):
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
            state = after
        self.found[state] = stop

    def _link(self) -> None:
        """Sets each state's fallback: that of its longest proper end which is a state."""
        for link, after in sorted(self._next.items(), key=lambda item: self.depth[item[1]]):
            state, character = divmod(link, _CODES)
            if state:
                self._fallback[after] = self.step(self._fallback[state], character)
            if after not in self.found and self._fallback[after] in self.found:
                self.found[after] = self.found[self._fallback[after]]


class _View:
    """Searches one view of the text for stop strings. One view: where its search stands, and which
    visible character each of its own is.

    ahead: visible text that it has read before it was pushed.
    """

    __slots__ = ("_ahead", "_gaps", "_hidden", "_size", "_state", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._size = 0
        self._hidden = 0
        self._gaps: list[tuple[int, int]] = []
        self._ahead = ""

    def twin(self) -> "_View":
        """A copy of this view, good as long as nothing is hidden."""
        twin = _View(self._stops)
        twin._state, twin._size = self._state, self._size
        return twin

    def push(self, text: str, before: int) -> StopMatch | None:
        """Searches more visible text. before: characters of it that were pushed before."""
        if self._ahead:
            count = common_prefix(text, self._ahead)
            if count < min(len(text), len(self._ahead)):
                self._start_anew(before + count)
            else:
                self._ahead = self._ahead[count:]
            text = text[count:]
        return self._read(text)

    def spell(self, held: str, token: str, before: int) -> StopMatch | None:
        """Searches a token that is not in the text, after visible text that is held back."""
        count = common_prefix(held, self._ahead)
        if count < len(self._ahead):
            self._start_anew(before)
            count = 0
        self._ahead = held
        match = self._read(held[count:])
        if match is None:
            self._hide(len(token))
            match = self._read(token)
        return match

    @property
    def certain(self) -> int:
        """Counts the visible characters that no match will ever begin in."""
        return self._visible(self._size - self._stops.depth[self._state])

    def _read(self, text: str) -> StopMatch | None:
        stops, state = self._stops, self._state
        for position, character in enumerate(text, self._size + 1):
            state = stops.step(state, ord(character))
            found = stops.found.get(state)
            if found is not None:
                start = self._visible(position - len(found))
                return StopMatch(self._visible(position), -len(found), start, found)
        self._state = state
        self._size += len(text)
        return None

    def _visible(self, position: int) -> int:
        hidden = sum(min(max(position - at, 0), size) for at, size in self._gaps)
        return position - self._hidden - hidden

    def _hide(self, size: int) -> None:
        """Hides the next `size` characters. Gaps that no match can reach become a mere sum."""
        reach = self._size - self._stops.longest
        past = [(at, length) for at, length in self._gaps if at + length <= reach]
        self._gaps = [*self._gaps[len(past) :], (self._size, size)]
        self._hidden += sum(length for _, length in past)

    def _start_anew(self, before: int) -> None:
        """Begin again: the text that was read ahead came out otherwise. Bytes may become invalid by
        a later one."""
        self._state = 0
        self._gaps = []
        self._hidden = self._size - before
        self._ahead = ""


class StopMatcher:
    """Lets text through up to the first stop string.

    Text that may still become part of a stop string is held back, so nothing has to be taken back.
    A stop string that is kept (`include`) needs no such care. hit: the stop string or the pattern
    found, or None.
    """

    __slots__ = ("_held", "_include", "_patterns", "_pushed", "_views", "hit")

    def __init__(
        self, stops: tuple[str, ...], include: bool, patterns: tuple[str, ...] = ()
    ) -> None:
        self._include = include
        self._patterns = PatternView(patterns) if patterns else None
        self._views = [_View(StopStrings(stops))] if stops else []
        self._held = ""
        self._pushed = 0
        self.hit: str | None = None

    def twin(self) -> "StopMatcher":
        """A matcher for another answer, before this one has read any text. Both share the states of
        the strings, and the time that patterns may take.
        """
        twin = copy.copy(self)
        twin._views = [view.twin() for view in self._views]
        twin._patterns = copy.copy(self._patterns)
        return twin

    @property
    def active(self) -> bool:
        """Whether there are strings to look for."""
        return bool(self._views) and self.hit is None

    def push(self, text: str) -> str:
        """Takes the next text, and gives what is now certain. After a hit there is none."""
        if self.hit is not None or not text:
            return ""
        if not self._views and self._patterns is None:
            return text
        matches = [view.push(text, self._pushed) for view in self._views]
        if self._patterns is not None:
            matches.append(self._patterns.push(text))
        self._held += text
        self._pushed += len(text)
        found = [match for match in matches if match is not None]
        return self._stop(min(found)) if found else self._release()

    def spell(self, held: str, token: str) -> str:
        """Searches hidden text. A token that the client does not see, in its place. held: what the
        text would end in, if it ended before the token, beyond what was pushed. The text that is
        now certain.
        """
        if not self.active:
            return ""
        if len(self._views) == 1:  # up to here both were the same
            self._views.append(self._views[0].twin())
        match = self._views[1].spell(held, token, self._pushed)
        if match is None:
            return self._release()
        # With the match the text ends, so what was held back is certain.
        seen = self._views[0].push(held, self._pushed)
        match = match if seen is None else min(match, seen)
        self._held += held
        self._pushed += len(held)
        return self._stop(match)

    def flush(self) -> str:
        """The text that was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _stop(self, match: StopMatch) -> str:
        self.hit = match.stop
        text = self._take(match.end if self._include else match.start)
        self._held = ""
        return text

    def _release(self) -> str:
        if self._include:
            return self._take(self._pushed)
        known = [] if self._patterns is None else [self._patterns.certain]
        return self._take(min(known + [view.certain for view in self._views]))

    def _take(self, end: int) -> str:
        """Takes the held text up to the visible character `end`."""
        count = max(end - self._pushed + len(self._held), 0)
        text, self._held = self._held[:count], self._held[count:]
        return text
