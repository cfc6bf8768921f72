"""Rules of llguidance's Lark for the JSON that a schema accepts, and the schemas that a grammar can
hold answers to. Pure.

The rules are made first as plain alternatives. Those that no text can end are left out, so that no
answer runs into one.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import msgspec

from loraplex.router.shape.lark import Lark
from loraplex.router.shape.schema.json_text import few_numbers, literal, number, string
from loraplex.router.shape.schema.keywords import BINDING, SchemaRefused, below, parts_of
from loraplex.router.shape.schema.reader import Reader
from loraplex.router.shape.schema.values import (
    ANY_VALUE,
    NO_VALUE,
    Arrays,
    CannotHold,
    Field,
    Form,
    JsonValues,
    Named,
    Objects,
    exactly,
    item_of,
)
from loraplex.router.shape.texts.format import FORMATS
from loraplex.router.shape.texts.regex import (
    NOTHING,
    Regex,
    TextsTooCostly,
    is_endless,
    negated,
    words,
)

_MOST_ALTERNATIVES = 20_000
# Where a pattern lets at most so many names through, they are written out.
_MOST_NAMES = 64
_MOST_UNIQUE = 60

Schema = dict[str, Any] | bool

_MOST_DROPPED = 40
_NAMING = frozenset(("$defs", "definitions", "$id", "id", "$anchor", "$dynamicAnchor", "$schema"))
# Keywords that let fewer values through the more their schemas accept.
_NEGATIVE = ("not", "if")


class Spacing(msgspec.Struct, frozen=True):
    """Patterns around the signs of JSON. between: white space between any of its parts."""

    comma: str = ", ?"
    colon: str = ": ?"
    between: str = ""


class _Key(NamedTuple):
    """A rule: of a form's values, or of what may follow within one of its arrays or objects."""

    kind: str
    form: Form
    number: int = 0
    state: tuple[Any, ...] = ()


class _Many(NamedTuple):
    parts: "tuple[_Symbol, ...]"
    least: int
    most: int | None


_Symbol = str | _Key | _Many
_Way = tuple[_Symbol, ...]


class _Members(NamedTuple):
    """The state of writing an object. fewest, most: members so far, as far as they count.
    missing: of `some`, those that are still to come. has_free: the next free name may be no new
    one."""

    field: int
    begun: bool
    fewest: int
    most: int
    missing: tuple[int, ...]
    has_free: bool = False


class _Items(NamedTuple):
    item: int
    counts: tuple[int, ...]


def json_rules(lark: Lark, reader: Reader, spacing: Spacing) -> str:
    """The expression of JSON that the schema accepts. Raises SchemaRefused."""
    return _Writer(lark, reader, spacing).write()


