"""Encoders: BERT, RoBERTa, ELECTRA, MPNet, DistilBERT, DeBERTa and ModernBERT. Tokens see all
others, and nothing writes text. Pure.

The parts follow BERT: learned positions, a norm behind each residual sum, MLPs without gate, and a
score head that reads the first token through a matrix and an activation.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.family import FULL, WINDOWED
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    Activation,
    AttentionSpec,
    DistanceBias,
    DistanceVectors,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionTable,
    RopeSpec,
    ScoreSpec,
    StepSpec,
)
from loraplex.server.protocol import Pooling

# Makes a norm of a path.
_MakeNorm = Callable[[str], NormSpec]
_ALL = family.Biases(qkv=True, o=True, mlp=True)
_EMBED, _POSITIONS, _TYPES, _NORM = (
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
    (r"^model\.embeddings\.word_embeddings\.", f"{_EMBED}."),
    (r"^model\.embeddings\.position_embeddings\.", f"{_POSITIONS}."),
    (r"^model\.embeddings\.token_type_embeddings\.", f"{_TYPES}."),
    (r"^model\.embeddings\.LayerNorm\.", f"{_NORM}."),
)


class _EncoderNames(NamedTuple):
    """Names of layers' modules. norms: behind attention, and behind the MLP. layers: as of
    `_stored_names`."""

    branches: family.LayerNames
    norms: tuple[str, str]
    layers: str = r"encoder\.layer"


def _stored_names(prefix: str, layers: str) -> tuple[tuple[str, str], ...]:
    """Patterns of stored tensors' names. prefix: of the body, where the checkpoint has a head.
    layers: what lies before a layer's number.
    """
    body = rf"^(?:{prefix}\.)?(?={layers}\.|embeddings|pooler\.|encoder\.|final_norm\.)"
    return ((body, "model."), (rf"^model\.{layers}\.", "model.layers."), *_EMBEDDINGS)


_BRANCHES = family.LayerNames(
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    ("intermediate.dense",),
    "output.dense",
)
_NAMES = _EncoderNames(_BRANCHES, ("attention.output.LayerNorm", "output.LayerNorm"))
_MPNET_NAMES = _EncoderNames(
    _BRANCHES._replace(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"), o="attention.attn.o"
    ),
    ("attention.LayerNorm", "output.LayerNorm"),
)
_DISTIL_NAMES = _EncoderNames(
    family.LayerNames(
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out_lin",
        ("ffn.lin1",),
        "ffn.lin2",
    ),
    ("sa_layer_norm", "output_layer_norm"),
    r"transformer\.layer",
)
_DISTIL_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
_POOLER, _DENSE, _LABELS = "model.pooler.dense", "classifier.dense", "classifier.out_proj"
# Row of MPNet's table before that of the first position, whatever pads.
_MPNET_PAD = 1

_DEBERTA_ATTENTION = "attention.self"
_DEBERTA_NAMES = _NAMES._replace(
    branches=_NAMES.branches._replace(
        qkv=tuple(f"{_DEBERTA_ATTENTION}.{name}_proj" for name in ("query", "key", "value"))
    )
)
_DEBERTA_KINDS = ("c2p", "p2c")

_MODERN_POOLINGS: dict[str, Pooling] = {"cls": "first", "mean": "mean"}
_MODERN_THETAS = {FULL: ("global_rope_theta", 160_000.0), WINDOWED: ("local_rope_theta", 10_000.0)}
_MODERN_LAYER = family.LayerNames(("attn.Wqkv",), "attn.Wo", ("mlp.Wi",), "mlp.Wo")
_MODERN_NAMES = (
    *_stored_names("model", "layers"),
    (r"^model\.embeddings\.tok_embeddings\.", f"{_EMBED}."),
    (r"^model\.embeddings\.norm\.", f"{_NORM}."),
    (r"^model\.final_norm\.", "model.norm."),
)


def _read_sizes(fields: Fields, positions: int = 512, **keys: Any) -> family.ModelSizes:
    """Read the sizes of an encoder, as `family.read_sizes` does with these keys. positions: where
    `config.json` says nothing.
    """
    fields.only("is_decoder", False)
    fields.only("add_cross_attention", False)
    fields.only("position_embedding_type", "absolute")
    usual = {"epsilon": 1e-12, "epsilon_key": "layer_norm_eps", "activation": "gelu"}
    said = fields.config.get("max_position_embeddings")
    fields = fields.changed(
        max_position_embeddings=positions if said is None else said,
        is_causal=False,
        use_bidirectional_attention=None,
    )
    sizes = family.read_sizes(fields, **{**usual, **keys})
    family.refuse_other_head_dim(fields, sizes)
    return sizes


def _layer(sizes: family.ModelSizes, names: _EncoderNames) -> LayerSpec:
    """Make a layer of two steps, each with a norm of its residual sum."""
    of = family.attention(sizes, None, biases=_ALL)
    attention, mlp = family.renamed(of, family.plain_mlp(sizes, _ALL), names.branches)
    first, second = (family.layer_norm(norm, sizes) for norm in names.norms)
    steps = StepSpec((attention,), None, after=first), StepSpec((mlp,), None, after=second)
    return LayerSpec(steps)


def _embedding(
    sizes: family.ModelSizes, first: int = 0, *, types: int, size: int | None = None
) -> EmbeddingSpec:
    """Make an embedding with positions and a norm. first: as of PositionTable. types: of tokens; 0
    = the model has no such table. size: of its rows; None = as wide as the model.
    """
    width = sizes.hidden if size is None else size
    matrix = LinearSpec("project_in", width, (Part(_PROJECTION, sizes.hidden),), "none", bias=True)
    return EmbeddingSpec(
        _EMBED,
        sizes.vocab,
        width,
        positions=PositionTable(_POSITIONS, sizes.positions, first),
        types=PositionTable(_TYPES, types) if types else None,
        norm=NormSpec(_NORM, width, sizes.epsilon, kind="layer", bias=True),
        projection=None if width == sizes.hidden else matrix,
    )


def _types_of(fields: Fields) -> int:
    """Read the number of types of tokens."""
    return fields.positive("type_vocab_size", 2)


def _score_heads(
    sizes: family.ModelSizes, dense: str, labels: str, activation: Activation
) -> tuple[ScoreSpec, ScoreSpec]:
    """Make the head that scores a text by its first token, and the one that scores each token.
    dense, labels: modules of the first.
    """
    matrix = LinearSpec("lm_head", sizes.hidden, (Part(dense, sizes.hidden),), "none", bias=True)
    of_text = ScoreSpec(labels, True, "first", matrix, activation)
    return of_text, ScoreSpec("classifier", True, "all")


def _encoder(
    fields: Fields,
    sizes: family.ModelSizes,
    embedding: EmbeddingSpec,
    layers: Sequence[LayerSpec],
    scores: tuple[ScoreSpec, ...],
    names: tuple[tuple[str, str], ...],
) -> ModelSpec:
    """Make the model from its parts. The norm of the last sum is that behind all layers. names: as
    of `_stored_names`.
    """
    model = family.model(fields.changed(eos_token_id=None), sizes, layers, sizes.positions)
    model = family.ended(model, layers)
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


def read_bert(fields: Fields) -> ModelSpec:
    """BERT: scores are made of what the pooler gives."""
    sizes = _read_sizes(fields)
    scores = _score_heads(sizes, _POOLER, "classifier", "tanh")
    embedding = _embedding(sizes, types=_types_of(fields))
    return _alike(fields, sizes, embedding, scores, "bert")


def read_roberta(fields: Fields) -> ModelSpec:
    """RoBERTa: positions begin behind that of padding."""
    sizes = _read_sizes(fields)
    pad = fields.config.get("pad_token_id", 1)
    if type(pad) is not int or not 0 <= pad < sizes.positions - 1:
        fields.refuse(f"pad_token_id must be a token before the last position, got {pad!r}")
        pad = 0
    scores = _score_heads(sizes, _DENSE, _LABELS, "tanh")
    embedding = _embedding(sizes, pad + 1, types=_types_of(fields))
    model = _alike(fields, sizes, embedding, scores, "roberta")
    return replace(model, unread_modules=(_POOLER,))


def read_electra(fields: Fields) -> ModelSpec:
    """ELECTRA's discriminator: rows of the embedding may be narrower than the model."""
    sizes = _read_sizes(fields)
    scores = _score_heads(sizes, _DENSE, _LABELS, "gelu")
    width = fields.positive("embedding_size", 128)
    embedding = _embedding(sizes, types=_types_of(fields), size=width)
    return _alike(fields, sizes, embedding, scores, "electra")


