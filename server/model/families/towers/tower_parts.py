"""Encoders of CLIP, SigLIP, InternVL and Pixtral, which several larger models have, and parts that
all encoders of pictures share. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionTable,
    RopeSpec,
)
from loraplex.server.model.spec.picture_spec import MergerSpec, PatchSpec, PictureSpec

# Of a larger model's `config.json`, its text part, and the table of its encoder. None where the
# vocabulary has no placeholder, or an encoder is of another kind.
ReadPictures = Callable[[Mapping[str, Any], ModelSpec, Fields], PictureSpec | None]

BIASES = family.Biases(qkv=True, o=True, mlp=True)
# Of a picture, where `config.json` has no number.
COLOURS = 3
_THETA = 10_000.0
# Types of rotation; transformers reads the latter as the former.
_AXIAL = ("axial", "default")

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
_OF_CLIP = {
    CLIP: _CLIP_USUAL,
    SIGLIP: {
        **_CLIP_USUAL,
        "patch_size": 16,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_CLIP_NAMES = family.LayerNames(
    tuple(f"self_attn.{name}_proj" for name in "qkv"), "self_attn.out_proj", ("mlp.fc1",), "mlp.fc2"
)
_CLIP_UNREAD = (r"embeddings\.position_ids", r"(post_layernorm|head)\..+")

_INTERN_USUAL: dict[str, Any] = {
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
_INTERN_NAMES = family.LayerNames(
    tuple(f"attention.{name}_proj" for name in "qkv"),
    "attention.projection_layer",
    ("mlp.fc1",),
    "mlp.fc2",
)
_QK_EPSILON = 1e-6

PIXTRAL = "pixtral"
_PIXTRAL_LAYERS = "vision_tower.transformer.layers"
_PIXTRAL_EPSILON = 1e-5
_PIXTRAL_USUAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_PIXTRAL_NAMES = family.LayerNames(
    tuple(f"attention.{name}_proj" for name in "qkv"),
    "attention.o_proj",
    ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "feed_forward.down_proj",
    ("attention_norm", "ffn_norm"),
)


class EncoderParts(NamedTuple):
    """An encoder as `config.json` says it. layer: each of `sizes.layers`. unread: expressions of
    names, as of ModelSpec. tile, pixels: a side of every picture, in patches and in pixels; 0 =
    there may be any number. splits, path: as of PictureSpec."""

    sizes: family.ModelSizes
    embedding: PatchSpec
    layer: LayerSpec
    unread: tuple[str, ...] = ()
    tile: int = 0
    pixels: int = 0
    splits: bool = False
    path: str = "vision_tower.encoder.layers"


def placeholder(config: Mapping[str, Any], text: ModelSpec, usual: int) -> int | None:
    """The token of a picture; None where the vocabulary has none."""
    token_id = config.get("image_token_id", usual)
    return token_id if type(token_id) is int and 0 <= token_id < text.vocab_size else None


def older_placeholder(config: Mapping[str, Any], text: ModelSpec, usual: int) -> int | None:
    """The token of a picture, of models with an older key for it, which counts first."""
    if "image_token_index" in config:
        return placeholder({}, text, config["image_token_index"])
    return placeholder(config, text, usual)


def tower(
    text: ModelSpec,
    embedding: PatchSpec,
    layers: Sequence[LayerSpec],
    norm: NormSpec,
    merger: MergerSpec,
    unread: str,
) -> ModelSpec:
    """Make an encoder from its parts. text: the model's text part. unread: as of ModelSpec."""
    quantisation = text.quantisation
    if quantisation is not None:
        quantisation = replace(quantisation, bodies=())
    return ModelSpec(
        family=text.family,
        embedding=embedding,
        layers=tuple(layers),
        norm=norm,
        head=merger,
        max_context=1,
        eos_token_ids=(),
        dtype=text.dtype,
        quantisation=quantisation,
        writes=False,
        is_causal=False,
        unread=unread,
    )


