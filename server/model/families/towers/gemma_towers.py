"""Encoders of pictures within Gemma. Pure."""

from collections.abc import Mapping
from math import isqrt
from typing import Any

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.towers.clip_towers import SIGLIP, clip_parts
from loraplex.server.model.families.towers.tower_parts import tower
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import ModelSpec, NormSpec
from loraplex.server.model.spec.picture_spec import MergerSpec, PictureSpec, PoolSpec
from loraplex.server.protocol import PictureForm

_GEMMA3_TOKEN, _GEMMA3_TOKENS = 262144, 256


def read_gemma3(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """Gemma 3: SigLIP's encoder whole, of whose patches squares are averaged, normed, and
    multiplied to tokens, which see each other."""
    token_id = config.get("image_token_index", config.get("image_token_id", _GEMMA3_TOKEN))
    if type(token_id) is not int or not 0 <= token_id < text.vocab_size:
        return None
    if fields.config.get("model_type", SIGLIP) != SIGLIP:
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
    merger = MergerSpec(product, tied=False, pool=PoolSpec(norm), side=side)
    layers, last = (parts.layer,) * sizes.layers, family.layer_norm("post_layernorm", sizes)
    return PictureSpec(
        tower(text, parts.embedding, layers, last, merger, "|".join(parts.unread)),
        token_id,
        form=PictureForm(side=side, tile=patches),
        pixels=parts.pixels,
        joins="all",
    )
