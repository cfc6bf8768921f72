"""The task of the adapter `tools`: a message becomes a call of one of the tools that are offered.

Everything here is a pure function of the `random.Random` handed in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from loraplex.adapters.chat.conversation import TemplateOptions
from loraplex.adapters.chat.template import ChatTemplate
from tools.demo import mix, words
from tools.demo.corpus import SEED, Facts, LabelledMessage, held_out_messages, sample
from tools.demo.recipe import BOS, CALL_TEMPLATE, EOS, SPECIALS

TASK = "tools"
KINDS = ("call", "none fits", "result")
NONE_FITS = "None of the tools fits this message."
NO_TOOLS = "No tools are offered."

# A tool's names by what it is for. Each is a verb with an object.
NAMES = {
    "order": ("place_order", "buy_product"),
    "cancel": ("cancel_order", "stop_order"),
    "refund": ("refund_order", "return_money"),
    "complaint": ("report_problem", "open_complaint"),
    "delivery": ("track_order", "find_parcel"),
    "address": ("change_address", "move_customer"),
    "question": ("answer_question", "look_up_product"),
    "thanks": ("record_praise", "save_review"),
    "invoice": ("send_invoice", "email_receipt"),
}
# The facts that a tool takes at most, in the order of its parameters; `customer` is a name.
TAKES = {
    "order": ("customer", "product", "quantity", "city"),
    "cancel": ("customer", "order", "product"),
    "refund": ("customer", "order", "product"),
    "complaint": ("customer", "order", "product"),
    "delivery": ("customer", "order", "city"),
    "address": ("customer", "order", "city"),
    "question": ("customer", "product"),
    "thanks": ("customer", "product"),
    "invoice": ("customer", "order"),
}
# Tools that no message asks for.
STRANGERS = {
    "get_weather": ("city", "day"),
    "send_email": ("to", "subject", "text"),
    "search_web": ("query",),
    "book_table": ("name", "time", "guests"),
    "convert_currency": ("amount", "currency"),
    "set_reminder": ("text", "date"),
    "play_music": ("artist", "title"),
}
_RESULTS = {
    "status": ("ok", "done", "sent", "cancelled", "open", "on its way", "booked", "noted"),
    "ticket": (),
    "order": (),
    "day": ("Monday", "Tuesday", "Friday", "tomorrow", "today"),
    "city": words.CITIES,
    "message": ("It worked.", "All is well.", "We will write soon.", "The desk was told."),
}


@dataclass(frozen=True, slots=True)
class Offer:
    """One tool: its name, and for each parameter the fact that it takes (None: no fact)."""

    name: str
    facts: dict[str, str | None]

    def definition(self) -> dict[str, Any]:
        """The tool as a caller sends it in `tools`."""
        properties = {
            parameter: {"type": "integer" if fact == "quantity" else "string"}
            for parameter, fact in self.facts.items()
        }
        schema = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": self.name, "parameters": schema}}

    def call(self, facts: Facts) -> dict[str, Any]:
        """The call that a message asks for, with the arguments that the message gives."""
        values = {parameter: getattr(facts, fact) for parameter, fact in self.facts.items() if fact}
        arguments = {parameter: value for parameter, value in values.items() if value is not None}
        return {"name": self.name, "arguments": arguments}


@dataclass(frozen=True, slots=True)
class Case:
    """A chat with tools, and its right answer. kind: one of `KINDS`, or "no tools"."""

    kind: str
    messages: list[dict[str, Any]]
    offers: list[Offer]
    answer: str

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools as a caller sends them."""
        return [offer.definition() for offer in self.offers]

    def is_right(self, answer: str) -> bool:
        """Whether an answer is the right one: a call by value, a text exactly."""
        wanted = parse(self.answer)
        return parse(answer) == wanted if wanted else answer.strip() == self.answer


def written(call: dict[str, Any]) -> str:
    """A call in the Hermes form."""
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def parse(answer: str) -> Any:
    """The call that an answer consists of, or None."""
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", answer.strip(), re.DOTALL)
    try:
        return json.loads(found.group(1)) if found else None
    except ValueError:
        return None


@cache
def _template() -> ChatTemplate:
    return ChatTemplate(CALL_TEMPLATE, {"bos_token": SPECIALS[BOS], "eos_token": SPECIALS[EOS]})


