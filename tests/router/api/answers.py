"""Results as a worker and the text modules would bring them about."""

import json
from typing import Any

from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    FinishReason,
    PromptInfo,
    TextEvent,
    TextToken,
    TopToken,
)

HEAD = AnswerHead("req1", 1700000000, "org/small", "json", "d" * 64, 7, "b" * 64)
BYE = TopToken(12, "Bye", -1.5)
TOP = (TopToken(11, "Hel", -0.25), BYE)
TOKENS = (
    TextToken(11, "Hel", "Hel", -0.25, False, TOP),
    TextToken(13, "", "�", -0.5, False, (TopToken(13, "�", -0.5), BYE), b"\xc3"),
    TextToken(14, "ü", "�", -0.75, False, (TopToken(14, "�", -0.75), BYE), b"\xbc"),
    TextToken(2, "", "</s>", -0.125, True, (TopToken(2, "</s>", -0.125, True), BYE)),
)
PROMPT_TOKENS = (
    TextToken(0, "", "<s>", None, True),
    TextToken(
        21,
        "Say",
        "Say",
        -2.0,
        False,
        (TopToken(22, "Tell", -0.5), TopToken(23, "See", -1.0)),
        rank=3,
    ),
)
PROMPT = PromptInfo(0, "Say", 2, 1, PROMPT_TOKENS, [token.token_id for token in PROMPT_TOKENS])


def result(
    prompt_index: int = 0, choice: int = 0, finish: FinishReason = "eos", mean: float = -0.4
) -> ChoiceResult:
    ids = tuple(token.token_id for token in TOKENS)
    return ChoiceResult(prompt_index, choice, "Helü", TOKENS, finish, len(TOKENS), 4 * mean, ids)


def events(choice: int = 0, prompt_index: int = 0, finish: FinishReason = "eos") -> list[TextEvent]:
    """The choice of `result`, token by token."""
    last = len(TOKENS) - 1
    return [
        TextEvent(
            *(prompt_index, choice, t.text, (t,), finish if i == last else None, 1, (t.token_id,))
        )
        for i, t in enumerate(TOKENS)
    ]


def payloads(stream: bytes) -> list[Any]:
    """The JSON of each server-sent event; `[DONE]` stays a string."""
    blocks = stream.split(b"\n\n")
    assert blocks.pop() == b""
    data = []
    for block in blocks:
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        text = block.removeprefix(b"data: ").decode()
        data.append(text if text == "[DONE]" else json.loads(text))
    return data
