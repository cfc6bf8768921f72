"""The demo's adapter that calls tools: its cases, its template, and what is shipped of it."""

from random import Random

import pytest

from loraplex.launcher.demo import adapter_paths
from tools.demo import calls, recipe
from tools.demo.corpus import SEED, Facts, held_out_messages

FACTS = Facts(intent="cancel", name="Zoë Novak", product="linen aprons", quantity=2, order="10442")
OFFER = calls.Offer("cancel_order", {"order": "order", "item": "product", "town": "city"})


def test_a_call_has_what_the_tool_takes_and_the_message_says() -> None:
    arguments = {"order": "10442", "item": "linen aprons"}
    assert OFFER.call(FACTS) == {"name": "cancel_order", "arguments": arguments}
    assert calls.parse(calls.written(OFFER.call(FACTS))) == OFFER.call(FACTS)


@pytest.mark.parametrize("kind", calls.KINDS)
def test_cases_are_repeatable_and_their_own_answers_are_right(kind: str) -> None:
    cases = list(calls.held_out_cases(kind, 40))
    assert cases == list(calls.held_out_cases(kind, 40))
    assert {case.kind for case in cases} == {kind}
    for case in cases:
        assert case.is_right(case.answer)
        assert not case.is_right(case.answer + "}")
        assert len({offer.name for offer in case.offers}) == len(case.offers) > 0
        named = calls.parse(case.answer)
        assert named is None or named["name"] in {offer.name for offer in case.offers}


def test_a_call_is_compared_by_value() -> None:
    case = next(calls.held_out_cases("call", 1))
    assert case.is_right(case.answer.replace(": ", ":  "))
    assert not case.is_right(case.answer.replace('"name"', '"nome"'))
    assert not case.is_right("Dear customer")


def test_no_training_case_is_about_a_held_out_message() -> None:
    held_out = {message.text for message in held_out_messages(SEED, 200)}
    rng = Random(1)
    for _ in range(300):
        prompt, _answer = calls.example(rng)
        assert not any(f"<|user|>{text}</s>" in prompt for text in held_out)


def test_the_template_writes_tools_calls_and_results() -> None:
    case = calls.Case(
        "result",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Cancel it. "}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "function": OFFER.call(FACTS)},
                    {"type": "function", "function": {"name": "wait", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "content": "ok"},
        ],
        [OFFER, calls.Offer("wait", {})],
        "Done: ok",
    )
    assert calls.prompt(case) == (
        "<s><|system|>Be brief.\nTools:\ncancel_order(order, item, town)\nwait()</s>"
        "<|user|>Cancel it.</s>"
        '<|assistant|><tool_call>\n{"name": "cancel_order", "arguments": '
        '{"order": "10442", "item": "linen aprons"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call></s>'
        "<|user|><tool_response>\nok\n</tool_response></s><|assistant|>"
    )


def test_without_tools_the_template_is_the_bases() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    case = calls.Case("no tools", messages, [], calls.NO_TOOLS)
    assert calls.prompt(case) == "<s><|user|>Hello</s><|assistant|>"


def test_every_adapter_of_the_recipe_is_shipped_with_its_template() -> None:
    assert set(adapter_paths()) == set(recipe.ADAPTERS)
    for name, path in adapter_paths().items():
        template = path / "chat_template.jinja"
        shipped = template.read_text(encoding="utf-8") if template.exists() else None
        assert shipped == recipe.ADAPTERS[name].template
