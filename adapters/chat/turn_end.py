"""Finds the token with which a chat template closes an assistant's turn. Pure.

Conversations with known words are rendered. The end is the added token right behind the answer,
apart from white space, whether the answer is the last turn or not. A token that the template also
writes inside an assistant's turn, as between reasoning and answer, ends nothing. Turns that call
tools are not looked at: a model that ends those otherwise names that token in its files.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loraplex.adapters.chat.conversation import Message, TemplateOptions

_QUESTION, _ANSWER, _REASONING = "Xqzasked", "Xqzsaid", "Xqzthought"
_ASKED: Message = {"role": "user", "content": _QUESTION}
_SAID: Message = {"role": "assistant", "content": _ANSWER}


class Probe(NamedTuple):
    """A conversation to render."""

    messages: tuple[Message, ...]
    options: TemplateOptions = TemplateOptions(add_generation_prompt=False)


# What a prompt ends with; then the last turn, one before another, and one with reasoning.
PROBES: tuple[Probe, ...] = (
    Probe((_ASKED,), TemplateOptions()),
    Probe((_ASKED, _SAID)),
    Probe((_ASKED, _SAID, {"role": "user", "content": "Xqznext"})),
    Probe((_ASKED, {**_SAID, "reasoning_content": _REASONING})),
)


def turn_ends(rendered: Sequence[str | None], added: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of the tokens that close an assistant's turn, ascending.

    rendered: what the template made of each of PROBES, None where it refused. added: the added
    tokens of the tokenizer, text -> id.
    """
    tokens = {text: i for text, i in added.items() if text.strip()}
    ends: set[str] = set()
    inside: set[str] = set()
    prompt, *answered = (_after(text or "", _QUESTION) for text in rendered)
    for turn in answered:
        if prompt is None or turn is None or _ANSWER not in turn:
            continue
        before, _, behind = turn.rpartition(_ANSWER)
        ends.update(_leading(behind.lstrip(), tokens))
        given = _common(prompt, before)
        inside.update(t for t in tokens if t in before and before.rfind(t) + len(t) > given)
    return tuple(sorted(tokens[text] for text in ends - inside))


def _after(text: str, word: str) -> str | None:
    head, found, tail = text.partition(word)
    return tail if found else None


def _leading(text: str, tokens: Mapping[str, int]) -> list[str]:
    """The longest token that the text begins with, if it begins with one."""
    found = [token for token in tokens if text.startswith(token)]
    return [max(found, key=len)] if found else []


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
