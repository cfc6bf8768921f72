"""Configurations of models with a part for images, as small as that part can be.

The arguments are settings of the text part.
"""

from typing import Any

from transformers import (
    Gemma3Config,
    Gemma4Config,
    Glm4vConfig,
    Glm46VConfig,
    Idefics3Config,
    InternVLConfig,
    Kimi_K25Config,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextVideoConfig,
    LlavaOnevisionConfig,
    Mistral3Config,
    Phi4MultimodalConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
    VipLlavaConfig,
)

# No adapter of the table changes these.
OF_IMAGES = r".*(vision|visual|projector|connector|embed_tokens_extend).*"
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 16,
    "patch_size": 8,
}
_CLIP: dict[str, Any] = {"model_type": "clip_vision_model", **_VISION}
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


def gemma4(**text: Any) -> PreTrainedConfig:
    sizes = {**_VISION, "head_dim": 16, "global_head_dim": 16, "position_embedding_size": 64}
    return Gemma4Config(text_config=text, vision_config=sizes, audio_config=None, **_both(text))


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


def qwen2_vl(**text: Any) -> PreTrainedConfig:
    sizes = {"depth": 1, "embed_dim": 16, "num_heads": 1, "patch_size": 8, "mlp_ratio": 1}
    vision = {**sizes, "hidden_size": text["hidden_size"]}
    return Qwen2VLConfig(text_config=text, vision_config=vision, **_both(text))


def qwen3_vl_moe(**text: Any) -> PreTrainedConfig:
    vision = {**_QWEN_VISION, "out_hidden_size": text["hidden_size"]}
    vision = {**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}
    experts: dict[str, Any] = {"experts_implementation": text["experts_implementation"]}
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, **_both(text), **experts)


def qwen35(**text: Any) -> PreTrainedConfig:
    vision = {**_QWEN_VISION, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 4}
    return Qwen3_5Config(text_config=text, vision_config=vision, **_both(text))


def qwen35_moe(**text: Any) -> PreTrainedConfig:
    vision = {**_QWEN_VISION, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 4}
    experts: dict[str, Any] = {"experts_implementation": text["experts_implementation"]}
    return Qwen3_5MoeConfig(text_config=text, vision_config=vision, **_both(text), **experts)


def glm4v(**text: Any) -> PreTrainedConfig:
    vision = {**_QWEN_VISION, "out_hidden_size": text["hidden_size"], "image_size": 16}
    return Glm4vConfig(text_config=text, vision_config=vision, **_both(text))


def glm46v(**text: Any) -> PreTrainedConfig:
    vision = {**_QWEN_VISION, "out_hidden_size": text["hidden_size"], "image_size": 16}
    of_text = {"model_type": "glm4v_text", **text}
    of_images = {"model_type": "glm4v_vision", **vision}
    return Glm46VConfig(text_config=of_text, vision_config=of_images, **_both(text))


def llava(**text: Any) -> PreTrainedConfig:
    return LlavaConfig(text_config=text, vision_config=_CLIP, **_both(text))


def llava_next(**text: Any) -> PreTrainedConfig:
    return LlavaNextConfig(text_config=text, vision_config=_CLIP, **_both(text))


def llava_next_video(**text: Any) -> PreTrainedConfig:
    return LlavaNextVideoConfig(text_config=text, vision_config=_CLIP, **_both(text))


def vipllava(**text: Any) -> PreTrainedConfig:
    of: dict[str, Any] = {"vision_feature_layer": [-1]}
    return VipLlavaConfig(text_config=text, vision_config=_CLIP, **_both(text), **of)


def llava_onevision(**text: Any) -> PreTrainedConfig:
    vision = {"model_type": "siglip_vision_model", **_VISION}
    return LlavaOnevisionConfig(text_config=text, vision_config=vision, **_both(text))


def internvl(**text: Any) -> PreTrainedConfig:
    of_text = {"model_type": "qwen2", **text}
    vision = {**_VISION, "image_size": [16, 16], "patch_size": [8, 8]}
    return InternVLConfig(text_config=of_text, vision_config=vision, **_both(text))


def phi4_multimodal(**text: Any) -> PreTrainedConfig:
    vision = {**_VISION, "feature_layer": -1, "crop_size": 16}
    audio = {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 1}
    audio |= {"nemo_conv_channels": 16, "input_size": 16, "ext_pw_out_channel": 16}
    return Phi4MultimodalConfig(**text, pad_token_id=0, vision_config=vision, audio_config=audio)


def kimi_k25(**text: Any) -> PreTrainedConfig:
    vision = {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4}
    return Kimi_K25Config(text_config=text, vision_config=vision, **_both(text))
