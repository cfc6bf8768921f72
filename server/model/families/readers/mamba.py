"""Mamba-2, alone or between and beside layers that attend: Bamba, Falcon-H1, Nemotron-H. Pure."""

import math
from typing import NamedTuple

from msgspec.structs import replace

from loraplex.adapters.base import Span
from loraplex.server.model.families import experts, family
from loraplex.server.model.families.family import FULL, ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.linear_spec import ExpertStorage, LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    Branch,
    LayerSpec,
    Mixer,
    MlpSpec,
    ModelSpec,
    StepSpec,
)
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.state_spec import Mamba2Spec

LINEAR = "linear_attention"
# Names of tensors in models with a `backbone`.
_BACKBONE = (
    (r"^backbone\.", "model."),
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^model\.norm_f\.", "model.norm."),
)
# As older configurations name kinds of layers.
_OLD = {"mamba": LINEAR, "attention": FULL}

_MLP, _MOE = "mlp", "moe"
_OF_LETTER = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}
_MIXER = "mixer"
# Other spellings of keys, which win.
_NEMOTRON_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
_NEMOTRON_NAMES = experts.ExpertNames(
    f"{_MIXER}.gate",
    f"{_MIXER}.experts.{{}}",
    "gate_proj",
    "up_proj",
    "down_proj",
    stacked=f"{_MIXER}.experts",
)


