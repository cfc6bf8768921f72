"""Reads a JSON schema as the set of values that it accepts. Pure."""

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from loraplex.router.shape.schema import keywords
from loraplex.router.shape.schema.keyword_values import GROUPS, constant_values
from loraplex.router.shape.schema.keywords import Document, SchemaRefused, Spot
from loraplex.router.shape.schema.values import (
    ALL,
    ANY_TEXT,
    ANY_VALUE,
    NO_VALUE,
    Algebra,
    Arrays,
    CannotHold,
    Emptiness,
    Field,
    Form,
    JsonValues,
    Named,
    Objects,
    item_of,
    join,
    not_text,
    of_types,
    with_all_but,
)
from loraplex.router.shape.texts.regex import NOTHING, Texts, TextsTooCostly

_MOST_FORMS = 20_000
_MOST_STEPS = 300_000
# Unions of which all parts are tried together, where keywords look at what others have read.
_MOST_TOGETHER = 5
_DEEPEST = 64
_MOST_SEEN = 200
_MOST_STEPS_TO_TAGS = 100_000
_UNIONS = ("oneOf", "anyOf")
_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
_COSTLY = "its patterns cost too much to compare"
_SELF = "a `$ref` in it leads back to itself, with nothing between"


class _Made(NamedTuple):
    """The parts of a form. kind: schema, both, either, not, constant."""

    kind: str
    parts: tuple[Any, ...]


