"""Models of several parts (text, images), of which the text part is served. Pure.

Their `config.json` holds that of the text part in `text_config`, or flat beside the other keys.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from loraplex.adapters.errors import shown

TEXT = "text_config"
# What savers call the text part's `model`, in names of modules.
TEXT_BODIES = "model.language_model", "language_model.model", "language_model", "model.text_model"
_TIED = "tie_word_embeddings"
_ROPES = ("rope_scaling", "rope_parameters")
# transformers saves of a text part only what differs from its class.
_QWEN25_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN2_TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_DEEPSEEK_TEXT: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
}
_MISTRAL4_TEXT: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "max_position_embeddings": 1048576,
}
_QWEN3_MOE_TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
}
_QWEN3_VL_MOE_TEXT: dict[str, Any] = {
    **_QWEN3_MOE_TEXT,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "rope_theta": 5e5,
}
_GLM4V_TEXT: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
_PHI4_TEXT: dict[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "eos_token_id": [199999, 200020],
}
_QWEN3_TEXT: dict[str, Any] = {
    **_QWEN2_TEXT,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}
_QWEN35_TEXT: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
}
_QWEN35_MOE_TEXT: dict[str, Any] = {
    **_QWEN35_TEXT,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
}
_GEMMA3_TEXT: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}
_GEMMA4_TEXT: dict[str, Any] = {**_GEMMA3_TEXT, "vocab_size": 262144, "num_hidden_layers": 30}
_GEMMA4_UNIFIED_TEXT: dict[str, Any] = {**_GEMMA4_TEXT, "max_position_embeddings": 262144}
_LLAMA_TEXT: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL_TEXT: dict[str, Any] = {
    **_LLAMA_TEXT,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
}
_MINISTRAL3_TEXT: dict[str, Any] = {
    **_MISTRAL_TEXT,
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "max_position_embeddings": 262144,
}


class TextPart(NamedTuple):
    """Text part of a composite model. family: of the text part, a key of `registry.FAMILIES`.
    usual: what its class says where `config.json` says nothing.
    """

    family: str
    usual: Mapping[str, Any] = {}


class Composite(NamedTuple):
    """Composite model, and the text parts that are served of it. architecture: the class that
    `config.json` names. texts: by `model_type` of `text_config`, the first where that names
    none. is_tied: where no `config.json` says so. inner_ties: whether `text_config` can say so.
    others: further classes that `config.json` may name.
    """

    architecture: str
    texts: Mapping[str, TextPart]
    is_tied: bool = False
    inner_ties: bool = True
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Classes that `config.json` may name, the usual one first."""
        return self.architecture, *self.others


