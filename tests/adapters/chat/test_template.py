"""Chat templates as transformers renders them, and templates that mean harm."""

from typing import Any, cast

import pytest
from jinja2 import UndefinedError
from transformers.utils.chat_template_utils import render_jinja_template

from loraplex.adapters.chat import template as template_module
from loraplex.adapters.chat.conversation import TemplateFault, TemplateOptions
from loraplex.adapters.chat.template import ChatTemplate

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind. {{ 7 * 7 }} {% raise %}"},
    {"role": "user", "content": "schöne Grüße\n<b>&\"'"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

USUAL = {
    "loop": "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\nU {{ m.content }}\n"
    "    {% else %}\n    {{- m.content | trim }}\n    {% endif %}\n{% endfor %}\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "generation's own names": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}"
    "{% endgeneration %}{{ x }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "python": "{{ messages[0]['content'].split(' ')[0].upper() }}{{ messages[::-1] | length }}",
    "undefined": "{{ nothing }}{% if tools is not none %}T{% endif %}{{ bos_token + eos_token }}",
    "macro": "{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say(messages[0].role) }}",
}


@pytest.mark.parametrize("source", USUAL.values(), ids=USUAL)
def test_renders_as_transformers_does(source: str) -> None:
    rendered: Any = render_jinja_template(
        [cast(Any, MESSAGES)],
        chat_template=source,
        add_generation_prompt=True,
        **cast(dict[str, Any], TOKENS),
    )
    assert ChatTemplate(source, TOKENS).render(MESSAGES) == rendered[0][0]


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "now", "strict": True, "x": None}, "y": 1e22},
    {"function": {"parameters": {"b": 1, "a": 2}, "name": "a"}, "type": "function"},
]
TOOL_READERS = {
    "whole": "{{ tools }}{% for t in tools %}{{ t.function | tojson(indent=4) }}{% endfor %}",
    "items": "{% for t in tools %}{% for k, v in t.function.items() %}{{ k }}={{ v | tojson }}"
    "{% endfor %}{% endfor %}",
    "left out": "{% for t in tools %}{{ t.function.description + t.function.parameters | string }}"
    "{% endfor %}",
}


def of_transformers(source: str, tools: Any) -> Any:
    return render_jinja_template([cast(Any, MESSAGES)], tools, chat_template=source)[0][0]


@pytest.mark.parametrize("name", TOOL_READERS)
def test_tools_are_written_as_transformers_does(name: str) -> None:
    source, tools = TOOL_READERS[name], TOOLS
    if name == "left out":  # Jinja fails; OpenAI says what is meant
        with pytest.raises(UndefinedError):
            of_transformers(source, TOOLS)
        none = {"description": "", "parameters": {"type": "object", "properties": {}}}
        tools = [{"function": none | tool["function"] | {"description": ""}} for tool in TOOLS]
    written = ChatTemplate(source, TOKENS).render(MESSAGES, TemplateOptions(tools=TOOLS))
    assert written == of_transformers(source, tools)


ROLES = [*MESSAGES, {"role": "critic", "content": " dull "}]


@pytest.mark.parametrize("name", ["loop", "blocks"])
def test_other_roles_are_the_templates_affair(name: str) -> None:
    rendered: Any = render_jinja_template([cast(Any, ROLES)], chat_template=USUAL[name])
    plain = TemplateOptions(add_generation_prompt=False)
    assert ChatTemplate(USUAL[name], {}).render(ROLES, plain) == rendered[0][0]
    begun = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert "dull" in ChatTemplate(USUAL[name], {}).render(ROLES, begun)
    parts = [{"role": "critic", "content": [{"type": "text", "text": text} for text in "ab"]}]
    assert "a\nb" in ChatTemplate(USUAL[name], {}).render(parts)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages if m.role in ('system', 'user') %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    ],
)
def test_a_role_that_would_be_lost_is_refused(source: str) -> None:
    with pytest.raises(TemplateFault, match="no messages of the role 'critic'"):
        ChatTemplate(source, {}).render(ROLES)


def test_one_text_is_not_found_for_two_messages() -> None:
    said = [{"role": "critic", "content": "dull"}, {"role": "critic", "content": "dull"}]
    assert ChatTemplate(USUAL["loop"], {}).render(said).count("dull") == 2
    with pytest.raises(TemplateFault, match="no messages of the role 'critic'"):
        ChatTemplate("{{ messages[0].content }}", {}).render(said)


VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "chat_template",
    "bos_token",
)


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_that_would_be_lost_are_refused(name: str) -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}{{ mood }}", TOKENS)
    assert template.render(MESSAGES, TemplateOptions(variables={"mood": "!"})) == "<s>2!"
    with pytest.raises(TemplateFault, match="cannot be replaced") as fault:
        template.render(MESSAGES, TemplateOptions(variables={"mood": "!", name: None}))
    assert (fault.value.cause, fault.value.param) == ("invalid", f"chat_template_kwargs.{name}")


HARMFUL = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "mutation": "{{ messages.append(1) }}",
    "big range": "{% for i in range(10**9) %}x{% endfor %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "raise": "{{ raise_exception('roles must alternate') }}",
    "division": "{{ 1 / 0 }}",
    "type": "{{ 1 + 'a' }}",
    "surrogate": r"{{ '\ud800' }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("source", HARMFUL.values(), ids=HARMFUL)
def test_faults_are_reported(source: str) -> None:
    with pytest.raises(TemplateFault, match="the chat template failed: "):
        ChatTemplate(source, TOKENS).render(MESSAGES)


NESTED = "{% for a in b %}" * 30 + "{% endfor %}" * 30


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% nonsense %}", "{{ a | no_filter }}", NESTED]
)
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateFault, match="cannot be compiled"):
        ChatTemplate(source, TOKENS)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_OUTPUT_CHARS", 1000)
    template = ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}", TOKENS)
    with pytest.raises(TemplateFault, match="more than 1000 characters"):
        template.render(MESSAGES)
