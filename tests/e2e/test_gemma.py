"""Images by HTTP with Gemma: answers about them are transformers' and PEFT's, token by token."""

from pathlib import Path

import pytest

from tests.e2e.gemma_model import ADAPTER, IMAGE, VIDEO, GemmaOracle, Kind, save_gemma
from tests.e2e.serving import running_folder
from tests.e2e.test_images import parts, post

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]
MOST = 12
# transformers takes no placeholder that was drawn.
BIAS = {str(IMAGE): -100, str(VIDEO): -100}
CHATS = [
    ("", ["square", "What is this?"]),
    (ADAPTER, ["square", "What is this?"]),
    (ADAPTER, ["Two:\n", "wide", "\nand", "clear", "\n\ndiffer how?"]),
    ("", ["turned", "grey", "wide", "!"]),
    (ADAPTER, ["no image at all"]),
    ("", ["square", "What is this?"]),  # a hit of the prefix cache
    ("", ["wide", "What is this?"]),
]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4_unified"])
def test_chats_are_those_of_transformers(kind: Kind, tmp_path: Path) -> None:
    save_gemma(tmp_path, kind)
    oracle = GemmaOracle(tmp_path, kind)
    with running_folder(tmp_path, [ADAPTER]) as serving:
        for model, content in CHATS:
            sent, read, files = parts(*content)
            body = {"messages": [{"role": "user", "content": sent}], "max_tokens": MOST}
            body |= {"model": model, "temperature": 0, "logit_bias": BIAS}
            found = post(serving, "/v1/chat/completions", body | {"return_token_ids": True})
            prompt, answer = oracle.answer(oracle.chat(read), files, adapted=bool(model), most=MOST)
            assert found["prompt_token_ids"] == prompt, content
            assert found["choices"][0]["token_ids"] == answer, content
