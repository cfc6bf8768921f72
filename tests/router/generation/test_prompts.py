"""Prompts of a call: which are turned into text, too."""

from typing import Any, cast

import msgspec
import pytest

from loraplex.router.api.openai import completions
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.generation.prompts import PromptMakers, build_prompts
from loraplex.router.text.model import TextModel
from tests.router.fake_worker import BASE_NAME, ids_of, make_card


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ({}, ""),
        ({"echo": True}, "hello"),
        ({"echo": True, "truncate_prompt_tokens": 4}, "ello"),
        ({"prompt_logprobs": 0}, "hello"),
    ],
)
async def test_ids_become_text_only_where_it_is_shown(wish: dict[str, Any], text: str) -> None:
    """Decoding a long prompt takes longer than all else that a router does with its ids."""
    body = {"model": BASE_NAME, "prompt": ids_of("hello"), "max_tokens": 1, **wish}
    call = completions.parse(msgspec.json.encode(body), ApiLimits()).call
    makers = cast(PromptMakers, None)  # of chats and pictures
    (prompt,) = await build_prompts(call, TextModel(make_card()), None, makers)
    assert (prompt.text, bool(prompt.parts)) == (text, bool(text))
