"""Bodies of `/v1/messages`, and what they become."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loraplex.router.api.messages import request as messages
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.call import GenerationCall, RequestError
from loraplex.router.shape.shape import JsonSchema
from loraplex.router.tools.tools import Tool, Tools

LIMITS = ApiLimits(max_messages=8, base_names=("base",))
SAY: Any = [{"role": "user", "content": "Say"}]
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
PLAIN_CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "21"}
SEARCHED = {"type": "search_result", "source": "https://a.b", "title": "t", "content": []}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}


def parse(**fields: Any) -> GenerationCall:
    body = {"model": "json", "messages": SAY, "max_tokens": 9} | fields
    return messages.parse(json.dumps(body).encode(), LIMITS).call


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def said(role: str, *content: Any) -> dict[str, Any]:
    """A message: of one string, or of blocks."""
    is_text = len(content) == 1 and isinstance(content[0], str)
    return {"role": role, "content": content[0] if is_text else list(content)}


def test_call() -> None:
    call = parse(
        system="Be kind",
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        stream=True,
        metadata={"user_id": "me"},
        cache_control={"type": "ephemeral"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert call.messages == [said("system", "Be kind"), said("user", "Say")]
    assert (call.api, call.max_tokens, call.stream, call.user) == ("messages", 9, True, "me")
    assert call.stop == ("END",)
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert call.adapter is not None
    assert call.adapter.adapter_id == "json"
    assert parse(model="base").adapter is None
    assert call.template.add_generation_prompt
    assert not call.template.continue_final_message


PARTS = [text("a"), text("b")]


@pytest.mark.parametrize(
    ("turns", "plain"),
    [
        ([said("user", text("a"))], [said("user", "a")]),
        ([said("user", *PARTS)], [said("user", *PARTS)]),
        ([said("user", "a"), said("user", "b")], [said("user", *PARTS)]),
        (
            [said("user", text("a", cache_control={"type": "ephemeral"}, citations=None))],
            [said("user", "a")],
        ),
        (
            [said("user", "a"), said("system", "s"), said("user", "b")],
            [said("user", "a"), said("system", "s"), said("user", "b")],
        ),
        (
            [
                said("user", "a"),
                said(
                    "assistant",
                    {"type": "thinking", "thinking": "Hm", "signature": ""},
                    text("b"),
                    CALL,
                    CALL | {"id": "c2"},
                ),
                said("user", RESULT, RESULT | {"tool_use_id": "c2", "is_error": True}, text("go")),
            ],
            [
                said("user", "a"),
                said("assistant", "b")
                | {
                    "reasoning_content": "Hm",
                    "tool_calls": [PLAIN_CALL, PLAIN_CALL | {"id": "c2"}],
                },
                said("tool", "21") | {"tool_call_id": "c1"},
                said("tool", "Error: 21") | {"tool_call_id": "c2"},
                said("user", "go"),
            ],
        ),
        (
            [said("assistant", CALL), said("user", RESULT | {"content": PARTS})],
            [
                {"role": "assistant", "content": None, "tool_calls": [PLAIN_CALL]},
                said("tool", *PARTS) | {"tool_call_id": "c1"},
            ],
        ),
        (
            [said("assistant", CALL), said("user", {"type": "tool_result", "tool_use_id": "c1"})],
            [
                {"role": "assistant", "content": None, "tool_calls": [PLAIN_CALL]},
                said("tool", "") | {"tool_call_id": "c1"},
            ],
        ),
    ],
)
def test_messages(turns: Any, plain: Any) -> None:
    assert parse(messages=turns).messages == plain


def test_blocks_of_claude_code() -> None:
    """Reasoning that nobody can read is left out, and a tool that was found is named."""
    turns = [
        *SAY,
        said("assistant", {"type": "redacted_thinking", "data": "x"}, text("b"), CALL),
        said("user", RESULT | {"content": [{"type": "tool_reference", "tool_name": "f"}]}),
    ]
    told = said("assistant", "b") | {"tool_calls": [PLAIN_CALL]}
    result = said("tool", "f") | {"tool_call_id": "c1"}
    assert parse(messages=turns).messages == [*SAY, told, result]


def test_system_of_blocks() -> None:
    blocks = [text("a", cache_control={"type": "ephemeral"}), text("b")]
    assert parse(system=blocks).messages == [said("system", *PARTS), said("user", "Say")]
    assert parse(system=blocks[:1]).messages == [said("system", "a"), said("user", "Say")]
    assert parse(system="").messages == parse(system=[]).messages == SAY


@given(
    st.lists(
        st.tuples(st.sampled_from(("user", "assistant")), st.lists(st.text(), min_size=1)),
        min_size=1,
        max_size=8,
    )
)
def test_texts_are_kept_in_order(turns: list[tuple[str, list[str]]]) -> None:
    """Neighbours of one speaker become one message, whose texts are those of all."""
    found = parse(messages=[said(role, *map(text, texts)) for role, texts in turns]).messages or []
    roles = [message["role"] for message in found]
    assert all(one != other for one, other in zip(roles, roles[1:], strict=False))
    told = [(m["role"], part) for m in found for part in texts_of(m["content"])]
    assert told == [(role, words) for role, texts in turns for words in texts]


def texts_of(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def test_an_answer_goes_on_from_the_last_message() -> None:
    options = parse(messages=[*SAY, said("assistant", "The")]).template
    assert (options.continue_final_message, options.add_generation_prompt) == (True, False)


TOOL = {"name": "f", "description": "F", "input_schema": {"type": "object"}}
F = Tool("f", "F", {"type": "object"}, place="tools[0].input_schema")


@pytest.mark.parametrize(
    ("tool", "choice", "tools"),
    [
        ({}, None, Tools((F,))),
        ({"type": "custom", "cache_control": {}}, {"type": "auto"}, Tools((F,))),
        ({"strict": True}, None, Tools((replace(F, strict=True),))),
        (
            {},
            {"type": "auto", "disable_parallel_tool_use": True},
            Tools((F,), "auto", (), False, False),
        ),
        ({}, {"type": "any"}, Tools((F,), "required")),
        ({}, {"type": "tool", "name": "f"}, Tools((F,), "required", ("f",), True, False)),
        ({}, {"type": "none"}, None),
        ({"allowed_callers": ["direct"], "defer_loading": True}, None, Tools((F,))),
    ],
)
def test_tools(tool: dict[str, Any], choice: Any, tools: Tools | None) -> None:
    call = parse(tools=[TOOL | tool], tool_choice=choice)
    assert call.tools == tools
    assert (call.template.tools is None) == (tools is None)


def test_templates_get_tools_as_they_came() -> None:
    """Fields that say nothing to the model are left out, so that no prompt depends on them."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    said = {"returns": {"x": [1]}, "input_schema": schema, "name": "f", "strict": True}
    unsaid = {"type": "custom", "cache_control": {"type": "ephemeral"}, "defer_loading": True}
    unsaid |= {"allowed_callers": ["direct"], "eager_input_streaming": True}
    shown = {"returns": {"x": [1]}, "parameters": schema, "name": "f", "strict": True}
    found = parse(tools=[said | unsaid]).template.tools
    assert json.dumps(found) == json.dumps([{"type": "function", "function": shown}])


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
    ],
)
def test_reasoning(fields: Any, effort: str | None) -> None:
    assert parse(**fields).template.effort == effort