_LLAMA = {"llama": TextPart("llama", _LLAMA_TEXT)}
_MISTRAL = {"mistral": TextPart("mistral", _MISTRAL_TEXT)}
_QWEN2 = {"qwen2": TextPart("qwen2", _QWEN2_TEXT)}
_QWEN3 = {
    "qwen3": TextPart("qwen3", _QWEN2_TEXT | {"head_dim": 128}),
    "qwen3_moe": TextPart("qwen3_moe", _QWEN3_MOE_TEXT),
}
# The first is meant where `text_config` names no type.
_LLAMA_FIRST = {**_LLAMA, **_MISTRAL, **_QWEN2, **_QWEN3}
_QWEN_FIRST = {**_QWEN2, **_QWEN3, **_LLAMA, **_MISTRAL}
_GLM4V = {"glm4v_text": TextPart("glm4v_text", _GLM4V_TEXT)}
# By `model_type`.
COMPOSITES: dict[str, Composite] = {
    "gemma3": Composite(
        "Gemma3ForConditionalGeneration",
        {"gemma3_text": TextPart("gemma3_text", _GEMMA3_TEXT)},
        is_tied=True,
    ),
    "gemma4": Composite(
        "Gemma4ForConditionalGeneration",
        {"gemma4_text": TextPart("gemma4_text", _GEMMA4_TEXT)},
        is_tied=True,
        inner_ties=False,
    ),
    "gemma4_unified": Composite(
        "Gemma4UnifiedForConditionalGeneration",
        {"gemma4_unified_text": TextPart("gemma4_unified_text", _GEMMA4_UNIFIED_TEXT)},
        is_tied=True,
        inner_ties=False,
    ),
    "glm46v": Composite("Glm46VForConditionalGeneration", _GLM4V, inner_ties=False),
    "glm4v": Composite("Glm4vForConditionalGeneration", _GLM4V),
    "idefics3": Composite("Idefics3ForConditionalGeneration", _LLAMA),
    "internvl": Composite(
        "InternVLForConditionalGeneration", _QWEN_FIRST, is_tied=True, inner_ties=False
    ),
    "kimi_k25": Composite(
        "KimiK25ForConditionalGeneration",
        {name: TextPart("deepseek_v3", _DEEPSEEK_TEXT) for name in ("deepseek_v3", "kimi_k2")},
        is_tied=True,
        inner_ties=False,
        others=("Kimi_K25ForConditionalGeneration",),
    ),
    "llava": Composite("LlavaForConditionalGeneration", _LLAMA_FIRST),
    "llava_next": Composite("LlavaNextForConditionalGeneration", _LLAMA_FIRST, inner_ties=False),
    "llava_next_video": Composite("LlavaNextVideoForConditionalGeneration", _LLAMA_FIRST),
    "llava_onevision": Composite("LlavaOnevisionForConditionalGeneration", _QWEN_FIRST),
    "mistral3": Composite(
        "Mistral3ForConditionalGeneration",
        {
            **_MISTRAL,
            "ministral3": TextPart("ministral3", _MINISTRAL3_TEXT),
            "mistral4": TextPart("mistral4", _MISTRAL4_TEXT),
        },
    ),
    "phi3_v": Composite("Phi3VForCausalLM", {"phi3_v": TextPart("phi3")}),
    "phi4_multimodal": Composite(
        "Phi4MultimodalForCausalLM", {"phi4_multimodal": TextPart("phi3", _PHI4_TEXT)}
    ),
    "phi4mm": Composite("Phi4MMForCausalLM", {"phi4mm": TextPart("phi3", _PHI4_TEXT)}),
    "qwen2_5_vl": Composite(
        "Qwen2_5_VLForConditionalGeneration",
        {"qwen2_5_vl_text": TextPart("qwen2", _QWEN25_TEXT)},
    ),
    "qwen2_vl": Composite(
        "Qwen2VLForConditionalGeneration", {"qwen2_vl_text": TextPart("qwen2", _QWEN25_TEXT)}
    ),
    "qwen3_5": Composite(
        "Qwen3_5ForConditionalGeneration",
        {"qwen3_5_text": TextPart("qwen3_5_text", _QWEN35_TEXT)},
        inner_ties=False,
    ),
    "qwen3_5_moe": Composite(
        "Qwen3_5MoeForConditionalGeneration",
        {"qwen3_5_moe_text": TextPart("qwen3_5_moe_text", _QWEN35_MOE_TEXT)},
        inner_ties=False,
    ),
    "qwen3_vl": Composite(
        "Qwen3VLForConditionalGeneration", {"qwen3_vl_text": TextPart("qwen3", _QWEN3_TEXT)}
    ),
    "qwen3_vl_moe": Composite(
        "Qwen3VLMoeForConditionalGeneration",
        {"qwen3_vl_moe_text": TextPart("qwen3_vl_moe_text", _QWEN3_VL_MOE_TEXT)},
        inner_ties=False,
    ),
    "smolvlm": Composite("SmolVLMForConditionalGeneration", _LLAMA),
    "vipllava": Composite("VipLlavaForConditionalGeneration", _LLAMA_FIRST, inner_ties=False),
}


class Text(NamedTuple):
    """The text part of a composite model. config: as a model of `family` alone would say it."""

    family: str
    config: dict[str, Any]


def text_of(config: Mapping[str, Any]) -> Text:
    """Return the text part of a composite model's configuration. config: of a composite model.
    Raises ValueError: it has no text part that is served.
    """
    model_type = config["model_type"]
    composite = COMPOSITES[model_type]
    inner = config.get(TEXT)
    if inner is None:
        inner = {key: value for key, value in config.items() if not key.endswith("_config")}
        inner.pop("model_type")
    if not isinstance(inner, Mapping):
        raise ValueError(f"{TEXT} must be a table, got {shown(inner)}")
    first = next(iter(composite.texts))
    part = composite.texts.get(str(inner.get("model_type", first)))
    if part is None:
        raise ValueError(
            f"{TEXT}: a text part of type {shown(inner.get('model_type'))} is not served; served of"
            f" {model_type} is {' or '.join(composite.texts)}"
        )
    text = {**part.usual, **inner, **_of_both(config, inner, composite), "model_type": model_type}
    for key in _ROPES:
        if isinstance(text.get(key), Mapping):
            text[key] = _of_text_alone(text[key])
    return Text(part.family, text)


def _of_both(
    config: Mapping[str, Any], inner: Mapping[str, Any], composite: Composite
) -> dict[str, Any]:
    """Values that stand next to `text_config`, or in it, or in both."""
    tables = (config, inner) if composite.inner_ties else (config,)
    tied = [table[_TIED] for table in tables if table.get(_TIED) is not None]
    found: dict[str, Any] = {_TIED: any(tied) if tied else composite.is_tied}
    for key in ("dtype", "torch_dtype", "eos_token_id"):
        if config.get(key) is not None:
            found[key] = config[key]
    return found


def _of_text_alone(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Three axes of positions turn a section of each head. Of text all three are the same, so that
    sections change nothing."""
    plain = {
        key: value
        for key, value in rope.items()
        if key not in ("mrope_section", "mrope_interleaved")
    }
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":
            plain[key] = "default"
    return plain
