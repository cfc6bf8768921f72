"""A tiny random Qwen2.5-VL with its tokenizer, processor file and adapters, and greedy answers of
transformers about pictures."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from PIL import Image, ImageOps
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.router.fake_worker import make_tokenizer
from tests.server.model.hub_models import SIZES, add_adapter, random_model

END, STARTS, OPENS, CLOSES, IMAGE, VIDEO = range(258, 264)
SPECIAL = (
    *("<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
# Of Qwen2.5-VL, without its videos.
TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content "
    "or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADAPTERS = {
    "one": LoraConfig(r=3, target_modules=r".*language_model.*(q_proj|v_proj)"),
    # Also of what reads images.
    "two": LoraConfig(r=4, lora_alpha=2, target_modules="all-linear"),
}
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.15,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


def save_all(folder: Path) -> None:
    """Makes `base`, and each adapter in a folder of its name."""
    base = random_model(_config, Qwen2_5_VLForConditionalGeneration, 5)
    base.save_pretrained(folder / "base")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    kind: Any = PreTrainedTokenizerFast
    saved = kind(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder / "base")
    Qwen2VLImageProcessorPil(size=SIZE).save_pretrained(folder / "base")
    (folder / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    made: Any = base
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        made = add_adapter(made, name, config, seed)
    made.save_pretrained(str(folder), selected_adapters=list(ADAPTERS))


def _config(**ignored: Any) -> Qwen2_5_VLConfig:
    text = {
        **SIZES,
        "vocab_size": VIDEO + 1,
        "max_position_embeddings": 1024,
        "rope_parameters": _ROPE,
        "eos_token_id": END,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**_VISION, "out_hidden_size": text["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=OPENS,
        vision_end_token_id=CLOSES,
        tie_word_embeddings=False,
    )


class Oracle:
    """transformers and PEFT on the saved folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kind: Any = Qwen2_5_VLForConditionalGeneration
        self.model = kind.from_pretrained(folder / "base", dtype="float32")
        first, *others = ADAPTERS
        self.model = PeftModel.from_pretrained(self.model, folder / first, adapter_name=first)
        for name in others:
            self.model.load_adapter(folder / name, name)
        self.model.train(False)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "base")
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder / "base")

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """The text of a chat. messages: with parts of type `image`."""
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    @torch.inference_mode()
    def answer(
        self,
        messages: list[dict[str, Any]],
        files: Sequence[bytes],
        adapter: str | None,
        most: int,
        **sizes: Any,
    ) -> tuple[list[int], list[int]]:
        """Ids of the prompt and of the greedy answer. messages: with parts of type `image`. sizes:
        what the processor is called with.
        """
        text = self.prompt(messages)
        inputs: dict[str, Any] = {}
        if files:
            seen = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in files]
            inputs = dict(self.processor(seen, return_tensors="pt", **sizes))
            for grid in inputs["image_grid_thw"]:
                text = text.replace("<|image_pad|>", "<place>" * (int(grid.prod()) // 4), 1)
            text = text.replace("<place>", "<|image_pad|>")
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
        if files:
            inputs["mm_token_type_ids"] = (ids == IMAGE).long()
        options: dict[str, Any] = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
        options |= {"bad_words_ids": [[IMAGE], [VIDEO]], "input_ids": ids, **inputs}
        return ids[0].tolist(), answer_of(self.model, adapter, options)


def answer_of(model: Any, adapter: str | None, options: dict[str, Any]) -> list[int]:
    """Ids that transformers draws after `input_ids`. adapter: None = the base."""
    if adapter is None:
        with model.disable_adapter():
            made = model.generate(**options)
    else:
        model.set_adapter(adapter)
        made = model.generate(**options)
    answer: list[int] = made[0, options["input_ids"].shape[1] :].tolist()
    return answer
