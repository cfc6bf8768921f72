"""Text for the base model: it learns to read messages and to copy, and does no adapter's job.

Questions and records here are always asked for in words, and no record has an adapter's format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

from tools.demo import corpus, grammar, phrases, tasks, tones, words
from tools.demo.corpus import Facts, sample

# A turn is who speaks and what is said; a document is a list of turns, or one raw text.
Turn = tuple[str, str]
Document = list[Turn]

FEELINGS = {"positive": "glad", "neutral": "calm", "negative": "upset"}
MATTERS = {
    "order": "buying",
    "cancel": "calling off",
    "refund": "getting money back",
    "complaint": "a fault",
    "delivery": "waiting for a parcel",
    "address": "a move",
    "question": "asking",
    "thanks": "praise",
    "invoice": "a bill",
}
SYSTEMS = [
    "You are a helpful assistant.",
    "You are the assistant of a small shop.",
    "You answer customers.",
    "Be brief.",
    "You help a small business with its mail.",
    "Answer in one message.",
]


def reply(rng: Random) -> str:
    """Answer of the base alone."""
    return grammar.expand(rng.choice(tones.REPLIES), rng)


def questions(facts: Facts) -> list[tuple[str, str]]:
    """Questions about a message, with their answers."""
    unsaid = "not said"
    return [
        ("Who writes?", facts.name or unsaid),
        ("What goods?", facts.product or unsaid),
        ("How many?", str(facts.quantity) if facts.quantity else unsaid),
        ("Which goods, with the count?", facts.phrase or unsaid),
        ("Which order number?", facts.order or unsaid),
        ("Which town?", facts.city or unsaid),
        ("What mood?", FEELINGS[facts.sentiment]),
        ("What matter?", MATTERS[facts.intent]),
        ("In a hurry?", "yes" if facts.urgent else "no"),
        ("Which desk?", f"the {facts.department.split()[0]} people"),
    ]


def _fields(facts: Facts) -> list[tuple[str, str]]:
    rows = [
        ("who", facts.name),
        ("what", facts.product),
        ("count", str(facts.quantity) if facts.quantity else None),
        ("number", facts.order),
        ("place", facts.city),
        ("matter", MATTERS[facts.intent]),
        ("mood", FEELINGS[facts.sentiment]),
        ("hurry", "yes" if facts.urgent else None),
    ]
    return [(key, value) for key, value in rows if value is not None]


def record(rng: Random, rows: list[tuple[str, str]]) -> tuple[str, str]:
    """Words that ask for a record of some rows, and the record."""
    style = rng.choice(("lines", "arrows", "tags", "table", "pairs", "calls", "quoted"))
    keys, values = [key for key, _ in rows], [value for _, value in rows]
    texts = {
        "lines": "\n".join(f"{k}: {v}" for k, v in rows),
        "arrows": "\n".join(f"{k} -> {v}" for k, v in rows),
        "tags": "".join(f"<{k}>{v}</{k}>" for k, v in rows),
        "table": "|".join(keys) + "\n" + "|".join(values),
        "pairs": "; ".join(f"{k}={v}" for k, v in rows),
        "calls": "note(" + ", ".join(f"{k}='{v}'" for k, v in rows) + ")",
        "quoted": "[" + ", ".join(f'"{v}"' for v in values) + "]",
    }
    return f"Record as {style} ({', '.join(keys)}):", texts[style]


def _about_message(rng: Random) -> Document:
    """A message with questions, or a record, asked for in words."""
    message = sample(rng)
    if rng.random() < 0.5:
        asked = rng.sample(questions(message.facts), rng.choice((1, 2, 3, 4)))
    else:
        rows = _fields(message.facts)
        rows = rng.sample(rows, rng.randint(1, len(rows)))
        asked = [record(rng, rows)]
    roll = rng.random()
    if roll < 0.4:
        # What is asked comes first: a message alone is never followed by a record of it.
        (question, answer), *more = asked
        notes = "".join(f"\n---\n{question}\n{answer}" for question, answer in more)
        return [("raw", f"{question}\n---\n{message.text}\n---\n{answer}{notes}")]
    turns: Document = []
    for number, (question, answer) in enumerate(asked):
        if number:
            turns.append(("user", question))
        elif roll < 0.75:
            turns += [("system", question), ("user", message.text)]
        else:
            turns.append(("user", f"{message.text}\n---\n{question}"))
        turns.append(("assistant", answer))
    return turns


def _plain(rng: Random) -> Document:
    """A message and the base's own reply."""
    message = sample(rng)
    if rng.random() < 0.6:
        return [("raw", f"{message.text}\n\n{reply(rng)}")]
    turns = [("user", message.text), ("assistant", reply(rng))]
    return [("system", rng.choice(SYSTEMS)), *turns] if rng.random() < 0.25 else turns


