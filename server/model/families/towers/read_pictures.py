"""Readers of encoders of pictures within larger models, by the model's type: Gemma's, LLaVA's and
their kin's are here. Pure."""

from collections.abc import Mapping
from math import isqrt
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import gemma
from loraplex.server.model.families.towers.qwen_towers import (
    read_qwen2,
    read_qwen3,
    read_qwen25,
    read_qwen35,
)
from loraplex.server.model.families.towers.tower_parts import (
    CLIP,
    COLOURS,
    PIXTRAL,
    SIGLIP,
    EncoderParts,
    ReadPictures,
    axial_rope,
    clip_parts,
    intern_parts,
    older_placeholder,
    pixtral_parts,
    placeholder,
    products,
    tower,
)
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    Branch,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    PositionTable,
)
from loraplex.server.model.spec.picture_spec import MergerSpec, PatchSpec, PictureSpec, PoolSpec
from loraplex.server.protocol import PictureForm, StretchedForm, TiledForm

_GEMMA3_TOKEN, _GEMMA3_TOKENS, _GEMMA4_TOKEN = 262144, 256, 258880
# Of a picture, by any file of Gemma 4's processors.
_MOST_TOKENS = 1120
# Where `config.json` says nothing.
_GEMMA4: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
}
_UNIFIED: dict[str, Any] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "output_proj_dims": 3840,
}
# torch's own, of a LayerNorm.
_EPSILON = 1e-5
# A checkpoint has other names than the model's modules.
_PROJECTION = "multimodal_embedder.embedding_projection"
_UNIFIED_TENSORS = (
    (r"^vision_embedder\.", "embed_vision."),
    (r"^embed_vision\.embedding_projection\.", f"embed_vision.{_PROJECTION}."),
)

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
_PROJECTOR = "multi_modal_projector"

_VISION = "vision_config"