class _Writer:
    def __init__(self, lark: Lark, reader: Reader, spacing: Spacing) -> None:
        self._lark = lark
        self._reader = reader
        self._texts = reader.algebra.texts
        space = f"(?:{spacing.between})" if spacing.between else ""
        self._comma = lark.regex(f"{space}{spacing.comma}{space}")
        self._colon = lark.regex(f"{space}{spacing.colon}{space}")
        self._open = {sign: lark.regex(rf"\{sign}{space}") for sign in "[{"}
        self._close = {sign: lark.regex(rf"{space}\{sign}") for sign in "]}"}
        self._terminals: dict[str, str] = {}
        self._objects: dict[_Key, tuple[Objects, list[tuple[str, Field]]]] = {}
        self._ways: dict[_Key, list[_Way]] = {}

    def write(self) -> str:
        root = _Key("value", self._reader.root)
        try:
            self._make(root)
        except TextsTooCostly:
            reason = "its patterns cost too much to compare"
            raise SchemaRefused(self._reader.place, "", reason) from None
        ending = _ending(self._ways)
        if root not in ending:
            raise self._no_answer(root)
        return self._written(root, ending)

    def _make(self, root: _Key) -> None:
        waiting, count = [root], 0
        while waiting:
            key = waiting.pop()
            if key in self._ways:
                continue
            try:
                ways = self._ways[key] = list(dict.fromkeys(self._made(key)))
            except CannotHold as error:
                raise self._reader.refusal(key.form, error) from None
            count += len(ways) + 1
            if count > _MOST_ALTERNATIVES:
                reason = "it is too large to be held to"
                raise SchemaRefused(self._reader.place, "", reason)
            waiting += [symbol for way in ways for symbol in _keys(way)]

    def _made(self, key: _Key) -> Iterator[_Way]:
        values = self._reader.values(key.form)
        match key.kind:
            case "value":
                yield from self._value(key.form, values)
            case "array":
                yield from self._items(key, values.arrays[key.number], _Items(*key.state))
            case "object":
                yield from self._members(key, values.objects[key.number], _Members(*key.state))

    def _value(self, form: Form, values: JsonValues) -> Iterator[_Way]:
        if values.null:
            yield (literal(None),)
        for one in sorted(values.booleans):
            yield (literal(one),)
        for numbers in values.numbers:
            yield (number(numbers),)
        if values.text.sure != NOTHING:
            yield (self._string(values.text.sure),)
        for index, array in enumerate(values.arrays):
            yield from self._array(_Key("array", form, index), array)
        for index, one_object in enumerate(values.objects):
            missing = tuple(range(len(one_object.some)))
            start = _Members(0, False, 0, 0, missing)
            yield self._open["{"], _Key("object", form, index, start)

    def _string(self, regex: Any) -> str:
        expression = string(regex)
        if expression not in self._terminals:
            self._terminals[expression] = self._lark.terminal("STRING", expression)
        return self._terminals[expression]

    # Arrays

    def _array(self, key: _Key, one: Arrays) -> Iterator[_Way]:
        if one.most is not None and one.most < one.least:
            return
        if one.unique and (one.most is None or one.most > 1):
            yield from self._unique(one)
        elif one.some:
            if len(one.some) > 3:
                raise CannotHold("is held to at most three times in one array", "contains")
            counts = (0,) * len(one.some)
            yield self._open["["], _Key("array", key.form, key.number, _Items(0, counts))
        else:
            if one.most != 0:
                yield (self._open["["], *self._plain_items(one, 0), self._close["]"])
            if one.least == 0:
                yield self._open["["], self._close["]"]

    def _plain_items(self, one: Arrays, index: int) -> _Way:
        """Items from this index on, at least one."""
        item = _Key("value", item_of(one, index))
        least, most = one.least - index - 1, None if one.most is None else one.most - index - 1
        if index >= len(one.first):
            return item, _Many((self._comma, item), max(least, 0), most)
        if most == 0:
            return (item,)
        more = (self._comma, *self._plain_items(one, index + 1))
        return item, _Many(more, min(max(least, 0), 1), 1)

    def _items(self, key: _Key, one: Arrays, at: _Items) -> Iterator[_Way]:
        """Ways on in an array of which some items are demanded."""
        done = all(n >= some.least for n, some in zip(at.counts, one.some, strict=True))
        if done and at.item >= one.least:
            yield (self._close["]"],)
        if one.most is not None and at.item >= one.most:
            return
        last = max(one.least, one.most or 0, len(one.first), *(some.start for some in one.some), 1)
        for form, counts in self._chosen(one, at):
            following = _Items(min(at.item + 1, last), counts)
            comma = (self._comma,) if at.item else ()
            yield (*comma, _Key("value", form), key._replace(state=following))

    def _chosen(self, one: Arrays, at: _Items) -> Iterator[tuple[Form, tuple[int, ...]]]:
        """Forms of the next item, with how many of each of `some` there are then."""
        forms = self._reader
        choices: list[list[tuple[Form, int]]] = []
        for count, some in zip(at.counts, one.some, strict=True):
            if at.item < some.start or (some.most is None and count >= some.least):
                choices.append([(ANY_VALUE, count)])
            elif some.most is None:
                choices.append([(ANY_VALUE, count), (some.form, count + 1)])
            else:
                more = [(some.form, count + 1)] if count < some.most else []
                choices.append([(forms.negated(some.form), count), *more])
        for choice in product(*choices):
            form = item_of(one, at.item)
            for demanded, _ in choice:
                form = forms.both(form, demanded)
            if form != NO_VALUE:
                yield form, tuple(count for _, count in choice)

    def _unique(self, one: Arrays) -> Iterator[_Way]:
        """Arrays of listed values, each at most once: which were there is the rules' parameter."""
        if one.some or any(form != one.rest for form in one.first[: one.most]):
            raise CannotHold("is held to only where all items have one schema", "uniqueItems")
        listed = self._listed(one.rest)
        if listed is None or len(listed) > _MOST_UNIQUE:
            reason = f"is held to only where items are from at most {_MOST_UNIQUE} values"
            raise CannotHold(f"{reason}, as of an `enum`", "uniqueItems")
        most = len(listed) if one.most is None else min(one.most, len(listed))
        more = self._lark.reserve("more")
        ways = [f"{self._close[']']} %if bit_count_ge(_, {one.least})"]
        for bit, value in enumerate(listed):
            here = f"%if and(bit_clear({bit}), bit_count_lt(_, {most}))"
            ways.append(f"{self._comma} {value} {more}::set_bit({bit}) {here}")
        self._lark.define(more, " | ".join(ways), parameter="::_")
        first = [f"{value} {more}::{1 << bit:#x}" for bit, value in enumerate(listed)]
        if one.least <= most:
            ends = [self._close["]"]] if one.least == 0 else []
            yield self._open["["], self._lark.either([*first, *ends])

    def _listed(self, form: Form) -> list[str] | None:
        """All values of a form as literals, if they are few and no arrays or objects."""
        values = self._reader.values(form)
        texts = self._texts.listed(values.text.sure, _MOST_UNIQUE)
        if texts is None or values.arrays or values.objects:
            return None
        found = [literal(None)] if values.null else []
        found += map(literal, [*sorted(values.booleans), *texts])
        for numbers in values.numbers:
            few = few_numbers(numbers, _MOST_UNIQUE)
            if few is None:
                return None
            found += map(literal, few)
        return list(dict.fromkeys(found))

    # Objects

    def _fields(self, key: _Key, one: Objects) -> tuple[Objects, list[tuple[str, Field]]]:
        """The members, with the names written out that a narrow pattern lets through."""
        key = key._replace(state=())
        if key not in self._objects:
            fields = [(n, f) for n, f in one.fields.items() if f.required or f.form != NO_VALUE]
            free = exactly(negated(words(one.fields)))
            others = []
            for names, form in one.others:
                left = self._reader.algebra.met_texts(names, free)
                listed = self._texts.listed(left.sure, _MOST_NAMES)
                if listed is None:
                    others.append(Named(left, form))
                else:
                    fields += [(name, Field(form)) for name in listed]
            needed = sum(field.required for _, field in fields)
            is_sure = all(self._never_again(names.sure) for names, _ in others)
            if one.least > needed + 1 and not is_sure:
                reason = f"may be at most {needed + 1} here: one more than `required` names"
                raise CannotHold(reason, "minProperties")
            shown = msgspec.structs.replace(one, others=tuple(others))
            self._objects[key] = shown, fields
        return self._objects[key]

    def _members(self, key: _Key, whole: Objects, at: _Members) -> Iterator[_Way]:
        """Ways on in an object, up to its end."""
        one, fields = self._fields(key, whole)
        if at.field == len(fields):
            yield from self._free_members(key, one, at)
            return
        name, (form, required) = fields[at.field]
        if not required:
            yield (key._replace(state=at._replace(field=at.field + 1)),)
        if one.most is not None and at.most >= one.most:
            return
        following = _counted(one, at)._replace(field=at.field + 1)
        comma = (self._comma,) if at.begun else ()
        has = self._texts.has
        missing = [n for n in at.missing if has(one.some[n].names.sure, name)]
        for member, left in self._demanded(one, form, at.missing, missing):
            rest = key._replace(state=following._replace(missing=left))
            yield (*comma, literal(name), self._colon, _Key("value", member), rest)

    def _never_again(self, names: Regex) -> bool:
        """Whether each of these names is sure to come once: there is always another."""
        return self._lark.names_once and is_endless(names)

    def _free_members(self, key: _Key, one: Objects, at: _Members) -> Iterator[_Way]:
        if at.fewest >= one.least and not at.missing:
            yield (self._close["}"],)
        if one.most is not None and at.most >= one.most:
            return
        comma = (self._comma,) if at.begun else ()
        for names, form in one.others:
            for left in ((), *((n,) for n in at.missing)):
                met, member = names, form
                for index in left:
                    met = self._reader.algebra.met_texts(met, one.some[index].names)
                    member = self._reader.both(member, one.some[index].form)
                if met.sure == NOTHING or member == NO_VALUE:
                    continue
                missing = tuple(n for n in at.missing if n not in left)
                self._lark.has_free_names = True
                self._lark.names_run_out |= not is_endless(met.sure)
                # Where a name may come again, only the first is known to be one more.
                has_free = at.has_free or not self._never_again(met.sure)
                following = _counted(one, at, counts=not at.has_free)._replace(has_free=has_free)
                rest = key._replace(state=following._replace(missing=missing))
                value = _Key("value", member)
                yield (*comma, self._string(met.sure), self._colon, value, rest)

    def _demanded(
        self, one: Objects, form: Form, missing: tuple[int, ...], here: list[int]
    ) -> Iterator[tuple[Form, tuple[int, ...]]]:
        """Yields the member's form without and with each demand, and the demands left then."""
        yield form, missing
        for index in here:
            left = tuple(n for n in missing if n != index)
            yield self._reader.both(form, one.some[index].form), left

    # Writing

    def _written(self, root: _Key, ending: set[_Key]) -> str:
        names = {key: self._lark.reserve(key.kind) for key in self._ways if key in ending}
        for key, name in names.items():
            ways = [way for way in self._ways[key] if _is_ending(way, ending)]
            body = " | ".join(self._line(way, names) for way in ways)
            self._lark.define(name, body)
        return names[root]

    def _line(self, way: _Way, names: dict[_Key, str]) -> str:
        parts: list[str] = []
        for symbol in way:
            if isinstance(symbol, str):
                parts.append(symbol)
            elif isinstance(symbol, _Key):
                parts.append(names[symbol])
            elif _is_ending(symbol.parts, names.keys()) and symbol.most != 0:
                most = "" if symbol.most is None else symbol.most
                body = self._line(symbol.parts, names)
                times = "?" if (symbol.least, most) == (0, 1) else f"{{{symbol.least},{most}}}"
                parts.append(body if symbol.least == most == 1 else f"({body}){times}")
        return " ".join(parts) or '""'

    def _no_answer(self, root: _Key) -> SchemaRefused:
        place = self._reader.place
        if root in _ending(self._ways, loops_end=True):
            return SchemaRefused(place, "", "refers to itself so that an answer could not end")
        return self._reader.no_answer() or SchemaRefused(place, "", "accepts no answer")


