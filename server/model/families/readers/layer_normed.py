"""Known attention between LayerNorms: StarCoder 2, StableLM and Cohere. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import LLAMA, RopeRules, read_rope
from loraplex.server.model.spec.linear_spec import Part
from loraplex.server.model.spec.model_spec import LayerSpec, ModelSpec, StepSpec

_STARCODER_EOS, _STABLELM_EOS, _COHERE_EOS = 50256, 0, 255001
_COHERE_WINDOW, _COHERE_PATTERN = 4096, 4


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
        family.layer(
            sizes, family.attention(sizes, rope, each, biases), mlp, family.layer_norms(sizes)
        )
        for each in windows
    ]
    fields = family.tied_where_unsaid(fields)
    return family.layer_normed(fields, generation, sizes, layers, max_context, _STARCODER_EOS)


def read_stablelm(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """StableLM 2 and 3B: a quarter of each head turns; some have attention and MLP in one step."""
    config = fields.config
    family.refuse_other_attention(fields)
    fields.only("qk_layernorm", False)
    sizes = family.read_sizes(fields, kv_heads=32, epsilon=1e-5, epsilon_key="layer_norm_eps")
    family.refuse_other_head_dim(fields, sizes)
    rope, max_context = read_rope(fields, sizes, RopeRules(partial=0.25))
    biases = family.Biases(qkv=bool(config.get("use_qkv_bias", False)))
    of = family.attention(sizes, rope, biases=biases)
    layer = family.layer(sizes, of, norms=family.layer_norms(sizes))
    if config.get("use_parallel_residual", False):
        layer = LayerSpec((StepSpec((of, family.mlp(sizes)), layer.steps[0].pre),))
    return family.layer_normed(
        fields, generation, sizes, [layer] * sizes.layers, max_context, _STABLELM_EOS
    )


def read_cohere(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Command R: attention and MLP in one step; neighbouring features turn together."""
    sizes = _read_cohere_sizes(fields)
    windows = (None,) * sizes.layers
    norms_heads = bool(fields.config.get("use_qk_norm", False))
    rules = RopeRules(theta=5e5)
    return _cohere(fields, generation, sizes, windows, rules, norms_heads=norms_heads)


def read_cohere2(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Command R7B and A: as Command R. Layers without a window have no rotation."""
    config = fields.config
    sizes = _read_cohere_sizes(fields)
    family.refuse_other_head_dim(fields, sizes)
    pattern = fields.positive("sliding_window_pattern", _COHERE_PATTERN)
    window = config.get("sliding_window", _COHERE_WINDOW)
    windows = family.read_windows(fields, sizes, window, lambda n: (n + 1) % pattern != 0)
    return _cohere(fields, generation, sizes, windows, LLAMA, turns_windowed=True)


def _read_cohere_sizes(fields: Fields) -> family.ModelSizes:
    family.refuse_other_attention(fields)
    return family.read_sizes(fields, epsilon=1e-5, epsilon_key="layer_norm_eps")


def _cohere(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: family.ModelSizes,
    windows: Sequence[int | None],
    rules: RopeRules,
    *,
    turns_windowed: bool = False,
    norms_heads: bool = False,
) -> ModelSpec:
    """Make a model of parallel layers. turns_windowed: layers with a window alone turn.
    norms_heads: q and k have LayerNorms."""
    config = fields.config
    rope, max_context = read_rope(fields, sizes, rules)
    turned = replace(rope, interleaved=True)
    biases = family.attention_biases(fields)
    norm = family.layer_norm("input_layernorm", sizes, bias=False)
    layers = []
    for window in windows:
        own = None if turns_windowed and window is None else turned
        of = family.attention(sizes, own, window, biases)
        if norms_heads:
            of = family.with_layer_norms(of, sizes, "norm", own=True)
        layers.append(LayerSpec((StepSpec((of, family.mlp(sizes)), norm),)))
    fields = family.tied_where_unsaid(fields)
    model = family.layer_normed(fields, generation, sizes, layers, max_context, _COHERE_EOS)
    scale = fields.number(config, "logit_scale", 0.0625)
    last = replace(model.norm, bias=False)
    return replace(model, norm=last, head=replace(model.head, scale=scale))
