"""Images by HTTP with LLaVA and others: answers are as of transformers and PEFT, by tokens."""

from pathlib import Path

import pytest

from tests.e2e import llava_model, tile_model
from tests.e2e.llava_model import LlavaOracle, save_llava
from tests.e2e.picture_chats import ADAPTER, CHATS, assert_chats
from tests.e2e.serving import running_folder
from tests.e2e.test_images import FILES, MOST, post
from tests.router.pictures.seeing import data_url

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]
KINDS = llava_model.KINDS | tile_model.KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_chats_and_markdown_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_llava(tmp_path, KINDS[kind])
    oracle = LlavaOracle(tmp_path, KINDS[kind])
    place = KINDS[kind].marked or KINDS[kind].tokens[1]
    with running_folder(tmp_path, [ADAPTER]) as serving:
        assert_chats(serving, oracle, CHATS)
        for adapter in (None, ADAPTER):
            marked = f"![]({data_url(FILES['wide'])})\nWhat?"
            wishes = {"max_new_tokens": MOST, "details": True, "adapter_id": adapter}
            generated = post(serving, "/generate", {"inputs": marked, "parameters": wishes})
            prompt, answer = oracle.answer(
                f"{place}\nWhat?", [FILES["wide"]], adapted=adapter is not None
            )
            details = generated["details"]
            assert details["prompt_tokens"] == len(prompt)
            assert [token["id"] for token in details["tokens"]] == answer
