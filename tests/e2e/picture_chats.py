"""Chats about pictures with a base and one adapter, held to transformers and PEFT."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image, ImageOps

from tests.e2e.picture_model import answer_of
from tests.e2e.serving import Serving
from tests.e2e.test_images import MOST, parts, post

ADAPTER = "two"
CHATS = [
    ("", ["square", "What is this?"]),
    (ADAPTER, ["square", "What is this?"]),
    (ADAPTER, ["Two:", "wide", "and", "clear", "differ how?"]),
    ("", ["turned", "grey", "wide", "!"]),
    (ADAPTER, ["no image at all"]),
    ("", ["square", "What is this?"]),  # a hit of the prefix cache
    ("", ["wide", "What is this?"]),
]


class ChatOracle:
    """transformers and PEFT on the saved folder, in float32. placeholders: ids that transformers
    takes from prompts alone, and that no answer may have."""

    def __init__(
        self, folder: Path, model: Any, tokenizer: Any, placeholders: Sequence[int]
    ) -> None:
        base = model.from_pretrained(folder / "base", dtype="float32")
        self.model: Any = PeftModel.from_pretrained(base, folder / ADAPTER, adapter_name=ADAPTER)
        self.model.train(False)
        self.tokenizer = tokenizer
        self.placeholders = placeholders

    def inputs(self, prompt: str, seen: list[Image.Image]) -> dict[str, Any]:
        """Inputs of transformers' model, `input_ids` among them. seen: the prompt's pictures."""
        raise NotImplementedError

    def chat(self, content: Sequence[dict[str, Any]]) -> str:
        """The prompt of a user's message."""
        messages = [{"role": "user", "content": content}]
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    @torch.inference_mode()
    def answer(
        self, prompt: str, files: Sequence[bytes], *, adapted: bool
    ) -> tuple[list[int], list[int]]:
        """Ids of the prompt and of the greedy answer."""
        seen = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in files]
        inputs = self.inputs(prompt, seen)
        options: dict[str, Any] = {"max_new_tokens": MOST, "do_sample": False, "pad_token_id": 0}
        options |= {"bad_words_ids": [[one] for one in self.placeholders], **inputs}
        ids: list[int] = inputs["input_ids"][0].tolist()
        return ids, answer_of(self.model, ADAPTER if adapted else None, options)


def assert_chats(
    serving: Serving, oracle: ChatOracle, chats: Sequence[tuple[str, list[str]]]
) -> None:
    """Prompts and answers of chats are the oracle's. chats: models and contents, as of `parts`."""
    bias = {str(one): -100 for one in oracle.placeholders}
    for model, content in chats:
        sent, read, files = parts(*content)
        body = {"messages": [{"role": "user", "content": sent}], "max_tokens": MOST}
        body |= {"model": model, "temperature": 0, "logit_bias": bias}
        found = post(serving, "/v1/chat/completions", body | {"return_token_ids": True})
        prompt, answer = oracle.answer(oracle.chat(read), files, adapted=bool(model))
        assert found["prompt_token_ids"] == prompt, content
        assert found["choices"][0]["token_ids"] == answer, content
