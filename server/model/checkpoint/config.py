"""ModelConfig: what a base model computes, read from `config.json`, and the BaseSpec of it. Pure.

A key that would change the maths and is not implemented is refused by name; nothing is guessed.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from adapters.base import BaseSpec, ModuleShape
from server.model.checkpoint.config_fields import Fields
from server.model.checkpoint.families import Family, other_family, other_forms
from server.model.checkpoint.rope_config import RopeConfig, read_rope

# transformers' names of one function.
_SILU = ("silu", "swish")
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_EXTRA_LAYERS = "num_nextn_predict_layers"
_MISTRAL_WINDOW = 4096
_QWEN_WINDOW_LAYERS = 28


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder of the Llama kind. windows: per layer, the attention window in tokens or None.

    extra_layers: stored beyond the last, to predict further tokens; they are not computed.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    extra_layers: int = 0

    @classmethod
    def from_json(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Read `config.json` (and `generation_config.json`, whose end-of-sequence ids win).

        Raises ValueError: of a model of another type with that alone, else with every unsupported
        or malformed key at once, what matters most first.
        """
        reason = other_family(config)
        if reason is not None:
            raise ValueError(reason)
        fields = Fields(config)
        result = _read(fields, generation or {})
        if fields.problems:
            raise ValueError("this model is not supported: " + "; ".join(fields.problems))
        return result.within(result.max_context)

    def within(self, max_context: int) -> "ModelConfig":
        """The same for contexts of at most so many tokens: a window that no position can leave is
        no window."""
        windows = tuple(w if w is not None and w < max_context else None for w in self.windows)
        return msgspec.structs.replace(self, windows=windows)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def base_spec(
    config: ModelConfig,
    digest: str,
    names: tuple[str, ...],
    embedding_digests: Mapping[str, str] | None = None,
    tokens: dict[str, int] | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> BaseSpec:
    """The module table that adapters for this model are validated against."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "q_proj": ("self_attn.q_proj", hidden, config.q_size),
        "k_proj": ("self_attn.k_proj", hidden, config.kv_size),
        "v_proj": ("self_attn.v_proj", hidden, config.kv_size),
        "o_proj": ("self_attn.o_proj", config.q_size, hidden),
        "gate_proj": ("mlp.gate_proj", hidden, inner),
        "up_proj": ("mlp.up_proj", hidden, inner),
        "down_proj": ("mlp.down_proj", inner, hidden),
    }
    return BaseSpec(
        digest=digest,
        names=names,
        num_layers=config.num_layers,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        layer_modules={name: ModuleShape(*shape) for name, shape in shapes.items()},
        model_modules={
            "embed_tokens": ModuleShape("model.embed_tokens", config.vocab_size, hidden),
            "lm_head": ModuleShape("lm_head", hidden, config.vocab_size),
        },
        embedding_digests=dict(embedding_digests or {}),
        tokens=tokens,
        eos_token_ids=eos_token_ids,
    )


def _read(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    config = fields.config
    family: Family = config["model_type"]
    for reason in other_forms(config, family):
        fields.refuse(reason)
    _refuse_other_maths(fields)
    before = len(fields.problems)
    sizes = {key: fields.positive(key) for key in _REQUIRED}
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    kv_heads = fields.positive("num_key_value_heads", 8 if family == "mistral" else heads)
    head_dim = fields.positive(
        "head_dim", 128 if family == "qwen3" else max(sizes["hidden_size"] // heads, 1)
    )
    is_sound = len(fields.problems) == before
    if is_sound:  # else what follows would follow from what is wrong already
        _check_heads(fields, heads, kv_heads, head_dim)
    rope, max_context = read_rope(fields, sizes["max_position_embeddings"])
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=family == "qwen2" or (family != "mistral" and attention_bias),
        o_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(fields, family, layers) if is_sound else (),
        max_context=max_context,
        eos_token_ids=_eos(fields, family, generation, sizes["vocab_size"]) if is_sound else (),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        extra_layers=fields.positive(_EXTRA_LAYERS) if config.get(_EXTRA_LAYERS) else 0,
    )


def _check_heads(fields: Fields, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        fields.refuse(f"{heads} attention heads do not divide among {kv_heads} key-value heads")
    if head_dim % 2:
        fields.refuse(f"head_dim must be even, got {head_dim}")


def _refuse_other_maths(fields: Fields) -> None:
    config = fields.config
    if config.get("hidden_act", "silu") not in _SILU:
        fields.refuse(f"hidden_act must be 'silu', got {config['hidden_act']!r}")
    if config.get("is_causal", True) is not True:
        fields.refuse(f"is_causal must be true, got {config['is_causal']!r}")


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """Per layer."""
    config = fields.config
    full: tuple[int | None, ...] = (None,) * layers
    qwen = family in ("qwen2", "qwen3")
    if family == "llama" or (qwen and not config.get("use_sliding_window", False)):
        return full
    window = config.get("sliding_window", _MISTRAL_WINDOW)
    if window is None or (type(window) is int and window == 0):
        return full
    if not isinstance(window, int) or window <= 0:
        fields.refuse(f"sliding_window must be a positive integer, got {window!r}")
        return full
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", _QWEN_WINDOW_LAYERS) if qwen else 0
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        fields.refuse("layer_types must say full_attention or sliding_attention for each layer")
        return full
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos(
    fields: Fields, family: Family, generation: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    default = 2 if family in ("llama", "mistral") else None
    value = generation.get("eos_token_id")
    if value is None:
        value = fields.config.get("eos_token_id", default)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        fields.refuse(f"eos_token_id must be ids below {vocab_size}, got {value!r}")
        return ()
    return tuple(dict.fromkeys(ids))
