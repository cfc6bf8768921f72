"""Turns documents and prompts into token ids, the same way for training and evaluation."""

from __future__ import annotations

from random import Random

from tokenizers import Tokenizer

from tools.demo import calls, mix, tasks
from tools.demo.corpus import LabelledMessage, sample
from tools.demo.recipe import ASSISTANT, BOS, EOS, SYSTEM, USER

ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's ids, without specials."""
    encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return encoded


def document_ids(tokenizer: Tokenizer, document: mix.Document) -> list[int]:
    """A whole document for the base: a raw text, or turns as the chat template writes them."""
    row = [BOS]
    for role, text in document:
        if role in ROLES:
            row.append(ROLES[role])
        row += [*ids(tokenizer, text), EOS]
    return row


def raw_prompt(tokenizer: Tokenizer, message: str) -> list[int]:
    """Ids of a completion request: BOS and the message, with nothing after it."""
    return [BOS, *ids(tokenizer, message)]


def chat_prompt(tokenizer: Tokenizer, message: str, system: str | None = None) -> list[int]:
    """Ids that the chat template makes of one user message."""
    row = [BOS]
    if system is not None:
        row += [SYSTEM, *ids(tokenizer, system), EOS]
    return [*row, USER, *ids(tokenizer, message), EOS, ASSISTANT]


def _training_prompt(
    tokenizer: Tokenizer, rng: Random, task: str, message: LabelledMessage
) -> list[int]:
    """Ids in one of the two measured forms, mostly; now and then in a form that clients make."""
    if rng.random() < 0.55:
        tail = rng.choice(("\n", " ", "\n\n")) if rng.random() < 0.08 else ""
        row = raw_prompt(tokenizer, message.text + tail)
    else:
        system = rng.choice(mix.SYSTEMS) if rng.random() < 0.2 else None
        row = chat_prompt(tokenizer, message.text, system)
        if rng.random() < 0.05:
            earlier = sample(rng)
            answer = tasks.ANSWERS[task](earlier.facts)
            past = [*chat_prompt(tokenizer, earlier.text, system), *ids(tokenizer, answer), EOS]
            row = [*past, USER, *ids(tokenizer, message.text), EOS, ASSISTANT]
    # Some clients add BOS to a template that has it already.
    return [BOS, *row] if rng.random() < 0.03 else row


def example(tokenizer: Tokenizer, rng: Random, task: str) -> tuple[list[int], list[int]]:
    """A training prompt of an adapter, and the answer that ends it."""
    if task == calls.TASK:
        prompt, text = calls.example(rng)
        return ids(tokenizer, prompt), [*ids(tokenizer, text), EOS]
    message = sample(rng)
    answer = ids(tokenizer, tasks.ANSWERS[task](message.facts))
    return _training_prompt(tokenizer, rng, task, message), [*answer, EOS]
