"""Mistral. Pure."""

from router.tools.formats.json_calls import JsonCalls

# [TOOL_CALLS][{"name": …, "arguments": {…}}, {…}]
MISTRAL_LIST = JsonCalls("mistral_list", ("[TOOL_CALLS]",), listed=True)
