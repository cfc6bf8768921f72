"""Small-business messages with known facts, on two sides that share no message.

Everything here is a pure function of the `random.Random` handed in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from tools.demo import grammar, phrases, tones, words

SEED = 20
HELD_OUT_BUCKETS = 16
INTENTS = tuple(phrases.CORES)
DEPARTMENTS = {
    "order": "sales",
    "question": "sales",
    "cancel": "billing",
    "refund": "billing",
    "invoice": "billing",
    "complaint": "support",
    "delivery": "shipping",
    "address": "shipping",
    "thanks": "front desk",
}
_POOLS = {
    "lovely": phrases.LOVELY,
    "day": phrases.DAYS,
    "occasion": phrases.OCCASIONS,
    "part": phrases.PARTS,
    "street": phrases.STREETS,
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a message. Each text is spelled as the message spells it."""

    intent: str
    name: str | None = None
    product: str | None = None
    quantity: int | None = None
    phrase: str | None = None  # The goods with their count, as written: "two oak shelves".
    order: str | None = None
    city: str | None = None
    sentiment: str = "neutral"
    urgent: bool = False

    @property
    def department(self) -> str:
        """Desk that answers."""
        return DEPARTMENTS[self.intent]

    @property
    def urgency(self) -> str:
        """Urgency in a word: low, normal or high."""
        if self.urgent:
            return "high"
        return "low" if self.intent in ("thanks", "question") else "normal"


@dataclass(frozen=True, slots=True)
class LabelledMessage:
    """A message and its facts."""

    text: str
    facts: Facts


class _Writer:
    """Writes one message, noting each fact at the moment its words are put in."""

    def __init__(self, rng: Random, *, novel: bool) -> None:
        self.rng = rng
        self.intent = rng.choice(INTENTS)
        self.found: dict[str, str | int] = {}
        self.upset = self.intent == "complaint"
        self.name = words.person(rng, novel=novel)
        self.city = words.city(rng, novel=novel)
        self.number = words.order_number(rng)
        self.quantity, self.counted = _counted(rng)
        self.goods = words.product(rng, novel=novel, many=self.quantity > 1)
        # Goods without a count are mostly one thing.
        self.bare = words.product(rng, novel=novel, many=rng.random() < 0.2)

    def value(self, slot: str) -> str:
        """The words for a placeholder."""
        rng = self.rng
        if slot in ("name", "city"):
            text: str = getattr(self, slot)
            self.found[slot] = text
            return text
        if slot == "np":
            return self._goods_with_count()
        if slot == "prod":
            self.found.setdefault("product", self.bare)
            return self.bare
        if slot == "ord":
            self.found["order"] = self.number
            return rng.choice(phrases.ORDER_REFS).format(no=self.number)
        return self._colour(slot)

    def _goods_with_count(self) -> str:
        goods, counted = self.goods, self.counted
        if counted == "a" and goods[0].lower() in "aeiou":
            counted = "an"
        phrase = f"{counted} {goods}"
        self.found.update(product=goods, quantity=self.quantity, phrase=phrase)
        # One message names one kind of goods.
        self.bare = goods
        return phrase

    def _colour(self, slot: str) -> str:
        rng = self.rng
        if slot == "broken":
            self.upset = True
            return rng.choice(phrases.BROKEN)
        if slot in _POOLS:
            return rng.choice(_POOLS[slot])
        if slot == "sep":
            return rng.choice((" ", " ", "\n"))
        return str(rng.randint(2, 29) if slot == "days" else rng.randint(5, 900))

    def sentence(self, template: str, roughen: int) -> str:
        """One sentence, with the facts it names noted."""
        text = grammar.expand(template, self.rng)
        if "{np}" in text and "{prod}" in text:
            self.bare = self.goods
        opens_with_order = text.startswith("{ord}")
        if roughen & 1:
            text = grammar.typos(text, self.rng)
        if roughen & 2:
            text = grammar.unpunctuated(text)
        filled = grammar.fill(text, self.value).replace("  ", " ")
        if opens_with_order or not text.startswith("{"):
            filled = filled[0].upper() + filled[1:]
        return filled


def _counted(rng: Random) -> tuple[int, str]:
    """A count and how it is written."""
    roll = rng.random()
    if roll < 0.25:
        return 1, rng.choice(("a", "a", "one", "1"))
    if roll < 0.31:
        return (2, "a pair of") if rng.random() < 0.5 else (12, "a dozen")
    if roll < 0.58:
        number = rng.randint(2, 12)
        return number, words.NUMBER_WORDS[number - 1]
    number = rng.randint(2, 12) if rng.random() < 0.5 else rng.randint(13, 250)
    return number, f"{number}x" if rng.random() < 0.08 else str(number)


