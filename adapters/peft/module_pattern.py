"""Regular expressions over module names, matched in time linear in the name. Pure.

PEFT matches `target_modules` and the like with Python's `re`, which backtracks: a tenant's pattern
could hold a core for years. This matcher answers exactly as `re.fullmatch` does, by simulating the
pattern's automaton (Thompson, CACM 11(6), 1968) and memoising its transitions. Each look-ahead and
look-behind has an automaton of its own, which finds all places where it holds in one pass.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from loraplex.adapters.peft.pattern_syntax import (
    WORD,
    Assert,
    Assertion,
    Branch,
    Chars,
    Concatenation,
    Look,
    Node,
    PatternError,
    Repeat,
    parse_pattern,
)

MAX_STATES = 8192
# Of all patterns of a config, at all names: some seconds.
MAX_STEPS = 1 << 24
_MAX_KEPT = 1 << 19

_States = frozenset[int]
# A position between two characters, as bits: what can be asked of it. Further bits are the looks.
_START, _END, _BOUNDARY, _FIRST_LOOK = 1, 2, 4, 8
# What a free move asks of a place: that the bits under the mask are these.
_Condition = tuple[int, int]
_ALWAYS: _Condition = (0, 0)
_CONDITIONS: dict[Assertion, _Condition] = {
    "start": (_START, _START),
    "end": (_END, _END),
    "boundary": (_BOUNDARY, _BOUNDARY),
    "inside": (_BOUNDARY, 0),
}


class Budget:
    """What the patterns of one config may take together: states, steps, and what is remembered."""

    def __init__(self, states: int = MAX_STATES, steps: int = MAX_STEPS) -> None:
        self._states = states
        self._steps = steps
        self._room = _MAX_KEPT

    def take_state(self) -> None:
        """Raises PatternError."""
        self._states -= 1
        if self._states < 0:
            raise PatternError("the pattern expands to too many states")

    def take_steps(self, count: int) -> None:
        """Raises PatternError."""
        self._steps -= count
        if self._steps < 0:
            raise PatternError("the patterns take too many steps to match")

    def may_keep(self, count: int) -> bool:
        """Whether there is room for so many things more."""
        self._room -= count
        return self._room >= 0


@dataclass(slots=True)
class _State:
    """One state: free moves, each under a condition, and at most one character move."""

    free: list[tuple[_Condition, int]] = field(default_factory=list)
    chars: Chars | None = None
    target: int = -1


class ModulePattern:
    """A compiled pattern. Names are not empty, ASCII, without line breaks.

    Raises PatternError when `text` is not within the supported language, or takes too much.
    """

    def __init__(self, text: str, budget: Budget | None = None) -> None:
        builder = _Builder(budget or Budget())
        self._whole = builder.automaton(parse_pattern(text))
        self._looks = builder.looks

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches the whole of `name`. Raises PatternError."""
        places = _places(name)
        for number, look in enumerate(self._looks):
            bit = _FIRST_LOOK << number
            held = look.holds(name, places)
            places = [
                place | bit if holds else place for place, holds in zip(places, held, strict=True)
            ]
        return self._whole.ends(name, places, anywhere=False)[-1]


class _Automaton:
    """The states of one node, from `start` to `accept`, and the transitions found so far."""

    def __init__(self, states: list[_State], start: int, accept: int, budget: Budget) -> None:
        self._states = states
        self._start: _States = frozenset((start,))
        self._accept = accept
        self._budget = budget
        # Sets of states by number, and by what stands in them.
        self._sets: list[_States] = [self._start]
        self._numbers: dict[_States, int] = {self._start: 0}
        self._moves: dict[tuple[int, int, str, bool], tuple[int, bool]] = {}

    def ends(self, text: str, places: Seq[int], anywhere: bool) -> list[bool]:
        """For each place whether a match ends there. anywhere: of those that begin at any place,
        else at the first."""
        self._budget.take_steps(len(places))
        current, found = 0, []
        for place, char in zip(places, (*text, ""), strict=True):
            key = (current, place, char, anywhere)
            current, accepts = self._moves.get(key) or self._move(key)
            found.append(accepts)
        return found

    def _move(self, key: tuple[int, int, str, bool]) -> tuple[int, bool]:
        """The states after the character, by number; and whether a match ends before it."""
        current, place, char, anywhere = key
        reached = self._closure(self._sets[current], place)
        among = map(self._states.__getitem__, reached)
        after = {state.target for state in among if char and _accepts(state.chars, char)}
        states = frozenset(after | self._start if anywhere else after)
        self._budget.take_steps(len(reached))
        return self._keep(key, states, self._accept in reached)

    def _keep(
        self, key: tuple[int, int, str, bool], states: _States, accepts: bool
    ) -> tuple[int, bool]:
        """The move, remembered while there is room: sets that repeat cost nothing."""
        number = self._numbers.get(states)
        if number is None:
            if not self._budget.may_keep(len(states) + 1):
                raise PatternError("the patterns take too much memory to match")
            number = self._numbers[states] = len(self._sets)
            self._sets.append(states)
        if self._budget.may_keep(1):
            self._moves[key] = (number, accepts)
        return number, accepts

    def _closure(self, states: _States, place: int) -> set[int]:
        reached, todo = set(states), list(states)
        while todo:
            for (mask, wanted), target in self._states[todo.pop()].free:
                if target not in reached and place & mask == wanted:
                    reached.add(target)
                    todo.append(target)
        return reached


