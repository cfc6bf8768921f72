"""BERT, and encoders that differ from it in positions, names and score heads. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import encoders, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.model_spec import DistanceBias, EmbeddingSpec, ModelSpec, ScoreSpec

_BRANCHES = family.LayerNames(
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
NAMES = encoders.EncoderNames(_BRANCHES, ("attention.output.LayerNorm", "output.LayerNorm"))
_MPNET_NAMES = encoders.EncoderNames(
    _BRANCHES._replace(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"), o="attention.attn.o"
    ),
    ("attention.LayerNorm", "output.LayerNorm"),
)
_DISTIL_NAMES = encoders.EncoderNames(
    family.LayerNames(
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out_lin",
        "ffn.lin1",
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
POOLER, _DENSE, _LABELS = "model.pooler.dense", "classifier.dense", "classifier.out_proj"
# Row of MPNet's table before that of the first position, whatever pads.
_MPNET_PAD = 1


def read_bert(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """BERT: scores are made of what the pooler gives."""
    sizes = encoders.read_sizes(fields)
    scores = encoders.score_heads(sizes, POOLER, "classifier", "tanh")
    embedding = encoders.embedding(sizes, types=encoders.types_of(fields))
    return _encoder(fields, sizes, embedding, scores, "bert")


def read_roberta(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """RoBERTa: positions begin behind that of padding."""
    sizes = encoders.read_sizes(fields)
    pad = fields.config.get("pad_token_id", 1)
    if type(pad) is not int or not 0 <= pad < sizes.positions - 1:
        fields.refuse(f"pad_token_id must be a token before the last position, got {pad!r}")
        pad = 0
    scores = encoders.score_heads(sizes, _DENSE, _LABELS, "tanh")
    embedding = encoders.embedding(sizes, pad + 1, types=encoders.types_of(fields))
    model = _encoder(fields, sizes, embedding, scores, "roberta")
    return replace(model, unread_modules=(POOLER,))


def read_electra(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """ELECTRA's discriminator: rows of the embedding may be narrower than the model."""
    sizes = encoders.read_sizes(fields)
    scores = encoders.score_heads(sizes, _DENSE, _LABELS, "gelu")
    width = fields.positive("embedding_size", 128)
    embedding = encoders.embedding(sizes, types=encoders.types_of(fields), size=width)
    return _encoder(fields, sizes, embedding, scores, "electra")


def read_mpnet(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """MPNet: scores of attention have biases by distance, the same in all layers."""
    fields.only("relative_attention_num_buckets", 32)
    sizes = encoders.read_sizes(fields)
    scores = encoders.score_heads(sizes, _DENSE, _LABELS, "tanh")
    embedding = encoders.embedding(sizes, _MPNET_PAD + 1, types=0)
    model = _encoder(fields, sizes, embedding, scores, "mpnet", _MPNET_NAMES)
    biases = DistanceBias("model.encoder.relative_attention_bias")
    return replace(model, biases=biases, unread_modules=(POOLER,))


def read_distilbert(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """DistilBERT: BERT under other names, without types of tokens."""
    config = fields.config
    named = {key: config[own] for key, own in _DISTIL_KEYS.items() if own in config}
    fields = fields.changed(**named, layer_norm_eps=1e-12)
    sizes = encoders.read_sizes(fields)
    scores = encoders.score_heads(sizes, "pre_classifier", "classifier", "relu")
    embedding = encoders.embedding(sizes, types=0)
    return _encoder(fields, sizes, embedding, scores, "distilbert", _DISTIL_NAMES)


def _encoder(
    fields: Fields,
    sizes: family.ModelSizes,
    embedding: EmbeddingSpec,
    scores: tuple[ScoreSpec, ...],
    prefix: str,
    names: encoders.EncoderNames = NAMES,
) -> ModelSpec:
    """Make a model whose layers are alike. prefix: as of `encoders.stored_names`."""
    layers = [encoders.layer(sizes, names)] * sizes.layers
    stored = encoders.stored_names(prefix, names.layers)
    return encoders.encoder(fields, sizes, embedding, layers, scores, stored)
