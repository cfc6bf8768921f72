"""Calls of tools as each family of models writes them, and made-up ones to write."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.router.shape.schema.json_rules import checked
from loraplex.router.tools.tools import Tool, Tools

Call = tuple[str, dict[str, Any]]
Writer = Callable[[Sequence[Call]], str]

_WORDS = (
    'ä "quoted" \\ back',
    "{braces} [in] </tool_call> <tool_call>",
    "line\nbreak\ttab",
    "😀 日本語 \u00a0",
    "",
    "it's; f(a=1, b='x')",
    "null",
    "-1e9",
    "</parameter",
    "</arg_value <arg_key>",
    " ends with space ",
    "functools[TOOL_CALL",
)

TOOLS = (
    Tool(
        "look_up",
        parameters={
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {
                    "type": "object",
                    "properties": {"x": {"type": ["number", "null"]}, "y ü": {"type": "string"}},
                    "additionalProperties": False,
                },
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    ),
    Tool("look", parameters={"type": "object", "properties": {"size": {"type": "number"}}}),
    Tool("now"),
)


def honoured_tools(tools: Tools) -> Tools:
    """With schemas as the router gives them to a grammar."""
    offered = tuple(
        replace(tool, parameters=checked(tool.parameters, "p")) if tool.parameters else tool
        for tool in tools.offered
    )
    return replace(tools, offered=offered)


class Native(NamedTuple):
    """write: the calls of one answer. before, after: whether text may stand there. begin: what
    stands before text that begins an answer.

    any_values: whether a value without a schema is written so that its type is seen."""

    write: Writer
    before: bool = True
    after: bool = True
    any_values: bool = True
    begin: str = ""


def _word(random: Random) -> str:
    return random.choice(_WORDS)


def value(random: Random, depth: int = 0) -> Any:
    kinds = 7 if depth < 2 else 5
    match random.randrange(kinds):
        case 0 | 1:
            return _word(random)
        case 2:
            return random.choice((0, -17, 2**40, 3.25, -1e-7))
        case 3:
            return random.choice((True, False))
        case 4:
            return None
        case 5:
            return [value(random, depth + 1) for _ in range(random.randrange(4))]
        case _:
            return {_word(random): value(random, depth + 1) for _ in range(random.randrange(4))}


def call(random: Random) -> Call:
    """Arguments that keep to the tool's schema, in the order of its properties."""
    match random.randrange(3):
        case 0:
            made: dict[str, Any] = {"query": _word(random)}
            if random.random() < 0.5:
                made["limit"] = random.randrange(-5, 100)
            if random.random() < 0.5:
                made["exact"] = random.random() < 0.5
            if random.random() < 0.5:
                made["tags"] = [_word(random) for _ in range(random.randrange(3))]
            if random.random() < 0.5:
                made["where"] = {"x": random.choice((None, 1, -2.5)), "y ü": _word(random)}
            return "look_up", made
        case 1:
            return "look", {"size": random.choice((0, 1.5, -3))} if random.random() < 0.8 else {}
        case _:
            return "now", {}


def _json(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def _objects(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [_json({"name": name, key: arguments}) for name, arguments in calls]


def _listed(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_objects(calls))}]"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm(calls: Sequence[Call], line: str = "\n") -> str:
    return line.join(
        f"<tool_call>{name}{line}"
        + "".join(
            f"<arg_key>{k}</arg_key>{line}<arg_value>{_text(v)}</arg_value>{line}"
            for k, v in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _as_python(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else _json(value)


def _pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_python_calls(calls, _as_python))}]"


def _python_calls(calls: Sequence[Call], text: Callable[[Any], str]) -> list[str]:
    return [
        f"{name}({', '.join(f'{key}={text(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]


def _olmo3(calls: Sequence[Call], text: Callable[[Any], str]) -> str:
    lines = "\n".join(_python_calls(calls, text))
    return f"<function_calls>{lines}</function_calls>"


def _harmony(calls: Sequence[Call]) -> str:
    header = " <|constrain|>json<|message|>"
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name}{header}{_json(args)}<|call|>"
        for name, args in calls
    )


def _harmony_of_templates(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{_json(args)}<|call|>"
        for name, args in calls
    )


# The format's name, and what sets one of its forms apart.
NATIVE = {
    "hermes": Native(_hermes),
    "llama3_json": Native(lambda calls: "; ".join(_objects(calls, "parameters"))),
    "llama3_json with a tag": Native(
        lambda calls: "<|python_tag|>" + "; ".join(_objects(calls, "parameters"))
    ),
    "mistral_list": Native(lambda calls: f"[TOOL_CALLS]{_listed(calls)}"),
    "mistral_list with ids": Native(
        lambda calls: (
            "[TOOL_CALLS] ["
            + ", ".join(
                _json({"name": name, "arguments": args, "id": "a1B2c3D4e"}) for name, args in calls
            )
            + "]"
        )
    ),
    "phi4_mini": Native(lambda calls: f"<|tool_call|>{_listed(calls)}<|/tool_call|>"),
    "phi4_mini without tokens": Native(lambda calls: f"functools{_listed(calls)}"),
    "granite": Native(lambda calls: f"<|tool_call|>{_listed(calls)}"),
    "mistral": Native(
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(args)}" for name, args in calls)
    ),
    "mistral_ids": Native(
        lambda calls: "".join(
            f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{_json(args)}" for name, args in calls
        )
    ),
    "functionary": Native(
        lambda calls: "".join(f"<function={name}>{_json(args)}</function>" for name, args in calls)
    ),
    "functionary_v3": Native(
        lambda calls: ">>>" + ">>>".join(f"{name}\n{_json(args)}" for name, args in calls),
        after=False,
        begin="all\n",
    ),
    "functionary_v3 from the prompt's marker on": Native(
        lambda calls: ">>>".join(f"{name}\n{_json(args)}" for name, args in calls),
        before=False,
        after=False,
        begin="all\n",
    ),
    "deepseek_v3": Native(_deepseek_v3),
    "deepseek_v31": Native(_deepseek_v31),
    "qwen3_coder": Native(_qwen3_coder, any_values=False),
    "glm": Native(_glm, any_values=False),
    "glm on one line": Native(lambda calls: _glm(calls, ""), any_values=False),
    "olmo3": Native(lambda calls: _olmo3(calls, _json)),
    "olmo3 with Python's words": Native(lambda calls: _olmo3(calls, _as_python)),
    "harmony": Native(_harmony, before=False, after=False, begin="<|channel|>final<|message|>"),
    "harmony as templates write it": Native(
        _harmony_of_templates, before=False, after=False, begin="<|channel|>final<|message|>"
    ),
    "pythonic": Native(_pythonic, before=False, after=False),
}
