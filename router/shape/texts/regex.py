"""Sets of texts as regular expressions that can be joined, met and negated. Pure.

Characters are code points without halves of pairs. Questions about a set are answered by
derivatives (Brzozowski), in a bounded number of steps.
"""

from collections.abc import Iterable, Iterator

import msgspec

Ranges = tuple[tuple[int, int], ...]
# Characters that a text may have: from the first of a range to its last.
_ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


class CharSet(msgspec.Struct, frozen=True):
    """One character of these ranges, which are in order and apart."""

    ranges: Ranges

    def __contains__(self, code: int) -> bool:
        return any(low <= code <= high for low, high in self.ranges)


class Words(msgspec.Struct, frozen=True):
    """One of these texts."""

    texts: frozenset[str]


class Seq(msgspec.Struct, frozen=True):
    parts: "tuple[Regex, ...]"


class Alt(msgspec.Struct, frozen=True):
    options: "frozenset[Regex]"


class Rep(msgspec.Struct, frozen=True):
    """A repetition. most: None = any number of times."""

    part: "Regex"
    least: int
    most: int | None


class Both(msgspec.Struct, frozen=True):
    parts: "frozenset[Regex]"


class Not(msgspec.Struct, frozen=True):
    part: "Regex"


Regex = CharSet | Words | Seq | Alt | Rep | Both | Not

ANY_CHAR, NOTHING, EMPTY = CharSet(_ALL), CharSet(()), Seq(())
ANYTHING = Rep(ANY_CHAR, 0, None)


