"""CLIP's and SigLIP's encoders within LLaVA. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.towers.tower_parts import (
    COLOURS,
    plain_layer,
    products,
    tower,
)
from loraplex.server.model.spec.model_spec import ModelSpec, NormSpec, PositionTable
from loraplex.server.model.spec.picture_spec import MergerSpec, PatchSpec, PictureSpec
from loraplex.server.protocol import PictureForm

_CLIP = "clip_vision_model"
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
_SIGLIP = "siglip_vision_model"
_USUAL = {
    _CLIP: _CLIP_USUAL,
    _SIGLIP: {
        **_CLIP_USUAL,
        "patch_size": 16,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_CLIP_NAMES = family.LayerNames(
    tuple(f"self_attn.{name}_proj" for name in "qkv"), "self_attn.out_proj", "mlp.fc1", "mlp.fc2"
)
_LLAVA_TOKEN = 32000


def read_llava(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """LLaVA with CLIP's encoder: a row before the patches, learned positions, LayerNorms. Some
    layer gives what two products make tokens of, mostly the last but one. SigLIP's has no such row,
    and no norm before the first layer.
    """
    token_id = config.get("image_token_index", config.get("image_token_id", _LLAVA_TOKEN))
    layer = config.get("vision_feature_layer", -2)
    layer = layer[0] if isinstance(layer, list) and len(layer) == 1 else layer
    strategy = config.get("vision_feature_select_strategy", "default")
    is_token = type(token_id) is int and 0 <= token_id < text.vocab_size
    encoder = str(fields.config.get("model_type", _CLIP))
    strategies = {_CLIP: ("default", "full"), _SIGLIP: ("full",)}.get(encoder, ())
    if not (is_token and type(layer) is int and strategy in strategies):
        return None
    fields = fields.changed(**{**_USUAL[encoder], **fields.config})
    has_row = encoder == _CLIP
    sizes = _clip_sizes(fields, is_whole=has_row)
    layers = layer if layer >= 0 else sizes.layers + 1 + layer
    if not 1 <= layers <= sizes.layers:
        fields.refuse(f"no layer of {sizes.layers} is vision_feature_layer {layer}")
        layers = 1
    side = fields.positive("image_size") // fields.positive("patch_size")
    added = int(has_row and strategy == "full")
    merger = replace(_projector(config, sizes, text, fields), skipped=has_row - added)
    return PictureSpec(
        tower=_clip_tower(fields, sizes, layers, merger, text, has_row=has_row),
        token_id=token_id,
        form=PictureForm(added=added, tile=side),
        pixels=fields.positive("image_size"),
    )


def _clip_sizes(fields: Fields, *, is_whole: bool) -> family.ModelSizes:
    """is_whole: a picture must have no pixels beside those of its patches."""
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


def _projector(
    config: Mapping[str, Any], sizes: family.ModelSizes, text: ModelSpec, fields: Fields
) -> MergerSpec:
    bias = config.get("multimodal_projector_bias", True) is not False
    names = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
    first, last = products(text, names, sizes.hidden, text.hidden_size, bias=bias)
    key = "projector_hidden_act"
    activation = family.read_activation(fields, key, config.get(key, "gelu"))
    return MergerSpec(
        last, tied=False, first=first, activation=activation, side=1, reads_stream=True
    )


def _clip_tower(
    fields: Fields,
    sizes: family.ModelSizes,
    layers: int,
    merger: MergerSpec,
    text: ModelSpec,
    *,
    has_row: bool,
) -> ModelSpec:
    """The first layers of an encoder, and the way from their last to tokens."""
    patch = fields.positive("patch_size")
    colours = fields.positive("num_channels", COLOURS)
    rows = has_row + (fields.positive("image_size") // patch) ** 2
    embedding = PatchSpec(
        "embeddings.patch_embedding",
        colours * patch**2,
        sizes.hidden,
        positions=PositionTable("embeddings.position_embedding", rows),
        norm=family.layer_norm("pre_layrnorm", sizes) if has_row else None,
        kernel=(colours, patch, patch),
        bias=not has_row,
        first="embeddings.class_embedding" if has_row else "",
    )
    beyond = "|".join(map(str, range(layers, sizes.layers))) or "-"
    layer = plain_layer(sizes, None, _CLIP_NAMES, "layer_norm")
    norm = NormSpec("post_layernorm", sizes.hidden, sizes.epsilon, kind="layer", has_weight=False)
    unread = rf"embeddings\.position_ids|(post_layernorm|head)\..+|model\.layers\.({beyond})\..+"
    return tower(text, embedding, (layer,) * layers, norm, merger, unread)
