"""OLMo 1 has LayerNorms without weights. OLMo 2 and 3 have norms behind attention and MLP alone,
and of q and k over all heads. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import llama
from loraplex.server.model.families.rope import RopeRules, read_rope, read_table, read_tables
from loraplex.server.model.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec

_EOS = 50279
_WINDOW = 4096
_OLMO3 = RopeRules(theta=5e5)


def read_olmo(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    sizes = _read_sizes(fields)._replace(epsilon=1e-5)
    norm = NormSpec("", sizes.hidden, sizes.epsilon, kind="layer", has_weight=False)
    model = llama.assembled(fields, generation, sizes, family.attention_biases(fields), eos=_EOS)
    steps = tuple(replace(step, pre=norm) for step in model.layers[0].steps)
    return replace(model, norm=norm, layers=(LayerSpec(steps),) * sizes.layers)


def read_olmo2(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    sizes = _read_sizes(fields)
    rope, max_context = read_rope(fields, sizes)
    attentions = [
        family.attention(sizes, rope, biases=family.attention_biases(fields))
    ] * sizes.layers
    return _model(fields, generation, sizes, attentions, max_context)


def read_olmo3(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Windows in three of four layers, whose rotation is another than that of the fourth."""
    sizes = _read_sizes(fields)

    def has_window(layer: int) -> bool:
        return (layer + 1) % 4 > 0

    window = fields.config.get("sliding_window", _WINDOW)
    windows = family.read_windows(fields, sizes, window, has_window)
    full, windowed = read_tables(fields, _OLMO3.theta, _OLMO3.theta)
    if not fields.table(fields.config, "rope_parameters"):
        fields.only("rope_theta", _OLMO3.theta)  # transformers gives it to one kind of layer alone
    for table in (full, windowed):
        if table.get("truncate", True) is not True:
            fields.refuse("truncate must be true, since transformers reads no other for OLMo 3")
    (rope, max_context), (windowed_rope, _) = (
        read_table(fields, table, sizes, _OLMO3) for table in (full, windowed)
    )
    biases = family.attention_biases(fields)
    attentions = [
        family.attention(sizes, windowed_rope if has else rope, each, biases)
        for has, each in zip(family.read_windowed(fields, sizes, has_window), windows, strict=True)
    ]
    return _model(fields, generation, sizes, attentions, max_context)


def with_wide_norms(of: AttentionSpec, sizes: family.ModelSizes) -> AttentionSpec:
    """Return attention whose q and k are normed over all heads together."""
    return replace(
        of,
        q_norm=NormSpec("self_attn.q_norm", of.q_size, sizes.epsilon),
        k_norm=NormSpec("self_attn.k_norm", of.kv_size, sizes.epsilon),
    )


def attending(sizes: family.ModelSizes, of: AttentionSpec) -> LayerSpec:
    """Make a layer whose attention and MLP have norms behind them, and whose q and k are normed
    over all heads together."""
    norms = family.NormPlaces(
        pre_attention=None,
        pre_mlp=None,
        post_attention=NormSpec("post_attention_layernorm", sizes.hidden, sizes.epsilon),
        post_mlp=NormSpec("post_feedforward_layernorm", sizes.hidden, sizes.epsilon),
    )
    return family.layer(sizes, with_wide_norms(of, sizes), norms=norms)


def _read_sizes(fields: Fields) -> family.ModelSizes:
    family.refuse_other_attention(fields)
    fields.only("clip_qkv", None)
    return family.read_sizes(fields, epsilon=1e-5)


def _model(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: family.ModelSizes,
    attentions: Sequence[AttentionSpec],
    max_context: int,
) -> ModelSpec:
    layers = [attending(sizes, of) for of in attentions]
    eos = family.read_eos(fields, generation, sizes, default=_EOS)
    return family.model(fields, sizes, layers, max_context, eos)
