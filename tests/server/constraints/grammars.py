"""Grammars of all kinds over the demo model's tokens."""

import json

from msgspec.structs import replace

from loraplex.router.shape.lark import Lark
from loraplex.router.tools.registry import FORMATS
from loraplex.router.tools.tools import Tool, Tools

TICKET = json.dumps(
    {
        "type": "object",
        "properties": {
            "department": {"enum": ["billing", "front desk", "shipping"]},
            "urgent": {"type": "boolean"},
            "note": {"type": "string", "maxLength": 12},
            "lines": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        },
        "required": ["department", "urgent", "note"],
        "additionalProperties": False,
    }
)
_TOOLS = Tools(
    offered=(
        Tool(
            "cancel_order",
            parameters={
                "type": "object",
                "properties": {"order": {"type": "string", "maxLength": 6}},
                "required": ["order"],
                "additionalProperties": False,
            },
        ),
        Tool("track_order"),
    )
)


def _calls(name: str, mode: str) -> str:
    lark = Lark()
    return lark.source(FORMATS[name].rules(replace(_TOOLS, mode=mode), lark))


GRAMMARS = {
    "json": f"start: %json {TICKET}",
    "pattern": "start: /[0-9]{3}-[a-f]{2,5}( of [0-9]{4})?/",
    "choice": 'start: "yes, of course" | "yes, but not now" | "no"',
    "late": f'start: /[a-z ]{{0,20}}/ "=> " %json {TICKET}',
    "special": 'start: "call" <[1]> "name: " /[a-z]{1,4}/ <[5]> | <[1]> /[a-z]+/',
    "free": "start: /(?s:.*)/",
    "any tool": _calls("hermes", "auto"),
    "some tool": _calls("hermes", "required"),
}
