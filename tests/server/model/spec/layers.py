"""Layers that differ from a model's own."""

from typing import Any

from msgspec.structs import replace

from loraplex.server.model.spec.model_spec import AttentionSpec, LayerSpec


def with_attention(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """The layer with other values of its AttentionSpec."""
    return layer.mapped(
        lambda branch: replace(branch, **changes) if isinstance(branch, AttentionSpec) else branch
    )
