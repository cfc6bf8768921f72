"""OLMo Hybrid: layers of Gated DeltaNet, with norms before them, between OLMo 3's layers of
attention, with norms behind. Pure.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.sharding import Span
from loraplex.server.model.families import family
from loraplex.server.model.families.family import FULL, ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import olmo, qwen3_next
from loraplex.server.model.families.readers.qwen3_next import LINEAR, PATH
from loraplex.server.model.families.rope import read_rope, rope_table
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import ModelSpec, RopeSpec
from loraplex.server.model.spec.state_spec import DeltaNetSpec

_EOS = 100257
_NORM_EPSILON = 1e-5  # which `config.json` does not say
_STORED = (
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
)


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_attention(fields)
    for key, usual in (("hidden_act", "silu"), ("is_causal", True), ("clip_qkv", None)):
        fields.only(key, usual)
    sizes = family.read_sizes(fields)
    rope, max_context = _read_rope(fields, sizes)
    attention = family.attention(sizes, rope, biases=family.attention_biases(fields))
    of_kind = {
        FULL: olmo.attending(sizes, attention),
        LINEAR: family.layer(sizes, _read_delta(fields, sizes)),
    }
    kinds = fields.config.get("layer_types")
    if kinds is None:
        kinds = [LINEAR if (n + 1) % 4 else FULL for n in range(sizes.layers)]
        kinds = kinds if FULL in kinds else [*kinds[:-1], FULL]
    kinds = family.read_mixed_kinds(fields, sizes, kinds, LINEAR)
    eos = family.read_eos(fields, generation, sizes, default=_EOS)
    layers = [of_kind[kind] for kind in kinds]
    model = family.model(fields, sizes, layers, max_context, eos)
    return replace(model, stored_names=_STORED)


def _read_rope(fields: Fields, sizes: ModelSizes) -> tuple[RopeSpec | None, int]:
    """Read the rotation; none where theta is null, as the published model has it."""
    said = {**fields.config, **rope_table(fields)}
    if "rope_theta" in said and said["rope_theta"] is None:
        return None, sizes.positions
    return read_rope(fields, sizes)


def _read_delta(fields: Fields, sizes: ModelSizes) -> DeltaNetSpec:
    usual = fields.positive("linear_num_key_heads", sizes.heads)
    key_dim = fields.positive("linear_key_head_dim", max(int(0.75 * sizes.hidden / usual), 1))
    heads = qwen3_next.read_heads(fields, (usual, sizes.heads, key_dim, 2 * key_dim))
    keys, values, key_dim, value_dim, kernel = heads
    of_keys = Span(keys * key_dim, key_dim)
    of_values = Span(values * value_dim, value_dim * values // keys)
    of_heads = Span(values, values // keys)
    mixed = {"q_proj": (of_keys,), "k_proj": (of_keys,), "v_proj": (of_values,)}
    gates = {"b_proj": (of_heads,), "a_proj": (of_heads,), "g_proj": (of_values,)}
    out = Part(f"{PATH}.o_proj", sizes.hidden)
    allows = fields.config.get("linear_allow_neg_eigval", True)
    if type(allows) is not bool:
        fields.refuse(f"linear_allow_neg_eigval must be true or false, got {allows!r}")
    return DeltaNetSpec(
        qwen3_next.column("in", sizes, mixed),
        qwen3_next.column("gates", sizes, gates),
        LinearSpec("out", of_values.features, (out,), "row"),
        PATH,
        *heads,
        _NORM_EPSILON,
        gates_z=True,
        beta=2 if allows else 1,
        norm="o_norm",
        convs=tuple(
            (f"{name}_conv1d", span.features)
            for name, span in zip("qkv", (of_keys, of_keys, of_values), strict=True)
        ),
    )
