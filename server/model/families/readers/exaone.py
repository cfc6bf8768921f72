"""EXAONE 4: norms behind attention and MLP alone; layers that see all tokens have no rotation
where others have windows. Pure."""

from collections.abc import Mapping
from typing import Any

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import read_rope
from loraplex.server.model.spec.model_spec import ModelSpec, NormSpec

_WINDOW, _PATTERN, _EOS = 4096, 4, 2


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_attention(fields)
    sizes = family.read_sizes(fields, kv_heads=32, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes)
    norms = family.NormPlaces(
        pre_attention=None,
        pre_mlp=None,
        post_attention=NormSpec("post_attention_layernorm", sizes.hidden, sizes.epsilon),
        post_mlp=NormSpec("post_feedforward_layernorm", sizes.hidden, sizes.epsilon),
    )
    windows = read_windows(fields, sizes)
    has_windows = fields.config.get("sliding_window", _WINDOW) is not None
    layers = [
        family.layer(
            sizes,
            family.attention(
                sizes, rope if window or not has_windows else None, window, qk_norm=True
            ),
            norms=norms,
        )
        for window in windows
    ]
    eos = family.read_eos(fields, generation, sizes, default=_EOS)
    return family.model(fields, sizes, layers, max_context, eos)


def read_windows(fields: Fields, sizes: family.ModelSizes) -> tuple[int | None, ...]:
    """Read each layer's window: in all layers but every fourth, or as `sliding_window_pattern` or
    `layer_types` say.
    """
    config = fields.config
    window = config.get("sliding_window", _WINDOW)
    if window is None or config.get("layer_types") is not None:
        return family.read_windows(fields, sizes, window)
    pattern = fields.positive("sliding_window_pattern", _PATTERN)
    return family.read_windows(fields, sizes, window, lambda layer: (layer + 1) % pattern != 0)
