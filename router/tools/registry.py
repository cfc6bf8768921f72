"""The formats of tool calls by name. Pure."""

from loraplex.router.tools.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from loraplex.router.tools.formats.format import ToolFormat
from loraplex.router.tools.formats.functionary import FUNCTIONARY, FUNCTIONARY_V3
from loraplex.router.tools.formats.glm import GLM
from loraplex.router.tools.formats.granite import GRANITE
from loraplex.router.tools.formats.harmony import HARMONY
from loraplex.router.tools.formats.hermes import HERMES
from loraplex.router.tools.formats.llama3_json import LLAMA3_JSON
from loraplex.router.tools.formats.mistral import MISTRAL, MISTRAL_IDS, MISTRAL_LIST
from loraplex.router.tools.formats.olmo3 import OLMO3
from loraplex.router.tools.formats.phi4_mini import PHI4_MINI
from loraplex.router.tools.formats.pythonic import PYTHONIC
from loraplex.router.tools.formats.qwen3_coder import QWEN3_CODER

_ALL: tuple[ToolFormat, ...] = (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_LIST,
    PHI4_MINI,
    GRANITE,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTIONARY,
    FUNCTIONARY_V3,
    QWEN3_CODER,
    GLM,
    PYTHONIC,
    HARMONY,
    OLMO3,
)
FORMATS = {tool_format.name: tool_format for tool_format in _ALL}

# Of the default text, and of calls that a grammar demands of any model.
DEFAULT: ToolFormat = HERMES

# What other families write within <tool_call>.
_OTHERS_IN_TAGS = "<function=", "<parameter=", "<arg_key>"


# The first whose texts a template has, and lacks.
_SIGNS: tuple[tuple[ToolFormat, tuple[str, ...], tuple[str, ...]], ...] = (
    (QWEN3_CODER, ("<tool_call>", "<function=", "<parameter="), ()),
    (GLM, ("<tool_call>", "<arg_key>", "<arg_value>"), ()),
    (FUNCTIONARY, ("<function=", "</function>"), ("<tool_call>", "<parameter=")),
    (FUNCTIONARY_V3, ("'>>>all", "'>>>' + tool_call"), ()),
    (MISTRAL_IDS, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), ()),
    (MISTRAL, ("[TOOL_CALLS]", "[ARGS]"), ()),
    (MISTRAL_LIST, ("[TOOL_CALLS]",), ("[ARGS]",)),
    (DEEPSEEK_V3, ("<｜tool▁calls▁begin｜>", "```json"), ()),
    (DEEPSEEK_V31, ("<｜tool▁calls▁begin｜>",), ()),
    (HERMES, ("<tool_call>", "</tool_call>", '"name":', '"arguments":'), _OTHERS_IN_TAGS),
    (GRANITE, ("<|start_of_role|>", "tools<|end_of_role|>"), ("</tool_call>",)),
    (OLMO3, ("<function_calls>",), ()),
    (HARMONY, ("<|channel|>", "to=functions."), ()),
    (PHI4_MINI, ("<|tool|>", "<|/tool|>"), ()),
    (PHI4_MINI, ("functools[",), ()),
    (PYTHONIC, ("[func_name1(",), ()),
    (LLAMA3_JSON, ('{"name": function name, "parameters":',), ()),
    (LLAMA3_JSON, ("<|python_tag|>", '"parameters":'), ()),
)


def detect(template_source: str) -> ToolFormat | None:
    """The format that a chat template writes calls in; None where it writes none that is known."""
    source = template_source.replace("\\", "")  # quotes stand escaped within texts
    for found, has, lacks in _SIGNS:
        if all(text in source for text in has) and not any(text in source for text in lacks):
            return found
    return None