def read_mpnet(fields: Fields) -> ModelSpec:
    """MPNet: scores of attention have biases by distance, the same in all layers."""
    fields.only("relative_attention_num_buckets", 32)
    sizes = _read_sizes(fields)
    scores = _score_heads(sizes, _DENSE, _LABELS, "tanh")
    embedding = _embedding(sizes, _MPNET_PAD + 1, types=0)
    model = _alike(fields, sizes, embedding, scores, "mpnet", _MPNET_NAMES)
    biases = DistanceBias("model.encoder.relative_attention_bias")
    return replace(model, biases=biases, unread_modules=(_POOLER,))


def read_distilbert(fields: Fields) -> ModelSpec:
    """DistilBERT: BERT under other names, without types of tokens."""
    config = fields.config
    named = {key: config[own] for key, own in _DISTIL_KEYS.items() if own in config}
    fields = fields.changed(**named, layer_norm_eps=1e-12)
    sizes = _read_sizes(fields)
    scores = _score_heads(sizes, "pre_classifier", "classifier", "relu")
    embedding = _embedding(sizes, types=0)
    return _alike(fields, sizes, embedding, scores, "distilbert", _DISTIL_NAMES)


def _alike(
    fields: Fields,
    sizes: family.ModelSizes,
    embedding: EmbeddingSpec,
    scores: tuple[ScoreSpec, ...],
    prefix: str,
    names: _EncoderNames = _NAMES,
) -> ModelSpec:
    """Make a model whose layers are alike. prefix: as of `_stored_names`."""
    layers = [_layer(sizes, names)] * sizes.layers
    stored = _stored_names(prefix, names.layers)
    return _encoder(fields, sizes, embedding, layers, scores, stored)