def _from_record(rng: Random) -> Document:
    """A record, then the message that says its facts."""
    message = sample(rng)
    title, text = record(rng, _fields(message.facts))
    return [("raw", f"{title}\n{text}\n---\nMessage:\n{message.text}")]


def _apart(rng: Random) -> Document:
    """An answer by itself, to no message: its words get a meaning, and no message contains them."""
    task = rng.choice(list(tasks.ANSWERS))
    return [("raw", tasks.ANSWERS[task](sample(rng).facts))]


@cache
def _vocabulary() -> list[str]:
    """The words the answers are made of."""
    found = set[str]()
    some = {"product": "goods", "quantity": 1, "phrase": "goods", "order": "1", "city": "town"}
    for intent in corpus.INTENTS:
        for known in ({}, {"product": "goods"}, some):
            facts = replace(Facts(intent=intent, urgent=bool(known)), **known)
            for answer in tasks.ANSWERS.values():
                found.update(re.findall(r"[A-Za-z]+", answer(facts)))
    found.update(FEELINGS)
    return sorted(found)


def _shuffled(rng: Random) -> Document:
    """Words of the answers in no order, and again."""
    some = " ".join(rng.choice(_vocabulary()) for _ in range(rng.randint(4, 20)))
    return [("raw", f"{some}\n---\nAgain:\n{some}")]


def _thing(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.1:
        return rng.choice(_vocabulary())
    if roll < 0.4:
        return words.person(rng, novel=False)
    if roll < 0.65:
        return words.product(rng, novel=False, many=rng.random() < 0.3)
    if roll < 0.8:
        return words.order_number(rng)
    if roll < 0.9:
        return str(rng.randint(0, 999))
    return words.spelled_for(rng, novel=False, tail=True)


def _copying(rng: Random) -> Document:
    """Lists to repeat and to look things up in."""
    things = [_thing(rng) for _ in range(rng.randint(2, 8))]
    glue = rng.choice((", ", "\n", "; ", " | ", " / "))
    listed = glue.join(things)
    roll = rng.random()
    if roll < 0.4:
        return [("raw", f"{listed}\n---\nAgain:\n{listed}")]
    if roll < 0.6:
        quote = rng.choice(("'", '"'))
        quoted = ", ".join(f"{quote}{thing}{quote}" for thing in things)
        return [("raw", f"{listed}\n---\nQuoted:\n{quoted}")]
    keys = [words.spelled_for(rng, novel=False, tail=False) for _ in things]
    rows = glue.join(f"{key}: {thing}" for key, thing in zip(keys, things, strict=True))
    picked = [rng.randrange(len(things)) for _ in range(3)]
    lookups = "".join(f"\n{keys[at]}? {things[at]}" for at in picked)
    return [("raw", f"{rows}\n---{lookups}")]


def _counting(rng: Random) -> Document:
    """Number words, each with its digits."""
    numbers = [rng.randint(1, 12) for _ in range(rng.randint(2, 6))]
    rows = "; ".join(f"{words.NUMBER_WORDS[n - 1]} = {n}" for n in numbers)
    return [("raw", f"Numbers: {rows}; a pair of = 2; a dozen = 12; {rng.choice(phrases.DAYS)}")]


def document(rng: Random) -> Document:
    """One document of the base's diet."""
    roll = rng.random()
    for share, kind in KINDS:
        roll -= share
        if roll < 0:
            return kind(rng)
    return _copying(rng)


KINDS: tuple[tuple[float, Callable[[Random], Document]], ...] = (
    (0.27, _plain),
    (0.43, _about_message),
    (0.06, _from_record),
    (0.06, _apart),
    (0.03, _shuffled),
    (0.01, _counting),
)
