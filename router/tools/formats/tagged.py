"""Calls whose arguments stand in tags, each in its own, by the schema of each. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loraplex.router.parts.parts import Scan, Steps
from loraplex.router.shape.lark import Lark
from loraplex.router.shape.schema.json_rules import is_void, json_grammar
from loraplex.router.tools.formats.grammar import arguments_schema, keeps_schema
from loraplex.router.tools.formats.json_calls import flowing_value, json_value
from loraplex.router.tools.tools import Tool, Tools

_NOTES = {"title", "description", "$schema", "$id", "$comment", "examples", "default"}
_NOTES |= {"deprecated", "readOnly", "writeOnly"}
_SHARED = "$defs", "definitions"
_KNOWN = {"type", "properties", "required", "additionalProperties", *_SHARED, *_NOTES}
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef)": "(?!#/(?:\$defs|definitions)/)')

Schema = dict[str, Any] | bool

_NAME = re.compile(r"[^<>\n]*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
LINE = '"\\n"?'


def separate_arguments(schema: dict[str, Any]) -> dict[str, Schema] | None:
    """Each argument's schema, in order; None where the arguments must keep to more than these.
    Arguments beyond those that the schema names are left out."""
    properties = schema.get("properties", {})
    if schema.keys() - _KNOWN or one_type(schema) != "object":
        return None
    if any(name not in properties for name in schema.get("required", ())):
        return None
    if _REFERENCE.search(json.dumps(schema)):
        return None
    shared = {key: schema[key] for key in _SHARED if key in schema}
    found = {
        name: {**sub, **shared} if isinstance(sub, dict) else sub
        for name, sub in properties.items()
    }
    return {name: sub for name, sub in found.items() if not is_void(sub)}


def is_text(schema: Schema | None) -> bool:
    """Whether values are strings of which nothing but the length or a list of texts is asked."""
    if not isinstance(schema, dict) or one_type(schema) != "string":
        return False
    asked = schema.keys() - {"type", *_SHARED, *_NOTES}
    texts = schema.get("enum", [schema.get("const")])
    listed = len(asked) == 1 and asked <= {"enum", "const"}
    return asked <= {"minLength", "maxLength"} or (
        listed and all(isinstance(text, str) for text in texts)
    )


def is_plain(schema: Schema) -> bool:
    """Whether nothing but the type is asked."""
    return isinstance(schema, dict) and not schema.keys() - {"type", *_SHARED, *_NOTES}


def one_type(schema: Schema | None) -> str | None:
    """The type that values have, where the schema names one alone."""
    found = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    return found if isinstance(found, str) else None


class ArgumentTags(msgspec.Struct, frozen=True):
    """A format in which tags name each argument. An argument is `open`, its name, `middle`, its
    value, `close`.

    padding: what natively stands before and after the value. Between the texts of `middle` may be
    space. Texts stand as they are, other values as JSON.
    """

    open: str
    middle: tuple[str, ...]
    close: str
    padding: str = ""

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end a text."""
        return tuple(dict.fromkeys((self.padding + self.close, self.close)))

    # Grammar

    def rules(self, tools: Tools, tool: Tool, lark: Lark) -> str:
        """Rules for a call's arguments: one JSON object if they cannot be written one by one."""
        if not keeps_schema(tools, tool):
            begin = f"{lark.literal(self.open)} /[^<>\\n]{{1,128}}/ {self._middle(lark)}"
            return f"({begin} {self._text(lark)} {LINE})*"
        schema = arguments_schema(tools, tool)
        separate = separate_arguments(schema)
        if separate is None or not all(name and _NAME.fullmatch(name) for name in separate):
            return f"{json_grammar(lark, schema)} {LINE}"
        required = schema.get("required", ())
        return " ".join(
            f"({self._argument(lark, name, sub)}){'' if name in required else '?'}"
            for name, sub in separate.items()
        )

    def _middle(self, lark: Lark) -> str:
        between = f" {LINE} ".join(map(lark.literal, self.middle))
        return f"{between} {lark.literal(self.padding)}"

    def _argument(self, lark: Lark, name: str, schema: Schema) -> str:
        begin = f"{lark.literal(self.open + name)} {self._middle(lark)}"
        if isinstance(schema, dict) and is_text(schema):
            return f"{begin} {self._text(lark, schema)} {LINE}"
        return f"{begin} {json_grammar(lark, schema)} {lark.literal(self.ends[0])} {LINE}"

    def _text(self, lark: Lark, schema: dict[str, Any] | None = None) -> str:
        """A text and the end of its tag."""
        schema = schema or {}
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if texts is not None:
            return lark.either(lark.literal(f"{text}{self.ends[0]}") for text in texts)
        text = rf"(?s:.{{{least},{most}}})" if least or most != "" else "(?s:.*)"
        if lark.has_special(self.close):
            return f"{lark.regex(text + _exactly(self.padding))} {lark.literal(self.close)}"
        whole = lark.regex(text + _exactly(self.ends[0]))
        later = lark.regex(f"(?s:.*){_exactly(self.close)}(?s:.+)")
        return lark.terminal("TEXT", f"{whole} & ~{later}")

    # Reader

    def arguments(
        self, scan: Scan, schemas: Mapping[str, Schema], ends: Sequence[str]
    ) -> Steps[str]:
        """Reads up to one of `ends`, which is returned; "" where the answer ends before."""
        yield from scan.spaces()
        scan.drop()
        if (yield from scan.peek()) == "{":
            yield from flowing_value(scan)
            return (yield from scan.until(ends, scan.drop))
        sign = "{"
        while True:
            word = yield from scan.until((self.open, *ends), scan.drop)
            scan.drop()
            if word != self.open:
                if word:
                    scan.arguments("{}" if sign == "{" else "}")
                return word
            name = yield from scan.run(_NAME)
            if not (yield from self._passes_middle(scan)):
                continue
            scan.arguments(f"{sign}{json.dumps(name, ensure_ascii=False)}: ")
            sign = ", "
            if self.padding:
                yield from scan.literal(self.padding)
            scan.drop()
            if not (yield from self._value(scan, schemas.get(name))):
                return ""

    def _passes_middle(self, scan: Scan) -> Steps[bool]:
        for number, text in enumerate(self.middle):
            if number:
                yield from scan.spaces()
            if not (yield from scan.literal(text)):
                return False
        return True

    def _value(self, scan: Scan, schema: Schema | None) -> Steps[bool]:
        """Reads a value and the end of its tag; False where the answer ends before."""
        if is_text(schema):
            scan.arguments('"')
            ended = yield from scan.until(self.ends, lambda: self._give_text(scan))
            scan.drop()
            if ended:
                scan.arguments('"')
            return bool(ended)
        yield from json_value(scan)
        value = scan.since(0)
        yield from scan.spaces()
        if not (yield from scan.literal(self.close)):
            scan.at = scan.start
            ended = yield from scan.until(self.ends, lambda: None)
            if not ended:
                scan.drop()
                return False
            value = scan.since(0).removesuffix(ended)
        scan.drop()
        scan.arguments(_as_json(value, schema))
        return True

    def _give_text(self, scan: Scan) -> None:
        text = scan.since(0)
        if scan.closed and scan.at == len(scan.buffer):
            text = self._without_partial_end(text)
        scan.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        scan.drop()

    def _without_partial_end(self, text: str) -> str:
        """The answer may have ended within the tag's end."""
        begins = {end[:length] for end in self.ends for length in range(1, len(end))}
        found = max((begin for begin in begins if text.endswith(begin)), key=len, default="")
        return text.removesuffix(found)


def _exactly(text: str) -> str:
    """A pattern of this text alone; newlines stand as they are."""
    return re.escape(text).replace("\\\n", "\n")


def properties(tool: Tool) -> Mapping[str, Schema]:
    """The schemas of a tool's arguments, as far as they stand by themselves."""
    found: dict[str, Schema] = (tool.parameters or {}).get("properties", {})
    return found


def _as_json(text: str, schema: Schema | None) -> str:
    """JSON stays; Python's words become JSON's; another text is a string."""
    stripped = text.strip()
    found = _PYTHON.get(stripped, stripped)
    try:
        value = json.loads(found, parse_constant=_refuse)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    is_string = one_type(schema) == "string"
    return (
        json.dumps(text, ensure_ascii=False) if is_string and not isinstance(value, str) else found
    )


def _refuse(constant: str) -> None:
    raise ValueError(constant)
