"""A tiny random LLaVA with its tokenizer, processor file and an adapter, and greedy answers of
transformers about pictures."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image, ImageOps
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.e2e.picture_model import ADAPTERS, answer_of
from tests.router.fake_worker import make_tokenizer
from tests.server.model.hub_models import SIZES, add_adapter, random_model

END, IMAGE = 258, 259
# As LLaVA 1.5 has it.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
ADAPTER = "two"
_SIDE, _TOKENS = 32, 16
_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": _SIDE,
    "patch_size": 8,
    "initializer_range": 0.15,
}


def save_llava(folder: Path) -> None:
    """Makes `base`, and the adapter in a folder of its name."""
    base = random_model(_config, LlavaForConditionalGeneration, 5)
    base.save_pretrained(folder / "base")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["</s>", "<image>"])
    kind: Any = PreTrainedTokenizerFast
    saved = kind(tokenizer_object=tokenizer, eos_token="</s>")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder / "base")
    size = {"height": _SIDE, "width": _SIDE}
    processor = CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=size)
    processor.save_pretrained(folder / "base")
    (folder / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    made: Any = add_adapter(base, ADAPTER, ADAPTERS[ADAPTER], 1)
    made.save_pretrained(str(folder), selected_adapters=[ADAPTER])


def _config(**ignored: Any) -> LlavaConfig:
    text = {**SIZES, "model_type": "llama", "vocab_size": IMAGE + 1, "eos_token_id": END}
    return LlavaConfig(
        text_config={**text, "max_position_embeddings": 1024},
        vision_config=_VISION,
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    )


class LlavaOracle:
    """transformers and PEFT on the saved folder, in float32."""

    def __init__(self, folder: Path) -> None:
        kind: Any = LlavaForConditionalGeneration
        base = kind.from_pretrained(folder / "base", dtype="float32")
        self.model: Any = PeftModel.from_pretrained(base, folder / ADAPTER, adapter_name=ADAPTER)
        self.model.train(False)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "base")
        self.processor = CLIPImageProcessorPil.from_pretrained(folder / "base")

    def chat(self, content: Sequence[dict[str, Any]]) -> str:
        """The prompt of a user's message."""
        messages: Any = [{"role": "user", "content": content}]
        text: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    @torch.inference_mode()
    def answer(
        self, prompt: str, files: Sequence[bytes], *, adapted: bool, most: int
    ) -> tuple[list[int], list[int]]:
        """Ids of the prompt and of the greedy answer."""
        text = prompt.replace("<image>", "<image>" * _TOKENS)
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
        seen = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in files]
        inputs = dict(self.processor(seen, return_tensors="pt")) if files else {}
        options: dict[str, Any] = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
        options |= {"bad_words_ids": [[IMAGE]], "input_ids": ids, **inputs}
        return ids[0].tolist(), answer_of(self.model, ADAPTER if adapted else None, options)
