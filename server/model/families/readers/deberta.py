"""DeBERTa 2 and 3: tokens have scores with vectors of distances, in place of positions. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import encoders, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import bert
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    DistanceVectors,
    EmbeddingSpec,
    LayerSpec,
    ModelSpec,
)

_OWN = "attention.self"
_NAMES = bert.NAMES._replace(
    branches=bert.NAMES.branches._replace(
        qkv=tuple(f"{_OWN}.{name}_proj" for name in ("query", "key", "value"))
    )
)
_KINDS = ("c2p", "p2c")


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    config = fields.config
    if config.get("conv_kernel_size"):
        fields.refuse(
            f"conv_kernel_size must be 0, got {config['conv_kernel_size']!r}: a convolution behind"
            " the first layer is not served"
        )
    sizes = encoders.read_sizes(fields, epsilon=1e-7)
    for key, usual in (
        ("embedding_size", sizes.hidden),
        ("pooler_hidden_size", sizes.hidden),
        ("attention_head_size", sizes.head_dim),
    ):
        fields.only(key, usual)
    kinds = _read_kinds(fields)
    distances = None
    if config.get("relative_attention") and kinds:
        distances = _read_distances(fields, sizes, kinds)
    own = distances is not None and not config.get("share_att_key")
    scale = float((sizes.head_dim * (1 + len(kinds))) ** -0.5)
    layer = encoders.layer(sizes, _NAMES).mapped(
        lambda of: _scaled(of, scale, kinds if own else ()) if isinstance(of, AttentionSpec) else of
    )
    named = config.get("pooler_hidden_act", "gelu")
    activation = family.read_activation(fields, "pooler_hidden_act", named)
    scores = encoders.score_heads(sizes, bert.POOLER, "classifier", activation)
    layers: list[LayerSpec] = [layer] * sizes.layers
    names = encoders.stored_names("deberta", _NAMES.layers)
    model = encoders.encoder(fields, sizes, _embedding(fields, sizes), layers, scores, names)
    return replace(model, distances=distances)


def _embedding(fields: Fields, sizes: family.ModelSizes) -> EmbeddingSpec:
    types = fields.config.get("type_vocab_size", 0)
    adds = fields.config.get("position_biased_input", True)
    if type(types) is not int or types < 0 or (types and not adds):
        fields.refuse(f"type_vocab_size must be 0 without positions in the input, got {types!r}")
        types = 0
    found = encoders.embedding(sizes, types=types)
    return found if adds else replace(found, positions=None)


def _read_kinds(fields: Fields) -> tuple[str, ...]:
    said = fields.config.get("pos_att_type") or []
    each = said.lower().split("|") if isinstance(said, str) else said
    if not isinstance(each, list) or not all(str(kind).strip() in _KINDS for kind in each):
        fields.refuse(f"pos_att_type must be of {' and '.join(_KINDS)}, got {said!r}")
        return ()
    return tuple(kind for kind in _KINDS if kind in {str(one).strip() for one in each})


def _read_distances(
    fields: Fields, sizes: family.ModelSizes, kinds: tuple[str, ...]
) -> DistanceVectors:
    most, buckets = (
        fields.config.get(key, -1) for key in ("max_relative_positions", "position_buckets")
    )
    if type(most) is not int or type(buckets) is not int:
        fields.refuse("max_relative_positions and position_buckets must be numbers of distances")
        most = buckets = -1
    most, buckets = most if most > 0 else sizes.positions, max(buckets, 0)
    if buckets and not 1 < buckets // 2 < most - 1:
        fields.refuse(f"position_buckets must be 4 to {2 * most - 3}, got {buckets}")
    said = fields.config.get("norm_rel_ebd", "none")
    if said not in ("none", "layer_norm"):
        fields.refuse(f"norm_rel_ebd must be none or layer_norm, got {said!r}")
    norm = family.layer_norm("model.encoder.LayerNorm", sizes) if said == "layer_norm" else None
    return DistanceVectors(
        "model.encoder.rel_embeddings",
        buckets or most,
        sizes.hidden,
        buckets,
        most,
        norm,
        meets_queries="c2p" in kinds,
        meets_keys="p2c" in kinds,
    )


def _scaled(of: AttentionSpec, scale: float, own: tuple[str, ...]) -> AttentionSpec:
    """Return the attention with this scale. own: kinds of scores for which vectors of distances
    have matrices of their own."""
    if not own:
        return replace(of, scale=scale)
    q = of.qkv.parts[0]
    paths = {"p2c": f"{_OWN}.pos_query_proj", "c2p": f"{_OWN}.pos_key_proj"}
    parts = tuple(
        Part(path, q.out_features, q.spans) for kind, path in paths.items() if kind in own
    )
    linear = LinearSpec("distances", of.qkv.in_features, parts, "column", bias=True)
    return replace(of, scale=scale, distances=linear)
