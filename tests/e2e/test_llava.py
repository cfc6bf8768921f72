"""Images by HTTP with LLaVA and others: answers are as of transformers and PEFT, by tokens."""

from pathlib import Path

import pytest

from tests.e2e import llava_model, tile_model
from tests.e2e.llava_model import ADAPTER, IMAGE, LlavaOracle, save_llava
from tests.e2e.serving import running_folder
from tests.e2e.test_images import FILES, parts, post
from tests.router.pictures.seeing import data_url

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]
TIMEOUT_S, MOST = 240, 12
KINDS = llava_model.KINDS | tile_model.KINDS
# transformers takes no placeholder that was drawn.
BIAS = {str(IMAGE): -100}
CHATS = [
    ("", ["square", "What is this?"]),
    (ADAPTER, ["square", "What is this?"]),
    (ADAPTER, ["Two:", "wide", "and", "clear", "differ how?"]),
    ("", ["turned", "grey", "wide", "!"]),
    (ADAPTER, ["no image at all"]),
    ("", ["square", "What is this?"]),  # a hit of the prefix cache
    ("", ["wide", "What is this?"]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_chats_and_markdown_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_llava(tmp_path, KINDS[kind])
    oracle = LlavaOracle(tmp_path, KINDS[kind])
    place = KINDS[kind].marked or KINDS[kind].tokens[1]
    with running_folder(tmp_path, [ADAPTER]) as serving:
        for model, content in CHATS:
            sent, read, files = parts(*content)
            body = {"messages": [{"role": "user", "content": sent}], "max_tokens": MOST}
            body |= {"model": model, "temperature": 0, "logit_bias": BIAS}
            found = post(serving, "/v1/chat/completions", body | {"return_token_ids": True})
            prompt, answer = oracle.answer(oracle.chat(read), files, adapted=bool(model), most=MOST)
            assert found["prompt_token_ids"] == prompt, content
            assert found["choices"][0]["token_ids"] == answer, content
        for adapter in (None, ADAPTER):
            marked = f"![]({data_url(FILES['wide'])})\nWhat?"
            wishes = {"max_new_tokens": MOST, "details": True, "adapter_id": adapter}
            generated = post(serving, "/generate", {"inputs": marked, "parameters": wishes})
            prompt, answer = oracle.answer(
                f"{place}\nWhat?", [FILES["wide"]], adapted=adapter is not None, most=MOST
            )
            details = generated["details"]
            assert details["prompt_tokens"] == len(prompt)
            assert [token["id"] for token in details["tokens"]] == answer