class _LookAround(NamedTuple):
    """automaton: of the body; of a look-ahead's body from its end to its start."""

    automaton: _Automaton
    behind: bool

    def holds(self, name: str, places: Seq[int]) -> list[bool]:
        """For each place whether the body matches. The looks within it are known there already."""
        if self.behind:
            return self.automaton.ends(name, places, anywhere=True)
        return self.automaton.ends(name[::-1], places[::-1], anywhere=True)[::-1]


class _Builder:
    """looks: those of the pattern, each after those within it."""

    def __init__(self, budget: Budget) -> None:
        self.looks: list[_LookAround] = []
        self._states: list[_State] = []
        self._budget = budget

    def automaton(self, node: Node) -> _Automaton:
        outer, self._states = self._states, []
        start = self._state()
        accept = self._build(node, start)
        inner, self._states = self._states, outer
        return _Automaton(inner, start, accept, self._budget)

    def _state(self) -> int:
        self._budget.take_state()
        self._states.append(_State())
        return len(self._states) - 1

    def _build(self, node: Node, start: int) -> int:
        """Adds the states that match `node` from `start` on; returns the state after it."""
        if isinstance(node, Concatenation):
            for part in node.parts:
                start = self._build(part, start)
            return start
        if isinstance(node, Repeat):
            return self._repeat(node, start)
        condition = self._look(node) if isinstance(node, Look) else _ALWAYS
        end = self._state()
        if isinstance(node, Chars):
            self._states[start].chars, self._states[start].target = node, end
        elif isinstance(node, Branch):
            for option in node.options:
                entry = self._state()
                self._states[start].free.append((_ALWAYS, entry))
                self._states[self._build(option, entry)].free.append((_ALWAYS, end))
        else:
            asked = _CONDITIONS[node.kind] if isinstance(node, Assert) else condition
            self._states[start].free.append((asked, end))
        return end

    def _look(self, node: Look) -> _Condition:
        body = node.body if node.behind else _reversed(node.body)
        self.looks.append(_LookAround(self.automaton(body), node.behind))
        bit = _FIRST_LOOK << (len(self.looks) - 1)
        return bit, 0 if node.negated else bit

    def _repeat(self, node: Repeat, start: int) -> int:
        for _ in range(node.minimum):
            start = self._build(node.body, start)
        end = self._state()
        if node.maximum is None:
            loop, entry = self._state(), self._state()
            self._states[start].free.append((_ALWAYS, loop))
            self._states[loop].free += [(_ALWAYS, entry), (_ALWAYS, end)]
            self._states[self._build(node.body, entry)].free.append((_ALWAYS, loop))
            return end
        self._states[start].free.append((_ALWAYS, end))
        for _ in range(node.maximum - node.minimum):
            entry = self._state()
            self._states[start].free.append((_ALWAYS, entry))
            start = self._build(node.body, entry)
            self._states[start].free.append((_ALWAYS, end))
        return end


def _places(name: str) -> list[int]:
    words = [False, *(char in WORD for char in name), False]
    places = [_BOUNDARY * (words[at] is not words[at + 1]) for at in range(len(name) + 1)]
    places[0] |= _START
    places[-1] |= _END
    return places


def _reversed(node: Node) -> Node:
    """Matches the same texts, read from their end. A look within it keeps its direction."""
    if isinstance(node, Concatenation):
        return Concatenation(tuple(map(_reversed, reversed(node.parts))))
    if isinstance(node, Branch):
        return Branch(tuple(map(_reversed, node.options)))
    if isinstance(node, Repeat):
        return Repeat(_reversed(node.body), node.minimum, node.maximum)
    return node


def _accepts(chars: Chars | None, char: str) -> bool:
    return chars is not None and (char in chars.chars) is not chars.negated