class _MambaSizes(NamedTuple):
    """Sizes of a Mamba-2. state: numbers of B and C of a group. kernel: tokens of the convolution.
    biases: of the products in and out, and of the convolution."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    biases: tuple[bool, bool, bool]
    limits: tuple[float, float]


def read_bamba(fields: Fields) -> ModelSpec:
    """Bamba: Mamba-2 between layers that attend, and an MLP in each."""
    fields.only("is_causal", True)
    config = fields.config
    sizes = family.read_sizes(fields, kv_heads=8, epsilon=1e-5)
    fields.only("partial_rotary_factor", 0.5)  # other values count in a table alone
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
        LINEAR: mixer(fields, sizes, read_mamba_sizes(fields, sizes)),
    }
    feed = StepSpec((_feed_forward(sizes, biases),), family.norm("pre_ff_layernorm", sizes))
    before = family.norm("input_layernorm", sizes)
    layers = [LayerSpec((StepSpec((mixers[kind],), before), feed)) for kind in kinds]
    last = "model.final_layernorm"
    return family.model(fields, sizes, layers, max_context, eos=2, last=last)


def _feed_forward(sizes: ModelSizes, biases: family.Biases) -> MlpSpec:
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


def read_mamba_sizes(fields: Fields, sizes: ModelSizes, inner: int | None = None) -> _MambaSizes:
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
    found = _MambaSizes(
        heads,
        max(head_dim, 1),
        fields.positive("mamba_n_groups", 1),
        fields.positive("mamba_d_state", 256),
        fields.positive("mamba_d_conv", 4),
        (proj, proj, bool(config.get("mamba_conv_bias", True))),
        _read_limits(fields),
    )
    return _checked(fields, found)


def _checked(fields: Fields, found: _MambaSizes) -> _MambaSizes:
    """Refuse sizes that do not go together."""
    if found.heads % found.groups:
        fields.refuse(f"{found.heads} heads of Mamba do not divide among {found.groups} groups")
        found = found._replace(groups=1)
    if found.kernel == 1:
        fields.refuse("the convolution of Mamba must have at least 2 tokens, got 1")
    return found


def _read_limits(fields: Fields) -> tuple[float, float]:
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
    of: _MambaSizes,
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


def read_mamba2(fields: Fields) -> ModelSpec:
    """Mamba-2 of any size. Its configuration names no longest context."""
    config = fields.config
    fields.only("hidden_act", "silu")
    heads, bias = fields.positive("num_heads", 128), bool(config.get("use_bias", False))
    found = _MambaSizes(
        heads,
        fields.positive("head_dim", 64),
        fields.positive("n_groups", 8),
        fields.positive("state_size", 128),
        fields.positive("conv_kernel", 4),
        (bias, bias, bool(config.get("use_conv_bias", True))),
        _read_limits(fields),
    )
    # Nothing else reads these three.
    fields = fields.changed(
        num_attention_heads=heads, intermediate_size=1, use_bidirectional_attention=None
    )
    sizes = family.read_sizes(fields, epsilon=1e-5, epsilon_key="layer_norm_epsilon")
    inner = fields.positive("expand", 2) * sizes.hidden
    if heads * found.head_dim != inner:
        fields.refuse(f"{heads} num_heads of head_dim {found.head_dim} are not {inner} features")
    of = mixer(fields, sizes, _checked(fields, found), "mixer")
    layer = LayerSpec((StepSpec((of,), family.norm("norm", sizes)),))
    model = family.model(fields, sizes, [layer] * sizes.layers, sizes.positions, eos=2)
    return replace(model, stored_names=_BACKBONE)


def read_falcon_h1(fields: Fields) -> ModelSpec:
    """Falcon-H1: Mamba-2 and attention beside each other, as two steps, since each has a factor."""
    fields.only("is_causal", True)
    config = fields.config
    sizes = family.read_sizes(fields, kv_heads=8, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes)
    attention, mlp = (bool(config.get(f"{name}_bias", False)) for name in ("attention", "mlp"))
    biases = family.Biases(attention, attention, mlp)
    of_input = fields.factor("attention_in_multiplier")
    if attention and of_input != 1.0:
        fields.refuse("attention_bias beside attention_in_multiplier is not served")
    attend = _falcon_attention(fields, family.attention(sizes, rope, biases=biases), of_input)
    gate, down = _factors(fields, "mlp_multipliers", 2)
    feed = replace(_feed_forward(sizes, biases), gate_factor=gate)
    layer = LayerSpec(
        (
            StepSpec(
                (_read_falcon_mamba(fields, sizes),),
                family.norm("input_layernorm", sizes),
                factor=fields.factor("ssm_out_multiplier"),
            ),
            StepSpec(
                (attend,),
                None,
                factor=of_input * fields.factor("attention_out_multiplier"),
                reads_last=True,
            ),
            StepSpec((feed,), family.norm("pre_ff_layernorm", sizes), factor=down),
        )
    )
    last = "model.final_layernorm"
    model = family.model(fields, sizes, [layer] * sizes.layers, max_context, eos=2, last=last)
    return replace(
        model,
        embedding=replace(model.embedding, scale=fields.factor("embedding_multiplier")),
        head=replace(model.head, scale=fields.factor("lm_head_multiplier")),
    )


def _falcon_attention(fields: Fields, of: AttentionSpec, of_input: float) -> AttentionSpec:
    """Attention whose factors of inputs and keys are those of scores: what values have of them is a
    factor of its result."""
    qkv, o = (replace(each, factor_behind=of_input != 1.0) for each in (of.qkv, of.o))
    scale = of.scale * of_input**2 * fields.factor("key_multiplier")
    return replace(of, qkv=qkv, o=o, scale=scale)


def _read_falcon_mamba(fields: Fields, sizes: family.ModelSizes) -> Mamba2Spec:
    config = fields.config
    inner = None
    if "mamba_d_ssm" not in config or config["mamba_d_ssm"] is not None:
        inner = fields.positive("mamba_d_ssm", 1024)
    found = read_mamba_sizes(fields, sizes, inner)
    into, _, conv = found.biases
    found = found._replace(biases=(into, bool(config.get("projectors_bias", False)), conv))
    of_input = fields.factor("ssm_in_multiplier")
    if into and of_input != 1.0:
        fields.refuse("mamba_proj_bias beside ssm_in_multiplier is not served")
    factors = tuple(of_input * each for each in _factors(fields, "ssm_multipliers", 5))
    spec = mixer(fields, sizes, found, factors=factors)
    return replace(
        spec,
        mixed=replace(spec.mixed, factor_behind=of_input != 1.0),
        norm_size=spec.norm_size if config.get("mamba_rms_norm", False) else None,
        gate_first=not config.get("mamba_norm_before_gate", True),
    )


def _factors(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    said = fields.config.get(key)
    if said is None:
        return (1.0,) * count
    if not isinstance(said, list) or len(said) != count:
        fields.refuse(f"{key} must be {count} numbers, got {said!r}")
        return (1.0,) * count
    return tuple(fields.number({key: each}, key, None) for each in said)


def read_nemotron_h(fields: Fields) -> ModelSpec:
    """Nemotron-H, and Nemotron 3 with experts."""
    fields.only("is_causal", True)
    config = fields.config
    kinds = _read_nemotron_kinds(fields)
    renamed = {own: config[key] for key, own in _NEMOTRON_KEYS.items() if key in config}
    fields = fields.changed(
        **renamed,
        num_hidden_layers=len(kinds),
        hidden_act=config.get("mlp_hidden_act", "relu2"),
        tie_word_embeddings=False,  # whatever it says: the class ties nothing
    )
    sizes = family.read_sizes(
        fields, kv_heads=8, head_dim=128, epsilon=1e-5, epsilon_key="layer_norm_epsilon"
    )
    layers = []
    for kind in kinds:
        branches = _read_nemotron_branches(fields, sizes, kind)
        layers.append(LayerSpec((StepSpec(branches, family.norm("norm", sizes)),)))
    if FULL not in kinds:
        fields.refuse("layers_block_type: a model without layers that attend is not served")
    model = family.model(fields, sizes, layers, sizes.positions, eos=2)
    return replace(model, stored_names=_BACKBONE)


def _read_nemotron_kinds(fields: Fields) -> list[str]:
    """The kind of each layer."""
    config = fields.config
    said = config.get("layers_block_type", config.get("layer_types"))
    if said is None:
        pattern = config.get("hybrid_override_pattern", "ME*-")
        said = [_OF_LETTER.get(letter) for letter in str(pattern)]
    kinds = current_kinds(said)
    known = isinstance(kinds, list) and all(kind in [*_OF_LETTER.values()] for kind in kinds)
    if not isinstance(kinds, list) or not kinds or not known:
        fields.refuse(f"layers_block_type must list {', '.join(_OF_LETTER.values())}")
        return [FULL]
    return kinds


def _read_nemotron_branches(fields: Fields, sizes: ModelSizes, kind: str) -> tuple[Branch, ...]:
    if kind == FULL:
        return (_nemotron_attention(sizes),)
    if kind == LINEAR:
        return (_read_nemotron_mamba(fields, sizes),)
    if kind == _MLP:
        return (_nemotron_mlp(fields, sizes),)
    return _read_nemotron_experts(fields, sizes)


def _nemotron_attention(sizes: ModelSizes) -> AttentionSpec:
    usual = family.attention(sizes, None)
    qkv, o = (_within(each) for each in usual.linears)
    return replace(usual, qkv=qkv, o=o)


def _within(linear: LinearSpec, path: str = _MIXER) -> LinearSpec:
    paths = (f"{path}.{part.path.rpartition('.')[2]}" for part in linear.parts)
    return family.with_paths(linear, *paths)


def _nemotron_mlp(fields: Fields, sizes: ModelSizes, path: str = _MIXER) -> MlpSpec:
    biases = family.Biases(mlp=bool(fields.config.get("mlp_bias", False)))
    usual = family.plain_mlp(sizes, biases)
    return replace(usual, gate_up=_within(usual.gate_up, path), down=_within(usual.down, path))


def _read_nemotron_mamba(fields: Fields, sizes: ModelSizes) -> Mamba2Spec:
    config = fields.config
    fields.only("mamba_hidden_act", "silu")
    bias = bool(config.get("use_bias", False))
    found = _MambaSizes(
        fields.positive("mamba_num_heads", 128),
        fields.positive("mamba_head_dim", 64),
        fields.positive("n_groups", 8),
        fields.positive("ssm_state_size", 128),
        fields.positive("conv_kernel", 4),
        (bias, bias, bool(config.get("use_conv_bias", True))),
        (fields.number(config, "time_step_min", 0.001), float("inf")),
    )
    return mixer(fields, sizes, _checked(fields, found), _MIXER)


def _read_nemotron_experts(fields: Fields, sizes: ModelSizes) -> tuple[MoeSpec, MlpSpec]:
    """Read experts without gate, and the MLP that every token has beside them."""
    config = fields.config
    fields.only("mlp_hidden_act", "relu2")
    number = config.get("n_routed_experts", config.get("num_local_experts"))
    counted = fields.changed(num_experts=number, num_local_experts=None)
    counts = experts.read_counts(counted, default=8, default_of_token=2)
    size = fields.positive("moe_intermediate_size", 7688)
    latent = fields.positive("moe_latent_size", sizes.hidden)
    moe = experts.moe(latent, size, counts, _NEMOTRON_NAMES, "sigmoid_top_k_normed")
    moe = replace(moe, router=replace(moe.router, in_features=sizes.hidden))
    if config.get("moe_latent_size") is not None:
        moe = replace(moe, latent=_nemotron_latent(fields, sizes, latent))
    moe = experts.read_scored(fields, moe, f"{_NEMOTRON_NAMES.router}.e_score_correction_bias")
    up = replace(
        moe.gate_up,
        parts=moe.gate_up.parts[1:],
        stored=ExpertStorage(f"{_NEMOTRON_NAMES.stacked}.up_proj"),
    )
    wide = sizes._replace(inner=fields.positive("moe_shared_expert_intermediate_size", 7688))
    of_all = _nemotron_mlp(fields, wide, f"{_MIXER}.shared_experts")
    shared = replace(
        of_all,
        gate_up=replace(of_all.gate_up, role="shared_gate_up"),
        down=replace(of_all.down, role="shared_down"),
    )
    return replace(moe, gate_up=up, activation="relu2"), shared


def _nemotron_latent(fields: Fields, sizes: ModelSizes, size: int) -> tuple[LinearSpec, LinearSpec]:
    """Products before and behind experts of so many features."""
    bias = bool(fields.config.get("mlp_bias", False))
    into, out = (
        Part(f"{_MIXER}.fc1_latent_proj", size),
        Part(f"{_MIXER}.fc2_latent_proj", sizes.hidden),
    )
    return (
        LinearSpec("latent_in", sizes.hidden, (into,), "none", bias),
        LinearSpec("latent_out", size, (out,), "none", bias),
    )
