"""The chat templates of a base model."""

from typing import Any

import pytest
from msgspec.structs import replace

from loraplex.adapters.chat.conversation import MessageForm, TemplateOptions
from loraplex.router.call import RequestError
from loraplex.router.text.model import BaseTemplates
from tests.router.text.small_models import TEMPLATE, card, text_model

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def named(**templates: str) -> BaseTemplates:
    default = templates.pop("default", None)
    return BaseTemplates(
        replace(card("byte_level"), chat_template=default, named_templates=templates)
    )


def test_the_base_template_of_a_model() -> None:
    assert text_model("byte_level").templates.render(HI).text == "<s><|user|>user: hi\nassistant: "


def test_faults_of_the_base_template_are_request_errors() -> None:
    with pytest.raises(RequestError) as caught:
        text_model("refusing").templates.render(HI)
    assert caught.value.cause == "template_error"


@pytest.mark.parametrize(("name", "says"), [(None, "d"), ("default", "d"), ("rag", "r")])
def test_a_template_is_chosen_by_its_name(name: str | None, says: str) -> None:
    templates = named(default="d", rag="r", tool_use="t")
    assert templates.render(HI, TemplateOptions(template=name)).text == says


@pytest.mark.parametrize(
    ("templates", "name", "cause"),
    [
        ({"default": "d", "rag": "r"}, "sql", "unsupported"),
        ({"default": "d"}, "{{ messages }}", "unsupported"),
        ({"rag": "r", "sql": "s"}, None, "invalid"),
        ({"default": "{% if %}", "rag": "r"}, None, "template_error"),
        ({}, None, "unsupported"),
    ],
)
def test_a_template_that_cannot_be_had(
    templates: dict[str, str], name: str | None, cause: str
) -> None:
    with pytest.raises(RequestError) as caught:
        named(**templates).render(HI, TemplateOptions(template=name))
    assert caught.value.cause == cause


def test_a_template_that_cannot_be_compiled_costs_its_own_chats_alone() -> None:
    templates = named(default="{% if %}", rag="r")
    assert len(templates) == 1
    assert "cannot be compiled" in templates.faults["default"]
    assert templates.render(HI, TemplateOptions(template="rag")).text == "r"


def test_the_cards_form_is_used_and_a_missing_one_found() -> None:
    told = MessageForm(only_lists=("user",))
    plain = card("byte_level")
    assert BaseTemplates(plain).forms == {"default": MessageForm(no_content="absent")}
    templates = BaseTemplates(replace(plain, message_forms={"default": told}))
    assert templates.forms == {"default": told}
    assert "[{'type'" in templates.render(HI).text
    assert TEMPLATE in plain.all_templates.values()
