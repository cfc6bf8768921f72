"""Mistral. Pure."""

from router.tools.formats.json_calls import JsonCalls
from router.tools.formats.named_calls import NamedCalls

# [TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, {…}]
MISTRAL_LIST = JsonCalls("mistral_list", ("[TOOL_CALLS]",), listed=True, ids=True)
# [TOOL_CALLS]name[ARGS]{…}
MISTRAL = NamedCalls("mistral", ("[TOOL_CALLS]", "[ARGS]"), open="[TOOL_CALLS]", middle="[ARGS]")
