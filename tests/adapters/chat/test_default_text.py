"""Tools for templates that read none, and hints that templates need not read."""

from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.chat.conversation import TemplateFault, TemplateOptions
from loraplex.adapters.chat.template import ChatTemplate

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# Gemma's manner: no system, and speakers take turns.
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
# Reads the system's message nowhere, in silence.
DEAF = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Köln's", "parameters": {"type": "object"}},
}
ASKED: Any = {"role": "user", "content": "Rain?"}
KIND: Any = {"role": "system", "content": "Be kind."}
LOOP: list[Any] = [
    ASKED,
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {
                "type": "function",
                "id": "1",
                "function": {"name": "weather", "arguments": '{"a":1}'},
            },
            {"type": "function", "id": "2", "function": {"name": "w", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": "wet", "tool_call_id": "1"},
    {"role": "tool", "content": [{"type": "text", "text": "dry"}], "tool_call_id": "2"},
    {"role": "user", "content": "And?"},
]
WRITTEN_LOOP = (
    "<assistant>I look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"a":1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "w", "arguments": {}}\n</tool_call>'
    "<user><tool_response>\nwet\n</tool_response>\n<tool_response>\ndry\n</tool_response>\nAnd?"
)


def written(source: str, messages: list[Any], **options: Any) -> str:
    asked = TemplateOptions(tools=[WEATHER], in_loop=True, **options)
    found = ChatTemplate(source, {}).written(messages, asked)
    assert found.has_default_text
    return found.text


@pytest.mark.parametrize("source", [TURNS, PARTS])
def test_the_system_describes_tools(source: str) -> None:
    text = written(source, [ASKED])
    assert text.startswith("<system># Tools\n\n")
    assert (
        '\n{"name": "weather", "description": "Köln\'s", "parameters": {"type": "object"}}\n'
        in text
    )
    assert text.endswith("<user>Rain?")
    merged = written(source, [KIND, ASKED])
    assert merged == text.replace("<system>", "<system>Be kind.\n\n")


@pytest.mark.parametrize("source", [NO_SYSTEM, DEAF])
def test_the_user_does_where_no_system_is_read(source: str) -> None:
    text = written(source, [ASKED])
    assert text.startswith("<user># Tools\n\n")
    assert text.endswith("answer in words.\n\nRain?")
    merged = written(source, [KIND, ASKED])
    assert merged == text.replace("<user>", "<user>Be kind.\n\n")


@pytest.mark.parametrize("source", [TURNS, NO_SYSTEM, DEAF, PARTS])
def test_calls_and_results_are_texts(source: str) -> None:
    text = written(source, LOOP)
    assert text.endswith(WRITTEN_LOOP)
    assert written(source, LOOP[:-1]) == text.removesuffix("\nAnd?")
    # Where no call is wanted any more, the loop stays as it was.
    none = TemplateOptions(in_loop=True)
    found = ChatTemplate(source, {}).written(LOOP, none)
    assert (found.text, found.has_default_text) == (f"<user>Rain?{WRITTEN_LOOP}", False)


# Qwen2.5-VL's manner: parts of images and texts, and no tools.
SEES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}[i]{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def test_images_stay_where_they_are() -> None:
    def seen(*texts: str) -> list[Any]:
        return [*({"type": "text", "text": text} for text in texts), {"type": "image"}]

    shown = {**ASKED, "content": seen("Rain", "here?")}
    told = [shown, *LOOP[1:3], {**LOOP[3], "content": seen("dry")}, {**ASKED, "content": seen()}]
    text = written(SEES, told)
    assert text.startswith("<system># Tools\n\n")
    results = WRITTEN_LOOP.replace("dry", "dry[i]").replace("And?", "[i]")
    assert text.endswith(f"<user>Rainhere?[i]{results}")
    deaf = written(SEES.replace("messages %}", "messages if m.role != 'system' %}"), [shown])
    assert deaf.endswith("answer in words.\n\nRainhere?[i]")


def test_an_image_is_not_gone_on_from() -> None:
    said = [ASKED, {"role": "assistant", "content": [{"type": "image"}]}]
    with pytest.raises(TemplateFault, match="does not end in a text"):
        written(SEES, said, add_generation_prompt=False, continue_final_message=True)


def test_the_text_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/tools.md").read_text()
    documented = page.partition("````text\n")[2].partition("\n````")[0]
    place = {"type": "object", "properties": {"place": {"type": "string"}}}
    tool = {"name": "weather", "description": "of a place", "parameters": place}
    options = TemplateOptions(tools=[{"type": "function", "function": tool}])
    text = ChatTemplate(TURNS, {}).render([ASKED], options)
    assert text == f"<system>{documented}<user>Rain?"


def test_messages_are_left_as_they_are() -> None:
    before = repr(LOOP)
    written(NO_SYSTEM, LOOP)
    assert repr(LOOP) == before


def test_a_template_that_reads_tools_has_them() -> None:
    template = ChatTemplate("{{ tools | tojson }}" + TURNS, {})
    found = template.written([ASKED], TemplateOptions(tools=[WEATHER], in_loop=True))
    assert "# Tools" not in found.text
    assert not found.has_default_text


def test_an_answer_goes_on_behind_the_text() -> None:
    begun = {"role": "assistant", "content": "It is"}
    text = written(TURNS, [ASKED, begun], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<user>Rain?<assistant>It is")


HINTS: dict[str, Any] = {
    "effort": "high",
    "thinks": True,
    "thinking_budget": 2048,
    "verbosity": "low",
}


@pytest.mark.parametrize(
    ("options", "unbound"),
    [
        (HINTS, ("reasoning_effort", "thinking", "thinking.budget_tokens", "verbosity")),
        ({"effort": "none", "verbosity": "medium"}, ()),
        ({}, ()),
    ],
)
def test_hints_that_nobody_reads_are_named(options: Any, unbound: Any) -> None:
    found = ChatTemplate(TURNS, {}).written([ASKED], TemplateOptions(**options))
    assert (found.text, found.unbound) == ("<user>Rain?", unbound)


def test_hints_are_variables() -> None:
    source = "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking_budget }} {{ verbosity }}"
    found = ChatTemplate(source, {}).written([ASKED], TemplateOptions(**HINTS))
    assert (found.text, found.unbound) == ("high True 2048 low", ())
    switch = ChatTemplate("{{ thinking }}", {})
    assert switch.render([ASKED], TemplateOptions(thinks=True)) == "True"
    assert switch.written([ASKED], TemplateOptions(effort="low")).unbound == ("reasoning_effort",)
    against = TemplateOptions(thinks=True, variables={"enable_thinking": False})
    with pytest.raises(TemplateFault, match="contradicts `thinking`"):
        switch.written([ASKED], against)
