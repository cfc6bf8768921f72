"""Qwen3: q and k are normed in each head. Pure."""

from collections.abc import Mapping
from typing import Any

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers.qwen2 import read_windows
from loraplex.server.model.families.rope import read_rope
from loraplex.server.model.spec.model_spec import ModelSpec

_HEAD_DIM = 128


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_attention(fields)
    sizes = family.read_sizes(fields, head_dim=_HEAD_DIM)
    rope, max_context = read_rope(fields, sizes)
    biases = family.attention_biases(fields)
    layers = [
        family.layer(sizes, family.attention(sizes, rope, window, biases, qk_norm=True))
        for window in read_windows(fields, sizes)
    ]
    eos = family.read_eos(fields, generation, sizes)
    return family.model(fields, sizes, layers, max_context, eos)
