"""Mamba-2 alone: no layer attends, and none has an MLP. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import mamba
from loraplex.server.model.spec.model_spec import LayerSpec, ModelSpec, StepSpec


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Mamba-2 of any size. Its configuration names no longest context."""
    config = fields.config
    fields.only("hidden_act", "silu")
    heads, bias = fields.positive("num_heads", 128), bool(config.get("use_bias", False))
    found = mamba.MambaSizes(
        heads,
        fields.positive("head_dim", 64),
        fields.positive("n_groups", 8),
        fields.positive("state_size", 128),
        fields.positive("conv_kernel", 4),
        (bias, bias, bool(config.get("use_conv_bias", True))),
        mamba.read_limits(fields),
    )
    # Nothing else reads these two.
    fields = fields.changed(num_attention_heads=heads, intermediate_size=1)
    sizes = family.read_sizes(fields, epsilon=1e-5, epsilon_key="layer_norm_epsilon")
    inner = fields.positive("expand", 2) * sizes.hidden
    if heads * found.head_dim != inner:
        fields.refuse(f"{heads} num_heads of head_dim {found.head_dim} are not {inner} features")
    mixer = mamba.mixer(fields, sizes, mamba.checked(fields, found), "mixer")
    layer = LayerSpec((StepSpec((mixer,), mamba.norm("norm", sizes)),))
    eos = family.read_eos(fields, generation, sizes, default=2)
    model = family.model(fields, sizes, [layer] * sizes.layers, sizes.positions, eos)
    return replace(model, stored_names=mamba.BACKBONE)
