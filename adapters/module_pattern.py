"""Regular expressions over module names, matched in time linear in the name. Pure.

PEFT matches `target_modules` and the like with Python's `re`, which backtracks: a tenant's pattern
could hold a core for years. This matcher answers exactly as `re.fullmatch` does, by simulating the
pattern's automaton (Thompson, CACM 11(6), 1968) and memoising its transitions. Each look-ahead and
look-behind has an automaton of its own, which finds all places where it holds in one pass.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from adapters.pattern_syntax import (
    WORD,
    Assert,
    Assertion,
    Branch,
    Chars,
    Look,
    Node,
    PatternError,
    Repeat,
    Sequence,
    parse_pattern,
)

MAX_STATES = 8192
_MAX_CACHED = 16_384
# What a free move asks of a place: nothing, an assertion, or the look of this number.
_Condition = Assertion | int | None
_States = frozenset[int]


class _Place(NamedTuple):
    """What can be asked of a position between two characters. looks: bit k = look k holds here."""

    start: bool
    end: bool
    boundary: bool
    looks: int = 0

    def holds(self, condition: _Condition) -> bool:
        if condition is None:
            return True
        if isinstance(condition, int):
            return bool(self.looks >> condition & 1)
        if condition == "start":
            return self.start
        if condition == "end":
            return self.end
        return self.boundary is (condition == "boundary")


@dataclass(slots=True)
class _State:
    """One state: free moves, each under a condition, and at most one character move."""

    free: list[tuple[_Condition, int]] = field(default_factory=list)
    chars: Chars | None = None
    target: int = -1


class ModulePattern:
    """A compiled pattern. Names are not empty, ASCII, without line breaks.

    Raises PatternError when `text` is not within the supported language, or takes more states.
    """

    def __init__(self, text: str, max_states: int = MAX_STATES) -> None:
        builder = _Builder(max_states)
        self._whole = builder.automaton(parse_pattern(text))
        self._looks = builder.looks
        self.num_states = builder.num_states

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches the whole of `name`."""
        places = _places(name)
        for number, look in enumerate(self._looks):
            places = [
                place._replace(looks=place.looks | holds << number)
                for place, holds in zip(places, look.holds(name, places), strict=True)
            ]
        return self._whole.ends(name, places, anywhere=False)[-1]


class _Automaton:
    """The states of one node, from `start` to `accept`, and the transitions found so far."""

    def __init__(self, states: list[_State], start: int, accept: int) -> None:
        self._states = states
        self._accept = accept
        self._start: _States = frozenset((start,))
        self._moves: dict[tuple[_States, _Place, str], _States] = {}

    def ends(self, text: str, places: Seq[_Place], anywhere: bool) -> list[bool]:
        """For each place whether a match ends there. anywhere: of those that begin at any place,
        else at the first."""
        states = self._start
        found = []
        for place, char in zip(places, (*text, ""), strict=True):
            states = self._move(states, place, "")
            found.append(self._accept in states)
            states = self._move(states, place, char) if char else states
            states = states | self._start if anywhere else states
        return found

    def _move(self, states: _States, place: _Place, char: str) -> _States:
        """The states after `char`; with none, those that are reached without reading."""
        key = (states, place, char)
        found = self._moves.get(key)
        if found is None:
            found = self._read(states, char) if char else self._closure(states, place)
            if len(self._moves) < _MAX_CACHED:
                self._moves[key] = found
        return found

    def _read(self, states: _States, char: str) -> _States:
        among = map(self._states.__getitem__, states)
        return frozenset(state.target for state in among if _accepts(state.chars, char))

    def _closure(self, states: _States, place: _Place) -> _States:
        reached, todo = set(states), list(states)
        while todo:
            for condition, target in self._states[todo.pop()].free:
                if target not in reached and place.holds(condition):
                    reached.add(target)
                    todo.append(target)
        return frozenset(reached)


class _LookAround(NamedTuple):
    """automaton: of the body; of a look-ahead's body from its end to its start."""

    automaton: _Automaton
    behind: bool
    negated: bool

    def holds(self, name: str, places: Seq[_Place]) -> list[bool]:
        """For each place. The looks within this one are known there already."""
        if self.behind:
            found = self.automaton.ends(name, places, anywhere=True)
        else:
            found = self.automaton.ends(name[::-1], places[::-1], anywhere=True)[::-1]
        return [each is not self.negated for each in found]


class _Builder:
    """looks: those of the pattern, each after those within it."""

    def __init__(self, max_states: int) -> None:
        self.num_states = 0
        self.looks: list[_LookAround] = []
        self._states: list[_State] = []
        self._max_states = max_states

    def automaton(self, node: Node) -> _Automaton:
        outer, self._states = self._states, []
        start = self._state()
        accept = self._build(node, start)
        inner, self._states = self._states, outer
        return _Automaton(inner, start, accept)

    def _state(self) -> int:
        if self.num_states >= self._max_states:
            raise PatternError("the pattern expands to too many states")
        self.num_states += 1
        self._states.append(_State())
        return len(self._states) - 1

    def _build(self, node: Node, start: int) -> int:
        """Adds the states that match `node` from `start` on; returns the state after it."""
        if isinstance(node, Sequence):
            for part in node.parts:
                start = self._build(part, start)
            return start
        if isinstance(node, Repeat):
            return self._repeat(node, start)
        condition = self._look(node) if isinstance(node, Look) else None
        end = self._state()
        if isinstance(node, Chars):
            self._states[start].chars, self._states[start].target = node, end
        elif isinstance(node, Branch):
            for option in node.options:
                entry = self._state()
                self._states[start].free.append((None, entry))
                self._states[self._build(option, entry)].free.append((None, end))
        else:
            asked = node.kind if isinstance(node, Assert) else condition
            self._states[start].free.append((asked, end))
        return end

    def _look(self, node: Look) -> int:
        body = node.body if node.behind else _reversed(node.body)
        self.looks.append(_LookAround(self.automaton(body), node.behind, node.negated))
        return len(self.looks) - 1

    def _repeat(self, node: Repeat, start: int) -> int:
        for _ in range(node.minimum):
            start = self._build(node.body, start)
        end = self._state()
        if node.maximum is None:
            loop, entry = self._state(), self._state()
            self._states[start].free.append((None, loop))
            self._states[loop].free += [(None, entry), (None, end)]
            self._states[self._build(node.body, entry)].free.append((None, loop))
            return end
        self._states[start].free.append((None, end))
        for _ in range(node.maximum - node.minimum):
            entry = self._state()
            self._states[start].free.append((None, entry))
            start = self._build(node.body, entry)
            self._states[start].free.append((None, end))
        return end


def _places(name: str) -> list[_Place]:
    words = [False, *(char in WORD for char in name), False]
    last = len(name)
    return [
        _Place(start=at == 0, end=at == last, boundary=words[at] is not words[at + 1])
        for at in range(last + 1)
    ]


def _reversed(node: Node) -> Node:
    """Matches the same texts, read from their end. A look within it keeps its direction."""
    if isinstance(node, Sequence):
        return Sequence(tuple(map(_reversed, reversed(node.parts))))
    if isinstance(node, Branch):
        return Branch(tuple(map(_reversed, node.options)))
    if isinstance(node, Repeat):
        return Repeat(_reversed(node.body), node.minimum, node.maximum)
    return node


def _accepts(chars: Chars | None, char: str) -> bool:
    return chars is not None and (char in chars.chars) is not chars.negated
