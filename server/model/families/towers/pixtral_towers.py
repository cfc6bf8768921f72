"""Pixtral's encoder. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.towers.tower_parts import COLOURS, EncoderParts, turned_sizes
from loraplex.server.model.spec.model_spec import LayerSpec, NormSpec, RopeSpec
from loraplex.server.model.spec.picture_spec import PatchSpec

PIXTRAL = "pixtral"
_LAYERS = "vision_tower.transformer.layers"
_EPSILON = 1e-5
_USUAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}


def pixtral_parts(fields: Fields) -> EncoderParts:
    """Patches of a picture of any size that all see each other: RMS norms, gated MLPs, rotation by
    height and width, whose frequencies take turns.
    """
    fields = fields.changed(**{**_USUAL, **fields.config})
    keys = "hidden_size", "num_attention_heads", "num_hidden_layers"
    sizes = turned_sizes(fields, keys, fields.positive("intermediate_size"), _EPSILON)
    fields.only("head_dim", sizes.head_dim)
    colours, patch = fields.positive("num_channels", COLOURS), fields.positive("patch_size")
    embedding = PatchSpec(
        "patch_conv",
        colours * patch**2,
        sizes.hidden,
        norm=NormSpec("ln_pre", sizes.hidden, _EPSILON),
        kernel=(colours, patch, patch),
    )
    return EncoderParts(sizes, embedding, _layer(sizes, _rope(fields)), splits=True, path=_LAYERS)


def _layer(sizes: family.ModelSizes, rope: RopeSpec) -> LayerSpec:
    of, mlp = family.attention(sizes, rope), family.mlp(sizes)
    qkv = family.with_paths(of.qkv, *(f"attention.{name}_proj" for name in "qkv"))
    of = replace(of, qkv=qkv, o=family.with_paths(of.o, "attention.o_proj"))
    gate_up = family.with_paths(mlp.gate_up, *(f"feed_forward.{n}_proj" for n in ("gate", "up")))
    mlp = replace(mlp, gate_up=gate_up, down=family.with_paths(mlp.down, "feed_forward.down_proj"))
    names = ("attention_norm", "ffn_norm")
    norms = family.NormPlaces(*(NormSpec(name, sizes.hidden, _EPSILON) for name in names))
    return family.layer(sizes, of, mlp, norms)


def _rope(fields: Fields) -> RopeSpec:
    config: Mapping[str, Any] = fields.config
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    table = fields.table(config, key)
    kind = table.get("rope_type", table.get("type", "axial"))
    if kind not in ("axial", "default"):
        fields.refuse(f"{key}: rope_type must be axial, got {kind!r}")
    theta = fields.number({**config, **table}, "rope_theta", 10_000.0)
    return RopeSpec("default", theta)
