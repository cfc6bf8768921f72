"""Sets of JSON values, by type, that can be joined, met and negated. Pure.

JsonValues within arrays and objects keep to *forms*: numbers that a `Forms` gives to schemas and to
what is made of them. So sets of values may lead back to themselves.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import msgspec

from loraplex.router.shape.schema.keywords import SchemaRefused
from loraplex.router.shape.texts.regex import (
    ANYTHING,
    NOTHING,
    Regex,
    Texts,
    Words,
    alt,
    both,
    negated,
    words,
)

Form = int
NO_VALUE: Form = 0
ANY_VALUE: Form = 1

_MOST_OTHERS = 64
_MOST_APART = 5_000
# The depth to which two sets are searched for what tells them apart.
_DEEPEST = 6


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


class Algebra:
    """Computes intersections and complements of sets of JSON values. forms: makes the forms of
    inner values. texts: answers questions about sets of texts.
    """

    def __init__(self, forms: Forms, texts: Texts) -> None:
        self._forms = forms
        self.texts = texts

    def met(self, one: JsonValues, other: JsonValues) -> JsonValues:
        """The intersection: the values that are in both."""
        if one == ALL or other == ALL:
            return other if one == ALL else one
        numbers = [_met_numbers(a, b) for a in one.numbers for b in other.numbers]
        return JsonValues(
            one.null and other.null,
            one.booleans & other.booleans,
            few(n for n in numbers if has_number(n)),
            self.met_texts(one.text, other.text),
            few(self._met_arrays(a, b) for a in one.arrays for b in other.arrays),
            few(self.met_objects(a, b) for a in one.objects for b in other.objects),
        )

    def met_texts(self, one: TextSet, other: TextSet) -> TextSet:
        return TextSet(*(self._met_regex(a, b) for a, b in zip(one, other, strict=True)))

    def _met_regex(self, one: Regex, other: Regex) -> Regex:
        found = both(one, other)
        for listed, rest in ((one, other), (other, one)):
            if isinstance(listed, Words):
                return words(text for text in listed.texts if self.texts.has(rest, text))
        return NOTHING if self.texts.is_empty(found) else found

    def negated(self, values: JsonValues) -> JsonValues:
        """The complement: all other values. Raises CannotHold."""
        arrays, objects, numbers = ALL.arrays, ALL.objects, ALL.numbers
        for one in values.numbers:
            others = _other_numbers(one)
            met = [_met_numbers(a, b) for a in numbers for b in others]
            numbers = few(n for n in met if has_number(n))
        for array in values.arrays:
            kept = self._other_arrays(array)
            arrays = few(self._met_arrays(a, b) for a in arrays for b in kept)
        for one_object in values.objects:
            left = self._other_objects(one_object)
            objects = few(self.met_objects(a, b) for a in objects for b in left)
        return JsonValues(
            not values.null,
            ALL.booleans - values.booleans,
            numbers,
            not_text(values.text),
            arrays,
            objects,
        )

    def form_of(self, objects: Objects, name: str) -> Form:
        """The form that a member of this name keeps to."""
        if name in objects.fields:
            return objects.fields[name].form
        found, known = ANY_VALUE, False
        for names, form in objects.others:
            if self.texts.has(names.possible, name):
                found, known = self._forms.both(found, form), True
        return found if known else NO_VALUE

    def _met_arrays(self, one: Arrays, other: Arrays) -> Arrays:
        both = self._forms.both
        length = max(len(one.first), len(other.first))
        pairs = ((item_of(one, n), item_of(other, n)) for n in range(length))
        reads = None if None in (one.read, other.read) else max(one.read or 0, other.read or 0)
        return Arrays(
            tuple(both(a, b) for a, b in pairs),
            both(one.rest, other.rest),
            max(one.least, other.least),
            _least_of(one.most, other.most),
            tuple(dict.fromkeys((*one.some, *other.some))),
            one.unique or other.unique,
            reads,
            (*one.read_some, *other.read_some),
        )

    def met_objects(self, one: Objects, other: Objects) -> Objects:
        fields = {}
        for name in dict.fromkeys((*one.fields, *other.fields)):
            form = self._forms.both(self.form_of(one, name), self.form_of(other, name))
            required = any(o.fields[name].required for o in (one, other) if name in o.fields)
            fields[name] = Field(form, required)
        others: list[Named] = []
        for names, form in one.others:
            for more, its in other.others:
                met, both = self.met_texts(names, more), self._forms.both(form, its)
                if met.sure != NOTHING and both != NO_VALUE:
                    others.append(Named(met, both))
        if len(others) > _MOST_OTHERS:
            raise CannotHold("its patterns of names overlap in too many ways")
        return Objects(
            fields,
            tuple(others),
            max(one.least, other.least),
            _least_of(one.most, other.most),
            (*one.some, *other.some),
            TextSet(*map(alt, one.read, other.read)),
        )

    def _other_arrays(self, one: Arrays) -> list[Arrays]:
        """All arrays but these, as a union."""
        if one.unique:
            raise CannotHold("arrays with equal items cannot be demanded")
        found = [Arrays(most=one.least - 1)] if one.least else []
        found += [] if one.most is None else [Arrays(least=one.most + 1)]
        for index, form in enumerate(one.first):
            if form != ANY_VALUE:
                items = (*[ANY_VALUE] * index, self._forms.negated(form))
                found.append(Arrays(items, least=index + 1))
        if one.rest != ANY_VALUE:
            wrong = Some(self._forms.negated(one.rest), 1, None, len(one.first))
            found.append(Arrays(some=(wrong,)))
        for some in one.some:
            fewer = [(0, some.least - 1)] if some.least else []
            more = [] if some.most is None else [(some.most + 1, None)]
            for least, most in (*fewer, *more):
                found.append(Arrays(some=(Some(some.form, least, most, some.start),)))
        return found

    def _other_objects(self, one: Objects) -> list[Objects]:
        """All objects but these, as a union."""
        found = [Objects(most=one.least - 1)] if one.least else []
        found += [] if one.most is None else [Objects(least=one.most + 1)]
        free = exactly(negated(words(one.fields)))
        for name, (form, required) in one.fields.items():
            if form != ANY_VALUE:
                found.append(Objects({name: Field(self._forms.negated(form), True)}))
            if required:
                found.append(Objects({name: Field(NO_VALUE)}))
        unknown = free
        for names, form in one.others:
            unknown = self.met_texts(unknown, not_text(names))
            if form != ANY_VALUE:
                wrong = Named(self.met_texts(names, free), self._forms.negated(form))
                found.append(Objects(some=(wrong,)))
        if unknown.sure != NOTHING:
            found.append(Objects(some=(Named(unknown, ANY_VALUE),)))
        for names, form in one.some:
            kept = Named(names, self._forms.negated(form)), Named(not_text(names), ANY_VALUE)
            found.append(Objects(others=kept))
        return found


class Emptiness:
    """Tells which forms are empty. values: gives the values of a form."""

    def __init__(self, values: Callable[[Form], JsonValues], algebra: Algebra) -> None:
        self._values = values
        self._algebra = algebra
        self._compared = 0

    def is_sure(self, form: Form) -> bool:
        """Whether the form is known to have no value."""
        return self._no_form(form, _DEEPEST)

    def apart(self, one: JsonValues, other: JsonValues) -> bool:
        """Whether two sets surely share nothing. Raises CannotHold after too many questions."""
        self._compared += 1
        if self._compared > _MOST_APART:
            raise CannotHold("there are too many options to compare")
        return self._is_empty(self._algebra.met(one, other), _DEEPEST)

    def _is_empty(self, values: JsonValues, depth: int) -> bool:
        """Whether a set is known to have no value."""
        if values.null or values.booleans or values.numbers or values.text.possible != NOTHING:
            return False
        if depth == 0:
            return values == NONE
        return all(self._no_array(one, depth - 1) for one in values.arrays) and all(
            self._no_object(one, depth - 1) for one in values.objects
        )

    def _no_array(self, one: Arrays, depth: int) -> bool:
        if one.most is not None and one.most < one.least:
            return True
        length = min(one.least, len(one.first) + 1)
        return any(self._no_form(item_of(one, n), depth) for n in range(length))

    def _no_object(self, one: Objects, depth: int) -> bool:
        needed = [field.form for field in one.fields.values() if field.required]
        if one.most is not None and one.most < max(one.least, len(needed)):
            return True
        return any(self._no_form(form, depth) for form in needed)

    def _no_form(self, form: Form, depth: int) -> bool:
        if form == NO_VALUE:
            return True
        try:
            return self._is_empty(self._values(form), depth)
        except SchemaRefused:  # or a schema that is being read
            return False


def _least_of(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)


# Numbers


def _met_numbers(one: Numbers, other: Numbers) -> Numbers:
    for listed, rest in ((one, other), (other, one)):
        if listed.only is not None:
            return Numbers(only=frozenset(n for n in listed.only if _has(rest, n)))
    low, low_is_open = max(_low(one), _low(other))
    high, high_is_open = min(_high(one), _high(other))
    whole = one.whole if other.whole is None else other.whole
    if whole is not None and one.whole not in (None, whole):
        low, high = Fraction(1), Fraction(0)
    return Numbers(
        None if low == -math.inf else Fraction(low),
        None if high == math.inf else Fraction(high),
        low_is_open,
        not high_is_open,
        both_steps(one.step, other.step),
        whole,
    )


def _has(numbers: Numbers, value: Fraction) -> bool:
    if numbers.only is not None:
        return value in numbers.only
    low, high = _low(numbers), _high(numbers)
    return (
        (low[0] < value or (low[0] == value and not low[1]))
        and (value < high[0] or (high[0] == value and high[1]))
        and (numbers.step is None or (value / numbers.step).denominator == 1)
        and numbers.whole in (None, value.denominator == 1)
    )


def _low(numbers: Numbers) -> tuple[Fraction | float, bool]:
    return (-math.inf if numbers.low is None else numbers.low), numbers.low_is_open


def _high(numbers: Numbers) -> tuple[Fraction | float, bool]:
    """Returns the upper bound, and whether the bound is one of the numbers."""
    return (math.inf if numbers.high is None else numbers.high), not numbers.high_is_open


def has_number(numbers: Numbers) -> bool:
    """Whether any number keeps to these limits."""
    if numbers.only is not None:
        return bool(numbers.only)
    low, high, step = numbers.low, numbers.high, step_of(numbers)
    if low is None or high is None:
        return True
    if step is None:
        is_open = numbers.low_is_open or numbers.high_is_open
        return low < high or (low == high and not is_open and numbers.whole is not False)
    first, last = math.ceil(low / step), math.floor(high / step)
    first += numbers.low_is_open and first * step == low
    last -= numbers.high_is_open and last * step == high
    return first <= last


def _other_numbers(one: Numbers) -> list[Numbers]:
    """All numbers but these, as a union."""
    if one.only is not None:
        lows = [None, *sorted(one.only)]
        return [Numbers(a, b, True, True) for a, b in zip(lows, [*lows[1:], None], strict=True)]
    found = []
    if one.low is not None:
        found.append(Numbers(high=one.low, high_is_open=not one.low_is_open))
    if one.high is not None:
        found.append(Numbers(low=one.high, low_is_open=not one.high_is_open))
    if one.whole is not None:
        found.append(Numbers(whole=not one.whole))
    if one.step is not None and one.step.denominator == 1 == one.step.numerator:
        found.append(Numbers(whole=False))
    elif one.step is not None:
        raise CannotHold("numbers that are no multiples cannot be demanded")
    return found
