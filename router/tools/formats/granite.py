"""Granite 3. Pure."""

from loraplex.router.tools.formats.json_calls import JsonCalls

# <|tool_call|>[{"name": …, "arguments": {…}}, {…}]
GRANITE = JsonCalls("granite", ("<|tool_call|>", "<tool_call>"), listed=True)
