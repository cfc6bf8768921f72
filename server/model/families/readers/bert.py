"""BERT, and RoBERTa with XLM-RoBERTa, which differ in positions and in the score head. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import encoders
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.model_spec import ModelSpec

_NAMES = encoders.EncoderNames(
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
    ("attention.output.LayerNorm", "output.LayerNorm"),
)
POOLER = "model.pooler.dense"
_LAYERS = r"encoder\.layer"


def read_bert(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """BERT: scores are made of what the pooler gives."""
    sizes = encoders.read_sizes(fields)
    scores = encoders.score_heads(sizes, POOLER, "classifier", "tanh")
    layers = [encoders.layer(sizes, _NAMES)] * sizes.layers
    embedding = encoders.embedding(fields, sizes)
    model = encoders.encoder(fields, sizes, embedding, layers, scores)
    return replace(model, stored_names=encoders.stored_names("bert", _LAYERS))


def read_roberta(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """RoBERTa: positions begin behind that of padding."""
    sizes = encoders.read_sizes(fields)
    pad = fields.config.get("pad_token_id", 1)
    if type(pad) is not int or not 0 <= pad < sizes.positions - 1:
        fields.refuse(f"pad_token_id must be a token before the last position, got {pad!r}")
        pad = 0
    scores = encoders.score_heads(sizes, "classifier.dense", "classifier.out_proj", "tanh")
    layers = [encoders.layer(sizes, _NAMES)] * sizes.layers
    embedding = encoders.embedding(fields, sizes, pad + 1)
    model = encoders.encoder(fields, sizes, embedding, layers, scores)
    names = encoders.stored_names("roberta", _LAYERS)
    return replace(model, stored_names=names, unread_modules=(POOLER,))
