"""Custom tools, whose calls are texts: to the model functions of one text, `input`. Pure."""

from typing import Literal

import msgspec

from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.router.api.request.body import require
from loraplex.router.tools.tools import Tool


class CustomFormat(msgspec.Struct, frozen=True):
    """The form of a custom tool's text. definition: a regular expression or a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["regex", "lark"] | None = None
    definition: str | None = None


def custom_tool(name: str, description: str | None, form: CustomFormat | None, place: str) -> Tool:
    """Makes a custom tool a function. place: of its format. Raises RequestError."""
    form, text = form or CustomFormat("text"), {"type": "string"}
    is_grammar, definition = form.type == "grammar", form.definition or ""
    for field in ("syntax", "definition"):
        has = getattr(form, field) is not None
        require(has == is_grammar, "goes with `grammar`", f"{place}.{field}")
    if form.syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    elif is_grammar:
        text["description"] = f"A text of this grammar, in Lark's notation:\n{definition}"
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    is_regex, is_lark = form.syntax == "regex", form.syntax == "lark"
    return Tool(name, description, schema, is_regex, place, is_lark)


def custom_arguments(text: str) -> str:
    """Writes a custom tool's input as the arguments of a function."""
    return msgspec.json.encode({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """Reads a custom tool's input; of a call that broke off, it is what the model wrote."""
    try:
        found = decode_object(arguments.encode()).get("input")
    except StrictJsonError:
        found = None
    return found if isinstance(found, str) else arguments
