"""The schema of a call's arguments, one argument at a time. Pure."""

import json
import re
from typing import Any

from loraplex.router.shape.schema.held import is_void

_NOTES = {"title", "description", "$schema", "$id", "$comment", "examples", "default"}
_NOTES |= {"deprecated", "readOnly", "writeOnly"}
_SHARED = "$defs", "definitions"
_KNOWN = {"type", "properties", "required", "additionalProperties", *_SHARED, *_NOTES}
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef)": "(?!#/(?:\$defs|definitions)/)')

Schema = dict[str, Any] | bool


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