def turned_sizes(
    fields: Fields, keys: tuple[str, str, str], inner: int, epsilon: float
) -> family.ModelSizes:
    """Read the sizes of an encoder whose heads turn by height and width. keys: of the numbers of
    features, of heads and of layers. inner: features within an MLP."""
    hidden, heads, layers = map(fields.positive, keys)
    if hidden % (4 * heads):
        fields.refuse(f"{keys[0]} must be a multiple of 4 * {keys[1]}")
        heads = 1
    shape = (inner, layers, heads, heads, hidden // heads)
    activation = family.read_activation(fields, "hidden_act", fields.config["hidden_act"])
    return family.ModelSizes(1, hidden, *shape, 1, epsilon, is_sound=True, activation=activation)


def axial_rope(fields: Fields, theta: float = _THETA) -> RopeSpec:
    """Read how heads turn by height and width. theta: where `config.json` says nothing."""
    table = fields.config.get("rope_parameters") or {}
    if not isinstance(table, Mapping) or table.get("rope_type", "axial") not in _AXIAL:
        fields.refuse(f"rope_parameters must be axial, got {table!r}")
        table = {}
    return RopeSpec("default", fields.number(table, "rope_theta", theta))


def plain_layer(
    sizes: family.ModelSizes, rope: RopeSpec | None, names: family.LayerNames, norm: str
) -> LayerSpec:
    """A layer with LayerNorms and a plain MLP. norm: their name, before the number."""
    of = family.attention(sizes, rope, biases=BIASES)
    of, mlp = family.renamed(of, family.plain_mlp(sizes, BIASES), names)
    return family.layer(sizes, of, mlp, family.layer_norms(sizes, (f"{norm}1", f"{norm}2")))


def products(
    text: ModelSpec, names: tuple[str, str], inputs: int, inner: int, *, bias: bool = True
) -> tuple[LinearSpec, LinearSpec]:
    """Make the two products of a merger. inputs: features of the patches of a token. inner:
    features between the products.
    """
    first, last = (
        LinearSpec("lm_head", width, (Part(name, features),), "none", bias=bias)
        for name, width, features in zip(
            names, (inputs, inner), (inner, text.hidden_size), strict=True
        )
    )
    return first, last


def clip_parts(fields: Fields, encoder: str) -> EncoderParts:
    """CLIP's encoder: a row before the patches, learned positions, LayerNorms. SigLIP's has no such
    row, and no norm before the first layer.
    """
    fields = fields.changed(**{**_OF_CLIP[encoder], **fields.config})
    has_row = encoder == CLIP
    sizes = _clip_sizes(fields, is_whole=has_row)
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
    return EncoderParts(sizes, embedding, layer, unread=_CLIP_UNREAD, tile=tile, pixels=pixels)


def _clip_sizes(fields: Fields, *, is_whole: bool) -> family.ModelSizes:
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


def intern_parts(fields: Fields) -> EncoderParts:
    """A row before the patches, learned positions, and a factor of each feature behind attention
    and MLP."""
    fields = fields.changed(**{**_INTERN_USUAL, **fields.config})
    both = ((key, fields.config[key]) for key in ("image_size", "patch_size"))
    fields = fields.changed(**{key: _one(value) for key, value in both})
    fields.only("use_absolute_position_embeddings", True)
    sizes = _clip_sizes(fields, is_whole=True)
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
    layer = _intern_layer(fields, sizes)
    return EncoderParts(sizes, embedding, layer, unread=unread, tile=tile, pixels=pixels)


def _one(value: Any) -> Any:
    """The size of either side, which may be said for both."""
    is_pair = isinstance(value, list) and len(value) == 2 and value[0] == value[1]
    return value[0] if is_pair else value


def _intern_layer(fields: Fields, sizes: family.ModelSizes) -> LayerSpec:
    biases = family.Biases(qkv=fields.config.get("attention_bias") is True, o=True, mlp=True)
    of = family.attention(sizes, None, biases=biases)
    of, mlp = family.renamed(of, family.plain_mlp(sizes, biases), _INTERN_NAMES)
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


def pixtral_parts(fields: Fields) -> EncoderParts:
    """Patches of a picture of any size that all see each other: RMS norms, gated MLPs, rotation by
    height and width, whose frequencies take turns.
    """
    fields = fields.changed(**{**_PIXTRAL_USUAL, **fields.config})
    keys = "hidden_size", "num_attention_heads", "num_hidden_layers"
    sizes = turned_sizes(fields, keys, fields.positive("intermediate_size"), _PIXTRAL_EPSILON)
    fields.only("head_dim", sizes.head_dim)
    colours, patch = fields.positive("num_channels", COLOURS), fields.positive("patch_size")
    embedding = PatchSpec(
        "patch_conv",
        colours * patch**2,
        sizes.hidden,
        norm=NormSpec("ln_pre", sizes.hidden, _PIXTRAL_EPSILON),
        kernel=(colours, patch, patch),
    )
    return EncoderParts(
        sizes,
        embedding,
        _pixtral_layer(sizes, _pixtral_rope(fields)),
        splits=True,
        path=_PIXTRAL_LAYERS,
    )


def _pixtral_layer(sizes: family.ModelSizes, rope: RopeSpec) -> LayerSpec:
    of, mlp = family.renamed(family.attention(sizes, rope), family.mlp(sizes), _PIXTRAL_NAMES)
    norms = family.NormPlaces(*(family.norm(name, sizes) for name in _PIXTRAL_NAMES.norms))
    return family.layer(sizes, of, mlp, norms)


def _pixtral_rope(fields: Fields) -> RopeSpec:
    config: Mapping[str, Any] = fields.config
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    table = fields.table(config, key)
    kind = table.get("rope_type", table.get("type", "axial"))
    if kind not in _AXIAL:
        fields.refuse(f"{key}: rope_type must be axial, got {kind!r}")
    theta = fields.number({**config, **table}, "rope_theta", _THETA)
    return RopeSpec("default", theta)
