"""Edits of a config.json: keys left out, of another type or value, and keys that change maths."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

Config = Mapping[str, Any]

# What other families have: here it must change the answer as transformers says, or be refused.
ADDED: tuple[dict[str, Any], ...] = (
    {"attention_bias": True},
    {"mlp_bias": True},
    {"attn_logit_softcapping": 2.0},
    {"final_logit_softcapping": 2.0},
    {"query_pre_attn_scalar": 4},
    {"attention_multiplier": 0.5},
    {"embedding_multiplier": 3.0},
    {"residual_multiplier": 0.5},
    {"logits_scaling": 4.0},
    {"logit_scale": 0.25},
    {"head_dim": 8},
    {"sliding_window": 5},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"layer_types": ["linear_attention"] * 3},
    {"is_causal": False},
    {"use_bidirectional_attention": True},
    {"partial_rotary_factor": 0.5},
    {"rope_theta": 50.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "su", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0}},
    {"no_rope_layers": [0, 1, 0]},
    {"hidden_act": "gelu"},
    {"hidden_activation": "relu"},
    {"use_qk_norm": True},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 1},
    {"num_experts": 4, "num_local_experts": 4},
    {"clip_qkv": 0.1},
    {"num_nextn_predict_layers": 1},
    {"quantization_config": {"quant_method": "fp8"}},
)


class Edit(NamedTuple):
    """name: what was done, for the message of a failure."""

    name: str
    config: dict[str, Any]


def edits(config: Config) -> Iterator[Edit]:
    """Of each key: the key left out, and other values; then keys that are added."""
    for key, value in config.items():
        if key in ("model_type", "transformers_version"):
            continue
        rest = {name: deepcopy(kept) for name, kept in config.items() if name != key}
        yield Edit(f"without {key}", rest)
        for other in others(value):
            yield Edit(f"{key} = {other!r}", {**rest, key: other})
    for added in ADDED:
        yield Edit(f"with {added}", {**deepcopy(dict(config)), **added})


def others(value: object) -> Iterator[object]:
    """Values of another type, and others of the same."""
    if value is None:
        yield from (2, 0.5, True, "x")
    elif isinstance(value, bool):
        yield from (not value, None)
    elif isinstance(value, int):
        yield from (value * 2, value + 1, 0, -value, str(value), None)
    elif isinstance(value, float):
        yield from (value * 1.7 + 0.1, 0.0, -value, "x", None)
    elif isinstance(value, str):
        yield from ("other", 5, None)
    elif isinstance(value, list):
        yield from ([], value[::-1], value[:-1], 5)
    elif isinstance(value, dict):
        yield from ({}, None, [])
        for name, inner in value.items():
            rest = {kept: deepcopy(of) for kept, of in value.items() if kept != name}
            yield rest
            yield from ({**rest, name: other} for other in others(inner))
