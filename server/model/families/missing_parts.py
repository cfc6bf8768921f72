"""The part that a model of another family needs and no served family has, by its type. Pure."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

_LINEAR_ATTENTION = "linear attention with recurrent state"
_STATE_SPACE = "state-space layers (Mamba's)"
_MLA = "multi-head latent attention (MLA)"
_CORRECTED = "a router that chooses experts by corrected scores"
_SHARED = "experts that every token uses beside the routed ones"
_ENCODER_DECODER = "an encoder whose output the decoder attends to"
_ENCODES = "attention to later tokens, which encoders have"
_IMAGES = "an encoder of images or sound"

# The part that is missing -> patterns of `model_type`. The first row that fits counts.
BY_TYPE: dict[str, tuple[str, ...]] = {
    _LINEAR_ATTENTION: (
        *("qwen3_5*", "qwen3_next", "qwen4_exp*", "kimi_linear", "bailing_hybrid"),
        *("minimax", "olmo_hybrid"),
    ),
    _STATE_SPACE: (
        *("*mamba*", "*jamba*", "bamba", "falcon_h1", "*zamba*", "nemotron_h*"),
        *("granitemoehybrid", "plamo2"),
    ),
    "recurrent layers": ("*rwkv*", "recurrent_gemma", "xlstm"),
    "layers of convolutions": ("lfm2*", "lfm3*", "*hyena*"),
    _MLA: (
        *("deepseek_v2*", "deepseek_v3*", "deepseek_vl_v2", "kimi_k2*", "longcat_flash*"),
        *("minicpm3", "glm4_moe_lite", "glm_moe_dsa", "youtu", "mistral4", "axk1", "axk2"),
        *("dots3_note*", "hy_v4"),
    ),
    "embeddings of each layer, and layers that share keys and values": ("gemma3n*", "gemma4*"),
    "attention in chunks, and experts whose input is scaled": ("llama4*",),
    _CORRECTED: (
        *("glm4_moe*", "glm4v_moe*", "dots1", "ernie4_5_moe", "exaone_moe", "hy_v3", "kolibri1"),
        *("laguna", "mimo_v2_flash", "minimax_m2", "minimax_m3*", "solar_open", "deepseek_v4"),
    ),
    _SHARED: ("qwen2_moe", "hunyuan_v1_moe", "granitemoeshared", "afmoe", "cohere2_moe"),
    "attention whose queries and values are clipped": ("olmoe", "dbrx"),
    "layer norms, where the served families have RMS norms": (
        *("gpt2", "gpt_neo*", "gptj", "codegen", "opt", "bloom", "mpt", "falcon", "phi", "phimoe"),
        *("persimmon", "stablelm*", "starcoder2", "gpt_bigcode", "biogpt", "xglm", "nemotron"),
        *("jais2", "cohere", "cohere2", "openai-gpt", "gpt-sw3", "ctrl", "olmo"),
    ),
    "an MLP without a gate": ("arcee", "apertus"),
    "norms inside attention and MLP": ("bitnet",),
    "differential attention": ("diffllama",),
    "attention masks that depend on the values": ("doge",),
    "a model of bytes and patches, where others have tokens": ("blt",),
    _ENCODES: (
        *("*bert*", "roberta*", "xlm-roberta*", "electra", "deberta*", "ernie", "esm*", "mpnet"),
        *("longformer", "big_bird", "camembert", "data2vec-text", "rembert", "xmod", "nomic*"),
    ),
    _ENCODER_DECODER: (
        *("*t5", "t5gemma*", "*bart", "bart", "marian", "*pegasus*", "m2m_100", "led", "whisper"),
        *("prophetnet", "blenderbot*", "mvp", "nllb-moe", "switch_transformers", "fsmt", "udop"),
        *("*encoder-decoder", "seamless*", "speech_to_text", "speecht5", "moonshine*"),
    ),
    _IMAGES: ("*llava*", "*_vl", "*_vl_*", "*vision*", "*audio*", "clip*", "siglip*", "idefics*"),
}
# Of a type that no row names: keys that only such a model has.
_BY_KEY: dict[str, str] = {
    "kv_lora_rank": _MLA,
    "linear_num_key_heads": _LINEAR_ATTENTION,
    "hybrid_override_pattern": _STATE_SPACE,
    "ssm_cfg": _STATE_SPACE,
    "n_shared_experts": _SHARED,
    "vision_config": _IMAGES,
    "audio_config": _IMAGES,
}


def missing_part(config: Mapping[str, Any]) -> str | None:
    """The part that the model needs and that is not served, as a phrase; None = not known."""
    model_type = str(config.get("model_type"))
    for part, patterns in BY_TYPE.items():
        if any(fnmatchcase(model_type, pattern) for pattern in patterns):
            return part
    if config.get("is_encoder_decoder") is True:
        return _ENCODER_DECODER
    if "linear_attention" in _listed(config.get("layer_types")):
        return _LINEAR_ATTENTION
    return next((part for key, part in _BY_KEY.items() if config.get(key)), None)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
