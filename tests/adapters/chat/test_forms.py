"""Prompts of many templates are what transformers makes of messages in the form that each reads.

`FORMS` says for each template, by hand, which form that is. Each was written for a trait that
templates of published models have.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from loraplex.adapters.chat.conversation import MessageForm, TemplateFault, TemplateOptions
from loraplex.adapters.chat.template import ChatTemplate
from tests.adapters.chat.conversations import CONVERSATIONS, Messages

FOLDER = Path(__file__).parent / "templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DOCUMENTS = [{"title": "Rain", "text": "Rain is wet."}, {"title": "Snow", "text": "Snow is cold."}]
ALL = "system user assistant tool"


class Form(NamedTuple):
    """lists: roles whose parts are read. wraps: roles of which parts alone are read.
    null: what null content beside a call is to be. calls: an empty text beside a call loses it."""

    lists: str = ""
    wraps: str = ""
    null: str = "absent"
    empty_loses_call: bool = False
    arguments: str = "object"
    developer: bool = False
    reasoning: str = ""
    documents: bool = False
    writes_calls: bool = True


NO_CALLS = Form(writes_calls=False)
ADDS_TEXT = Form(null="empty", writes_calls=False)
FORMS: dict[str, Form] = {
    "turns": ADDS_TEXT,
    "folded_system": ADDS_TEXT,
    "headers": NO_CALLS,
    "one_call_a_turn": Form(),
    "ids_of_nine": Form(),
    "system_prompt_tags": Form(lists="user", null="empty", writes_calls=False),
    "no_system": NO_CALLS,
    "system_before_first": Form(lists="user assistant", null="empty", writes_calls=False),
    "tags": ADDS_TEXT,
    "at_the_last": ADDS_TEXT,
    "null_means_call": Form(null="null", empty_loses_call=True, arguments="text"),
    "text_arguments": Form(arguments="text"),
    "tool_tags": Form(),
    "last_thoughts": Form(reasoning="reasoning_content"),
    "documents": Form(documents=True),
    "recipients": Form(null="null", arguments="text"),
    "channels": Form(developer=True, reasoning="thinking"),
    "available_documents": Form(null="empty", documents=True),
    "modes": NO_CALLS,
    "parts_alone": Form(lists=ALL, wraps=ALL, null="empty", writes_calls=False),
    "first_part_alone": Form(wraps=ALL, null="empty", writes_calls=False),
    "parts_or_text": Form(lists=ALL, null="empty", writes_calls=False),
    "parts_of_users": Form(lists="user", developer=True, writes_calls=False),
    "controls": ADDS_TEXT,
    "macros": Form(),
    "lookups": Form(developer=True),
    "pythonic": Form(),
    "kept_thoughts": Form(lists=ALL, reasoning="reasoning_content"),
    "thinking_by_name": Form(null="empty", reasoning="thinking", writes_calls=False),
    "reasoning_by_name": Form(reasoning="reasoning"),
    "results_listed": Form(
        lists="user system assistant",
        wraps="tool",
        null="part",
        empty_loses_call=True,
        reasoning="thinking",
    ),
    "known_developer": Form(
        lists="system developer", null="empty", developer=True, writes_calls=False
    ),
}


def in_form(message: dict[str, Any], form: Form) -> dict[str, Any]:
    told = dict(message)
    if told["role"] == "developer" and not form.developer:
        told["role"] = "system"
    told["content"] = content_in_form(message, told["role"], form)
    is_lost = message["content"] == "" and form.empty_loses_call
    if "tool_calls" in message and (message["content"] is None or is_lost):
        told["content"] = None
        if form.null == "absent":
            del told["content"]
        if form.null == "part":
            told["content"] = [{"type": "text", "text": ""}]
        if form.null == "empty":
            told["content"] = [{"type": "text", "text": ""}] if told["role"] in form.wraps else ""
    reasoning = told.pop("reasoning_content", None)
    if reasoning is not None and form.reasoning:
        told[form.reasoning] = reasoning
    if "tool_calls" in message:
        told["tool_calls"] = [call_in_form(call, form) for call in message["tool_calls"]]
    return told


def content_in_form(message: dict[str, Any], role: str, form: Form) -> Any:
    content = message["content"]
    if isinstance(content, list) and role not in form.lists.split():
        content = "\n".join(part["text"] for part in content)
    if isinstance(content, str) and role in form.wraps.split():
        content = [{"type": "text", "text": content}]
    return content


def call_in_form(call: dict[str, Any], form: Form) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if form.arguments == "object" and isinstance(arguments, str):
        arguments = json.loads(arguments)
    if form.arguments == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def of_transformers(source: str, messages: Messages, options: TemplateOptions) -> str | None:
    """None where the template refuses."""
    variables: dict[str, Any] = {**TOKENS, **options.variables}
    try:
        rendered: Any = render_jinja_template(
            [cast(Any, messages)],
            documents=options.documents,
            chat_template=source,
            continue_final_message=options.continue_final_message,
            add_generation_prompt=options.add_generation_prompt,
            **variables,
        )
    except Exception:
        return None
    prompt: str = rendered[0][0]
    return prompt


def of_ours(template: ChatTemplate, messages: Messages, options: TemplateOptions) -> str | None:
    try:
        return template.render(messages, options)
    except TemplateFault:
        return None


def test_there_are_enough() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(FORMS)
    assert len(FORMS) >= 30
    assert len(CONVERSATIONS) == 12


@pytest.mark.parametrize("name", FORMS)
def test_prompts_are_those_of_transformers(name: str) -> None:
    source, form = (FOLDER / f"{name}.jinja").read_text(), FORMS[name]
    template = ChatTemplate(source, TOKENS)
    compared = 0
    for title, conversation in CONVERSATIONS.items():
        options = [TemplateOptions(), TemplateOptions(add_generation_prompt=False)]
        if title == "an answer begun":
            options.append(TemplateOptions(False, continue_final_message=True))
        if form.documents:
            options.append(TemplateOptions(documents=DOCUMENTS))
        for each in options:
            expected = of_transformers(source, [in_form(m, form) for m in conversation], each)
            assert of_ours(template, conversation, each) == expected, (title, each, template.form)
            compared += expected is not None
    assert compared >= 4


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name].writes_calls])
def test_calls_are_never_lost_in_silence(name: str) -> None:
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(), TOKENS)
    for title in ("a call beside null", "a call beside an empty text"):
        prompt = template.render(CONVERSATIONS[title])
        assert "find_order" in prompt
        assert "None" not in prompt


@pytest.mark.parametrize("name", FORMS)
def test_every_text_of_parts_is_written(name: str) -> None:
    """No matter which form the template reads."""
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(), TOKENS)
    prompt = template.render(CONVERSATIONS["lists of parts"][1:])
    for text in ("Where is", "my parcel?", "On its way.", "Thanks", "a lot", "!"):
        assert text in prompt
    assert "type" not in prompt


def test_what_a_form_says() -> None:
    assert str(MessageForm(lists=("user",), only_lists=("tool",), reasoning="thinking")) == (
        "content as text, or lists of parts (user), lists alone (tool); beside tool calls absent; "
        "arguments as object; developer as system; reasoning as thinking"
    )
