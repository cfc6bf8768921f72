"""A tiny random LLaVA or Mistral 3 with its tokenizer, processor files and an adapter, and greedy
answers of transformers about pictures."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.e2e.picture_chats import ADAPTER, ChatOracle
from tests.e2e.picture_model import ADAPTERS
from tests.router.fake_worker import make_tokenizer
from tests.server.model.hub_models import SIZES, add_adapter, random_model

END, IMAGE = 258, 259
# LLaVA 1.5's template.
_LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# LLaVA 1.6's template with Mistral, for users alone.
_NEXT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] }}{% endfor %}{{ ' [/INST]' }}{% endif %}{% endfor %}"
)
# Mistral Small 3.1's template, for users alone.
_MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% if message['content'] is string %}{{ '[INST]' + message['content'] + '[/INST]' }}{% else %}"
    "{{ '[INST]' }}{% for block in message['content'] %}{% if block['type'] == 'text' %}"
    "{{ block['text'] }}{% elif block['type'] in ['image', 'image_url'] %}{{ '[IMG]' }}"
    "{% endif %}{% endfor %}{{ '[/INST]' }}{% endif %}{% endif %}{% endfor %}"
)
_SIDE, _PATCH = 32, 8
_FINE = {"height": _PATCH, "width": _PATCH}
_ROW_TOKENS = ("</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]")
_SQUARE = {"height": _SIDE, "width": _SIDE}
_PIXTRAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": _PATCH,
    "initializer_range": 0.15,
}
_CLIP = {**_PIXTRAL, "model_type": "clip_vision_model", "image_size": _SIDE}


class Kind(NamedTuple):
    """A type of model. tokens: added ones; the second is the placeholder. expand: the text of a
    picture, from what its processor gives and the picture's number. around: the whole processor's
    file. beside: of the model's configuration. text, texts: type of the text part, and what else
    its configuration says. marked: what stands for a picture that a text marks; "" = the
    placeholder."""

    config: Callable[..., Any]
    model: Any
    vision: dict[str, Any]
    template: str
    tokens: tuple[str, ...]
    processor: Any
    expand: Callable[[dict[str, Any], int], str]
    around: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    text: str = "llama"
    texts: dict[str, Any] = {}
    marked: str = ""


_PADDED = [[_SIDE * high, _SIDE * wide] for high, wide in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
_TILES = LlavaNextImageProcessorPil(
    size={"shortest_edge": _SIDE}, crop_size=_SQUARE, image_grid_pinpoints=_PADDED
)


def _rows(merged: int, inputs: dict[str, Any], number: int) -> str:
    high, wide = (int(side) // (merged * _PATCH) for side in inputs["image_sizes"][number])
    rows = ["[IMG]" * wide] * high
    return "[IMG_BREAK]".join(rows) + "[IMG_END]"


def _tiles(inputs: dict[str, Any], number: int) -> str:
    of: Any = LlavaNextProcessor
    own = SimpleNamespace(image_processor=_TILES, patch_size=_PATCH, num_additional_image_tokens=0)
    own._get_unpadded_features = partial(of._get_unpadded_features, own)
    sizes = inputs["image_sizes"][number].tolist()
    tokens: int = of._get_number_of_features(own, *sizes, _SIDE, _SIDE)
    return "<image>" * tokens


KINDS = {
    "llava": Kind(
        LlavaConfig,
        LlavaForConditionalGeneration,
        _CLIP,
        _LLAVA_TEMPLATE,
        ("</s>", "<image>"),
        CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=_SQUARE),
        lambda inputs, number: "<image>" * (_SIDE // _PATCH) ** 2,
    ),
    "llava_next": Kind(
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        _CLIP,
        _NEXT_TEMPLATE,
        ("</s>", "<image>", "[INST]", "[/INST]"),
        _TILES,
        _tiles,
        beside={"image_grid_pinpoints": _PADDED},
    ),
    "mistral3": Kind(
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {**_PIXTRAL, "model_type": "pixtral"},
        _MISTRAL_TEMPLATE,
        _ROW_TOKENS,
        # The processor around it has its own patches.
        PixtralImageProcessorPil(
            size={"longest_edge": 256}, patch_size={"height": 16, "width": 16}
        ),
        partial(_rows, 2),
        {"patch_size": _PATCH, "spatial_merge_size": 2},
        text="mistral",
    ),
    "pixtral": Kind(
        LlavaConfig,
        LlavaForConditionalGeneration,
        {**_PIXTRAL, "model_type": "pixtral"},
        _MISTRAL_TEMPLATE,
        _ROW_TOKENS,
        PixtralImageProcessorPil(size={"longest_edge": 256}, patch_size=_FINE),
        partial(_rows, 1),
        {"patch_size": _PATCH},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        text="mistral",
        texts={"max_position_embeddings": 4096},
    ),
}


def save_llava(folder: Path, kind: Kind) -> None:
    """Makes `base`, and the adapter in a folder of its name."""

    def config(**ignored: Any) -> Any:
        vocab = END + len(kind.tokens)
        text = {**SIZES, "model_type": kind.text, "vocab_size": vocab, "eos_token_id": END}
        return kind.config(
            text_config={**text, "max_position_embeddings": 1024, **kind.texts},
            vision_config=kind.vision,
            image_token_index=IMAGE,
            tie_word_embeddings=False,
            **kind.beside,
        )

    base = random_model(config, kind.model, 5)
    base.save_pretrained(folder / "base")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([*kind.tokens])
    made_of: Any = PreTrainedTokenizerFast
    saved = made_of(tokenizer_object=tokenizer, eos_token="</s>", bos_token="</s>")
    saved.chat_template = kind.template
    saved.save_pretrained(folder / "base")
    kind.processor.save_pretrained(folder / "base")
    if kind.around:
        (folder / "base" / "processor_config.json").write_text(json.dumps(kind.around))
    (folder / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    made: Any = add_adapter(base, ADAPTER, ADAPTERS[ADAPTER], 1)
    made.save_pretrained(str(folder), selected_adapters=[ADAPTER])


class LlavaOracle(ChatOracle):
    def __init__(self, folder: Path, kind: Kind) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "base")
        super().__init__(folder, kind.model, tokenizer, (IMAGE,))
        self._kind = kind

    def inputs(self, prompt: str, seen: list[Image.Image]) -> dict[str, Any]:
        inputs = dict(self._kind.processor(seen, return_tensors="pt")) if seen else {}
        before, *behind = prompt.split(self._kind.tokens[1])
        for number, part in enumerate(behind):
            before += self._kind.expand(inputs, number) + part
        ids = torch.tensor([self.tokenizer(before, add_special_tokens=False)["input_ids"]])
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == IMAGE).long()
        for name in ("rows", "cols", "num_patches"):  # of the text alone
            inputs.pop(name, None)
        return {**inputs, "input_ids": ids}
