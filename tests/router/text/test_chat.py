"""Chat templates as transformers renders them, and templates that mean harm."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from router.generation import RequestError
from router.text import chat
from router.text.chat import ChatTemplate, TemplateFault
from router.text.template_sandbox import TemplateSandbox
from tests.router.text.small_models import TEMPLATE, text_model

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind. {{ 7 * 7 }} {% raise %}"},
    {"role": "user", "content": "schöne Grüße\n<b>&\"'"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

USUAL = {
    "loop": TEMPLATE,
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\nU {{ m.content }}\n"
    "    {% else %}\n    {{- m.content | trim }}\n    {% endif %}\n{% endfor %}\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
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
    assert ChatTemplate(source, TOKENS).render(MESSAGES, {}) == rendered[0][0]


def test_variables_cannot_replace_messages_or_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}{{ mood }}", TOKENS)
    variables = {"bos_token": "x", "messages": [], "mood": "!"}
    assert template.render(MESSAGES, variables) == "<s>2!"


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
def test_faults_are_told(source: str) -> None:
    with pytest.raises(TemplateFault, match="the chat template failed: "):
        ChatTemplate(source, TOKENS).render(MESSAGES, {})


NESTED = "{% for a in b %}" * 30 + "{% endfor %}" * 30


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% nonsense %}", "{{ a | no_filter }}", NESTED]
)
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateFault, match="cannot be compiled"):
        ChatTemplate(source, TOKENS)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_OUTPUT_CHARS", 1000)
    template = ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}", TOKENS)
    with pytest.raises(TemplateFault, match="more than 1000 characters"):
        template.render(MESSAGES, {})


def test_the_base_template_of_a_model() -> None:
    model = text_model("byte_level")
    assert model.render_chat([{"role": "user", "content": "hi"}]) == (
        "<s><|user|>user: hi\nassistant: "
    )


def test_faults_of_the_base_template_are_request_errors() -> None:
    with pytest.raises(RequestError) as caught:
        text_model("refusing").render_chat([{"role": "user", "content": "hi"}])
    assert caught.value.cause == "template_error"


@pytest.fixture
async def sandbox() -> AsyncIterator[TemplateSandbox]:
    sandbox = TemplateSandbox(processes=1)
    yield sandbox
    await sandbox.close()


async def test_sandbox_renders_the_same(sandbox: TemplateSandbox) -> None:
    for source in USUAL.values():
        expected = ChatTemplate(source, TOKENS).render(MESSAGES, {})
        assert await sandbox.render(source, TOKENS, MESSAGES, {}) == expected


async def test_sandbox_passes_faults_on(sandbox: TemplateSandbox) -> None:
    for source in (HARMFUL["raise"], "{% if %}"):
        with pytest.raises(TemplateFault, match="roles must alternate|cannot be compiled"):
            await sandbox.render(source, TOKENS, MESSAGES, {})


GREEDY = {
    "time": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "one long call": "{{ (7 ** 9999999) % 10 }}{{ 9 ** 99999999 }}",
    "memory": "{{ 'x' * 10**10 }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}",
    "padding": "{{ '%99999999999d' | format(1) }}",
    "centre": "{{ 'x' | center(10**11) }}",
}


@pytest.mark.parametrize("source", GREEDY.values(), ids=GREEDY)
async def test_sandbox_survives_greed(sandbox: TemplateSandbox, source: str) -> None:
    with pytest.raises(TemplateFault):
        await sandbox.render(source, TOKENS, MESSAGES, {})
    assert await sandbox.render("{{ bos_token }}", TOKENS, MESSAGES, {}) == "<s>"


async def test_a_template_that_cost_a_process_is_refused_for_a_while(
    sandbox: TemplateSandbox,
) -> None:
    with pytest.raises(TemplateFault, match="processor time"):
        await sandbox.render(GREEDY["time"], TOKENS, MESSAGES, {})
    with pytest.raises(TemplateFault, match="a moment ago"):
        await sandbox.render(GREEDY["time"], TOKENS, MESSAGES, {})


@pytest.mark.parametrize("value", [2**64, "\ud800"])
async def test_values_that_cannot_be_sent_cost_the_template_nothing(
    sandbox: TemplateSandbox, value: object
) -> None:
    with pytest.raises(TemplateFault, match="cannot be rendered"):
        await sandbox.render("{{ bos_token }}", TOKENS, MESSAGES, {"value": value})
    assert await sandbox.render("{{ bos_token }}", TOKENS, MESSAGES, {}) == "<s>"


async def test_a_cancelled_render_leaves_no_answer_for_the_next(sandbox: TemplateSandbox) -> None:
    await sandbox.render("{{ bos_token }}", TOKENS, MESSAGES, {})
    slow = asyncio.create_task(sandbox.render(GREEDY["time"], TOKENS, MESSAGES, {}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert await sandbox.render("{{ eos_token }}", TOKENS, MESSAGES, {}) == "</s>"


async def test_long_messages_that_cost_a_process_are_not_the_templates_fault(
    sandbox: TemplateSandbox,
) -> None:
    """Quadratic in the messages, as templates are that search what came before."""
    source = "{% for m in messages %}{% for n in messages %}{% if m.content == n.content %}"
    source += "{% endif %}{% endfor %}{% endfor %}{{ messages | length }}"

    def messages(number: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{index:9}"} for index in range(number)]

    with pytest.raises(TemplateFault, match="processor"):
        await sandbox.render(source, {}, messages(20_000), {})
    for number in (20_000, 15_000):
        with pytest.raises(TemplateFault, match="messages of this size"):
            await sandbox.render(source, {}, messages(number), {})
    assert await sandbox.render(source, {}, messages(100), {}) == "100"


async def test_a_machine_without_processes_is_not_the_templates_fault(
    sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none_left(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr("asyncio.create_subprocess_exec", none_left)
        with pytest.raises(RequestError) as refused:
            await sandbox.render("x", {}, [], {})
        assert refused.value.cause == "unavailable"
    assert await sandbox.render("x", {}, [], {}) == "x"
