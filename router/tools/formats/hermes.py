"""Hermes, Qwen 2.5 and Qwen 3. Pure."""

from loraplex.router.tools.formats.json_calls import JsonCalls

# <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>
HERMES = JsonCalls("hermes", ("<tool_call>",), "</tool_call>", lines=True)
