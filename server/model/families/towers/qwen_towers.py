"""Qwen-VL's encoders. Pure."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.towers.tower_parts import (
    BIASES,
    COLOURS,
    ReadPictures,
    axial_rope,
    placeholder,
    plain_layer,
    products,
    tower,
    turned_sizes,
)
from loraplex.server.model.spec.model_spec import (
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionTable,
    RopeSpec,
)
from loraplex.server.model.spec.picture_spec import (
    DeepMergerSpec,
    MergerSpec,
    PatchSpec,
    PictureSpec,
)
from loraplex.server.protocol import PictureForm

_EPSILON = 1e-6
# Of heads and of layers.
_KEYS = "num_heads", "depth"
_ROPES = ("rope_scaling", "rope_parameters")
# What transformers' classes say where `config.json` says nothing.
_QWEN2: dict[str, Any] = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
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
_QWEN3: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_QWEN35: dict[str, Any] = {**_QWEN3, "deepstack_visual_indexes": []}


class _Encoder(NamedTuple):
    """An encoder as a reader makes it. norm: of what the merger reads. positions,
    bias: as of PatchSpec. window: as of PictureSpec."""

    sizes: family.ModelSizes
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    merger: MergerSpec
    window: int = 0
    positions: PositionTable | None = None
    bias: bool = False


class _Kind(NamedTuple):
    """A type's encoder. usual: values where `config.json` has none. read: takes the side of a
    square of patches that becomes a token. sections: such numbers of pairs of a head's features
    that turn by time, by height and by width. takes_turns: the first pairs turn by each in turn;
    else one section lies behind the other. token_id: of the placeholder."""

    usual: Mapping[str, Any]
    read: Callable[[Fields, ModelSpec, int], _Encoder]
    sections: tuple[int, int, int] = (16, 24, 24)
    takes_turns: bool = False
    token_id: int = 151655


def _read_qwen(
    kind: _Kind, config: Mapping[str, Any], text: ModelSpec, fields: Fields
) -> PictureSpec | None:
    token_id = placeholder(config, text, kind.token_id)
    if token_id is None:
        return None
    fields = fields.changed(**{**kind.usual, **fields.config})
    side = fields.positive("spatial_merge_size")
    encoder = kind.read(fields, text, side)
    return PictureSpec(
        tower=_tower(fields, encoder, text),
        token_id=token_id,
        form=PictureForm(side=side),
        window=encoder.window,
        axes=_axes(config, text, fields, kind),
        path="visual.blocks",
    )


def _qwen2_encoder(fields: Fields, text: ModelSpec, side: int) -> _Encoder:
    """Qwen2-VL: LayerNorms, MLPs without gate, rotation by height and width."""
    inner = fields.positive("embed_dim") * fields.positive("mlp_ratio")
    sizes = turned_sizes(fields, ("embed_dim", *_KEYS), inner, _EPSILON)
    names = family.LayerNames(("attn.qkv",), "attn.proj", ("mlp.fc1",), "mlp.fc2")
    layers = (plain_layer(sizes, axial_rope(fields), names, "norm"),) * sizes.layers
    merger = _merger(fields, "hidden_size", sizes, text, side, ("merger.mlp.0", "merger.mlp.2"))
    return _Encoder(sizes, layers, family.layer_norm("merger.ln_q", sizes), merger)


def _qwen25_encoder(fields: Fields, text: ModelSpec, side: int) -> _Encoder:
    """Qwen2.5-VL: windows in most layers, RMS norms, gated MLPs, rotation by two axes."""
    fields.only("hidden_act", "silu")
    inner = fields.positive("intermediate_size")
    sizes = turned_sizes(fields, ("hidden_size", *_KEYS), inner, _EPSILON)
    merger = _merger(fields, "out_hidden_size", sizes, text, side, ("merger.mlp.0", "merger.mlp.2"))
    window = fields.positive("window_size") // side // fields.positive("patch_size")
    if not window:
        fields.refuse("window_size must hold a token")
    whole = fields.config["fullatt_block_indexes"]
    if not isinstance(whole, list) or not all(type(index) is int for index in whole):
        fields.refuse(f"fullatt_block_indexes must be a list of layers, got {whole!r}")
        whole = []
    patches = (window * side) ** 2
    rope = axial_rope(fields)
    windows = (None if n in whole else patches for n in range(sizes.layers))
    layers = (_windowed_layer(sizes, rope, window) for window in windows)
    norm = NormSpec("merger.ln_q", sizes.hidden, _EPSILON)
    return _Encoder(sizes, tuple(layers), norm, merger, window)


def _qwen3_encoder(fields: Fields, text: ModelSpec, side: int) -> _Encoder:
    """Qwen3-VL: as Qwen2-VL, with a table of positions and deep mergers. Qwen3.5 has none."""
    inner = fields.positive("intermediate_size")
    sizes = turned_sizes(fields, ("hidden_size", *_KEYS), inner, _EPSILON)
    names = family.LayerNames(("attn.qkv",), "attn.proj", ("mlp.linear_fc1",), "mlp.linear_fc2")
    layers = (plain_layer(sizes, axial_rope(fields), names, "norm"),) * sizes.layers
    merger = _merger(fields, "out_hidden_size", sizes, text, side, _fcs("merger"))
    merger = replace(merger, deep=_deep(fields, side, sizes, text))
    positions = PositionTable("pos_embed", fields.positive("num_position_embeddings"))
    norm = family.layer_norm("merger.norm", sizes)
    return _Encoder(sizes, layers, norm, merger, positions=positions, bias=True)


def _fcs(path: str) -> tuple[str, str]:
    return f"{path}.linear_fc1", f"{path}.linear_fc2"


def _deep(
    fields: Fields, side: int, sizes: family.ModelSizes, text: ModelSpec
) -> tuple[DeepMergerSpec, ...]:
    layers = fields.config["deepstack_visual_indexes"]
    known = isinstance(layers, list) and all(type(n) is int for n in layers)
    if not known or layers != sorted({n for n in layers if 0 <= n < sizes.layers}):
        fields.refuse(f"deepstack_visual_indexes must be layers in their order, got {layers!r}")
        return ()
    if len(layers) >= text.num_layers:
        fields.refuse(f"deepstack_visual_indexes: the text part has {text.num_layers} layers")
    merged, found = sizes.hidden * side**2, []
    for number, layer in enumerate(layers):
        path = f"deepstack_merger_list.{number}"
        norm = NormSpec(f"{path}.norm", merged, _EPSILON, kind="layer", bias=True)
        found.append(DeepMergerSpec(layer, norm, *products(text, _fcs(path), merged, merged)))
    return tuple(found)


def _windowed_layer(sizes: family.ModelSizes, rope: RopeSpec, window: int | None) -> LayerSpec:
    norms = family.NormPlaces(*(NormSpec(f"norm{n}", sizes.hidden, _EPSILON) for n in (1, 2)))
    of = family.attention(sizes, rope, window, BIASES)
    of = replace(of, qkv=family.fused(of.qkv, "attn.qkv"), o=family.with_paths(of.o, "attn.proj"))
    return family.layer(sizes, of, family.mlp(sizes, BIASES), norms)


def _merger(
    fields: Fields,
    width: str,
    sizes: family.ModelSizes,
    text: ModelSpec,
    side: int,
    names: tuple[str, str],
) -> MergerSpec:
    """width: the key of what it gives. names: of its modules."""
    if fields.positive(width) != text.hidden_size:
        fields.refuse(f"{width} must be that of the text part, {text.hidden_size}")
    merged = sizes.hidden * side**2
    first, last = products(text, names, merged, merged)
    return MergerSpec(last, tied=False, first=first)


def _tower(fields: Fields, encoder: _Encoder, text: ModelSpec) -> ModelSpec:
    patch = fields.positive("patch_size")
    colours = fields.positive("in_channels", fields.config.get("in_chans", COLOURS))
    kernel = (colours, fields.positive("temporal_patch_size"), patch, patch)
    columns, hidden = kernel[0] * kernel[1] * patch * patch, encoder.sizes.hidden
    of_patches = PatchSpec(
        "patch_embed.proj",
        columns,
        hidden,
        positions=encoder.positions,
        kernel=kernel,
        bias=encoder.bias,
    )
    unread = r"rotary_pos_emb\.inv_freq"
    return tower(text, of_patches, encoder.layers, encoder.norm, encoder.merger, unread)


def _axes(
    config: Mapping[str, Any], text: ModelSpec, fields: Fields, kind: _Kind
) -> tuple[int, ...] | None:
    attention = next(iter(text.attentions.values()), None)
    if attention is None:
        return None
    inner = config.get("text_config") or config
    tables = (inner.get(key) for key in _ROPES)
    table = next((table for table in tables if isinstance(table, Mapping)), {})
    sections = table.get("mrope_section", [*kind.sections])
    turned = None if attention.rope is None else attention.rope.rotary_dim
    pairs = (turned or attention.head_dim) // 2
    known = isinstance(sections, list) and all(type(n) is int and n >= 0 for n in sections)
    if not known or len(sections) != 3 or sum(sections) != pairs:
        fields.refuse(f"mrope_section must be three numbers of {pairs} in all, got {sections!r}")
        return (0,) * pairs
    if kind.takes_turns:
        return tuple(n % 3 if n < 3 * sections[n % 3] else 0 for n in range(pairs))
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


read_qwen2: ReadPictures = partial(_read_qwen, _Kind(_QWEN2, _qwen2_encoder))
read_qwen25: ReadPictures = partial(_read_qwen, _Kind(_QWEN25, _qwen25_encoder))
read_qwen3: ReadPictures = partial(
    _read_qwen, _Kind(_QWEN3, _qwen3_encoder, sections=(24, 20, 20), takes_turns=True)
)
read_qwen35: ReadPictures = partial(
    _read_qwen, _Kind(_QWEN35, _qwen3_encoder, (11, 11, 10), takes_turns=True, token_id=248056)
)
