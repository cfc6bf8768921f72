"""Phi 1 to 4: first parallel blocks with LayerNorm, since Phi 3 Llama with fused matrices. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    StepSpec,
)

_PHI = RopeRules(partial=0.5)
# Phi 3's first configurations say "su", and transformers takes "yarn" for the same.
_PHI3 = RopeRules(
    partial=1.0,
    kinds={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    original_context=4096,
)
_EOS, _PHI3_EOS = 2, 32000


def read_phi(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Phi 1 to 2: attention and an MLP without gate read one LayerNorm; the head has a bias."""
    family.refuse_other_attention(fields)
    sizes = family.read_sizes(
        fields, epsilon=1e-5, epsilon_key="layer_norm_eps", activation="gelu_new"
    )
    rope, max_context = read_rope(fields, sizes, _PHI)
    of = family.attention(sizes, rope, biases=family.Biases(qkv=True))
    of = replace(of, o=replace(of.o, parts=(Part("self_attn.dense", sizes.hidden),), bias=True))
    if fields.config.get("qk_layernorm", False):
        of = family.with_layer_norms(of, sizes)
    step = StepSpec((of, _read_mlp(fields, sizes)), family.layer_norm("input_layernorm", sizes))
    eos = family.read_eos(fields, generation, sizes, default=_EOS)
    layers = (LayerSpec((step,)),) * sizes.layers
    model = family.model(fields, sizes, layers, max_context, eos)
    head = replace(model.head, linear=replace(model.head.linear, bias=True))
    return replace(model, norm=family.layer_norm("model.final_layernorm", sizes), head=head)


def _read_mlp(fields: Fields, sizes: family.ModelSizes) -> MlpSpec:
    hidden, inner = sizes.hidden, sizes.inner
    return MlpSpec(
        LinearSpec("up", hidden, (Part("mlp.fc1", inner),), "column", bias=True),
        LinearSpec("down", inner, (Part("mlp.fc2", hidden),), "row", bias=True),
        sizes.activation,
        is_gated=False,
    )


def read_phi3(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_attention(fields)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        fields.only(key, 1)
    fields.only("layer_types", None)
    sizes = family.read_sizes(fields, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes, _PHI3)
    windows = family.read_windows(fields, sizes, fields.config.get("sliding_window"))
    mlp = family.fused_mlp(sizes)
    layers = [
        family.layer(sizes, _fused(family.attention(sizes, rope, window)), mlp)
        for window in windows
    ]
    eos = family.read_eos(fields, generation, sizes, default=_PHI3_EOS)
    return family.model(fields, sizes, layers, max_context, eos)


def _fused(of: AttentionSpec) -> AttentionSpec:
    return replace(of, qkv=family.fused(of.qkv, "self_attn.qkv_proj"))
