"""Known attention between LayerNorms: StarCoder 2 and StableLM. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.linear_spec import Part
from loraplex.server.model.spec.model_spec import LayerSpec, ModelSpec, NormSpec, StepSpec

_STARCODER_EOS, _STABLELM_EOS = 50256, 0


def read_starcoder2(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """StarCoder 2: an MLP without gate; every matrix has a bias, or none."""
    config = fields.config
    family.refuse_other_attention(fields)
    fields.only("layer_types", None)
    sizes = family.read_sizes(
        fields,
        kv_heads=2,
        epsilon=1e-5,
        epsilon_key="norm_epsilon",
        activation="gelu_pytorch_tanh",
    )
    rope, max_context = read_rope(fields, sizes)
    bias = bool(config.get("use_bias", True))
    biases = family.Biases(qkv=bias, o=bias, mlp=bias)
    mlp = family.plain_mlp(sizes, biases)
    mlp = replace(
        mlp,
        gate_up=replace(mlp.gate_up, parts=(Part("mlp.c_fc", sizes.inner),)),
        down=replace(mlp.down, parts=(Part("mlp.c_proj", sizes.hidden),)),
    )
    windows = family.read_windows(fields, sizes, config.get("sliding_window"))
    layers = [
        family.layer(sizes, family.attention(sizes, rope, each, biases), mlp, _norms(sizes))
        for each in windows
    ]
    if config.get("tie_word_embeddings") is None:
        fields = fields.changed(tie_word_embeddings=True)
    return _model(fields, generation, sizes, layers, max_context, _STARCODER_EOS)


def read_stablelm(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """StableLM 2 and 3B: a quarter of each head turns; some have attention and MLP in one step."""
    config = fields.config
    family.refuse_other_attention(fields)
    fields.only("qk_layernorm", False)
    sizes = family.read_sizes(fields, kv_heads=32, epsilon=1e-5, epsilon_key="layer_norm_eps")
    if sizes.is_sound and sizes.heads * sizes.head_dim != sizes.hidden:
        fields.refuse("head_dim times num_attention_heads must be hidden_size")
    rope, max_context = read_rope(fields, sizes, RopeRules(partial=0.25))
    biases = family.Biases(qkv=bool(config.get("use_qkv_bias", False)))
    of = family.attention(sizes, rope, biases=biases)
    layer = family.layer(sizes, of, norms=_norms(sizes))
    if config.get("use_parallel_residual", False):
        layer = LayerSpec((StepSpec((of, family.mlp(sizes)), layer.steps[0].pre),))
    return _model(fields, generation, sizes, [layer] * sizes.layers, max_context, _STABLELM_EOS)


def _norm(path: str, sizes: family.ModelSizes) -> NormSpec:
    return NormSpec(path, sizes.hidden, sizes.epsilon, kind="layer", bias=True)


def _norms(sizes: family.ModelSizes) -> family.NormPlaces:
    return family.NormPlaces(
        _norm("input_layernorm", sizes), _norm("post_attention_layernorm", sizes)
    )


def _model(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: family.ModelSizes,
    layers: Sequence[LayerSpec],
    max_context: int,
    eos: int,
) -> ModelSpec:
    ids = family.read_eos(fields, generation, sizes, default=eos)
    model = family.model(fields, sizes, layers, max_context, ids)
    return replace(model, norm=_norm(model.norm.path, sizes))
