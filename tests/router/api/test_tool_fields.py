"""Tools in a chat's body, by table."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.responses import request as responses
from loraplex.router.call import RequestError
from loraplex.router.tools.tools import Tool, Tools
from tests.router.api.test_bodies import CHAT, call_of

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "of a place", "parameters": PLACE},
}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
BOTH = (
    Tool("weather", "of a place", PLACE, place="tools[0].function.parameters"),
    Tool("now", strict=True, place="tools[1].function.parameters"),
)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "tools"),
    [
        ({}, Tools(BOTH)),
        ({"tool_choice": "auto"}, Tools(BOTH)),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, Tools(BOTH, "required")),
        ({"tool_choice": named("now")}, Tools(BOTH, "required", ("now",), True, False)),
        ({"tool_choice": "now"}, Tools(BOTH, "required", ("now",), True, False)),
        ({"tool_choice": "any"}, Tools(BOTH, "required")),
        ({"tool_choice": {"type": "any"}}, Tools(BOTH, "required")),
        ({"tool_choice": {"type": "auto"}}, Tools(BOTH)),
        ({"tool_choice": {"type": "none"}}, None),
        *(
            ({"tool_choice": choice}, Tools(BOTH, "required", ("now",), True, False))
            for choice in (
                {"function": {"name": "now"}},
                {"type": "tool", "name": "now"},
                {"type": "function", "name": "now"},
            )
        ),
        ({"tool_choice": allowed("auto", "now", "now")}, Tools(BOTH, "auto", ("now",))),
        ({"tool_choice": allowed("required", "weather")}, Tools(BOTH, "required", ("weather",))),
        ({"parallel_tool_calls": True}, Tools(BOTH)),
        ({"parallel_tool_calls": False}, Tools(BOTH, parallel=False)),
    ],
)
def test_what_may_be_called(fields: dict[str, Any], tools: Tools | None) -> None:
    call = call_of(CHAT, tools=[WEATHER, NOW], **fields)
    assert call.tools == tools
    assert (call.template.tools is None) == (tools is None)


def test_templates_get_tools_as_they_came() -> None:
    further = {
        "x-of-mine": {"a": [1, None]},
        "function": {"strict": False, "parameters": {}, "returns": {}, "name": "then"},
        "type": "function",
    }
    null = {"function": {"name": "n", "description": None, "parameters": None}}
    offered = [WEATHER, NOW, further, null]
    assert json.dumps(call_of(CHAT, tools=offered).template.tools) == json.dumps(offered)


def custom(name: str, **form: Any) -> dict[str, Any]:
    said = {"name": name, "description": "C"} | ({"format": form} if form else {})
    return {"type": "custom", "custom": said}


def test_custom_tools_are_functions_of_a_text() -> None:
    """As those of `/v1/responses`: the text keeps to a regex, and a grammar of Lark is shown."""
    date = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+|x"}}
    code = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
    tools = [WEATHER, custom("say", type="text"), custom("date", **date), custom("code", **code)]
    chosen = {"type": "custom", "custom": {"name": "say"}}
    among = {"mode": "auto", "tools": [chosen, named("weather")]}
    call = call_of(CHAT, tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": among})
    flat: list[dict[str, Any]] = [{"type": "function", **WEATHER["function"]}]
    for tool in tools[1:]:
        form = tool["custom"]["format"]
        said: dict[str, Any] = {"type": form["type"]} | form.get("grammar", {})
        flat.append({"type": "custom", **tool["custom"], "format": said})
    body = {"model": "base", "input": "hi", "tools": flat}
    twin = responses.parse(json.dumps(body).encode(), ApiLimits(base_names=("base",))).call
    assert call.tools is not None
    assert twin.tools is not None
    assert call.template.tools == twin.template.tools
    offered = [replace(tool, place="") for tool in call.tools.offered]
    assert offered == [replace(tool, place="") for tool in twin.tools.offered]
    assert call.tools.callable == ("say", "weather")
    assert call.unbound == ("tools[3].custom.format",)
    must = call_of(CHAT, tools=tools, tool_choice=chosen).tools
    assert must is not None
    assert (must.callable, must.named) == (("say",), True)


OLDER = [tool["function"] for tool in (WEATHER, NOW)]
OLD = tuple(replace(tool, place=f"functions[{i}].parameters") for i, tool in enumerate(BOTH))


@pytest.mark.parametrize(
    ("choice", "same", "tools"),
    [
        (None, "auto", Tools(OLD, parallel=False)),
        ("auto", "auto", Tools(OLD, parallel=False)),
        ("none", "none", None),
        ({"name": "now"}, named("now"), Tools(OLD, "required", ("now",), True, False)),
    ],
)
def test_functions_of_old_are_tools_of_which_one_is_called(
    choice: Any, same: Any, tools: Tools | None
) -> None:
    call = call_of(CHAT, functions=OLDER, function_call=choice)
    assert call.tools == tools
    newer = {"tools": [WEATHER, NOW], "tool_choice": same, "parallel_tool_calls": False}
    expected = call_of(CHAT, **newer)
    if expected.tools is not None:
        expected = replace(expected, tools=replace(expected.tools, offered=OLD))
    assert call == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [NOW, WEATHER, NOW]}, "tools[2].function.name"),
        ({"tools": [NOW], "tool_choice": named("weather")}, "tool_choice.function.name"),
        (
            {"tools": [NOW], "tool_choice": allowed("auto", "now", "weather")},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"tools": [NOW], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": [NOW], "tool_choice": allowed("none", "now")},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tools": [NOW], "tool_choice": "later"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": ""}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [NOW], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": named("now")}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [custom("a b")]}, "tools[0].custom.name"),
        ({"tools": [NOW, custom("now")]}, "tools[1].custom.name"),
        ({"tools": [custom("x", type="grammar")]}, "tools[0].custom.format.grammar"),
        (
            {"tools": [custom("x", type="grammar", grammar={"syntax": "lark"})]},
            "tools[0].custom.format.grammar.definition",
        ),
        (
            {"tools": [NOW], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "tool_choice.custom.name",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [NOW, "now"]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
        ({"tools": [named("a b")]}, "tools[0].function.name"),
        ({"tools": [named("n" * 129)]}, "tools[0].function.name"),
        ({"tools": [named(f"n{i}") for i in range(513)]}, "tools"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
        ({"functions": [{"name": "f"}, {"name": "a b"}]}, "functions[1].name"),
        ({"functions": [{"description": "f"}]}, "functions[0].name"),
        ({"functions": OLDER, "tools": [NOW]}, "tools"),
        ({"functions": OLDER, "tool_choice": "required"}, "tool_choice"),
        ({"functions": OLDER, "function_call": {"name": "f"}}, "function_call.name"),
        ({"functions": OLDER, "function_call": "now"}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": [NOW], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "utmost"}, "reasoning_effort"),
    ],
)
def test_faults_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        call_of(CHAT, **fields)
    assert refused.value.param == param
