"""Encoders of pictures within larger models, by the model's type. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import ModelSpec, NormSpec, RopeSpec
from loraplex.server.model.spec.picture_spec import MergerSpec, PatchSpec, PictureSpec

VISION = "vision_config"
_EPSILON = 1e-6
_ROPES = ("rope_scaling", "rope_parameters")
_BIASES = family.Biases(qkv=True, o=True, mlp=True)
# What transformers' class says where `config.json` says nothing.
_QWEN25: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN25_SECTIONS = [16, 24, 24]
_QWEN25_TOKEN = 151655
_COLOURS = 3


def read_pictures(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """Read how a larger model reads pictures; None where no reader is here, `config.json` describes
    no encoder, or the vocabulary has no placeholder. text: its text part. fields: take what is
    refused.
    """
    reader = _READERS.get(str(config.get("model_type")))
    table = config.get(VISION)
    if reader is None or table is None:
        return None
    if not isinstance(table, Mapping):
        fields.refuse(f"{VISION} must be a table, got {table!r}")
        return None
    beside = Fields(table)
    found = reader(config, text, beside)
    for problem in beside.problems:
        fields.refuse(f"{VISION}: {problem}")
    return None if beside.problems else found


def _read_qwen25(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> PictureSpec | None:
    """Qwen2.5-VL: windows but for a few layers, RMS norms, gated MLPs, rotation by height and
    width.
    """
    token_id = config.get("image_token_id", _QWEN25_TOKEN)
    if type(token_id) is not int or not 0 <= token_id < text.vocab_size:
        return None
    fields = fields.changed(**{**_QWEN25, **fields.config})
    sizes = _sizes(fields)
    if fields.positive("out_hidden_size") != text.hidden_size:
        fields.refuse(f"out_hidden_size must be that of the text part, {text.hidden_size}")
    side, patch = fields.positive("spatial_merge_size"), fields.positive("patch_size")
    window = fields.positive("window_size") // side // patch
    if not window:
        fields.refuse("window_size must hold a token")
    whole = fields.config["fullatt_block_indexes"]
    if not isinstance(whole, list) or not all(type(index) is int for index in whole):
        fields.refuse(f"fullatt_block_indexes must be a list of layers, got {whole!r}")
        whole = []
    seen = [None if n in whole else (window * side) ** 2 for n in range(sizes.layers)]
    return PictureSpec(
        tower=_tower(fields, sizes, seen, text),
        token_id=token_id,
        window=window,
        sections=_sections(config, text, fields),
    )


def _sizes(fields: Fields) -> family.ModelSizes:
    heads, hidden = fields.positive("num_heads"), fields.positive("hidden_size")
    if hidden % (4 * heads):
        fields.refuse("hidden_size must be a multiple of 4 * num_heads")
        heads = 1
    fields.only("hidden_act", "silu")
    inner, layers = fields.positive("intermediate_size"), fields.positive("depth")
    shape = (inner, layers, heads, heads, hidden // heads)
    return family.ModelSizes(1, hidden, *shape, 1, _EPSILON, is_sound=True)


def _tower(
    fields: Fields, sizes: family.ModelSizes, windows: list[int | None], text: ModelSpec
) -> ModelSpec:
    side, patch = fields.positive("spatial_merge_size"), fields.positive("patch_size")
    colours = fields.positive("in_channels", fields.config.get("in_chans", _COLOURS))
    kernel = (colours, fields.positive("temporal_patch_size"), patch, patch)
    columns = kernel[0] * kernel[1] * patch * patch
    norms = family.NormPlaces(*(NormSpec(f"norm{n}", sizes.hidden, _EPSILON) for n in (1, 2)))
    of_pairs = RopeSpec("default", 10_000.0)
    layers = []
    for window in windows:
        of = family.attention(sizes, of_pairs, window, _BIASES)
        qkv, o = family.fused(of.qkv, "attn.qkv"), family.with_paths(of.o, "attn.proj")
        of = replace(of, qkv=qkv, o=o)
        layers.append(family.layer(sizes, of, family.mlp(sizes, _BIASES), norms))
    merged = sizes.hidden * side**2
    first, last = (
        LinearSpec("lm_head", merged, (Part(f"merger.mlp.{n}", features),), "none", bias=True)
        for n, features in ((0, merged), (2, text.hidden_size))
    )
    return ModelSpec(
        family=text.family,
        embedding=PatchSpec("patch_embed.proj", columns, sizes.hidden, kernel=kernel),
        layers=tuple(layers),
        norm=NormSpec("merger.ln_q", sizes.hidden, _EPSILON),
        head=MergerSpec(last, tied=False, first=first, side=side),
        max_context=1,
        eos_token_ids=(),
        dtype=text.dtype,
        quantisation=text.quantisation,
        writes=False,
        is_causal=False,
        unread=r"rotary_pos_emb\.inv_freq",
    )


def _sections(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> tuple[int, int, int]:
    inner = config.get("text_config") or config
    tables = (inner.get(key) for key in _ROPES)
    table = next((table for table in tables if isinstance(table, Mapping)), {})
    sections = table.get("mrope_section", _QWEN25_SECTIONS)
    pairs = text.layers[0].attention.head_dim // 2
    known = isinstance(sections, list) and all(type(n) is int and n >= 0 for n in sections)
    if not known or len(sections) != 3 or sum(sections) != pairs:
        fields.refuse(f"mrope_section must be three numbers of {pairs} in all, got {sections!r}")
        return pairs, 0, 0
    time, height, width = sections
    return time, height, width


_READERS: dict[str, Callable[[Mapping[str, Any], ModelSpec, Fields], PictureSpec | None]] = {
    "qwen2_5_vl": _read_qwen25,
}
