"""Phi-4-mini. Pure."""

from loraplex.router.tools.formats.json_calls import JsonCalls

# <|tool_call|>[{"name": …, "arguments": {…}}]<|/tool_call|> or functools[{…}]
PHI4_MINI = JsonCalls("phi4_mini", ("<|tool_call|>", "functools["), "<|/tool_call|>", listed=True)