def _extras(writer: _Writer, roughen: int) -> tuple[list[str], str, bool]:
    """Sentences about other things than the matter, their mood, and whether they are urgent."""
    rng, extras = writer.rng, []
    mood = "neutral"
    if writer.upset:
        mood = "negative"
    elif writer.intent == "thanks":
        mood = "positive"
    elif rng.random() < 0.45:
        mood = rng.choice(("negative", "positive"))
    said = writer.upset or writer.intent == "thanks"
    if mood != "neutral" and (not said or rng.random() < 0.3):
        pool = tones.NEGATIVE if mood == "negative" else tones.POSITIVE
        extras.append(writer.sentence(rng.choice(pool), roughen))
    urgent = writer.intent != "thanks" and rng.random() < 0.25
    if urgent:
        extras.append(writer.sentence(rng.choice(tones.URGENT), roughen))
    if rng.random() < 0.22:
        extras.append(writer.sentence(rng.choice(tones.DETAILS), roughen))
    rng.shuffle(extras)
    return extras, mood, urgent


def _opening(writer: _Writer, roughen: int, named: bool) -> str:
    rng, text = writer.rng, ""
    if rng.random() < 0.6:
        text = rng.choice(phrases.GREETINGS)
        if rng.random() < 0.06:
            text = f"{rng.choice(('Hi', 'Hello', 'Dear', 'Hey'))} {rng.choice(words.FIRST)}"
        text += rng.choice((", ", ", ", "! ", ". ", ",\n", ",\n\n", " ", " - "))
    if named:
        intro = rng.choice(phrases.INTROS)
        while "city" in writer.found and "{city}" in intro:
            intro = rng.choice(phrases.INTROS)
        intro = writer.sentence(intro, roughen)
        if text.endswith((", ", " ")) and rng.random() < 0.4 and not intro.startswith(writer.name):
            intro = intro[0].lower() + intro[1:] if intro[:2] != "I " else intro
        text += intro
    return text


def _ending(writer: _Writer, roughen: int, named: bool) -> str:
    rng = writer.rng
    if named:
        return writer.sentence(rng.choice(phrases.SIGNATURES), roughen)
    if rng.random() < 0.3:
        return rng.choice(phrases.CLOSINGS) + rng.choice((".", "!", ""))
    return ""


def _tidy(text: str) -> str:
    """One space between words, one empty line at most: a wider gap would give a name away."""
    return re.sub(r" *\n+ *", lambda gap: gap.group().strip(" ")[:2], re.sub(" +", " ", text))


def _write(rng: Random, *, novel: bool) -> LabelledMessage:
    writer = _Writer(rng, novel=novel)
    roughen = (1 if rng.random() < 0.1 else 0) | (2 if rng.random() < 0.08 else 0)
    core = writer.sentence(rng.choice(phrases.CORES[writer.intent]), roughen)
    extras, mood, urgent = _extras(writer, roughen)
    where = rng.random()
    opening = _opening(writer, roughen, where < 0.58)
    ending = _ending(writer, roughen, 0.58 <= where < 0.94)
    at = rng.choice((0, len(extras), len(extras)))
    body = [*extras[:at], core, *extras[at:]]
    glue = rng.choice((" ",) * 8 + ("\n", "\n\n"))
    text = glue.join(part for part in (opening.rstrip(" "), " ".join(body), ending) if part)
    if rng.random() < 0.12:
        text = text.rstrip(".!?")
    elif rng.random() < 0.06:
        text = text.replace("!", rng.choice(("!!", "!!!")))
    text = _tidy(text)
    fields: dict[str, str | int] = dict(writer.found)
    if rng.random() < 0.13:
        text = text.lower()
        fields = {key: v.lower() if isinstance(v, str) else v for key, v in fields.items()}
    facts = Facts(intent=writer.intent, sentiment=mood, urgent=urgent)
    return LabelledMessage(text.strip(), replace(facts, **fields))  # type: ignore[arg-type]


def is_held_out(message: LabelledMessage) -> bool:
    """Tells whether a message is held out: a hash of all its facts decides."""
    facts = message.facts
    key = "|".join(str(v) for v in (facts.name, facts.product, facts.order, facts.city) if v)
    return words.bucket(key or message.text, HELD_OUT_BUCKETS) == 0


def sample(rng: Random, *, held_out: bool = False) -> LabelledMessage:
    """One message of the asked side."""
    while True:
        message = _write(rng, novel=held_out)
        if is_held_out(message) == held_out:
            return message


def held_out_messages(seed: int, count: int) -> Iterator[LabelledMessage]:
    """The messages an evaluation uses: all different, none of them ever trained on."""
    rng, seen = Random(f"held-out:{seed}"), set[str]()
    while len(seen) < count:
        message = sample(rng, held_out=True)
        if message.text not in seen:
            seen.add(message.text)
            yield message
