"""Sets of JSON values, by type, that can be joined, met and negated. Pure.

JsonValues within arrays and objects keep to *forms*: numbers that a `Forms` gives to schemas and to
what is made of them. So sets of values may lead back to themselves.
"""

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import msgspec

from loraplex.router.shape.texts.regex import ANYTHING, NOTHING, Regex, alt, negated

Form = int
NO_VALUE: Form = 0
ANY_VALUE: Form = 1


class TextSet(NamedTuple):
    """A set of texts that is known within bounds.

    sure: texts that are in the set. possible: these and texts that may be; all others are not.
    """

    sure: Regex
    possible: Regex


ANY_TEXT, NO_TEXT = TextSet(ANYTHING, ANYTHING), TextSet(NOTHING, NOTHING)


def exactly(regex: Regex) -> TextSet:
    return TextSet(regex, regex)


class Numbers(msgspec.Struct, frozen=True):
    """A set of JSON numbers. low, high: bounds; None = none. low_is_open, high_is_open: the bound
    itself is left out.

    step: all numbers are its multiples. whole: True = whole numbers, False = others, None = both.
    only: a list of all the numbers, whatever the other fields say; None = no list.
    """

    low: Fraction | None = None
    high: Fraction | None = None
    low_is_open: bool = False
    high_is_open: bool = False
    step: Fraction | None = None
    whole: bool | None = None
    only: frozenset[Fraction] | None = None


class Some(msgspec.Struct, frozen=True):
    """Demands `least` to `most` items of the form from `start` on. most: None = any number."""

    form: Form
    least: int
    most: int | None
    start: int = 0


class Arrays(msgspec.Struct, frozen=True):
    """A set of JSON arrays. first: forms of the first items. rest: of the others. read: items from
    the begin that keywords of the schema have spoken of; None = all.
    """

    first: tuple[Form, ...] = ()
    rest: Form = ANY_VALUE
    least: int = 0
    most: int | None = None
    some: tuple[Some, ...] = ()
    unique: bool = False
    read: int | None = 0
    read_some: tuple[Form, ...] = ()


class Field(NamedTuple):
    form: Form
    required: bool = False


class Named(NamedTuple):
    """Members whose names are in a set."""

    names: TextSet
    form: Form


class Objects(msgspec.Struct, frozen=True):
    """A set of JSON objects. fields: by name, in the order of writing. others: of all other names;
    those in none of these sets are not allowed. some: members of which there is at least one.
    read: names that keywords of the schema have spoken of.
    """

    fields: Mapping[str, Field] = {}
    others: tuple[Named, ...] = (Named(ANY_TEXT, ANY_VALUE),)
    least: int = 0
    most: int | None = None
    some: tuple[Named, ...] = ()
    read: TextSet = NO_TEXT


class JsonValues(msgspec.Struct, frozen=True):
    """The union of its fields, each with the values of one JSON type."""

    null: bool = False
    booleans: frozenset[bool] = frozenset()
    numbers: tuple[Numbers, ...] = ()
    text: TextSet = NO_TEXT
    arrays: tuple[Arrays, ...] = ()
    objects: tuple[Objects, ...] = ()


NONE = JsonValues()
ALL = JsonValues(True, frozenset([False, True]), (Numbers(),), ANY_TEXT, (Arrays(),), (Objects(),))
_OF_TYPE = {
    "null": JsonValues(null=True),
    "boolean": JsonValues(booleans=ALL.booleans),
    "integer": JsonValues(numbers=(Numbers(whole=True),)),
    "number": JsonValues(numbers=ALL.numbers),
    "string": JsonValues(text=ANY_TEXT),
    "array": JsonValues(arrays=ALL.arrays),
    "object": JsonValues(objects=ALL.objects),
}
_MOST_UNIONS = 256


class CannotHold(ValueError):
    """No grammar writes this set; str() says why. keyword: that asks for it, "" = not known."""

    def __init__(self, reason: str, keyword: str = "") -> None:
        super().__init__(reason)
        self.keyword = keyword


class Forms(Protocol):
    """Makes forms of other forms."""

    def both(self, one: Form, other: Form) -> Form: ...
    def negated(self, one: Form) -> Form: ...
    def constant(self, value: Any) -> Form: ...


def of_types(types: Iterable[str]) -> JsonValues:
    return join([_OF_TYPE[one] for one in types])


def with_all_but(**part: Any) -> JsonValues:
    """All values, but for the given types only the given ones."""
    return msgspec.structs.replace(ALL, **part)


def join(several: Iterable[JsonValues]) -> JsonValues:
    """The values that are in one of several."""
    found = list(several)
    if len(found) == 1:
        return found[0]
    return JsonValues(
        any(one.null for one in found),
        frozenset().union(*(one.booleans for one in found)),
        few(n for one in found for n in one.numbers),
        TextSet(*map(alt, *(one.text for one in found))) if found else NO_TEXT,
        few(array for one in found for array in one.arrays),
        few(objects for one in found for objects in one.objects),
    )


def not_text(text: TextSet) -> TextSet:
    return TextSet(negated(text.possible), negated(text.sure))


def item_of(arrays: Arrays, index: int) -> Form:
    return arrays.first[index] if index < len(arrays.first) else arrays.rest


def few(found: Iterable[Any]) -> tuple[Any, ...]:
    """Returns each of them once. Raises CannotHold for more than can be worked with."""
    kept: list[Any] = []
    for one in found:
        if one not in kept:
            kept.append(one)
        if len(kept) > _MOST_UNIONS:
            raise CannotHold("its options multiply to too many")
    return tuple(kept)


def both_steps(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    if one is None or other is None:
        return one or other
    scale = math.lcm(one.denominator, other.denominator)
    return Fraction(math.lcm(int(one * scale), int(other * scale)), scale)


def step_of(numbers: Numbers) -> Fraction | None:
    return both_steps(numbers.step, Fraction(1)) if numbers.whole else numbers.step
