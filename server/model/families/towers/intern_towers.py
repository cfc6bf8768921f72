"""InternVL's encoder. Pure."""

from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.towers.clip_towers import clip_sizes
from loraplex.server.model.families.towers.tower_parts import COLOURS, EncoderParts
from loraplex.server.model.spec.model_spec import LayerSpec, NormSpec, PositionTable
from loraplex.server.model.spec.picture_spec import PatchSpec

_USUAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
}
_NAMES = family.LayerNames(
    tuple(f"attention.{name}_proj" for name in "qkv"),
    "attention.projection_layer",
    "mlp.fc1",
    "mlp.fc2",
)
_QK_EPSILON = 1e-6


def intern_parts(fields: Fields) -> EncoderParts:
    """A row before the patches, learned positions, and a factor of each feature behind attention
    and MLP."""
    fields = fields.changed(**{**_USUAL, **fields.config})
    both = ((key, fields.config[key]) for key in ("image_size", "patch_size"))
    fields = fields.changed(**{key: _one(value) for key, value in both})
    fields.only("use_absolute_position_embeddings", True)
    sizes = clip_sizes(fields, is_whole=True)
    pixels, patch = fields.positive("image_size"), fields.positive("patch_size")
    colours, tile = fields.positive("num_channels", COLOURS), pixels // patch
    embedding = PatchSpec(
        "embeddings.patch_embeddings.projection",
        colours * patch**2,
        sizes.hidden,
        positions=PositionTable("embeddings.position_embeddings", 1 + tile**2),
        kernel=(colours, patch, patch),
        bias=True,
        first="embeddings.cls_token",
        is_batched=True,
    )
    unread = (r"embeddings\.mask_token", r"layernorm\..+")
    layer = _layer(fields, sizes)
    return EncoderParts(sizes, embedding, layer, unread=unread, tile=tile, pixels=pixels)


def _one(value: Any) -> Any:
    """The size of either side, which may be said for both."""
    is_pair = isinstance(value, list) and len(value) == 2 and value[0] == value[1]
    return value[0] if is_pair else value


def _layer(fields: Fields, sizes: family.ModelSizes) -> LayerSpec:
    biases = family.Biases(qkv=fields.config.get("attention_bias") is True, o=True, mlp=True)
    of = family.attention(sizes, None, biases=biases)
    of, mlp = family.branches_of(sizes, of, _NAMES, biases)
    if fields.config.get("use_qk_norm") is True:
        q, k = (NormSpec(f"attention.{name}_norm", of.q_size, _QK_EPSILON) for name in "qk")
        of = replace(of, q_norm=q, k_norm=k)
    before, behind = (family.layer_norm(f"layernorm_{at}", sizes) for at in ("before", "after"))
    if fields.config["norm_type"] == "rms_norm":
        before, behind = (replace(norm, kind="rms", bias=False) for norm in (before, behind))
    else:
        fields.only("norm_type", "layer_norm")
    factors = (NormSpec(f"lambda_{n}", sizes.hidden, 0.0, kind="scale") for n in (1, 2))
    return family.layer(sizes, of, mlp, family.NormPlaces(before, behind, *factors))
