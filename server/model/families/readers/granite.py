"""Granite 3: Llama with factors of embedding, scores, branches and logits. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import read_rope
from loraplex.server.model.spec.model_spec import ModelSpec


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_maths(fields)
    config = fields.config
    sizes = family.read_sizes(fields)
    rope, max_context = read_rope(fields, sizes)
    bias = bool(config.get("attention_bias", False))
    biases = family.Biases(qkv=bias, o=bias, mlp=bool(config.get("mlp_bias", False)))
    embedding, scale, residual, logits = (
        fields.number(config, key, 1.0)
        for key in (
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        )
    )
    of = family.attention(sizes, rope, biases=biases, scale=scale)
    layer = family.layer(sizes, of, family.mlp(sizes, biases), factor=residual)
    eos = family.read_eos(fields, generation, sizes, default=2)
    model = family.model(fields, sizes, (layer,) * sizes.layers, max_context, eos)
    return replace(
        model,
        embedding=replace(model.embedding, scale=embedding),
        head=replace(model.head, scale=1.0 / logits),
    )
