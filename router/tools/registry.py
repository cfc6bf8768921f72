"""The formats of tool calls by name. Pure."""

from router.tools.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from router.tools.formats.format import ToolFormat
from router.tools.formats.functionary import FUNCTIONARY
from router.tools.formats.granite import GRANITE
from router.tools.formats.hermes import HERMES
from router.tools.formats.llama3_json import LLAMA3_JSON
from router.tools.formats.mistral import MISTRAL, MISTRAL_LIST
from router.tools.formats.phi4_mini import PHI4_MINI

_ALL: tuple[ToolFormat, ...] = (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_LIST,
    PHI4_MINI,
    GRANITE,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTIONARY,
)
FORMATS = {tool_format.name: tool_format for tool_format in _ALL}


def detect(template_source: str) -> ToolFormat | None:
    """The format that a chat template writes calls in; None where it writes none that is known."""
    return HERMES if "<tool_call>" in template_source else None