def test_reasoning_with_a_budget() -> None:
    options = parse(thinking={"type": "enabled", "budget_tokens": 2048}).template
    assert (options.thinks, options.thinking_budget, options.effort) == (True, 2048, None)
    options = parse(thinking={"type": "adaptive"}).template
    assert (options.thinks, options.thinking_budget) == (None, None)


def test_what_changes_nothing_passes() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    clouds = {"anthropic_version": "vertex-2023-10-16", "anthropic_beta": ["x"]}
    assert parse(**clouds, user_profile_id="u", thinking=thinking, betas=[]) == parse()


def test_form_of_the_text() -> None:
    schema = {"type": "object"}
    call = parse(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert call.shape == JsonSchema(schema, "output_config.format.schema")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": SAY * 9}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [said("tool", "x")]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [said("assistant", IMAGE)]}, "messages[0].content[0].type"),
        ({"messages": [said("user", {"type": "image"})]}, "messages[0].content[0].source"),
        (
            {"messages": [said("user", {"type": "image", "source": {"type": "text"}})]},
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [said("user", {"type": "image", "source": {"type": "base64"}})]},
            "messages[0].content[0].source.data",
        ),
        ({"messages": [said("user", {"type": "document"})]}, "messages[0].content[0].type"),
        ({"messages": [said("user", CALL)]}, "messages[0].content[0].type"),
        ({"messages": [said("assistant", RESULT)]}, "messages[0].content[0].type"),
        ({"messages": [said("user", {"type": "text"})]}, "messages[0].content[0].text"),
        (
            {"messages": [said("user", RESULT | {"content": [{"type": "document"}]})]},
            "messages[0].content[0].content[0]",
        ),
        ({"messages": [*SAY, said("assistant", CALL)]}, "messages[1].content"),
        ({"messages": [said("assistant", {"type": "redacted_thinking"})]}, None),
        ({"system": [IMAGE]}, "system[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop": "x"}, "stop"),
        ({"user": "me"}, "user"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"metadata": {"user": "me"}}, "metadata.user"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        (
            {"thinking": {"type": "enabled"}, "output_config": {"effort": "none"}},
            "output_config.effort",
        ),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            "output_config.effort",
        ),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "adaptive", "display": "hidden"}}, "thinking.display"),
        ({"messages": [said("user", SEARCHED)]}, "messages[0].content[0].type"),
        (
            {"messages": [said("user", RESULT | {"content": [SEARCHED]})]},
            "messages[0].content[0].content[0]",
        ),
        ({"container": "x"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"context_management": {"edits": [1]}}, "context_management"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        (
            {"messages": [said("user", RESULT | {"content": [{"type": "tool_reference"}]})]},
            "messages[0].content[0].content[0].tool_name",
        ),
        (
            {"messages": [said("user", {"type": "redacted_thinking"})]},
            "messages[0].content[0].type",
        ),
        ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_refusals(fields: Any, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert param is None or caught.value.param == param
    assert (caught.value.details is None) == (param != "thread")
    assert caught.value.cause in ("invalid", "unsupported", "unknown_parameter")


def test_count_needs_no_max_tokens() -> None:
    body = {"model": "json", "messages": SAY, "tools": [TOOL], "system": "Be kind"}
    counted = messages.parse_count(json.dumps(body).encode(), LIMITS, None)
    asked = parse(tools=[TOOL], system="Be kind")
    assert (counted.messages, counted.template) == (asked.messages, asked.template)
