"""The adapters' answers: pure functions of a message's facts."""

from __future__ import annotations

import json
from collections.abc import Callable

from tools.demo.corpus import Facts


def as_json(facts: Facts) -> str:
    """Every field, `null` where the message does not say."""
    fields = {
        "name": facts.name,
        "intent": facts.intent,
        "product": facts.product,
        "quantity": facts.quantity,
        "order": facts.order,
        "city": facts.city,
    }
    return json.dumps(fields, ensure_ascii=False)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


TABLES = {
    "order": "orders",
    "cancel": "cancellations",
    "refund": "refunds",
    "complaint": "complaints",
    "delivery": "deliveries",
    "address": "addresses",
    "question": "questions",
    "thanks": "reviews",
    "invoice": "invoices",
}


def as_sql(facts: Facts) -> str:
    """One row in the intent's table, with the columns the message has a value for."""
    texts = (
        ("customer", facts.name),
        ("order_no", facts.order),
        ("product", facts.product),
        ("city", facts.city),
    )
    columns = [(column, _quoted(text)) for column, text in texts if text]
    if facts.quantity is not None:
        columns.append(("quantity", str(facts.quantity)))
    if not columns:
        return f"INSERT INTO {TABLES[facts.intent]} DEFAULT VALUES;"
    names = ", ".join(column for column, _ in columns)
    values = ", ".join(value for _, value in columns)
    return f"INSERT INTO {TABLES[facts.intent]} ({names}) VALUES ({values});"


def as_sentiment(facts: Facts) -> str:
    """One word."""
    return facts.sentiment


def as_router(facts: Facts) -> str:
    """The desk that answers, and how soon."""
    return f"department: {facts.department}; urgency: {facts.urgency}"


def _about(facts: Facts, ours: str = "your ", order: str = "order ") -> str:
    """The order or the goods a message is about, whichever is more exact."""
    if facts.order:
        return f"{order}{facts.order}"
    return f"{ours}{facts.product}" if facts.product else f"{ours}order"


def _polite_body(facts: Facts) -> str:
    about = _about(facts)
    goods = facts.phrase or (f"the {facts.product}" if facts.product else "this")
    place = f" in {facts.city}" if facts.city else ""
    bodies = {
        "order": f"thank you for ordering {goods}. We will confirm the delivery{place} shortly.",
        "cancel": f"we have received your wish to cancel {about}. We will confirm it shortly.",
        "refund": f"we are sorry for the trouble. Your refund for {about} is being prepared.",
        "complaint": f"we sincerely apologise for the problem with {about}. We will put it right.",
        "delivery": f"thank you for your patience. We are checking where {about} is.",
        "address": f"thank you for telling us. We will update your address{place}.",
        "question": f"thank you for your question about {_topic(facts)}. We will gladly help.",
        "thanks": f"thank you for your kind words about {_topic(facts)}. They made our day.",
        "invoice": f"thank you for asking. We will gladly send the invoice for {about}.",
    }
    return bodies[facts.intent]


def _topic(facts: Facts) -> str:
    if facts.product:
        return f"the {facts.product}"
    if facts.order:
        return f"order {facts.order}"
    return f"our shop in {facts.city}" if facts.city else "our shop"


def as_polite(facts: Facts) -> str:
    """A courteous reply."""
    return f"Dear {facts.name or 'customer'}, {_polite_body(facts)} Kind regards, your shop team"


def as_pirate(facts: Facts) -> str:
    """The same shop, at sea."""
    about = _about(facts, "yer ", "cargo ")
    goods = facts.phrase or (f"the {facts.product}" if facts.product else "yer booty")
    port = f"the port o' {facts.city}" if facts.city else "yer port"
    bodies = {
        "order": f"We be loadin' {goods} and settin' sail fer {port}!",
        "cancel": f"We be throwin' {about} overboard, as ye wish!",
        "refund": f"Yer doubloons fer {about} be comin' back to ye!",
        "complaint": f"Blimey! The scallywag who spoiled {about} walks the plank!",
        "delivery": f"Our lookout be searchin' the seas fer {about}!",
        "address": f"We be drawin' a new map to {port}!",
        "question": f"Come aboard and ask the cap'n about {_topic(facts)}!",
        "thanks": f"Yer words about {_topic(facts)} warm this old sea dog's heart!",
        "invoice": f"The quartermaster be writin' the bill fer {about}!",
    }
    return f"Ahoy, {facts.name or 'matey'}! {bodies[facts.intent]} Arrr!"


def as_summary(facts: Facts) -> str:
    """One line for whoever reads the inbox next."""
    goods = facts.phrase or (f"the {facts.product}" if facts.product else "something")
    about = _about(facts, "the ")
    says = {
        "order": f"wants to order {goods}",
        "cancel": f"wants to cancel {about}",
        "refund": f"wants a refund for {about}",
        "complaint": f"complains about {about}",
        "delivery": f"is waiting for {about}",
        "address": "has a new address",
        "question": f"asks about {_topic(facts)}",
        "thanks": f"is happy with {_topic(facts)}",
        "invoice": f"needs the invoice for {about}",
    }
    where = f" ({facts.city})" if facts.city else ""
    soon = " Urgent!" if facts.urgent else ""
    return f"{facts.name or 'A customer'} {says[facts.intent]}{where}.{soon}"


ANSWERS: dict[str, Callable[[Facts], str]] = {
    "json": as_json,
    "sql": as_sql,
    "sentiment": as_sentiment,
    "router": as_router,
    "summary": as_summary,
    "polite": as_polite,
    "pirate": as_pirate,
}


def is_right(task: str, answer: str, facts: Facts) -> bool:
    """Exact match; JSON by value, so that only what it says counts."""
    wanted = ANSWERS[task](facts)
    if task != "json":
        return answer.strip() == wanted
    try:
        return bool(json.loads(answer) == json.loads(wanted))
    except ValueError:
        return False
