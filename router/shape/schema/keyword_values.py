"""The values that single keywords of JSON Schema accept, grouped by type. Pure."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Protocol

from loraplex.router.shape.schema import keywords
from loraplex.router.shape.schema.keywords import SchemaRefused, Spot, below
from loraplex.router.shape.schema.values import (
    ANY_TEXT,
    ANY_VALUE,
    NO_TEXT,
    NO_VALUE,
    Algebra,
    Arrays,
    Field,
    Form,
    JsonValues,
    Named,
    Numbers,
    Objects,
    Some,
    TextSet,
    exactly,
    join,
    not_text,
    with_all_but,
)
from loraplex.router.shape.texts.format import FORMATS
from loraplex.router.shape.texts.pattern import PatternRefused, texts_of
from loraplex.router.shape.texts.regex import ANY_CHAR, alt, both, rep, words


class SchemaReader(Protocol):
    algebra: Algebra

    def below(self, spot: Spot, *keys: str | int) -> Form: ...
    def values(self, form: Form) -> JsonValues: ...
    def constant(self, value: Any) -> Form: ...
    def both(self, one: Form, other: Form) -> Form: ...
    def is_read(self, spot: Spot, keyword: str) -> bool: ...


# The readers raise ValueError with the keyword's fault, or SchemaRefused.


def constant_values(value: Any, form_of: Callable[[Any], Form]) -> JsonValues:
    """The value alone."""
    if value is None:
        return JsonValues(null=True)
    if isinstance(value, bool):
        return JsonValues(booleans=frozenset([value]))
    if isinstance(value, str):
        return JsonValues(text=exactly(words([value])))
    if isinstance(value, list):
        items = tuple(map(form_of, value))
        return JsonValues(arrays=(Arrays(items, NO_VALUE, len(items), len(items), read=None),))
    if isinstance(value, dict):
        fields = {name: Field(form_of(one), True) for name, one in value.items()}
        return JsonValues(objects=(Objects(fields, (), read=ANY_TEXT),))
    return JsonValues(numbers=(Numbers(only=frozenset([_exact(value)])),))


def enum(reader: SchemaReader, spot: Spot, keyword: str) -> JsonValues:
    found: list[JsonValues] = []
    texts: list[str] = []
    listed: list[Fraction] = []
    for index, one in enumerate(_value(spot, keyword, keywords.some)):
        try:
            value = keywords.constant(one)
        except ValueError as error:
            raise SchemaRefused(below(spot.place, keyword, index), "", str(error)) from None
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            listed.append(_exact(value))
        else:
            found.append(constant_values(value, reader.constant))
    numbers = (Numbers(only=frozenset(listed)),) if listed else ()
    return join([*found, JsonValues(numbers=numbers, text=exactly(words(texts)))])


def const(reader: SchemaReader, spot: Spot, keyword: str) -> JsonValues:
    return constant_values(_value(spot, keyword, keywords.constant), reader.constant)


def numbers(reader: SchemaReader, spot: Spot, _: str) -> JsonValues:
    found: dict[str, Any] = {}
    bounds = (("low", "minimum", "exclusiveMinimum"), ("high", "maximum", "exclusiveMaximum"))
    for side, keyword, exclusive in bounds:
        said = [one for one in (keyword, exclusive) if reader.is_read(spot, one)]
        old = [one for one in said if isinstance(spot.schema[one], bool)]
        if old and (old[0] == keyword or spot.resource.draft > 4):
            raise SchemaRefused(spot.place, old[0], "must be a number")
        is_open = bool(old) and spot.schema[exclusive]
        limits = [
            (_exact(_value(spot, one, keywords.number)), one == exclusive or is_open)
            for one in said
            if one not in old
        ]
        if limits:
            key = max if side == "low" else min
            limit = key(limit for limit, _ in limits)
            found[side] = limit
            found[f"{side}_is_open"] = any(opened for one, opened in limits if one == limit)
    if reader.is_read(spot, "multipleOf"):
        found["step"] = _exact(_value(spot, "multipleOf", keywords.number))
        if found["step"] <= 0:
            raise SchemaRefused(spot.place, "multipleOf", "must be above 0")
    return with_all_but(numbers=(Numbers(**found),))


def text(reader: SchemaReader, spot: Spot, _: str) -> JsonValues:
    found = ANY_TEXT
    if reader.is_read(spot, "pattern"):
        pattern = _value(spot, "pattern", keywords.text)
        found = _pattern(reader, pattern, spot.place, "pattern")
    if reader.is_read(spot, "format"):
        known = FORMATS.get(_value(spot, "format", keywords.text))
        if known is not None:
            regex = texts_of(f"^(?:{known.pattern})$", for_certain=True)
            if known.most is not None:
                regex = both(regex, rep(ANY_CHAR, 0, known.most))
            found = reader.algebra.met_texts(found, exactly(regex))
    least, most = _counts(reader, spot, "minLength", "maxLength")
    if least or most is not None:
        length = exactly(rep(ANY_CHAR, least, most))
        found = reader.algebra.met_texts(found, length)
    return with_all_but(text=found)


def arrays(reader: SchemaReader, spot: Spot, _: str) -> JsonValues:
    schema, old = spot.schema, spot.resource.draft < 2020
    first, rest = "prefixItems", "items"
    if isinstance(schema.get("items"), list):
        first, rest = "items", "additionalItems"
    for keyword in ("prefixItems", "additionalItems"):
        if reader.is_read(spot, keyword) and old is (keyword == "prefixItems"):
            raise SchemaRefused(spot.place, keyword, "is not of the draft that `$schema` names")
    if first == "items" and not old and reader.is_read(spot, "items"):
        raise SchemaRefused(spot.place, "items", "must be a schema: use `prefixItems` for several")
    items: tuple[Form, ...] = ()
    if reader.is_read(spot, first):
        several = _value(spot, first, keywords.items)
        items = tuple(reader.below(spot, first, n) for n in range(len(several)))
    other = reader.below(spot, rest) if reader.is_read(spot, rest) else ANY_VALUE
    least, most = _counts(reader, spot, "minItems", "maxItems")
    read = None if reader.is_read(spot, rest) else len(items)
    some = _contained(reader, spot)
    unique = reader.is_read(spot, "uniqueItems") and _value(spot, "uniqueItems", _boolean)
    seen = tuple(one.form for one in some) if not old else ()
    return with_all_but(arrays=(Arrays(items, other, least, most, some, unique, read, seen),))


def _contained(reader: SchemaReader, spot: Spot) -> tuple[Some, ...]:
    if not reader.is_read(spot, "contains"):
        return ()
    least, most = 1, None
    if reader.is_read(spot, "minContains"):
        least = _value(spot, "minContains", keywords.count)
    if reader.is_read(spot, "maxContains"):
        most = _value(spot, "maxContains", keywords.count)
    return (Some(reader.below(spot, "contains"), least, most),)


def objects(reader: SchemaReader, spot: Spot, _: str) -> JsonValues:
    algebra = reader.algebra
    others, known = [Named(ANY_TEXT, ANY_VALUE)], NO_TEXT
    if reader.is_read(spot, "patternProperties"):
        for key in _value(spot, "patternProperties", keywords.mapping):
            place = below(spot.place, "patternProperties", key)
            names = _pattern(reader, key, place, "")
            form = reader.below(spot, "patternProperties", key)
            named = Objects(others=(Named(names, form), Named(not_text(names), ANY_VALUE)))
            others = list(algebra.met_objects(Objects(others=tuple(others)), named).others)
            known = TextSet(alt(known.sure, names.sure), alt(known.possible, names.possible))
    named_fields = (
        _value(spot, "properties", keywords.mapping) if reader.is_read(spot, "properties") else {}
    )
    whole = Objects(others=tuple(others))
    fields = {}
    for name in named_fields:
        form = reader.below(spot, "properties", name)
        fields[name] = Field(reader.both(form, algebra.form_of(whole, name)))
    read = TextSet(alt(known.sure, words(fields)), alt(known.possible, words(fields)))
    if reader.is_read(spot, "additionalProperties"):
        other = reader.below(spot, "additionalProperties")
        free = not_text(known)
        kept = Objects(others=(Named(known, ANY_VALUE), Named(free, other)))
        whole = algebra.met_objects(whole, kept)
        read = ANY_TEXT
    if reader.is_read(spot, "required"):
        for name in _value(spot, "required", keywords.texts):
            form = fields[name].form if name in fields else algebra.form_of(whole, name)
            fields[name] = Field(form, True)
    least, most = _counts(reader, spot, "minProperties", "maxProperties")
    found = Objects(fields, whole.others, least, most, read=read)
    if reader.is_read(spot, "propertyNames"):
        names = reader.values(reader.below(spot, "propertyNames")).text
        found = algebra.met_objects(found, Objects(others=(Named(names, ANY_VALUE),)))
        found = Objects(found.fields, found.others, least, most, read=read)
    return with_all_but(objects=(found,))


# Values of keywords


def _value(spot: Spot, keyword: str, read: Callable[[Any], Any]) -> Any:
    try:
        return read(spot.schema[keyword])
    except ValueError as error:
        raise SchemaRefused(spot.place, keyword, str(error)) from None


def _counts(reader: SchemaReader, spot: Spot, least: str, most: str) -> tuple[int, int | None]:
    low = _value(spot, least, keywords.count) if reader.is_read(spot, least) else 0
    return low, _value(spot, most, keywords.count) if reader.is_read(spot, most) else None


def _pattern(reader: SchemaReader, pattern: str, place: str, keyword: str) -> TextSet:
    reader.algebra.texts.will_read(pattern)
    try:
        return TextSet(texts_of(pattern, for_certain=True), texts_of(pattern, for_certain=False))
    except PatternRefused as error:
        raise SchemaRefused(place, keyword, str(error)) from None


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _exact(number: int | float) -> Fraction:
    return Fraction(Decimal(repr(number)))


# Keywords that are read together, with their reader.
GROUPS: tuple[tuple[tuple[str, ...], Callable[[SchemaReader, Spot, str], JsonValues]], ...] = (
    (("const",), const),
    (("enum",), enum),
    (
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        numbers,
    ),
    (("pattern", "format", "minLength", "maxLength"), text),
    (
        ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems")
        + ("contains",),
        arrays,
    ),
    (
        ("properties", "patternProperties", "additionalProperties", "required", "propertyNames")
        + ("minProperties", "maxProperties"),
        objects,
    ),
)