def read_gemma3(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """Gemma 3: SigLIP's encoder whole, of whose patches squares are averaged, normed, and
    multiplied to tokens, which see each other."""
    token_id = older_placeholder(config, text, _GEMMA3_TOKEN)
    if token_id is None or fields.config.get("model_type", SIGLIP) != SIGLIP:
        return None
    parts = clip_parts(fields, SIGLIP)
    sizes, patches = parts.sizes, parts.tile
    tokens = config.get("mm_tokens_per_image", _GEMMA3_TOKENS)
    tokens_a_side = isqrt(tokens) if type(tokens) is int and tokens > 0 else 0
    if not tokens_a_side or tokens_a_side**2 != tokens or patches % tokens_a_side:
        fields.refuse(f"mm_tokens_per_image {tokens!r}: no such square of {patches} * {patches}")
        return None
    projector = "multi_modal_projector"
    norm = NormSpec(f"{projector}.mm_soft_emb_norm", sizes.hidden, sizes.epsilon, offset=1.0)
    part = Part(f"{projector}.mm_input_projection", text.hidden_size)
    product = LinearSpec("lm_head", sizes.hidden, (part,), "none", transposed=True)
    side = patches // tokens_a_side
    merger = MergerSpec(product, tied=False, pool=PoolSpec(norm))
    layers, last = (parts.layer,) * sizes.layers, family.layer_norm("post_layernorm", sizes)
    return PictureSpec(
        tower(text, parts.embedding, layers, last, merger, "|".join(parts.unread)),
        token_id,
        form=PictureForm(side=side, tile=patches),
        pixels=parts.pixels,
        joins="all",
    )


def read_gemma4(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """Gemma 4: an encoder whose rows turn by column and row, with norms around attention and MLP.
    Squares of patches are averaged. Tokens of a picture see each other in layers with a window,
    unless the model is small."""
    token_id = placeholder(config, text, _GEMMA4_TOKEN)
    if token_id is None:
        return None
    fields = fields.changed(**{**_GEMMA4, **fields.config})
    sizes, side = _gemma4_sizes(fields), fields.positive("pooling_kernel_size")
    rows = _rows(fields, "position_embedding_size", side)
    positions = PositionTable("patch_embedder.position_embedding_table", rows)
    columns = COLOURS * fields.positive("patch_size") ** 2
    embedding = PatchSpec(
        "patch_embedder.input_proj",
        columns,
        sizes.hidden,
        positions=positions,
        kernel=(columns,),
        by_axis=True,
    )
    norm = NormSpec("", sizes.hidden, sizes.epsilon, has_weight=False)
    tensors = ("std_bias", "std_scale") if fields.config.get("standardize", False) else ("", "")
    part = Part("embed_vision.embedding_projection", text.hidden_size)
    merger = MergerSpec(
        LinearSpec("lm_head", sizes.hidden, (part,), "none"),
        tied=False,
        pool=PoolSpec(norm, sizes.hidden**0.5, *tensors),
        reads_stream=True,
    )
    layers = (_gemma4_layer(fields, sizes),) * sizes.layers
    table = config.get("text_config") or config
    joins = table.get("use_bidirectional_attention") == "vision"
    padding = table.get("pad_token_id", 0)
    return PictureSpec(
        tower(text, embedding, layers, norm, merger, "-"),
        token_id,
        form=PictureForm(side=side),
        joins="windowed" if joins else "none",
        in_halves=True,
        stand_in=padding if text.embedding.inputs is not None else None,
        wrapped=".linear",
    )


def read_unified(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """Gemma 4 of one tower for text and images: patches of a token's size, with norms around their
    product and behind vectors of column and row. No layer comes before that of tokens."""
    token_id = placeholder(config, text, _GEMMA4_TOKEN)
    if token_id is None:
        return None
    fields = fields.changed(**{**_UNIFIED, **fields.config})
    hidden = fields.positive("mm_embed_dim")
    fields.only("output_proj_dims", hidden)
    columns = (
        COLOURS * (fields.positive("patch_size") * fields.positive("pooling_kernel_size")) ** 2
    )
    before, behind, last = (
        NormSpec(f"embed_vision.{name}", size, _EPSILON, kind="layer", bias=True)
        for name, size in (("patch_ln1", columns), ("patch_ln2", hidden), ("pos_norm", hidden))
    )
    embedding = PatchSpec(
        "embed_vision.patch_dense",
        columns,
        hidden,
        positions=PositionTable("embed_vision.pos_embedding", _rows(fields, "mm_posemb_size", 1)),
        norm=last,
        kernel=(columns,),
        bias=True,
        by_axis=True,
        is_paired=True,
        around=(before, behind),
    )
    epsilon = fields.number(fields.config, "rms_norm_eps", 1e-6)
    norm = NormSpec("", hidden, epsilon, has_weight=False)
    part = Part(f"embed_vision.{_PROJECTION}", text.hidden_size)
    product = LinearSpec("lm_head", hidden, (part,), "none")
    merger = MergerSpec(product, tied=False, norm=norm, reads_stream=True)
    model = replace(tower(text, embedding, (), norm, merger, "-"), stored_names=_UNIFIED_TENSORS)
    table = config.get("text_config") or config
    joins = table.get("use_bidirectional_attention", "vision") == "vision"
    # A longer picture's tokens would see each other beyond the window.
    most = min((window for window in text.windows if window), default=_MOST_TOKENS)
    return PictureSpec(
        model,
        token_id,
        joins="all" if joins else "none",
        path="embed_vision",
        most_tokens=min(most, _MOST_TOKENS),
    )


def _rows(fields: Fields, key: str, side: int) -> int:
    """Rows of a table of positions, which are enough for the longest picture."""
    rows, least = fields.positive(key), _MOST_TOKENS * side
    if rows < least:
        fields.refuse(f"{key} must be at least {least}, got {rows}")
    return rows


def _gemma4_sizes(fields: Fields) -> family.ModelSizes:
    hidden, inner, layers, heads, head_dim = (
        fields.positive(key)
        for key in (
            *("hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "head_dim"),
        )
    )
    fields.only("num_key_value_heads", heads)
    if head_dim % 4:
        fields.refuse(f"head_dim must be a multiple of 4, got {head_dim}")
    epsilon = fields.number(fields.config, "rms_norm_eps", 1e-6)
    return family.ModelSizes(
        1, hidden, inner, layers, heads, heads, head_dim, 1, epsilon, is_sound=True
    )


def _gemma4_layer(fields: Fields, sizes: family.ModelSizes) -> LayerSpec:
    of = family.attention(sizes, axial_rope(fields, 100.0), scale=1.0, qk_norm=True)
    (layer,) = gemma.layers_of(fields, sizes, [replace(of, norms_values=True)], offset=0.0)
    if not fields.config.get("use_clipped_linears", False):
        return layer

    def clipped(branch: Branch) -> Branch:
        if isinstance(branch, MlpSpec):
            gate_up, down = (replace(each, clips=True) for each in (branch.gate_up, branch.down))
            return replace(branch, gate_up=gate_up, down=down)
        assert isinstance(branch, AttentionSpec)
        qkv, o = (replace(each, clips=True) for each in (branch.qkv, branch.o))
        return replace(branch, qkv=qkv, o=o)

    return layer.mapped(clipped)


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


_READERS: dict[str, ReadPictures] = {
    "gemma3": read_gemma3,
    "gemma4": read_gemma4,
    "gemma4_unified": read_unified,
    "idefics3": read_idefics3,
    "internvl": read_internvl,
    "llava": read_llava,
    "llava_next": read_llava_next,
    "mistral3": read_mistral3,
    "qwen2_5_vl": read_qwen25,
    "qwen2_vl": read_qwen2,
    "qwen3_5": read_qwen35,
    "qwen3_5_moe": read_qwen35,
    "qwen3_vl": read_qwen3,
    "qwen3_vl_moe": read_qwen3,
    "smolvlm": read_idefics3,
}


def with_pictures(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> ModelSpec:
    """Return a larger model's text part with what reads pictures, where a reader is here."""
    pictures = _read_pictures(config, text, fields)
    if pictures is None or pictures.joins == "none":
        return replace(text, pictures=pictures)

    def joining(branch: Branch) -> Branch:
        if not isinstance(branch, AttentionSpec):
            return branch
        joins = pictures.joins == "all" or branch.window is not None
        return replace(branch, joins_pictures=joins)

    return replace(text.mapped(joining), pictures=pictures)


def _read_pictures(
    config: Mapping[str, Any], text: ModelSpec, fields: Fields
) -> PictureSpec | None:
    """Read how a larger model reads pictures; None where no reader is here, `config.json` describes
    no encoder, or the vocabulary has no placeholder. text: its text part. fields: take what is
    refused.
    """
    read, table = _READERS.get(str(config.get("model_type"))), config.get(_VISION)
    if read is None or table is None:
        return None
    if not isinstance(table, Mapping):
        fields.refuse(f"{_VISION} must be a table, got {table!r}")
        return None
    beside = Fields(table)
    found = read(config, text, beside)
    for problem in beside.problems:
        fields.refuse(f"{_VISION}: {problem}")
    return None if beside.problems else found
