"""Encoders of pictures within Gemma. Pure."""

from collections.abc import Mapping
from math import isqrt
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import gemma
from loraplex.server.model.families.towers.tower_parts import (
    COLOURS,
    SIGLIP,
    axial_rope,
    clip_parts,
    older_placeholder,
    placeholder,
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
from loraplex.server.protocol import PictureForm

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
_LAYER_NORM = 1e-5
# A checkpoint has other names than the model's modules.
_PROJECTION = "multimodal_embedder.embedding_projection"
_UNIFIED_TENSORS = (
    (r"^vision_embedder\.", "embed_vision."),
    (r"^embed_vision\.embedding_projection\.", f"embed_vision.{_PROJECTION}."),
)


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
        NormSpec(f"embed_vision.{name}", size, _LAYER_NORM, kind="layer", bias=True)
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
