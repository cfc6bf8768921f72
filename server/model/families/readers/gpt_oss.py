"""gpt-oss: experts with biases in every layer, sinks, windows in every other layer. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import experts, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_table, rope_table
from loraplex.server.model.spec.linear_spec import (
    MXFP4_BLOCK,
    ExpertForm,
    ExpertStorage,
    LinearSpec,
)
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.moe_spec import SWIGLU_ALPHA, SWIGLU_LIMIT, MoeSpec

_KV_HEADS, _HEAD_DIM = 8, 64
_EPSILON = 1e-5
_WINDOW = 128
_ROPE = RopeRules(theta=150_000.0)
# Where `config.json` says nothing of the rotation but its theta.
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_NAMES = experts.ExpertNames("mlp.router", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_attention(fields)
    experts.refuse_other_routing(fields)
    config = fields.config
    sizes = family.read_sizes(fields, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, epsilon=_EPSILON)
    rope, max_context = read_table(fields, rope_table(fields) or _YARN, sizes, _ROPE)
    bias = bool(config.get("attention_bias", True))
    moe = _read_moe(fields, sizes)
    windows = family.read_windows(
        fields, sizes, config.get("sliding_window", _WINDOW), lambda layer: layer % 2 == 0
    )
    biases = family.Biases(qkv=bias, o=bias)
    layers = [
        family.layer(sizes, replace(family.attention(sizes, rope, window, biases), sinks=True), moe)
        for window in windows
    ]
    eos = family.read_eos(fields, generation, sizes)
    return family.model(fields, sizes, layers, max_context, eos)


def _read_moe(fields: Fields, sizes: family.ModelSizes) -> MoeSpec:
    for key, served in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(fields.config, key, served) != served:
            fields.refuse(f"{key} must be {served:g}, got {fields.config[key]!r}")
    if _is_mxfp4(fields):
        for key, size in (("hidden_size", sizes.hidden), ("intermediate_size", sizes.inner)):
            if sizes.is_sound and size % MXFP4_BLOCK:
                fields.refuse(f"{key} must be a multiple of {MXFP4_BLOCK} in MXFP4, got {size}")
    counts = experts.read_counts(fields, default=128, default_of_token=4)
    form: ExpertForm = "mxfp4" if _is_mxfp4(fields) else "stacked"
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _NAMES, "top_k_softmax")
    return replace(
        moe,
        gate_up=_with_bias(moe.gate_up, form, interleaved=True),
        down=_with_bias(moe.down, form, interleaved=False),
        router=replace(moe.router, bias=True),
        activation="clamped_swiglu",
    )


def _is_mxfp4(fields: Fields) -> bool:
    return fields.table(fields.config, "quantization_config").get("quant_method") == "mxfp4"


def _with_bias(linear: LinearSpec, form: ExpertForm, *, interleaved: bool) -> LinearSpec:
    """Add a bias to a product of experts, whose weights lie as this family stores them."""
    assert linear.stored is not None
    storage = ExpertStorage(linear.stored.path, form, interleaved, transposed=True)
    return replace(linear, bias=True, stored=storage)
