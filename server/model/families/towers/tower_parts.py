"""Parts that encoders of pictures share. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import LayerSpec, ModelSpec, NormSpec, RopeSpec
from loraplex.server.model.spec.picture_spec import MergerSpec, PatchSpec, PictureSpec

# Of a larger model's `config.json`, its text part, and the table of its encoder. None where the
# vocabulary has no placeholder, or an encoder is of another kind.
ReadPictures = Callable[[Mapping[str, Any], ModelSpec, Fields], PictureSpec | None]

BIASES = family.Biases(qkv=True, o=True, mlp=True)
# Of a picture, where `config.json` has no number.
COLOURS = 3


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


def plain_layer(
    sizes: family.ModelSizes, rope: RopeSpec | None, names: family.LayerNames, norm: str
) -> LayerSpec:
    """Make a layer with LayerNorms, and an MLP without gate. norm: the name of norms, before their
    number.
    """
    of = family.attention(sizes, rope, biases=BIASES)
    of, mlp = family.branches_of(sizes, of, names, BIASES)
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