def chars(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """Ranges in any order; halves of pairs are left out."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return CharSet(met_ranges(tuple(joined), _ALL))


def other_chars(of: CharSet) -> CharSet:
    ends = [-1, *(end for one in of.ranges for end in one), 0x110000]
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return chars((last + 1, first - 1) for last, first in pairs if first - last > 1)


def met_ranges(one: Ranges, other: Ranges) -> Ranges:
    """The characters that are in both."""
    found: list[tuple[int, int]] = []
    mine = its = 0
    while mine < len(one) and its < len(other):
        (a, b), (c, d) = one[mine], other[its]
        if max(a, c) <= min(b, d):
            found.append((max(a, c), min(b, d)))
        mine, its = (mine + 1, its) if b < d else (mine, its + 1)
    return tuple(found)


def words(texts: Iterable[str]) -> Regex:
    found = frozenset(texts)
    return Words(found) if found else NOTHING


def seq(*parts: Regex) -> Regex:
    flat: list[Regex] = []
    for part in parts:
        more = part.parts if isinstance(part, Seq) else (part,)
        flat += more[1:] if flat[-1:] == [ANYTHING] == list(more[:1]) else more
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(*options: Regex) -> Regex:
    flat: set[Regex] = set()
    for option in options:
        flat |= option.options if isinstance(option, Alt) else {option}
    listed = [one for one in flat if isinstance(one, Words)]
    if len(listed) > 1:
        flat = flat.difference(listed) | {words(text for one in listed for text in one.texts)}
    flat.discard(NOTHING)
    if ANYTHING in flat:
        return ANYTHING
    return next(iter(flat)) if len(flat) == 1 else Alt(frozenset(flat)) if flat else NOTHING


def rep(part: Regex, least: int, most: int | None) -> Regex:
    if most == 0:
        return EMPTY
    if part == NOTHING:
        return NOTHING if least else EMPTY
    if isinstance(part, Rep) and part.most is None and part.least < 2 and least < 2:
        return Rep(part.part, min(part.least, least), None) if most is None else part
    return part if least == most == 1 else Rep(part, 0 if can_be_empty(part) else least, most)


def both(*parts: Regex) -> Regex:
    flat: set[Regex] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, Both) else {part}
    flat.discard(ANYTHING)
    if NOTHING in flat or any(isinstance(one, Not) and one.part in flat for one in flat):
        return NOTHING
    return next(iter(flat)) if len(flat) == 1 else Both(frozenset(flat)) if flat else ANYTHING


def negated(part: Regex) -> Regex:
    if isinstance(part, Not):
        return part.part
    return ANYTHING if part == NOTHING else NOTHING if part == ANYTHING else Not(part)


def can_be_empty(regex: Regex) -> bool:
    match regex:
        case CharSet():
            return False
        case Words(texts):
            return "" in texts
        case Seq(parts) | Both(parts):
            return all(map(can_be_empty, parts))
        case Alt(options):
            return any(map(can_be_empty, options))
        case Rep(part, least):
            return least == 0 or can_be_empty(part)
        case Not(part):
            return not can_be_empty(part)


def after(regex: Regex, code: int) -> Regex:
    """The expression for the rest of a text after this character."""
    match regex:
        case CharSet():
            return EMPTY if code in regex else NOTHING
        case Words(texts):
            return words(text[1:] for text in texts if text and ord(text[0]) == code)
        case Seq(parts):
            return _after_first(parts, code)
        case Alt(options):
            return alt(*(after(option, code) for option in options))
        case Rep(part, least, most):
            left = None if most is None else most - 1
            return seq(after(part, code), rep(part, max(0, least - 1), left))
        case Both(parts):
            return both(*(after(one, code) for one in parts))
        case Not(part):
            return negated(after(part, code))


def _after_first(parts: tuple[Regex, ...], code: int) -> Regex:
    found: list[Regex] = []
    for index, part in enumerate(parts):
        found.append(seq(after(part, code), *parts[index + 1 :]))
        if not can_be_empty(part):
            break
    return alt(*found)


def _firsts(regex: Regex) -> Iterator[CharSet]:
    """Sets of characters that tell begins of texts apart."""
    match regex:
        case CharSet():
            yield regex
        case Words(texts):
            yield from {chars([(ord(text[0]),) * 2]) for text in texts if text}
        case Seq(parts):
            for part in parts:
                yield from _firsts(part)
                if not can_be_empty(part):
                    return
        case Alt(several) | Both(several):
            for one in several:
                yield from _firsts(one)
        case Rep(part) | Not(part):
            yield from _firsts(part)


def _kinds(regex: Regex) -> list[Ranges]:
    """Divides all characters into kinds that are one to the regex at its begin."""
    kinds: list[Ranges] = [_ALL]
    for one in set(_firsts(regex)):
        rest = other_chars(one).ranges
        split = ((met_ranges(kind, one.ranges), met_ranges(kind, rest)) for kind in kinds)
        kinds = [kind for pair in split for kind in pair if kind]
    return kinds


def _lacks_few(regex: Regex) -> bool:
    """Whether the set is known to have all texts but listed ones."""
    if isinstance(regex, Both):
        return all(map(_lacks_few, regex.parts))
    return isinstance(regex, Not) and isinstance(regex.part, Words)


def is_endless(regex: Regex) -> bool:
    """Whether each begin of its texts is known to go on in any number of ways."""
    match regex:
        case Seq(parts):
            return bool(parts) and is_endless(parts[-1])
        case Rep(_, _, most):
            return most is None
        case Alt(several):
            return all(map(is_endless, several))
        case Both(several):
            return sum(not _lacks_few(one) for one in several) < 2 and all(map(is_endless, several))
    return _lacks_few(regex)


def _size(regex: Regex) -> int:
    match regex:
        case CharSet():
            return 1
        case Words(texts):
            return len(texts)
        case Seq(several) | Alt(several) | Both(several):
            return 1 + sum(map(_size, several))
        case Rep(part) | Not(part):
            return 1 + _size(part)


class TextsTooCostly(Exception):
    """A question about texts takes too many steps."""


class Texts:
    """Answers questions about sets of texts. most_steps: for all questions together; a step is
    the work for one part of an expression at one character. most_read: characters of patterns.

    Methods raise TextsTooCostly.
    """

    def __init__(self, most_steps: int, most_read: int = 1 << 17) -> None:
        self._left = most_steps
        self._unread = most_read
        self._steps: dict[Regex, list[tuple[Ranges, Regex]]] = {}
        self._empty: dict[Regex, bool] = {}

    def will_read(self, pattern: str) -> None:
        """Counts a pattern before anything is built of it, which no question could pay for."""
        self._unread -= len(pattern)
        if self._unread < 0:
            raise TextsTooCostly

    def has(self, regex: Regex, text: str) -> bool:
        match regex:
            case Words(texts):
                return text in texts
            case Not(part):
                return not self.has(part, text)
            case Both(parts):
                return all(self.has(part, text) for part in parts)
        if regex == ANYTHING:
            return True
        for character in text:
            regex = self._after(regex, ord(character))
        return can_be_empty(regex)

    def _after(self, regex: Regex, code: int) -> Regex:
        self._pay(_size(regex))
        return after(regex, code)

    def is_empty(self, regex: Regex) -> bool:
        """Whether the set has no text."""
        if isinstance(regex, CharSet | Words) or _lacks_few(regex):
            return regex == NOTHING
        if regex not in self._empty:
            self._empty[regex] = self._has_none(regex)
        return self._empty[regex]

    def _has_none(self, regex: Regex) -> bool:
        seen, waiting = {regex}, [regex]
        while waiting:
            here = waiting.pop()
            if can_be_empty(here) or self._empty.get(here) is False:
                return False
            new = {state for _, state in self._next(here)} - seen
            seen |= new
            waiting += new
        return True

    def listed(self, regex: Regex, most: int) -> list[str] | None:
        """Lists the texts of a set that has at most `most`; None for a larger set."""
        if isinstance(regex, Words):
            return sorted(regex.texts) if len(regex.texts) <= most else None
        if _lacks_few(regex):
            return None
        found: list[str] = []
        waiting: list[tuple[str, Regex]] = [("", regex)]
        while waiting:
            text, here = waiting.pop()
            found += [text] if can_be_empty(here) else []
            steps = [(kind, state) for kind, state in self._next(here) if not self.is_empty(state)]
            size = sum(high - low + 1 for kind, _ in steps for low, high in kind)
            if len(found) + len(waiting) + size > most or len(text) > _LONGEST:
                return None
            for kind, state in steps:
                codes = (code for low, high in kind for code in range(low, high + 1))
                waiting += [(text + chr(code), state) for code in codes]
        return sorted(found)

    def _next(self, regex: Regex) -> list[tuple[Ranges, Regex]]:
        """Kinds of characters, each with what may follow it."""
        if regex not in self._steps:
            kinds = _kinds(regex)
            self._pay(len(kinds) * _size(regex))
            states = [(kind, after(regex, kind[0][0])) for kind in kinds]
            self._steps[regex] = [(kind, state) for kind, state in states if state != NOTHING]
        return self._steps[regex]

    def _pay(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise TextsTooCostly


_LONGEST = 200
