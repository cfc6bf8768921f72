"""Parts that readers of encoders are made of: tokens see all others, and nothing writes text. Pure.

The parts follow BERT: learned positions, a norm behind each residual sum, MLPs without gate, and a
score head that reads the first token through a matrix and an activation.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    Activation,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionTable,
    ScoreSpec,
    StepSpec,
)
from loraplex.server.protocol import Pooling as Pooling

# Makes a norm of a path.
MakeNorm = Callable[[str], NormSpec]
_ALL = family.Biases(qkv=True, o=True, mlp=True)
EMBED, POSITIONS, TYPES, NORM = (
    f"model.{name}" for name in ("embed_tokens", "embed_positions", "embed_types", "embed_norm")
)
_PROJECTION = "model.embeddings_project"
# Of heads for other tasks, and what old versions stored beside weights.
_UNREAD = (
    r"(cls|lm_head|vocab_\w+|qa_outputs|generator_\w+|discriminator_\w+|classifier|pre_classifier|"
    r"head|decoder|lm_predictions|mask_predictions|model\.pooler|sequence_summary)\..+|"
    r".*\b(position_ids|token_type_ids)"
)
_EMBEDDINGS = (
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^model\.embeddings\.word_embeddings\.", f"{EMBED}."),
    (r"^model\.embeddings\.position_embeddings\.", f"{POSITIONS}."),
    (r"^model\.embeddings\.token_type_embeddings\.", f"{TYPES}."),
    (r"^model\.embeddings\.LayerNorm\.", f"{NORM}."),
)


class EncoderNames(NamedTuple):
    """Names of layers' modules. norms: behind attention, and behind the MLP. layers: as of
    `stored_names`."""

    branches: family.LayerNames
    norms: tuple[str, str]
    layers: str = r"encoder\.layer"


def stored_names(prefix: str, layers: str) -> tuple[tuple[str, str], ...]:
    """Patterns of stored tensors' names. prefix: of the body, where the checkpoint has a head.
    layers: what lies before a layer's number.
    """
    body = rf"^(?:{prefix}\.)?(?={layers}\.|embeddings|pooler\.|encoder\.|final_norm\.)"
    return ((body, "model."), (rf"^model\.{layers}\.", "model.layers."), *_EMBEDDINGS)


def read_sizes(fields: Fields, positions: int = 512, **keys: Any) -> family.ModelSizes:
    """Read the sizes of an encoder, as `family.read_sizes` does with these keys. positions: where
    `config.json` says nothing.
    """
    fields.only("is_decoder", False)
    fields.only("add_cross_attention", False)
    fields.only("position_embedding_type", "absolute")
    usual = {"epsilon": 1e-12, "epsilon_key": "layer_norm_eps", "activation": "gelu"}
    if fields.config.get("max_position_embeddings") is None:
        fields = fields.changed(max_position_embeddings=positions)
    sizes = family.read_sizes(fields, **{**usual, **keys})
    family.refuse_other_head_dim(fields, sizes)
    return sizes


def layer(sizes: family.ModelSizes, names: EncoderNames) -> LayerSpec:
    """Make a layer of two steps, each with a norm of its residual sum."""
    of = family.attention(sizes, None, biases=_ALL)
    attention, mlp = family.branches_of(sizes, of, names.branches, _ALL)
    first, second = (family.layer_norm(norm, sizes) for norm in names.norms)
    steps = StepSpec((attention,), None, after=first), StepSpec((mlp,), None, after=second)
    return LayerSpec(steps)


def embedding(
    sizes: family.ModelSizes, first: int = 0, *, types: int, size: int | None = None
) -> EmbeddingSpec:
    """Make an embedding with positions and a norm. first: as of PositionTable. types: of tokens; 0
    = the model has no such table. size: of its rows; None = as wide as the model.
    """
    width = sizes.hidden if size is None else size
    matrix = LinearSpec("project_in", width, (Part(_PROJECTION, sizes.hidden),), "none", bias=True)
    return EmbeddingSpec(
        EMBED,
        sizes.vocab,
        width,
        positions=PositionTable(POSITIONS, sizes.positions, first),
        types=PositionTable(TYPES, types) if types else None,
        norm=NormSpec(NORM, width, sizes.epsilon, kind="layer", bias=True),
        projection=None if width == sizes.hidden else matrix,
    )


def types_of(fields: Fields) -> int:
    """Read the number of types of tokens."""
    return fields.positive("type_vocab_size", 2)


def score_heads(
    sizes: family.ModelSizes, dense: str, labels: str, activation: Activation
) -> tuple[ScoreSpec, ScoreSpec]:
    """Make the head that scores a text by its first token, and the one that scores each token.
    dense, labels: modules of the first.
    """
    matrix = LinearSpec("lm_head", sizes.hidden, (Part(dense, sizes.hidden),), "none", bias=True)
    of_text = ScoreSpec(labels, True, "first", matrix, activation)
    return of_text, ScoreSpec("classifier", True, "all")


def encoder(
    fields: Fields,
    sizes: family.ModelSizes,
    embedding: EmbeddingSpec,
    layers: Sequence[LayerSpec],
    scores: tuple[ScoreSpec, ...],
    names: tuple[tuple[str, str], ...],
) -> ModelSpec:
    """Make the model from its parts. The norm of the last sum is that behind all layers. names: as
    of `stored_names`.
    """
    model = family.ended(family.model(fields, sizes, layers, sizes.positions, ()), layers)
    matrix = next(score.dense for score in scores if score.dense is not None)
    first = 0 if embedding.positions is None else embedding.positions.first
    return replace(
        model,
        embedding=embedding,
        head=HeadSpec(matrix, tied=True),
        max_context=sizes.positions - first,
        writes=False,
        is_causal=False,
        scores=scores,
        stored_names=names,
        unread=_UNREAD,
    )
