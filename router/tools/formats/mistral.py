"""Mistral. Pure."""

from loraplex.router.tools.formats.json_calls import JsonCalls
from loraplex.router.tools.formats.named_calls import NamedCalls

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

# [TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, {…}]
MISTRAL_LIST = JsonCalls("mistral_list", (_OPEN,), listed=True, ids=True, short_ids=True)
# [TOOL_CALLS]name[ARGS]{…}
MISTRAL = NamedCalls("mistral", (_OPEN, _ARGUMENTS), open=_OPEN, middle=_ARGUMENTS, short_ids=True)
# [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}
MISTRAL_IDS = NamedCalls(
    "mistral_ids",
    (_OPEN, _ID, _ARGUMENTS),
    open=_OPEN,
    middle=_ARGUMENTS,
    id_marker=_ID,
    short_ids=True,
)
