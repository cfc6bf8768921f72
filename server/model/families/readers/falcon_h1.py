"""Falcon-H1: attention and Mamba-2 side by side, with factors of nearly all. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import mamba
from loraplex.server.model.families.rope import read_rope
from loraplex.server.model.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec, StepSpec
from loraplex.server.model.spec.state_spec import Mamba2Spec


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read a layer's first step as two, since each branch has a factor of its own."""
    family.refuse_other_attention(fields)
    fields.only("is_causal", True)
    config = fields.config
    sizes = family.read_sizes(fields, kv_heads=8, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes)
    attention, mlp = (bool(config.get(f"{name}_bias", False)) for name in ("attention", "mlp"))
    biases = family.Biases(attention, attention, mlp)
    of_input = _factor(fields, "attention_in_multiplier")
    if attention and of_input != 1.0:
        fields.refuse("attention_bias beside attention_in_multiplier is not served")
    attend = _scaled(fields, family.attention(sizes, rope, biases=biases), of_input)
    gate, down = _factors(fields, "mlp_multipliers", 2)
    feed = replace(mamba.feed_forward(sizes, biases), gate_factor=gate)
    layer = LayerSpec(
        (
            StepSpec(
                (_read_mamba(fields, sizes),),
                mamba.norm("input_layernorm", sizes),
                factor=_factor(fields, "ssm_out_multiplier"),
            ),
            StepSpec(
                (attend,),
                None,
                factor=of_input * _factor(fields, "attention_out_multiplier"),
                reads_last=True,
            ),
            StepSpec((feed,), mamba.norm("pre_ff_layernorm", sizes), factor=down),
        )
    )
    eos = family.read_eos(fields, generation, sizes, default=2)
    model = family.model(fields, sizes, [layer] * sizes.layers, max_context, eos)
    return replace(
        model,
        norm=mamba.norm("model.final_layernorm", sizes),
        embedding=replace(model.embedding, scale=_factor(fields, "embedding_multiplier")),
        head=replace(model.head, scale=_factor(fields, "lm_head_multiplier")),
    )


def _scaled(fields: Fields, of: AttentionSpec, of_input: float) -> AttentionSpec:
    """Attention whose factors of inputs and keys are those of scores: what values have of them is a
    factor of its result."""
    return replace(of, scale=of.scale * of_input**2 * _factor(fields, "key_multiplier"))


def _read_mamba(fields: Fields, sizes: family.ModelSizes) -> Mamba2Spec:
    config = fields.config
    inner = None
    if "mamba_d_ssm" not in config or config["mamba_d_ssm"] is not None:
        inner = fields.positive("mamba_d_ssm", 1024)
    found = mamba.read_mamba(fields, sizes, inner)
    into, _, conv = found.biases
    found = found._replace(biases=(into, bool(config.get("projectors_bias", False)), conv))
    of_input = _factor(fields, "ssm_in_multiplier")
    if into and of_input != 1.0:
        fields.refuse("mamba_proj_bias beside ssm_in_multiplier is not served")
    factors = tuple(of_input * each for each in _factors(fields, "ssm_multipliers", 5))
    spec = mamba.mixer(fields, sizes, found, factors=factors)
    return replace(
        spec,
        norm_size=spec.norm_size if config.get("mamba_rms_norm", False) else None,
        gate_first=not config.get("mamba_norm_before_gate", True),
    )


def _factor(fields: Fields, key: str) -> float:
    return fields.number(fields.config, key, 1.0)


def _factors(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    said = fields.config.get(key)
    if said is None:
        return (1.0,) * count
    if not isinstance(said, list) or len(said) != count:
        fields.refuse(f"{key} must be {count} numbers, got {said!r}")
        return (1.0,) * count
    return tuple(fields.number({key: each}, key, None) for each in said)
