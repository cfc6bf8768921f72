"""SmolLM 3: positions turn nothing in every fourth layer. Pure."""

from collections.abc import Mapping
from typing import Any

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.model_spec import ModelSpec

_ROPE = RopeRules(theta=2e6)
_EOS = 128001


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    config = fields.config
    family.refuse_other_attention(fields)
    sizes = family.read_sizes(fields, kv_heads=4)
    rope, max_context = read_rope(fields, sizes, _ROPE)
    turns = _turning_layers(fields, sizes)
    bias = bool(config.get("attention_bias", False))
    biases = family.Biases(qkv=bias, o=bias, mlp=bool(config.get("mlp_bias", False)))
    windows = _read_windows(fields, sizes, turns)
    layers = [
        family.layer(
            sizes,
            family.attention(sizes, rope if turn else None, window, biases),
            family.mlp(sizes, biases),
        )
        for turn, window in zip(turns, windows, strict=True)
    ]
    eos = family.read_eos(fields, generation, sizes, default=_EOS)
    return family.model(fields, sizes, layers, max_context, eos, tied=True)


def _turning_layers(fields: Fields, sizes: family.ModelSizes) -> list[bool]:
    """Say for each layer whether it has a rotation. The list in `config.json` may be longer."""
    interval = fields.positive("no_rope_layer_interval", 4)
    usual = [(layer + 1) % interval != 0 for layer in range(sizes.layers)]
    said = fields.config.get("no_rope_layers")
    if said is None:
        return usual
    if not isinstance(said, list) or len(said) < len(usual) or not set(said) <= {0, 1}:
        fields.refuse("no_rope_layers must be 1, or 0 for a layer without rotation, for each layer")
        return usual
    return [bool(turn) for turn in said[: len(usual)]]


def _read_windows(
    fields: Fields, sizes: family.ModelSizes, turns: list[bool]
) -> tuple[int | None, ...]:
    """Layers without rotation have one, where `layer_types` says nothing."""
    config = fields.config
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if window is None and family.WINDOWED in fields.listed("layer_types"):
        fields.refuse(f"layer_types: {family.WINDOWED} needs use_sliding_window and sliding_window")
    return family.read_windows(fields, sizes, window, lambda layer: not turns[layer])