def _counted(one: Objects, at: _Members, *, counts: bool = True) -> _Members:
    """The state of an object's members after one more member."""
    fewest = min(at.fewest + counts, one.least)
    most = 0 if one.most is None else at.most + 1
    return at._replace(begun=True, fewest=fewest, most=most)


def _keys(way: Iterable[_Symbol]) -> Iterator[_Key]:
    for symbol in way:
        if isinstance(symbol, _Key):
            yield symbol
        elif isinstance(symbol, _Many):
            yield from _keys(symbol.parts)


def _ending(ways: Mapping[_Key, list[_Way]], *, loops_end: bool = False) -> set[_Key]:
    """The rules that can end. loops_end: rules that lead back to themselves count as ended."""
    users: dict[_Key, set[_Key]] = {key: set() for key in ways}
    for key, several in ways.items():
        for symbol in {one for way in several for one in _keys(way)}:
            users[symbol].add(key)
    found = set(ways) if loops_end else set[_Key]()
    waiting = list(ways)
    while waiting:
        key = waiting.pop()
        ends = any(_is_ending(way, found) for way in ways[key])
        if ends is not (key in found):
            found ^= {key}
            waiting += users[key]
    return found


def _is_ending(way: Iterable[_Symbol], ending: Collection[_Key]) -> bool:
    for symbol in way:
        if isinstance(symbol, _Key) and symbol not in ending:
            return False
        if isinstance(symbol, _Many) and symbol.least and not _is_ending(symbol.parts, ending):
            return False
    return True


