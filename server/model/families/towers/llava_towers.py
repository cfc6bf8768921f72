"""LLaVA and its kin: encoders whose layer is made tokens of by a projector. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.towers.tower_parts import (
    CLIP,
    PIXTRAL,
    SIGLIP,
    EncoderParts,
    clip_parts,
    intern_parts,
    older_placeholder,
    pixtral_parts,
    products,
    tower,
)
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import ModelSpec, NormSpec
from loraplex.server.model.spec.picture_spec import MergerSpec, PictureSpec
from loraplex.server.protocol import PictureForm, StretchedForm, TiledForm

# Rows of an encoder's layer that become tokens: all of them, or those behind the first.
_FULL, _BEHIND = "full", "default"
_STRATEGIES = {CLIP: (_BEHIND, _FULL), SIGLIP: (_FULL,), PIXTRAL: (_FULL,)}
_LLAVA_TOKEN, _MISTRAL3_TOKEN, _IDEFICS3_TOKEN, _INTERNVL_TOKEN = 32000, 10, 128257, 151667
# Of LLaVA-NeXT, where `config.json` says nothing.
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_IDEFICS3: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "patch_size": 32,
}
# torch's own, of a LayerNorm.
_EPSILON = 1e-5
_PROJECTOR = "multi_modal_projector"


def read_llava(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """LLaVA with CLIP's, SigLIP's or Pixtral's encoder. Some layer gives what two products make
    tokens of, mostly the last but one.
    """
    encoder = str(fields.config.get("model_type", CLIP))
    strategy = config.get("vision_feature_select_strategy", _BEHIND)
    token_id, layer = older_placeholder(config, text, _LLAVA_TOKEN), _feature_layer(config, -2)
    if token_id is None or layer is None or strategy not in _STRATEGIES.get(encoder, ()):
        return None
    parts = pixtral_parts(fields) if encoder == PIXTRAL else clip_parts(fields, encoder)
    has_row = bool(parts.embedding.first)
    added = int(has_row and strategy == _FULL)
    bias = config.get("multimodal_projector_bias") is not False
    merger = _projector(config, parts.sizes.hidden, text, fields, bias=bias)
    merger = replace(merger, reads_stream=True, skipped=has_row - added)
    norm = NormSpec("post_layernorm", parts.sizes.hidden, 1.0, kind="layer", has_weight=False)
    model = _tower(parts, layer, norm, merger, text, fields)
    form = PictureForm(added=added, tile=parts.tile)
    return PictureSpec(
        model, token_id, form=form, pixels=parts.pixels, splits=parts.splits, path=parts.path
    )


def read_llava_next(
    config: Mapping[str, Any], text: ModelSpec, fields: Fields
) -> PictureSpec | None:
    """LLaVA-NeXT: as LLaVA, of pictures in tiles, whose tokens lie line by line."""
    found = read_llava(config, text, fields)
    if found is None or found.form.added or not found.pixels:
        return None
    tilings = _tilings(config, found.pixels, fields)
    model = replace(found.tower, head=replace(found.merger, newline="image_newline"))
    return replace(found, tower=model, form=TiledForm(tile=found.form.tile, tilings=tilings))


def _tilings(config: Mapping[str, Any], pixels: int, fields: Fields) -> tuple[tuple[int, int], ...]:
    """Numbers of tiles by height and width. pixels: a side of a tile."""
    key = "image_grid_pinpoints"
    sizes = _PINPOINTS if config.get(key) is None else config[key]

    def is_sound(size: object) -> bool:
        if not isinstance(size, list) or len(size) != 2:
            return False
        return all(type(n) is int and n > 0 and n % pixels == 0 for n in size)

    if not isinstance(sizes, list) or not sizes or not all(map(is_sound, sizes)):
        fields.refuse(f"{key} must be multiples of {pixels} pixels, got {sizes!r}")
        return ((1, 1),)
    return tuple((high // pixels, wide // pixels) for high, wide in sizes)


def read_mistral3(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """Mistral 3: Pixtral's encoder. Normed patches of a square become one by a product, before two
    more make a token.
    """
    token_id, layer = older_placeholder(config, text, _MISTRAL3_TOKEN), _feature_layer(config, -1)
    is_pixtral = fields.config.get("model_type", PIXTRAL) == PIXTRAL
    if token_id is None or layer is None or not is_pixtral:
        return None
    parts = pixtral_parts(fields)
    side = fields.changed(**config).positive("spatial_merge_size", 2)
    hidden = parts.sizes.hidden
    name = f"{_PROJECTOR}.patch_merger.merging_layer"
    joined = LinearSpec("lm_head", hidden * side**2, (Part(name, hidden),), "none")
    bias = config.get("multimodal_projector_bias", False) is not False
    merger = _projector(config, hidden, text, fields, bias=bias)
    merger = replace(merger, joined=joined)
    norm = NormSpec(f"{_PROJECTOR}.norm", hidden, text.norm.epsilon)
    model = _tower(parts, layer, norm, merger, text, fields)
    form = PictureForm(side)
    return PictureSpec(model, token_id, form=form, splits=parts.splits, path=parts.path)


def read_idefics3(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """Idefics3 and SmolVLM: SigLIP's encoder of tiles. Normed patches of a square become a token by
    one product.
    """
    token_id = older_placeholder(config, text, _IDEFICS3_TOKEN)
    if token_id is None:
        return None
    parts = clip_parts(fields.changed(**{**_IDEFICS3, **fields.config}), SIGLIP)
    side = fields.changed(**config).positive("scale_factor", 2)
    _check_side(side, parts, "scale_factor", fields)
    part = Part("connector.modality_projection.proj", text.hidden_size)
    product = LinearSpec("lm_head", parts.sizes.hidden * side**2, (part,), "none")
    parts = parts._replace(embedding=replace(parts.embedding, by_fraction=True))
    norm = family.layer_norm("post_layernorm", parts.sizes)
    merger = MergerSpec(product, tied=False)
    model = _tower(parts, parts.sizes.layers, norm, merger, text, fields)
    form = StretchedForm(side=side, tile=parts.tile)
    path = "vision_model.encoder.layers"
    return PictureSpec(model, token_id, form=form, pixels=parts.pixels, path=path)


def read_internvl(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """InternVL: an encoder of tiles with a row before the patches. A square of patches becomes a
    token by a norm and two products.
    """
    token_id, layer = older_placeholder(config, text, _INTERNVL_TOKEN), _feature_layer(config, -1)
    strategy = config.get("vision_feature_select_strategy", _BEHIND)
    if token_id is None or layer is None or strategy != _BEHIND:
        return None
    parts = intern_parts(fields)
    ratio = fields.number(config, "downsample_ratio", 0.5)
    side = int(1 / ratio) if int(1 / ratio) * ratio == 1 else 0
    _check_side(side, parts, f"downsample_ratio {ratio}", fields)
    merged = parts.sizes.hidden * side**2
    merger = replace(
        _projector(config, merged, text, fields),
        norm=NormSpec(f"{_PROJECTOR}.layer_norm", merged, _EPSILON, kind="layer", bias=True),
        reads_stream=layer != -1 or fields.config.get("use_mean_pooling") is not False,
        skipped=1,
    )
    norm = family.layer_norm("layernorm", parts.sizes)
    if merger.reads_stream:
        norm = replace(norm, has_weight=False, bias=False)
    model = _tower(parts, layer, norm, merger, text, fields)
    form = StretchedForm(side=side, tile=parts.tile)
    path = "vision_tower.encoder.layer"
    return PictureSpec(model, token_id, form=form, pixels=parts.pixels, path=path)


def _check_side(side: int, parts: EncoderParts, key: str, fields: Fields) -> None:
    """Check that squares of patches fill a tile."""
    if side < 1 or parts.tile % side:
        fields.refuse(f"{key}: squares of {side} * {side} patches do not fill {parts.tile}")


def _feature_layer(config: Mapping[str, Any], usual: int) -> int | None:
    """The layer that is read, from 0 = what the first one reads, or from the end; None where there
    are several."""
    layer = config.get("vision_feature_layer", usual)
    layer = layer[0] if isinstance(layer, list) and len(layer) == 1 else layer
    return layer if type(layer) is int else None


def _projector(
    config: Mapping[str, Any],
    inputs: int,
    text: ModelSpec,
    fields: Fields,
    *,
    bias: bool = True,
) -> MergerSpec:
    """Make a merger of two products. inputs: features that it reads."""
    names = (f"{_PROJECTOR}.linear_1", f"{_PROJECTOR}.linear_2")
    first, last = products(text, names, inputs, text.hidden_size, bias=bias)
    key = "projector_hidden_act"
    activation = family.read_activation(fields, key, config.get(key, "gelu"))
    return MergerSpec(last, tied=False, first=first, activation=activation)


def _tower(
    parts: EncoderParts,
    layer: int,
    norm: NormSpec,
    merger: MergerSpec,
    text: ModelSpec,
    fields: Fields,
) -> ModelSpec:
    """The first layers of an encoder, and the way from their last to tokens."""
    most = parts.sizes.layers
    layers = layer if layer >= 0 else most + 1 + layer
    if not 1 <= layers <= most:
        fields.refuse(f"no layer of {most} is vision_feature_layer {layer}")
        layers = 1
    beyond = "|".join(map(str, range(layers, most))) or "-"
    unread = "|".join((*parts.unread, rf"model\.layers\.({beyond})\..+"))
    return tower(text, parts.embedding, (parts.layer,) * layers, norm, merger, unread)