def read_deberta(fields: Fields) -> ModelSpec:
    """DeBERTa V2 and V3: tokens have scores with vectors of distances, too."""
    config = fields.config
    if config.get("conv_kernel_size"):
        fields.refuse(
            f"conv_kernel_size must be 0, got {config['conv_kernel_size']!r}: a convolution behind"
            " the first layer is not served"
        )
    sizes = _read_sizes(fields, epsilon=1e-7)
    for key, usual in (
        ("embedding_size", sizes.hidden),
        ("pooler_hidden_size", sizes.hidden),
        ("attention_head_size", sizes.head_dim),
    ):
        fields.only(key, usual)
    kinds = _read_deberta_kinds(fields)
    distances = None
    if config.get("relative_attention") and kinds:
        distances = _read_distances(fields, sizes, kinds)
    own = distances is not None and not config.get("share_att_key")
    scale = float((sizes.head_dim * (1 + len(kinds))) ** -0.5)
    layer = _layer(sizes, _DEBERTA_NAMES).mapped(
        lambda of: (
            _deberta_attention(of, scale, kinds if own else ())
            if isinstance(of, AttentionSpec)
            else of
        )
    )
    named = config.get("pooler_hidden_act", "gelu")
    activation = family.read_activation(fields, "pooler_hidden_act", named)
    scores = _score_heads(sizes, _POOLER, "classifier", activation)
    layers: list[LayerSpec] = [layer] * sizes.layers
    names = _stored_names("deberta", _DEBERTA_NAMES.layers)
    model = _encoder(fields, sizes, _deberta_embedding(fields, sizes), layers, scores, names)
    return replace(model, distances=distances)


def _deberta_embedding(fields: Fields, sizes: family.ModelSizes) -> EmbeddingSpec:
    types = fields.config.get("type_vocab_size", 0)
    adds = fields.config.get("position_biased_input", True)
    if type(types) is not int or types < 0 or (types and not adds):
        fields.refuse(f"type_vocab_size must be 0 without positions in the input, got {types!r}")
        types = 0
    found = _embedding(sizes, types=types)
    return found if adds else replace(found, positions=None)


def _read_deberta_kinds(fields: Fields) -> tuple[str, ...]:
    said = fields.config.get("pos_att_type") or []
    each = said.lower().split("|") if isinstance(said, str) else said
    if not isinstance(each, list) or not all(str(kind).strip() in _DEBERTA_KINDS for kind in each):
        fields.refuse(f"pos_att_type must be of {' and '.join(_DEBERTA_KINDS)}, got {said!r}")
        return ()
    return tuple(kind for kind in _DEBERTA_KINDS if kind in {str(one).strip() for one in each})


def _read_distances(
    fields: Fields, sizes: family.ModelSizes, kinds: tuple[str, ...]
) -> DistanceVectors:
    most, buckets = (
        fields.config.get(key, -1) for key in ("max_relative_positions", "position_buckets")
    )
    if type(most) is not int or type(buckets) is not int:
        fields.refuse("max_relative_positions and position_buckets must be numbers of distances")
        most = buckets = -1
    most, buckets = most if most > 0 else sizes.positions, max(buckets, 0)
    if buckets and not 1 < buckets // 2 < most - 1:
        fields.refuse(f"position_buckets must be 4 to {2 * most - 3}, got {buckets}")
    said = fields.config.get("norm_rel_ebd", "none")
    if said not in ("none", "layer_norm"):
        fields.refuse(f"norm_rel_ebd must be none or layer_norm, got {said!r}")
    norm = family.layer_norm("model.encoder.LayerNorm", sizes) if said == "layer_norm" else None
    return DistanceVectors(
        "model.encoder.rel_embeddings",
        buckets or most,
        sizes.hidden,
        buckets,
        most,
        norm,
        meets_queries="c2p" in kinds,
        meets_keys="p2c" in kinds,
    )


