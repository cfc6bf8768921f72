"""Regular expressions over module names, matched in time linear in the name. Pure.

PEFT matches `target_modules` and the like with Python's `re`, which backtracks: a tenant's pattern
could hold a core for years. This matcher answers exactly as `re.fullmatch` does, by simulating the
pattern's automaton (Thompson, CACM 11(6), 1968) and memoising its transitions.
"""

from dataclasses import dataclass, field

from adapters.pattern_syntax import (
    WORD,
    Assert,
    Assertion,
    Chars,
    Node,
    PatternError,
    Repeat,
    Sequence,
    parse_pattern,
)

MAX_STATES = 8192
_MAX_CACHED = 16_384


@dataclass(slots=True)
class _State:
    """One state: free moves, each under an assertion or none, and at most one character move."""

    free: list[tuple[Assertion | None, int]] = field(default_factory=list)
    chars: Chars | None = None
    target: int = -1


class _Builder:
    def __init__(self, max_states: int) -> None:
        self.states: list[_State] = []
        self._max_states = max_states

    def state(self) -> int:
        if len(self.states) >= self._max_states:
            raise PatternError("the pattern expands to too many states")
        self.states.append(_State())
        return len(self.states) - 1

    def build(self, node: Node, start: int) -> int:
        """Adds the states that match `node` from `start` on; returns the state after it."""
        if isinstance(node, Sequence):
            for part in node.parts:
                start = self.build(part, start)
            return start
        if isinstance(node, Repeat):
            return self._repeat(node, start)
        end = self.state()
        if isinstance(node, Chars):
            self.states[start].chars, self.states[start].target = node, end
            return end
        if isinstance(node, Assert):
            self.states[start].free.append((node.kind, end))
            return end
        for option in node.options:
            entry = self.state()
            self.states[start].free.append((None, entry))
            self.states[self.build(option, entry)].free.append((None, end))
        return end

    def _repeat(self, node: Repeat, start: int) -> int:
        for _ in range(node.minimum):
            start = self.build(node.body, start)
        end = self.state()
        if node.maximum is None:
            loop, entry = self.state(), self.state()
            self.states[start].free.append((None, loop))
            self.states[loop].free += [(None, entry), (None, end)]
            self.states[self.build(node.body, entry)].free.append((None, loop))
            return end
        self.states[start].free.append((None, end))
        for _ in range(node.maximum - node.minimum):
            entry = self.state()
            self.states[start].free.append((None, entry))
            start = self.build(node.body, entry)
            self.states[start].free.append((None, end))
        return end


@dataclass(frozen=True, slots=True)
class _Place:
    """What an assertion can ask of a position between two characters."""

    start: bool
    end: bool
    boundary: bool

    def holds(self, kind: Assertion | None) -> bool:
        if kind is None:
            return True
        if kind == "start":
            return self.start
        return self.end if kind == "end" else self.boundary


_States = frozenset[int]


class ModulePattern:
    """A compiled pattern. Names are not empty, ASCII, without line breaks.

    Raises PatternError when `text` is not within the supported language, or takes more states.
    """

    def __init__(self, text: str, max_states: int = MAX_STATES) -> None:
        builder = _Builder(max_states)
        start = builder.state()
        self._accept = builder.build(parse_pattern(text), start)
        self._states = builder.states
        self._start: _States = frozenset((start,))
        self._moves: dict[tuple[_States, str, str], _States] = {}

    @property
    def num_states(self) -> int:
        return len(self._states)

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches the whole of `name`."""
        states, before = self._start, ""
        for char in name:
            states = self._move(states, before, char)
            if not states:
                return False
            before = char
        return self._accept in self._closure(states, before, "")

    def _move(self, states: _States, before: str, char: str) -> _States:
        kind = "" if not before else ("w" if before in WORD else ".")
        key = (states, kind, char)
        found = self._moves.get(key)
        if found is None:
            found = frozenset(
                self._states[state].target
                for state in self._closure(states, before, char)
                if _accepts(self._states[state].chars, char)
            )
            if len(self._moves) < _MAX_CACHED:
                self._moves[key] = found
        return found

    def _closure(self, states: _States, before: str, after: str) -> set[int]:
        """Every state reachable without reading, between the characters `before` and `after`."""
        boundary = (before in WORD) is not (after in WORD)
        place = _Place(start=not before, end=not after, boundary=boundary)
        reached, todo = set(states), list(states)
        while todo:
            for assertion, target in self._states[todo.pop()].free:
                if target not in reached and place.holds(assertion):
                    reached.add(target)
                    todo.append(target)
        return reached


def _accepts(chars: Chars | None, char: str) -> bool:
    return chars is not None and (char in chars.chars) is not chars.negated