class Reader:
    """Forms of one schema, and the values that keep to them.

    dropped: keywords by their places that bind nothing. Methods raise SchemaRefused.
    """

    def __init__(
        self, schema: Any, param: str, dropped: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        self.document = Document(schema, param)
        self.algebra = Algebra(self, Texts(_MOST_STEPS))
        self.place = param
        self._dropped = dropped
        self._made: list[_Made] = [_Made("either", ()), _Made("both", ())]
        self._forms: dict[_Made, Form] = {made: form for form, made in enumerate(self._made)}
        self._spots: dict[tuple[int, str, tuple[str, ...]], Spot] = {}
        self._values: dict[Form, JsonValues] = {}
        self._reading: set[Form] = set()
        emptiness = Emptiness(self.values, self.algebra)
        self._apart, self._is_void = emptiness.apart, emptiness.is_sure
        self._tags = Tags(self._follow)
        self.root = self.schema(self.document.root)

    # Forms

    def schema(self, spot: Spot) -> Form:
        if isinstance(spot.schema, bool):
            return ANY_VALUE if spot.schema else NO_VALUE
        if not isinstance(spot.schema, dict):
            raise SchemaRefused(spot.place, "", "a schema must be an object or a boolean")
        key = id(spot.schema), spot.resource.uri, spot.scope
        self._spots.setdefault(key, spot)
        return self._form("schema", key)

    def both(self, one: Form, other: Form) -> Form:
        parts = {*self._parts("both", one), *self._parts("both", other)}
        if NO_VALUE in parts or any(self.negated(part) in parts for part in parts):
            return NO_VALUE
        return self._joined("both", parts)

    def either(self, options: Iterable[Form]) -> Form:
        parts = {part for option in options for part in self._parts("either", option)}
        return ANY_VALUE if ANY_VALUE in parts else self._joined("either", parts)

    def negated(self, one: Form) -> Form:
        made = self._made[one]
        if one in (ANY_VALUE, NO_VALUE):
            return NO_VALUE if one == ANY_VALUE else ANY_VALUE
        return made.parts[0] if made.kind == "not" else self._form("not", (one,))

    def constant(self, value: Any) -> Form:
        key = keywords.same_text(value)
        return self._form("constant", (key,))

    def _parts(self, kind: str, form: Form) -> tuple[Form, ...]:
        made = self._made[form]
        return made.parts if made.kind == kind else (form,)

    def _joined(self, kind: str, parts: set[Form]) -> Form:
        return next(iter(parts)) if len(parts) == 1 else self._form(kind, tuple(sorted(parts)))

    def _form(self, kind: str, parts: tuple[Any, ...]) -> Form:
        made = _Made(kind, parts)
        if made not in self._forms:
            if len(self._made) >= _MOST_FORMS:
                raise SchemaRefused(self.place, "", "it is too large to be held to")
            self._forms[made] = len(self._made)
            self._made.append(made)
        return self._forms[made]

    # Values

    def values(self, form: Form) -> JsonValues:
        if form not in self._values:
            if form in self._reading:
                raise SchemaRefused(self.place, "", _SELF)
            if len(self._reading) > _DEEPEST:
                reason = f"more than {_DEEPEST} of its schemas speak of one value"
                raise SchemaRefused(self.place, "", reason)
            self._reading.add(form)
            try:
                self._values[form] = self._read(self._made[form])
            except CannotHold as error:
                raise self.refusal(form, error) from None
            except TextsTooCostly:
                raise SchemaRefused(self.place, "", _COSTLY) from None
            finally:
                self._reading.discard(form)
        return self._values[form]

    def _read(self, made: _Made) -> JsonValues:
        match made.kind:
            case "schema":
                return self._read_schema(self._spots[made.parts])
            case "constant":
                return constant_values(keywords.from_text(made.parts[0]), self.constant)
            case "not":
                return self.algebra.negated(self.values(made.parts[0]))
            case "either":
                return join(self.values(part) for part in made.parts)
        found = ALL
        for part in made.parts:
            found = self.algebra.met(found, self.values(part))
        return found

    def _read_schema(self, spot: Spot) -> JsonValues:
        self._check_unknown(spot)
        found = ALL
        for several, read in _READERS:
            keyword = next((one for one in several if self.is_read(spot, one)), None)
            if keyword is None:
                continue
            try:
                found = self.algebra.met(found, read(self, spot, keyword))
            except SchemaRefused:
                raise
            except (ValueError, TextsTooCostly) as error:
                reason = str(error) or _COSTLY
                raise SchemaRefused(spot.place, keyword, reason) from None
        if self.document.has_unevaluated:
            found = self._unevaluated(spot, found)
        return found

    def _check_unknown(self, spot: Spot) -> None:
        for keyword in spot.schema:
            if keyword not in keywords.BINDING and self.is_read(spot, keyword):
                reason = keywords.reason_against(keyword)
                if reason is not None:
                    raise SchemaRefused(spot.place, keyword, reason)

    def _follow(self, ref: str) -> Any:
        try:
            return self.document.reference(self.document.root, ref, "$ref").schema
        except SchemaRefused:
            return None

    def below(self, spot: Spot, *keys: str | int) -> Form:
        return self.schema(self.document.below(spot, *keys))

    def refusal(self, form: Form, error: CannotHold) -> SchemaRefused:
        """The refusal of a form, at the place that asks for what cannot be held."""
        waiting, seen = [form], set[Form]()
        while waiting and error.keyword and len(seen) < _MOST_SEEN:
            here = waiting.pop(0)
            made = self._made[here]
            if here in seen or made.kind == "constant":
                continue
            seen.add(here)
            if made.kind != "schema":
                waiting += made.parts
                continue
            spot = self._spots[made.parts]
            if self.is_read(spot, error.keyword):
                return SchemaRefused(spot.place, error.keyword, str(error))
            waiting += self._in_place(spot)
        return SchemaRefused(self.place, "", str(error))

    def _in_place(self, spot: Spot) -> Iterator[Form]:
        """Forms of the schemas that apply to the same value, such as those of `allOf` or `$ref`."""
        for keyword in ("allOf", "anyOf", "oneOf"):
            if self.is_read(spot, keyword):
                yield from self.options(spot, keyword)
        for keyword in ("$ref", "$dynamicRef"):
            if self.is_read(spot, keyword):
                yield self.schema(self.document.reference(spot, spot.schema[keyword], keyword))

    def no_answer(self) -> SchemaRefused | None:
        """Why nothing is accepted, where one member alone is the reason."""
        form = self.root
        while self._made[form].kind == "schema":
            spot, values = self._spots[self._made[form].parts], self.values(form)
            needed = values.objects[0].fields.items() if values.objects else ()
            void = ((n, f.form) for n, f in needed if f.required and self._is_void(f.form))
            found = next(void, None)
            if found is None:
                return None
            name, form = found
            if form == NO_VALUE:
                closed = spot.schema.get("additionalProperties") is False
                by = "`additionalProperties: false` forbids" if closed else "nothing here allows"
                return SchemaRefused(spot.place, "required", f"names `{name}`, which {by}")
        return None

    def is_read(self, spot: Spot, keyword: str) -> bool:
        """Whether the keyword is there, and binds."""
        return keyword in spot.schema and (spot.place, keyword) not in self._dropped

    # Keywords that join schemas

    def options(self, spot: Spot, keyword: str) -> list[Form]:
        several = keywords.some(spot.schema[keyword])
        return [self.below(spot, keyword, index) for index in range(len(several))]

    def reference(self, spot: Spot, keyword: str) -> JsonValues:
        ref = keywords.text(spot.schema[keyword])
        beside = keywords.BINDING & spot.schema.keys() - {keyword}
        if spot.resource.draft < 2019 and beside:
            raise ValueError("keywords beside it mean nothing in this draft")
        return self.values(self.schema(self.document.reference(spot, ref, keyword)))

    def all_of(self, spot: Spot, keyword: str) -> JsonValues:
        found = ALL
        for option in self.options(spot, keyword):
            found = self.algebra.met(found, self.values(option))
        return found

    def any_of(self, spot: Spot, keyword: str) -> JsonValues:
        options = list(map(self.values, self.options(spot, keyword)))
        if self.document.has_unevaluated:
            if len(options) > _MOST_TOGETHER:
                raise ValueError(f"has more than {_MOST_TOGETHER} options beside `unevaluated…`")
            options = self._together(options)
        return self._tagged(spot, keyword, join(options))

    def _together(self, options: list[JsonValues]) -> list[JsonValues]:
        """Combines options: each one, and all that keep to several, which have read more."""
        found = list(options)
        for size in range(2, len(options) + 1):
            for several in combinations(options, size):
                met = several[0]
                for one in several[1:]:
                    met = self.algebra.met(met, one)
                found.append(met)
        return found

    def one_of(self, spot: Spot, keyword: str) -> JsonValues:
        """Reads `oneOf`: each option without the others that it may overlap with."""
        options = self.options(spot, keyword)
        tagged = [self._tagged(spot, keyword, self.values(option)) for option in options]
        found = []
        for index, one in enumerate(tagged):
            for other, values in enumerate(tagged):
                if other == index or self._apart(one, values):
                    continue
                try:
                    one = self.algebra.met(one, self.algebra.negated(values))
                except CannotHold as error:
                    pair = f"options {min(index, other)} and {max(index, other)}"
                    reason = f"{pair} are not known to exclude each other: {error}"
                    raise CannotHold(reason) from None
            found.append(one)
        return join(found)

    def _tagged(self, spot: Spot, keyword: str, values: JsonValues) -> JsonValues:
        """The values that have the tag that distinguishes the options, if there is one."""
        tag = self._tags.missing(spot.schema, keyword)
        if tag is None:
            return values
        return self.algebra.met(values, with_all_but(objects=(_having(tag),)))

    def negation(self, spot: Spot, keyword: str) -> JsonValues:
        return self.algebra.negated(self.values(self.below(spot, keyword)))

    def conditional(self, spot: Spot, keyword: str) -> JsonValues:
        condition = self.values(self.below(spot, keyword))
        then, other = (self._branch(spot, branch) for branch in ("then", "else"))
        if then == other == ALL and not self.document.has_unevaluated:
            return ALL
        met = self.algebra.met(condition, then)
        return join([met, self.algebra.met(self.algebra.negated(condition), other)])

    def _branch(self, spot: Spot, keyword: str) -> JsonValues:
        if not self.is_read(spot, keyword):
            return ALL
        return self.values(self.below(spot, keyword))

    def dependent(self, spot: Spot, keyword: str) -> JsonValues:
        """The values that a member's presence allows: other members, or a schema of the object."""
        found = ALL
        for name, demanded in keywords.mapping(spot.schema[keyword]).items():
            if isinstance(demanded, list) and keyword != "dependentSchemas":
                needed = Objects({n: Field(ANY_VALUE, True) for n in keywords.texts(demanded)})
                then = with_all_but(objects=(needed,))
            elif keyword == "dependentRequired":
                raise ValueError("must have arrays of names")
            else:
                then = self.values(self.below(spot, keyword, name))
            present = JsonValues(objects=(_having(name),))
            lacking = with_all_but(objects=(Objects({name: Field(NO_VALUE)}),))
            found = self.algebra.met(found, join([lacking, self.algebra.met(present, then)]))
        return found

    # Items and members that no other keyword has read

    def _unevaluated(self, spot: Spot, found: JsonValues) -> JsonValues:
        arrays, objects = found.arrays, found.objects
        if self.is_read(spot, "unevaluatedItems"):
            form = self.below(spot, "unevaluatedItems")
            arrays = tuple(self._other_items(one, form) for one in arrays)
        if self.is_read(spot, "unevaluatedProperties"):
            form = self.below(spot, "unevaluatedProperties")
            objects = tuple(self._other_members(one, form) for one in objects)
        return JsonValues(found.null, found.booleans, found.numbers, found.text, arrays, objects)

    def _other_items(self, one: Arrays, form: Form) -> Arrays:
        if one.read is None:
            return one
        form = self.either([form, *one.read_some])
        length = max(len(one.first), one.read)
        items = (item_of(one, index) for index in range(length))
        first = tuple(
            item if index < one.read else self.both(item, form) for index, item in enumerate(items)
        )
        rest = self.both(one.rest, form)
        return Arrays(first, rest, one.least, one.most, one.some, one.unique, None)

    def _other_members(self, one: Objects, form: Form) -> Objects:
        fields = {
            name: field
            if self.algebra.texts.has(one.read.sure, name)
            else Field(self.both(field.form, form), field.required)
            for name, field in one.fields.items()
        }
        unread = not_text(one.read)
        others = []
        for names, member in one.others:
            kept = self.algebra.met_texts(names, one.read)
            rest = self.algebra.met_texts(names, unread)
            several = (Named(kept, member), Named(rest, self.both(member, form)))
            others += [o for o in several if o.names.sure != NOTHING and o.form != NO_VALUE]
        return Objects(fields, tuple(others), one.least, one.most, one.some, ANY_TEXT)


# Which property distinguishes the options of a union, though not all of them require it


class Tags:
    """Finds the tags of one schema. follow: gives the schema that a `$ref` names, or None."""

    def __init__(self, follow: Callable[[str], Any]) -> None:
        self._follow = follow
        self._steps = 0

    def missing(self, schema: dict[str, Any], keyword: str) -> str | None:
        """A property that all options of `oneOf` or `anyOf` have, and some do not require.

        That is what `discriminator` names. For `oneOf` without one it is the first property whose
        constants all differ.
        """
        options: list[dict[str, Any]] = []
        for leaf in self._leaves(schema[keyword]):
            if leaf is None:
                return None
            options.append(leaf)
        tag = _named(schema.get("discriminator"))
        if tag is None and keyword == "oneOf":
            tag = next((name for name in options[0]["properties"] if _differ(name, options)), None)
        if tag is None or not all(tag in option["properties"] for option in options):
            return None
        return None if all(_requires(option, tag) for option in options) else tag

    def _leaves(self, options: list[Any]) -> Iterator[dict[str, Any] | None]:
        """Yields the objects among the options, with unions opened; None for any other option."""
        waiting = options[::-1]
        while waiting:
            option = waiting.pop()
            self._steps += 1
            if self._steps > _MOST_STEPS_TO_TAGS or not isinstance(option, dict):
                yield None
                return
            union = next((option[key] for key in _UNIONS if key in option), None)
            if isinstance(option.get("properties"), dict):
                yield option
            elif isinstance(option.get("$ref"), str):
                waiting.append(self._follow(option["$ref"]))
            elif isinstance(union, list):
                waiting += union[::-1]
            else:
                yield None


def _named(discriminator: Any) -> str | None:
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return name if isinstance(name, str) else None


def _differ(name: str, options: list[dict[str, Any]]) -> bool:
    constants = [_constant(option["properties"].get(name)) for option in options]
    return None not in constants and len(set(constants)) == len(constants)


def _constant(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return keywords.same_text(schema["const"])
    values = schema.get("enum")
    return keywords.same_text(values[0]) if isinstance(values, list) and len(values) == 1 else None


def _requires(option: dict[str, Any], name: str) -> bool:
    required = option.get("required")
    return isinstance(required, list) and name in required


def _having(name: str) -> Objects:
    return Objects({name: Field(ANY_VALUE, True)})


def _type(_: Reader, spot: Spot, keyword: str) -> JsonValues:
    return of_types(keywords.types(spot.schema[keyword]))


_READERS: tuple[tuple[tuple[str, ...], Callable[[Reader, Spot, str], JsonValues]], ...] = (
    (("type",), _type),
    *GROUPS,
    (("$ref",), Reader.reference),
    (("$dynamicRef",), Reader.reference),
    (("allOf",), Reader.all_of),
    (("anyOf",), Reader.any_of),
    (("oneOf",), Reader.one_of),
    (("not",), Reader.negation),
    (("if",), Reader.conditional),
    *(((keyword,), Reader.dependent) for keyword in _DEPENDENT),
)
