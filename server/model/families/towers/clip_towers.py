"""CLIP's and SigLIP's encoders. Pure."""

from typing import Any

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.towers.tower_parts import COLOURS, EncoderParts, plain_layer
from loraplex.server.model.spec.model_spec import PositionTable
from loraplex.server.model.spec.picture_spec import PatchSpec

CLIP = "clip_vision_model"
_CLIP_USUAL: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "layer_norm_eps": 1e-5,
    "hidden_act": "quick_gelu",
}
SIGLIP = "siglip_vision_model"
_USUAL = {
    CLIP: _CLIP_USUAL,
    SIGLIP: {
        **_CLIP_USUAL,
        "patch_size": 16,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_CLIP_NAMES = family.LayerNames(
    tuple(f"self_attn.{name}_proj" for name in "qkv"), "self_attn.out_proj", "mlp.fc1", "mlp.fc2"
)
_UNREAD = (r"embeddings\.position_ids", r"(post_layernorm|head)\..+")


def clip_parts(fields: Fields, encoder: str) -> EncoderParts:
    """CLIP's encoder: a row before the patches, learned positions, LayerNorms. SigLIP's has no such
    row, and no norm before the first layer.
    """
    fields = fields.changed(**{**_USUAL[encoder], **fields.config})
    has_row = encoder == CLIP
    sizes = clip_sizes(fields, is_whole=has_row)
    pixels, patch = fields.positive("image_size"), fields.positive("patch_size")
    colours, tile = fields.positive("num_channels", COLOURS), pixels // patch
    embedding = PatchSpec(
        "embeddings.patch_embedding",
        colours * patch**2,
        sizes.hidden,
        positions=PositionTable("embeddings.position_embedding", has_row + tile**2),
        norm=family.layer_norm("pre_layrnorm", sizes) if has_row else None,
        kernel=(colours, patch, patch),
        bias=not has_row,
        first="embeddings.class_embedding" if has_row else "",
    )
    layer = plain_layer(sizes, None, _CLIP_NAMES, "layer_norm")
    return EncoderParts(sizes, embedding, layer, unread=_UNREAD, tile=tile, pixels=pixels)


def clip_sizes(fields: Fields, *, is_whole: bool) -> family.ModelSizes:
    """Read an encoder's sizes. is_whole: a tile must have no pixels beside those of its patches."""
    hidden, inner, layers, heads = (
        fields.positive(key)
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    if hidden % heads:
        fields.refuse("hidden_size must be a multiple of num_attention_heads")
    if is_whole and fields.positive("image_size") % fields.positive("patch_size"):
        fields.refuse("image_size must be a multiple of patch_size")
    epsilon = fields.number(fields.config, "layer_norm_eps", _CLIP_USUAL["layer_norm_eps"])
    activation = family.read_activation(fields, "hidden_act", fields.config["hidden_act"])
    shape = (inner, layers, heads, heads, max(hidden // heads, 1))
    return family.ModelSizes(1, hidden, *shape, 1, epsilon, True, activation)
