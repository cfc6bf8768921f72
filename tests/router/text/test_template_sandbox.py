"""Tenants' chat templates in processes of their own, and those that mean harm."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loraplex.adapters.chat.conversation import TemplateFault, TemplateOptions
from loraplex.adapters.chat.template import ChatTemplate
from loraplex.adapters.common.turns import Room
from loraplex.router.call import RequestError
from loraplex.router.text.template_sandbox import TemplateSandbox
from loraplex.router.text.turn_taking import TurnTaking
from tests.adapters.chat.test_forms import FOLDER
from tests.lost_helpers import kill_helpers
from tests.router.text.small_models import REFUSING, TEMPLATE

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind. {{ 7 * 7 }} {% raise %}"},
    {"role": "user", "content": "schöne Grüße\n<b>&\"'"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NONE = TemplateOptions()
SOURCES = [path.read_text() for path in FOLDER.glob("*.jinja")]
USUAL = [
    TEMPLATE,
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "{{ nothing }}{% if tools is not none %}T{% endif %}{{ bos_token + eos_token }}",
]


@pytest.fixture
async def sandbox() -> AsyncIterator[TemplateSandbox]:
    sandbox = TemplateSandbox(processes=1)
    yield sandbox
    await sandbox.close()


async def test_sandbox_renders_the_same(sandbox: TemplateSandbox) -> None:
    for source in USUAL:
        template = ChatTemplate(source, TOKENS)
        assert await sandbox.form(source, TOKENS) == template.form
        assert await sandbox.render(source, TOKENS, MESSAGES, NONE) == template.render(MESSAGES)


async def test_sandbox_finds_the_same_forms(sandbox: TemplateSandbox) -> None:
    for source in SOURCES:
        assert await sandbox.form(source, TOKENS) == ChatTemplate(source, TOKENS).form


async def test_sandbox_says_which_field_is_at_fault(sandbox: TemplateSandbox) -> None:
    with pytest.raises(TemplateFault) as fault:
        await sandbox.render("x", TOKENS, MESSAGES, TemplateOptions(documents=[]))
    assert (fault.value.cause, fault.value.param) == ("unsupported", "documents")


async def test_sandbox_passes_faults_on(sandbox: TemplateSandbox) -> None:
    for source in (REFUSING, "{% if %}"):
        with pytest.raises(TemplateFault, match="good enough|cannot be compiled"):
            await sandbox.render(source, TOKENS, MESSAGES, NONE)


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
        await sandbox.render(source, TOKENS, MESSAGES, NONE)
    assert await sandbox.render("{{ bos_token }}", TOKENS, MESSAGES, NONE) == "<s>"


async def test_a_template_that_cost_a_process_is_refused_for_a_while(
    sandbox: TemplateSandbox,
) -> None:
    with pytest.raises(TemplateFault, match="processor time"):
        await sandbox.render(GREEDY["time"], TOKENS, MESSAGES, NONE)
    taking = TurnTaking({"template": Room(size=1, of_one=1, line=1)})
    async with taking.of("a").take("template"):  # it is known before any line
        with pytest.raises(TemplateFault, match="a moment ago"):
            await sandbox.render(GREEDY["time"], TOKENS, MESSAGES, NONE, taking.of("a"))


async def test_templates_of_others_are_not_waited_for(sandbox: TemplateSandbox) -> None:
    taking = TurnTaking({"template": Room(size=2, of_one=1, line=9)})
    asked = ("{{ bos_token }}", TOKENS, MESSAGES, NONE)
    async with taking.of("a").take("template"):
        waiting = asyncio.create_task(sandbox.render(*asked, taking.of("a")))
        assert await sandbox.render(*asked, taking.of("b")) == "<s>"
        assert not waiting.done()
    assert await waiting == "<s>"


@pytest.mark.parametrize("value", [2**64, "\ud800"])
async def test_values_that_cannot_be_sent_cost_the_template_nothing(
    sandbox: TemplateSandbox, value: object
) -> None:
    with pytest.raises(TemplateFault, match="cannot be rendered"):
        await sandbox.render(
            "{{ bos_token }}", TOKENS, MESSAGES, TemplateOptions(variables={"value": value})
        )
    assert await sandbox.render("{{ bos_token }}", TOKENS, MESSAGES, NONE) == "<s>"


async def test_a_cancelled_render_leaves_no_answer_for_the_next(sandbox: TemplateSandbox) -> None:
    await sandbox.render("{{ bos_token }}", TOKENS, MESSAGES, NONE)
    slow = asyncio.create_task(sandbox.render(GREEDY["time"], TOKENS, MESSAGES, NONE))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert await sandbox.render("{{ eos_token }}", TOKENS, MESSAGES, NONE) == "</s>"


async def test_processes_that_died_idle_cost_nobody_anything(sandbox: TemplateSandbox) -> None:
    for number in range(3):
        source = f"{number}{{{{ bos_token }}}}"
        assert await sandbox.render(source, TOKENS, MESSAGES, NONE) == f"{number}<s>"
        kill_helpers("loraplex.router.text.template_worker")
        assert await sandbox.render(source, TOKENS, MESSAGES, NONE) == f"{number}<s>"


async def test_long_messages_that_cost_a_process_are_not_the_templates_fault(
    sandbox: TemplateSandbox,
) -> None:
    """Quadratic in the messages, as templates are that search what came before."""
    source = "{% for m in messages %}{% for n in messages %}{% if m.content == n.content %}"
    source += "{% endif %}{% endfor %}{% endfor %}{{ messages | length }}"

    def messages(number: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{index:9}"} for index in range(number)]

    with pytest.raises(TemplateFault, match="processor"):
        await sandbox.render(source, {}, messages(20_000), NONE)
    for number in (20_000, 15_000):
        with pytest.raises(TemplateFault, match="messages of this size"):
            await sandbox.render(source, {}, messages(number), NONE)
    assert await sandbox.render(source, {}, messages(100), NONE) == "100"


async def test_a_machine_without_processes_is_not_the_templates_fault(
    sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen", none_left)
        with pytest.raises(RequestError) as refused:
            await sandbox.render("x", {}, [], NONE)
        assert refused.value.cause == "unavailable"
    assert await sandbox.render("x", {}, [], NONE) == "x"


async def test_a_machine_that_cannot_render_says_why(
    sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.adapters.helpers.helper._PROGRAM", "import nowhere")
    with pytest.raises(RequestError, match="No module named 'nowhere'") as refused:
        await sandbox.render("x", {}, [], NONE)
    assert refused.value.cause == "not_served"