ONE_LINE = Spacing()
# Enough for text on one line or indented, and too little to go on for ever.
LOOSE = Spacing(",", ":", r"( |\r?\n[ \t]{0,64})?")


def json_grammar(
    lark: Lark, schema: Schema, spacing: Spacing = ONE_LINE, param: str = "schema"
) -> str:
    """The expression of JSON that the schema accepts. Raises SchemaRefused."""
    try:
        return json_rules(lark, Reader(schema, param), spacing)
    except RecursionError:
        raise SchemaRefused(param, "", "is nested too deep to be held to") from None


def checked(schema: Schema, param: str) -> Schema:
    """The schema without annotations. Raises SchemaRefused where it cannot be held to."""
    json_grammar(Lark(), schema, param=param)
    held: Schema = _without(schema, param, frozenset())
    return held


def as_far_as_held(schema: dict[str, Any], param: str) -> tuple[Schema, tuple[str, ...]]:
    """Returns the schema without the keywords that cannot be held to, and their places."""
    dropped: dict[tuple[str, str], None] = {}
    try:
        outer = _negatives(schema, param)
        for _ in range(_MOST_DROPPED):
            left = frozenset(dropped)
            try:
                json_rules(Lark(), Reader(schema, param, left), ONE_LINE)
            except SchemaRefused as error:
                found = outer.get(error.place, (error.place, error.keyword))
                if not found[1] or found in dropped:
                    break
                dropped[found] = None
            else:
                held = checked(_without(schema, param, left), param)
                return held, tuple(below(*one) for one in dropped)
    except SchemaRefused:
        pass
    return {"type": "object"}, (param,)