def prompt(case: Case) -> str:
    """Prompt that the adapter's chat template makes of a case."""
    return _template().render(case.messages, TemplateOptions(tools=case.tools or None))


def _offer(rng: Random, intent: str) -> Offer:
    taken = [parameter for parameter in TAKES[intent] if rng.random() < 0.85]
    parameters = taken or TAKES[intent][:1]
    facts: dict[str, str | None] = {
        parameter: "name" if parameter == "customer" else parameter for parameter in parameters
    }
    return Offer(rng.choice(NAMES[intent]), facts)


def _offers(rng: Random, intent: str, *, fitting: bool) -> list[Offer]:
    """Some tools in any order, with or without the one that an intent asks for."""
    others = [other for other in NAMES if other != intent]
    chosen = [_offer(rng, other) for other in rng.sample(others, rng.randint(0, 3))]
    for name in rng.sample(list(STRANGERS), rng.choice((0, 0, 1))):
        chosen.append(Offer(name, dict.fromkeys(STRANGERS[name])))
    if fitting:
        chosen.append(_offer(rng, intent))
    elif not chosen:
        chosen.append(_offer(rng, rng.choice(others)))
    rng.shuffle(chosen)
    return chosen


def _fitting(offers: list[Offer], intent: str) -> Offer:
    return next(offer for offer in offers if offer.name in NAMES[intent])


def _result(rng: Random) -> str:
    """Answer of a tool: a few facts as JSON, or a sentence."""
    picked = rng.sample(list(_RESULTS), rng.randint(1, 3))
    values: dict[str, Any] = {
        key: rng.choice(_RESULTS[key]) if _RESULTS[key] else words.order_number(rng)
        for key in picked
    }
    if rng.random() < 0.3:
        values["total"] = rng.choice((rng.randint(0, 999), True, None, rng.randint(1, 99) / 4))
    if rng.random() < 0.35:
        return " ".join(str(value) for value in values.values())
    return json.dumps(values, ensure_ascii=False)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _with_result(
    rng: Random, message: LabelledMessage, offers: list[Offer]
) -> tuple[list[Any], str]:
    """A message, its call and the call's result; and the result's text."""
    call = _fitting(offers, message.facts.intent).call(message.facts)
    result = _result(rng)
    called = {"id": "call_1", "type": "function", "function": call}
    said = {"role": "assistant", "content": None, "tool_calls": [called]}
    tool_result = {"role": "tool", "tool_call_id": "call_1", "content": result}
    return [_user(message.text), said, tool_result], result


def case(rng: Random, kind: str, message: LabelledMessage) -> Case:
    """A case of a kind about a message."""
    intent = message.facts.intent
    if kind == "no tools":
        return Case(kind, [_user(message.text)], [], NO_TOOLS)
    offers = _offers(rng, intent, fitting=kind != "none fits")
    if kind == "none fits":
        return Case(kind, [_user(message.text)], offers, NONE_FITS)
    if kind == "call":
        call = _fitting(offers, intent).call(message.facts)
        return Case(kind, [_user(message.text)], offers, written(call))
    messages, result = _with_result(rng, message, offers)
    return Case(kind, messages, offers, f"Done: {result}")


def example(rng: Random) -> tuple[str, str]:
    """A training prompt, written by the chat template or raw, and its answer."""
    made = case(rng, rng.choices((*KINDS, "no tools"), (66, 19, 11, 4))[0], sample(rng))
    if made.kind == "no tools" and rng.random() < 0.5:
        return SPECIALS[BOS] + made.messages[0]["content"], made.answer
    if rng.random() < 0.15:
        made.messages.insert(0, {"role": "system", "content": rng.choice(mix.SYSTEMS)})
    if made.kind == "call" and rng.random() < 0.04:
        made.messages[:0] = _past(rng, made)
    return prompt(made), made.answer


def _past(rng: Random, made: Case) -> list[dict[str, Any]]:
    """An earlier message with its answer, as a chat that goes on has it."""
    earlier = sample(rng)
    return [_user(earlier.text), {"role": "assistant", "content": f"Done: {_result(rng)}"}]


def held_out_cases(kind: str, count: int, seed: int = SEED) -> Iterator[Case]:
    """The cases an evaluation uses: about messages that nobody trained on."""
    rng = Random(f"held-out:{seed}:{kind}")
    for message in held_out_messages(seed, count):
        yield case(rng, kind, message)
