"""The formats of tool calls by name. Pure."""

from router.tools.formats.format import ToolFormat
from router.tools.formats.hermes import HERMES

_ALL: tuple[ToolFormat, ...] = (HERMES,)
FORMATS = {tool_format.name: tool_format for tool_format in _ALL}


def detect(template_source: str) -> ToolFormat | None:
    """The format that a chat template writes calls in; None where it writes none that is known."""
    return HERMES if "<tool_call>" in template_source else None