def is_void(schema: Schema) -> bool:
    """Whether no value keeps to a schema that can be held to."""
    try:
        json_grammar(Lark(), schema)
    except SchemaRefused:
        return True
    return False


def _without(schema: Any, place: str, dropped: frozenset[tuple[str, str]]) -> Any:
    """A copy without these keywords, and without annotations."""
    if not isinstance(schema, dict):
        return schema
    kept = {
        keyword: value
        for keyword, value in schema.items()
        if (place, keyword) not in dropped
        and (keyword in BINDING or keyword in _NAMING or keyword == "discriminator")
        and (keyword != "format" or value in FORMATS)
    }
    for keys in parts_of(kept):
        keyword, *rest = keys
        assert isinstance(keyword, str)
        inner = _without(_at(kept, keys), below(place, *keys), dropped)
        if rest:
            kept[keyword] = kept[keyword].copy()
            kept[keyword][rest[0]] = inner
        else:
            kept[keyword] = inner
    return kept


def _at(found: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        found = found[key]
    return found


def _negatives(schema: Any, param: str) -> dict[str, tuple[str, str]]:
    """The outermost place and keyword that negates, for each place below `not` and its like."""
    found: dict[str, tuple[str, str]] = {}
    waiting: list[tuple[Any, str, tuple[str, str] | None]] = [(schema, param, None)]
    while waiting:
        here, place, outer = waiting.pop()
        if outer is not None:
            found[place] = outer
        for keys in parts_of(here) if isinstance(here, dict) else ():
            is_first = outer is None and keys[0] in _NEGATIVE
            inner = (place, str(keys[0])) if is_first else outer
            waiting.append((_at(here, keys), below(place, *keys), inner))
    return found
