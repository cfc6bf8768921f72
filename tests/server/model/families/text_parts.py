"""Configurations of models with a part for images, as small as that part can be.

The arguments are settings of the text part.
"""

from typing import Any

from transformers import (
    Gemma3Config,
    Idefics3Config,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

# No adapter of the table changes these.
OF_IMAGES = r".*(vision|visual|projector|connector).*"
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 1,
    "patch_size": 8,
    "fullatt_block_indexes": [0],
}


def _both(text: dict[str, Any]) -> dict[str, Any]:
    """What stands beside `text_config` too."""
    tied = text.get("tie_word_embeddings", False)
    return {"tie_word_embeddings": tied, "pad_token_id": 0}


def gemma3(**text: Any) -> PreTrainedConfig:
    vision = {"model_type": "siglip_vision_model", **_VISION}
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)


def qwen25_vl(**text: Any) -> PreTrainedConfig:
    vision = {**_QWEN_VISION, "out_hidden_size": text["hidden_size"]}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_both(text))


def qwen3_vl(**text: Any) -> PreTrainedConfig:
    vision = {**_QWEN_VISION, "out_hidden_size": text["hidden_size"]}
    vision = {**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **_both(text))


def smolvlm(**text: Any) -> PreTrainedConfig:
    of_llama = {"model_type": "llama", **text}
    return SmolVLMConfig(text_config=of_llama, vision_config=_VISION, **_both(text))


def idefics3(**text: Any) -> PreTrainedConfig:
    of_llama = {"model_type": "llama", **text}
    return Idefics3Config(text_config=of_llama, vision_config=_VISION, **_both(text))


def mistral3(**text: Any) -> PreTrainedConfig:
    text = {"model_type": "mistral", **text}
    vision = {"model_type": "pixtral", "head_dim": 16, **_VISION}
    return Mistral3Config(text_config=text, vision_config=vision, **_both(text))
