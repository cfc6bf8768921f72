"""Models like those of `llava_model`: of tiles, and Qwen3.5."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.e2e.llava_model import IMAGE, Kind

_SIDE, _PATCH, _TOKENS = 48, 8, 9
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": _SIDE,
    "patch_size": _PATCH,
    "initializer_range": 0.15,
}
# SmolVLM's template.
_SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_SMOLVLM_TOKENS = ("<fake_token_around_image>", "<global-img>", "<|im_start|>")
# InternVL 3's template, without its videos.
_INTERNVL_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3.5's template, for images and texts alone.
_QWEN_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message.role + '\n'}}"
    "{% for item in message.content %}{% if item.type == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% elif 'text' in item %}{{ item.text }}"
    "{% endif %}{% endfor %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN_TEXT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "full_attention_interval": 3,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
    },
}
_QWEN_IDS: dict[str, Any] = {
    "vision_start_token_id": IMAGE + 1,
    "vision_end_token_id": IMAGE + 2,
    "video_token_id": IMAGE + 3,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
    "initializer_range": 0.15,
}


def _of_idefics3(inputs: dict[str, Any], number: int) -> str:
    names = {"fake_image_token": _SMOLVLM_TOKENS[0], "global_image_tag": _SMOLVLM_TOKENS[1]}
    own: Any = SimpleNamespace(image_token="<image>", image_seq_len=_TOKENS, **names)
    return str(Idefics3Processor.replace_image_token(own, inputs, number))


def _of_internvl(inputs: dict[str, Any], number: int) -> str:
    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    own: Any = SimpleNamespace(image_token="<IMG_CONTEXT>", image_seq_length=_TOKENS, **names)
    return str(InternVLProcessor.replace_image_token(own, inputs, number))


def _of_qwen(inputs: dict[str, Any], number: int) -> str:
    return "<|image_pad|>" * (int(inputs["image_grid_thw"][number].prod()) // 4)


KINDS = {
    "idefics3": Kind(
        partial(Idefics3Config, image_token_id=IMAGE),
        Idefics3ForConditionalGeneration,
        _VISION,
        _SMOLVLM_TEMPLATE,
        ("</s>", "<image>", *_SMOLVLM_TOKENS, *(f"<row_{n}_col_{n}>" for n in (1, 2))),
        Idefics3ImageProcessorPil(
            size={"longest_edge": 3 * _SIDE},
            max_image_size={"longest_edge": _SIDE},
            return_row_col_info=True,
        ),
        _of_idefics3,
        {"image_seq_len": _TOKENS},
    ),
    "internvl": Kind(
        partial(InternVLConfig, image_token_id=IMAGE),
        InternVLForConditionalGeneration,
        _VISION,
        _INTERNVL_TEMPLATE,
        ("</s>", "<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"),
        GotOcr2ImageProcessorPil(
            size={"height": _SIDE, "width": _SIDE}, crop_to_patches=True, max_patches=6
        ),
        _of_internvl,
        {"image_seq_length": _TOKENS},
        text="qwen2",
    ),
    "qwen3_5": Kind(
        partial(Qwen3_5Config, image_token_id=IMAGE, **_QWEN_IDS),
        Qwen3_5ForConditionalGeneration,
        _QWEN_VISION,
        _QWEN_TEMPLATE,
        ("</s>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
        Qwen2VLImageProcessorPil(
            size={"shortest_edge": 4096, "longest_edge": 40960}, patch_size=16
        ),
        _of_qwen,
        text="qwen3_5_text",
        texts=_QWEN_TEXT,
        marked="<|vision_start|><|image_pad|><|vision_end|>",
    ),
}