def _deberta_attention(of: AttentionSpec, scale: float, own: tuple[str, ...]) -> AttentionSpec:
    """Return the attention with this scale. own: kinds of scores for which vectors of distances
    have matrices of their own."""
    if not own:
        return replace(of, scale=scale)
    q = of.qkv.parts[0]
    paths = {
        "p2c": f"{_DEBERTA_ATTENTION}.pos_query_proj",
        "c2p": f"{_DEBERTA_ATTENTION}.pos_key_proj",
    }
    parts = tuple(
        Part(path, q.out_features, q.spans) for kind, path in paths.items() if kind in own
    )
    linear = LinearSpec("distances", of.qkv.in_features, parts, "column", bias=True)
    return replace(of, scale=scale, distances=linear)


def read_modernbert(fields: Fields) -> ModelSpec:
    """ModernBERT: norms before steps, gated MLPs, rotations, and windows in two of three layers."""
    config = fields.config
    fields = fields.changed(hidden_act=config.get("hidden_activation", "gelu"))
    fields.only("rope_scaling", None)
    sizes = _read_sizes(fields, 8192, epsilon=1e-5, epsilon_key="norm_eps")
    has_bias = bool(config.get("norm_bias", False))

    def norm(path: str) -> NormSpec:
        return family.layer_norm(path, sizes, bias=has_bias)

    every = fields.positive("global_attn_every_n_layers", 3)
    windowed = family.read_windowed(fields, sizes, lambda n: n % every != 0)
    layers = [
        _modern_layer(fields, sizes, norm, n, windowed=is_one) for n, is_one in enumerate(windowed)
    ]
    embedding = EmbeddingSpec(_EMBED, sizes.vocab, sizes.hidden, norm=norm(_NORM))
    model = _encoder(
        fields, sizes, embedding, layers, _modern_scores(fields, sizes, norm), _MODERN_NAMES
    )
    return replace(model, norm=norm("model.norm"))


def _modern_layer(
    fields: Fields,
    sizes: family.ModelSizes,
    norm: _MakeNorm,
    number: int,
    *,
    windowed: bool,
) -> LayerSpec:
    bias, window = bool(fields.config.get("attention_bias", False)), None
    if windowed:
        window = fields.positive("local_attention", 128) // 2 + 1
    biases = family.Biases(bias, bias, bool(fields.config.get("mlp_bias", False)))
    of = family.attention(
        sizes, _modern_rope(fields, WINDOWED if windowed else FULL), window, biases
    )
    branches = family.renamed(of, family.mlp(sizes, biases), _MODERN_LAYER)
    norms = family.NormPlaces(norm("attn_norm") if number else None, norm("mlp_norm"))
    return family.layer(sizes, *branches, norms)


def _modern_rope(fields: Fields, kind: str) -> RopeSpec:
    key, usual = _MODERN_THETAS[kind]
    table = fields.table(fields.table(fields.config, "rope_parameters"), kind)
    if table.get("rope_type", "default") != "default":
        fields.refuse(f"rope_parameters: only default is served, got {table['rope_type']!r}")
    usual = fields.number(fields.config, key, usual)
    return RopeSpec("default", fields.number(table, "rope_theta", usual))


def _modern_scores(
    fields: Fields, sizes: family.ModelSizes, norm: _MakeNorm
) -> tuple[ScoreSpec, ...]:
    config, hidden = fields.config, sizes.hidden
    pooling = _MODERN_POOLINGS.get(str(config.get("classifier_pooling", "cls")))
    if pooling is None:
        fields.refuse(
            f"classifier_pooling must be cls or mean, got {config['classifier_pooling']!r}"
        )
    named = config.get("classifier_activation", "gelu")
    activation = family.read_activation(fields, "classifier_activation", named)
    bias = bool(config.get("classifier_bias", False))
    matrix = LinearSpec("lm_head", hidden, (Part("head.dense", hidden),), "none", bias)
    inner = (matrix, activation, norm("head.norm"))
    of_text = ScoreSpec("classifier", True, pooling or "first", *inner)
    return of_text, replace(of_text, pooling="all")
