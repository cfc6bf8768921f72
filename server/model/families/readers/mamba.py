"""Mamba-2 as most families spell it, and Bamba, whose other layers attend. Pure."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.adapters.sharding import Span
from loraplex.server.model.families import family
from loraplex.server.model.families.family import FULL, ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    LayerSpec,
    Mixer,
    MlpSpec,
    ModelSpec,
    NormSpec,
    StepSpec,
)
from loraplex.server.model.spec.state_spec import Mamba2Spec

LINEAR = "linear_attention"
# Names of tensors in models with a `backbone`.
BACKBONE = (
    (r"^backbone\.", "model."),
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^model\.norm_f\.", "model.norm."),
)
# As older configurations name kinds of layers.
_OLD = {"mamba": LINEAR, "attention": FULL}


class MambaSizes(NamedTuple):
    """Sizes of a Mamba-2. state: numbers of B and C of a group. kernel: tokens of the convolution.
    biases: of the products in and out, and of the convolution."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    biases: tuple[bool, bool, bool]
    limits: tuple[float, float]


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Bamba."""
    family.refuse_other_attention(fields)
    fields.only("is_causal", True)
    config = fields.config
    sizes = family.read_sizes(fields, kv_heads=8, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes, RopeRules(partial=0.5))
    attention, mlp = (bool(config.get(f"{name}_bias", False)) for name in ("attention", "mlp"))
    biases = family.Biases(attention, attention, mlp)
    attending = config.get("attn_layer_indices") or []
    if not isinstance(attending, list):
        fields.refuse(f"attn_layer_indices must be a list of layers, got {attending!r}")
        attending = []
    kinds = [FULL if number in attending else LINEAR for number in range(sizes.layers)]
    if FULL not in kinds:
        fields.refuse("attn_layer_indices: a model without layers that attend is not served")
    mixers: dict[str, Mixer] = {
        FULL: family.attention(sizes, rope, biases=biases),
        LINEAR: mixer(fields, sizes, read_mamba(fields, sizes)),
    }
    feed = StepSpec((feed_forward(sizes, biases),), norm("pre_ff_layernorm", sizes))
    before = norm("input_layernorm", sizes)
    layers = [LayerSpec((StepSpec((mixers[kind],), before), feed)) for kind in kinds]
    eos = family.read_eos(fields, generation, sizes, default=2)
    model = family.model(fields, sizes, layers, max_context, eos)
    return replace(model, norm=norm("model.final_layernorm", sizes))


def norm(path: str, sizes: ModelSizes) -> NormSpec:
    return NormSpec(path, sizes.hidden, sizes.epsilon)


def feed_forward(sizes: ModelSizes, biases: family.Biases) -> MlpSpec:
    """Make the MLP of a layer under `feed_forward`."""
    usual = family.mlp(sizes, biases)
    gate_up, down = (
        family.with_paths(each, *(part.path.replace("mlp", "feed_forward") for part in each.parts))
        for each in usual.linears
    )
    return replace(usual, gate_up=gate_up, down=down)


def current_kinds(kinds: object) -> object:
    """Kinds of layers, older names replaced."""
    if not isinstance(kinds, list):
        return kinds
    return [_OLD.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]


def read_mamba(fields: Fields, sizes: ModelSizes, inner: int | None = None) -> MambaSizes:
    """Read sizes from the keys `mamba_…`. inner: features of all heads; None = `mamba_expand` times
    those of the residual stream."""
    config = fields.config
    fields.only("hidden_act", "silu")
    heads = fields.positive("mamba_n_heads", 128)
    if inner is None:
        inner = fields.positive("mamba_expand", 2) * sizes.hidden
    head_dim = inner // heads
    if config.get("mamba_d_head", "auto") != "auto":
        head_dim = fields.positive("mamba_d_head")
    if heads * head_dim != inner:
        fields.refuse(f"{heads} mamba_n_heads of mamba_d_head {head_dim} are not {inner} features")
    proj = bool(config.get("mamba_proj_bias", False))
    found = MambaSizes(
        heads,
        max(head_dim, 1),
        fields.positive("mamba_n_groups", 1),
        fields.positive("mamba_d_state", 256),
        fields.positive("mamba_d_conv", 4),
        (proj, proj, bool(config.get("mamba_conv_bias", True))),
        read_limits(fields),
    )
    return checked(fields, found)


def checked(fields: Fields, found: MambaSizes) -> MambaSizes:
    """Refuse sizes that do not go together."""
    if found.heads % found.groups:
        fields.refuse(f"{found.heads} heads of Mamba do not divide among {found.groups} groups")
        found = found._replace(groups=1)
    if found.kernel == 1:
        fields.refuse("the convolution of Mamba must have at least 2 tokens, got 1")
    return found


def read_limits(fields: Fields) -> tuple[float, float]:
    """The least and the largest time step. Infinity is a table in JSON."""
    said = fields.config.get("time_step_limit", [0.0, math.inf])
    values = [
        math.inf if each in ({"__float__": "Infinity"}, "Infinity") else each
        for each in (said if isinstance(said, list) else [])
    ]
    if len(values) != 2 or not all(type(each) in (int, float) for each in values):
        fields.refuse(f"time_step_limit must be two numbers, got {said!r}")
        return 0.0, math.inf
    return float(values[0]), float(values[1])


def mixer(
    fields: Fields,
    sizes: ModelSizes,
    of: MambaSizes,
    path: str = "mamba",
    factors: tuple[float, ...] = (1.0,) * 5,
) -> Mamba2Spec:
    """Make the Mamba-2 of a layer, which norms each group behind its gate. factors: of z, x, B, C
    and dt."""
    inner, groups = of.heads * of.head_dim, of.groups * of.state
    values, keys = Span(inner, of.head_dim), Span(groups, of.state)
    spans = (values, values, keys, keys, Span(of.heads))
    width = sum(span.features for span in spans)
    of_in, of_out, of_conv = of.biases
    return Mamba2Spec(
        LinearSpec("in", sizes.hidden, (Part(f"{path}.in_proj", width, spans),), "column", of_in),
        LinearSpec("out", inner, (Part(f"{path}.out_proj", sizes.hidden),), "row", of_out),
        path,
        of.heads,
        of.groups,
        of.head_dim,
        of.state,
        of.kernel,
        sizes.epsilon,
        norm_size=inner // of.groups,
        bias=of_conv,
        limits=of.limits,
        factors=factors,
    )
