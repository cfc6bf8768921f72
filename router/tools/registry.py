"""The formats of tool calls by name. Pure."""

from loraplex.router.tools.formats.format import ToolFormat
from loraplex.router.tools.formats.glm import GLM
from loraplex.router.tools.formats.harmony import HARMONY
from loraplex.router.tools.formats.json_calls import JsonCalls
from loraplex.router.tools.formats.named_calls import NamedCalls
from loraplex.router.tools.formats.olmo3 import OLMO3
from loraplex.router.tools.formats.pythonic import PYTHONIC
from loraplex.router.tools.formats.qwen3_coder import QWEN3_CODER

# Hermes, Qwen 2.5 and Qwen 3: <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>
HERMES = JsonCalls("hermes", ("<tool_call>",), "</tool_call>", lines=True)

# Llama 3.1 and 3.2: {"name": …, "parameters": {…}}; {…}
LLAMA3_JSON = JsonCalls(
    "llama3_json",
    ("<|python_tag|>",),
    bare=True,
    between=";",
    arguments_key="parameters",
)

# Mistral
_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
# [TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, {…}]
MISTRAL_LIST = JsonCalls("mistral_list", (_TOOL_CALLS,), listed=True, ids=True, short_ids=True)
# [TOOL_CALLS]name[ARGS]{…}
MISTRAL = NamedCalls(
    "mistral", (_TOOL_CALLS, _ARGS), open=_TOOL_CALLS, middle=_ARGS, short_ids=True
)
# [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}
MISTRAL_IDS = NamedCalls(
    "mistral_ids",
    (_TOOL_CALLS, _CALL_ID, _ARGS),
    open=_TOOL_CALLS,
    middle=_ARGS,
    id_marker=_CALL_ID,
    short_ids=True,
)

# Phi-4-mini: <|tool_call|>[{"name": …, "arguments": {…}}]<|/tool_call|> or functools[{…}]
PHI4_MINI = JsonCalls("phi4_mini", ("<|tool_call|>", "functools["), "<|/tool_call|>", listed=True)

# Granite 3: <|tool_call|>[{"name": …, "arguments": {…}}, {…}]
GRANITE = JsonCalls("granite", ("<|tool_call|>", "<tool_call>"), listed=True)

# DeepSeek
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_MARKERS = _CALLS_BEGIN, _CALL_BEGIN, _SEP, _CALL_END, _CALLS_END
# V3 and R1: each call is <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then arguments in a fence
DEEPSEEK_V3 = NamedCalls(
    "deepseek_v3",
    _DEEPSEEK_MARKERS,
    open=f"{_CALL_BEGIN}function{_SEP}",
    middle="\n```json\n",
    close=f"\n```{_CALL_END}",
    begin=_CALLS_BEGIN,
    end=_CALLS_END,
    between="\n",
)
# V3.1: <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
DEEPSEEK_V31 = NamedCalls(
    "deepseek_v31",
    _DEEPSEEK_MARKERS,
    open=_CALL_BEGIN,
    middle=_SEP,
    close=_CALL_END,
    begin=_CALLS_BEGIN,
    end=_CALLS_END,
)

# Functionary, and Llama 3 with custom tools
# 3.1: <function=name>{…}</function>
FUNCTIONARY = NamedCalls(
    "functionary",
    ("<function=", "</function>"),
    open="<function=",
    middle=">",
    close="</function>",
)
# 3.2: >>>all\ntext>>>name\n{…}
FUNCTIONARY_V3 = NamedCalls("functionary_v3", (">>>",), open=">>>", middle="\n", to_user="all\n")

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

# The format of the default text, and of calls that a grammar demands of any model.
DEFAULT: ToolFormat = HERMES

# Texts that other families write within <tool_call>.
_OTHERS_IN_TAGS = "<function=", "<parameter=", "<arg_key>"


# Formats with texts that their templates have, and lack. The first that fits counts.
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
