"""Gemma 1, 2 and 3: norms stored less one, a scaled embedding, a GELU in the MLP. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import read_rope, read_table, read_tables
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
)

_ACTIVATION = "gelu_pytorch_tanh"
_HEAD_DIM = 256
_EOS = 1
_WINDOW = 4096
_SCALAR = 256
_FULL_THETA, _WINDOWED_THETA = 1e6, 1e4


def read_gemma(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Norms in Llama's places."""
    sizes = _read_sizes(fields, kv_heads=16)
    rope, max_context = read_rope(fields, sizes)
    if fields.config.get("hidden_activation") not in (None, _ACTIVATION):
        named = fields.config["hidden_activation"]
        fields.refuse(f"hidden_activation must be {_ACTIVATION}, got {named!r}")
    norms = family.NormPlaces(
        pre_attention=_norm("input_layernorm", sizes.hidden, sizes),
        pre_mlp=_norm("post_attention_layernorm", sizes.hidden, sizes),
    )
    named = fields.config.get("hidden_act", _ACTIVATION)
    # The first configurations say "gelu" and mean what the models were trained with.
    activation = family.read_activation(
        fields, "hidden_act", _ACTIVATION if named == "gelu" else named
    )
    of = family.attention(sizes, rope, biases=family.attention_biases(fields))
    layer = family.layer(sizes, of, family.mlp(sizes, activation=activation), norms)
    return model_of(fields, generation, sizes, (layer,) * sizes.layers, max_context)


def read_vaultgemma(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """VaultGemma: Gemma 2 without norms behind attention and MLP."""
    model = read_gemma2(fields, generation)
    layers = (
        LayerSpec(tuple(replace(step, post=None) for step in layer.steps)) for layer in model.layers
    )
    return replace(model, layers=tuple(layers))


def read_gemma2(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Soft caps on scores and logits; a window in every other layer, from the first on."""
    config = fields.config
    sizes = _read_sizes(fields, kv_heads=4)
    rope, max_context = read_rope(fields, sizes)
    scale = fields.number(config, "query_pre_attn_scalar", _SCALAR) ** -0.5
    softcap = read_softcap(fields, "attn_logit_softcapping", 50.0)
    window, biases = config.get("sliding_window", _WINDOW), family.attention_biases(fields)
    windows = family.read_windows(fields, sizes, window, lambda layer: layer % 2 == 0)
    layers = layers_of(
        fields,
        sizes,
        [
            family.attention(sizes, rope, each, biases, scale=scale, softcap=softcap)
            for each in windows
        ],
    )
    cap = read_softcap(fields, "final_logit_softcapping", 30.0)
    return model_of(fields, generation, sizes, layers, max_context, cap)


def read_gemma3(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Windows in five of six layers, whose rotation is another than that of the sixth; norms of q
    and k. Positions are not multiplied by a factor of the rotation: they are counted with it."""
    config = fields.config
    sizes = _read_sizes(fields, kv_heads=4)
    if config.get("attn_logit_softcapping") is not None:
        fields.refuse("attn_logit_softcapping must be null, since Gemma 3 computes none")
    pattern = fields.positive("sliding_window_pattern", 6)

    def has_window(layer: int) -> bool:
        return (layer + 1) % pattern > 0

    windows = family.read_windows(fields, sizes, config.get("sliding_window", _WINDOW), has_window)
    local_theta = config.get("rope_local_base_freq", _WINDOWED_THETA)
    tables = read_tables(fields, config.get("rope_theta", _FULL_THETA), local_theta)
    full, windowed = (read_table(fields, table, sizes)[0] for table in tables)
    ropes = [windowed if has else full for has in family.read_windowed(fields, sizes, has_window)]
    scale = fields.number(config, "query_pre_attn_scalar", _SCALAR) ** -0.5
    biases = family.attention_biases(fields)
    attentions = [
        replace(
            family.attention(sizes, rope, window, biases, scale=scale),
            q_norm=_norm("self_attn.q_norm", sizes.head_dim, sizes),
            k_norm=_norm("self_attn.k_norm", sizes.head_dim, sizes),
        )
        for rope, window in zip(ropes, windows, strict=True)
    ]
    layers = layers_of(fields, sizes, attentions)
    cap = read_softcap(fields, "final_logit_softcapping", None)
    return model_of(fields, generation, sizes, layers, sizes.positions, cap)


def _read_sizes(fields: Fields, kv_heads: int) -> family.ModelSizes:
    family.refuse_other_attention(fields)
    return family.read_sizes(fields, kv_heads=kv_heads, head_dim=_HEAD_DIM, activation=None)


def read_softcap(fields: Fields, key: str, usual: float | None) -> float | None:
    """Read a soft cap. usual: where `config.json` has no such key; null = no cap."""
    if fields.config.get(key, usual) is None:
        return None
    return fields.number(fields.config, key, usual)


def _norm(path: str, size: int, sizes: family.ModelSizes, offset: float = 1.0) -> NormSpec:
    return NormSpec(path, size, sizes.epsilon, offset=offset)


def layers_of(
    fields: Fields,
    sizes: family.ModelSizes,
    attentions: Sequence[AttentionSpec],
    offset: float = 1.0,
) -> list[LayerSpec]:
    """Make the layers, with norms before and behind attention and MLP. offset: of norms."""
    norms = family.NormPlaces(
        pre_attention=_norm("input_layernorm", sizes.hidden, sizes, offset),
        post_attention=_norm("post_attention_layernorm", sizes.hidden, sizes, offset),
        pre_mlp=_norm("pre_feedforward_layernorm", sizes.hidden, sizes, offset),
        post_mlp=_norm("post_feedforward_layernorm", sizes.hidden, sizes, offset),
    )
    named = fields.config.get("hidden_activation", _ACTIVATION)
    activation = family.read_activation(fields, "hidden_activation", named)
    mlp = family.mlp(sizes, activation=activation)
    return [family.layer(sizes, of, mlp, norms) for of in attentions]


def model_of(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: family.ModelSizes,
    layers: Sequence[LayerSpec],
    max_context: int,
    softcap: float | None = None,
    offset: float = 1.0,
) -> ModelSpec:
    """Make the model, with scaled embeddings. softcap: of logits. offset: of the last norm."""
    eos = family.read_eos(fields, generation, sizes, default=_EOS)
    plain = family.model(fields, sizes, layers, max_context, eos, tied=True)
    return replace(
        plain,
        embedding=replace(plain.embedding, scale=sizes.hidden**0.5),
        norm=_norm(plain.norm.path, sizes.hidden, sizes, offset),
        head=replace(plain.head, softcap=softcap),
    )
