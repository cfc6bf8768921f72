"""The kinds of models that are served, and why others are not: type, head, stored form. Pure."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from loraplex.adapters.violations import shown
from loraplex.server.model.families.head_forms import head_form

_LISTED = "`loraplex info` lists what is"


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
        "plamo2",
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
        *("gpt2", "gpt_neo*", "gptj", "codegen", "opt", "bloom", "mpt", "falcon", "phimoe"),
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


def other_family(config: Mapping[str, Any], families: Collection[str]) -> str | None:
    """The one reason that counts for a model of another type: its other settings mean nothing.
    families: the values of `model_type` that are served."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in families:
        return None
    if model_type is None:
        return f"config.json names no model_type; {_LISTED}"
    part = missing_part(config)
    because = f": it needs {part}" if part else f"; {_LISTED}"
    return f"model type {shown(model_type)} is not served{because}"


def other_forms(
    config: Mapping[str, Any], architecture: str, *, for_vectors: bool = False
) -> list[str]:
    """Reasons of a model of a served type: another head, MLX's weights, code of its own.
    architecture: the class that is served. for_vectors: as of `read_model`."""
    has_no_head = for_vectors or head_form(config, architecture) == "none"
    reasons = (
        _head(config, architecture),
        _of_mlx(config),
        _own_code(config, architecture),
        _own_body(config) if has_no_head else None,
    )
    return [reason for reason in reasons if reason is not None]


def _head(config: Mapping[str, Any], served: str) -> str | None:
    named = config.get("architectures") or []
    if not isinstance(named, list):
        return f"architectures must be a list of names, got {shown(named)}"
    if head_form(config, served) is not None:
        return None
    found = ", ".join(map(str, named))[:160]
    if any("bidirectional" in str(name).lower() for name in named):
        return f"architectures: {shown(found)} attends to later tokens, too; served is {served}"
    return f"architectures: {shown(found)} is no form that is served; served is {served}"


def _of_mlx(config: Mapping[str, Any]) -> str | None:
    if not config.get("quantization"):
        return None
    return "quantization: quantised weights (MLX) are not served; serve the original"


def _own_code(config: Mapping[str, Any], served: str) -> str | None:
    """Code beside the weights under the name of a class that transformers has is left out, as
    transformers leaves it out: what is computed is the library's."""
    codes = config.get("auto_map") or {}
    if not isinstance(codes, Mapping):
        return f"auto_map must be a table, got {shown(codes)}"
    code = codes.get("AutoModelForCausalLM")
    if code is None and head_form(config, served) == "classes":
        code = codes.get("AutoModelForSequenceClassification")
        served = str((config.get("architectures") or [""])[0])
    if code is None or str(code).rpartition(".")[2].lower() == served.lower():
        return None
    return f"auto_map: the model needs code of its own ({shown(code)}), which is never run"


def _own_body(config: Mapping[str, Any]) -> str | None:
    """The code that a model for vectors brings, if any; such a body may attend both ways.

    GTE-Qwen2's does so under the library's own name.
    """
    codes = config.get("auto_map")
    code = codes.get("AutoModel") if isinstance(codes, Mapping) else None
    if code is None:
        return None
    return (
        f"auto_map: its vectors need code of its own ({shown(code)}), which is never run and may "
        "attend to later tokens"
    )
