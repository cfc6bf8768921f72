"""Nemotron-H and Nemotron 3: a layer is a Mamba-2, an attention, an MLP or experts. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import experts, family
from loraplex.server.model.families.family import FULL, ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import mamba
from loraplex.server.model.spec.linear_spec import ExpertStorage, LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    Branch,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    StepSpec,
)
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.state_spec import Mamba2Spec

_LINEAR, _MLP, _MOE = mamba.LINEAR, "mlp", "moe"
_OF_LETTER = {"M": _LINEAR, "*": FULL, "-": _MLP, "E": _MOE}
_PATH = "mixer"
# Other spellings of keys, which win.
_OTHER_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
_NAMES = experts.ExpertNames(
    f"{_PATH}.gate",
    f"{_PATH}.experts.{{}}",
    "gate_proj",
    "up_proj",
    "down_proj",
    stacked=f"{_PATH}.experts",
)


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Nemotron-H, and Nemotron 3 with experts."""
    family.refuse_other_attention(fields)
    fields.only("is_causal", True)
    config = fields.config
    kinds = _read_kinds(fields)
    renamed = {own: config[key] for key, own in _OTHER_KEYS.items() if key in config}
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
        branches = _read_branches(fields, sizes, kind)
        layers.append(LayerSpec((StepSpec(branches, mamba.norm("norm", sizes)),)))
    if FULL not in kinds:
        fields.refuse("layers_block_type: a model without layers that attend is not served")
    eos = family.read_eos(fields, generation, sizes, default=2)
    model = family.model(fields, sizes, layers, sizes.positions, eos)
    return replace(model, stored_names=mamba.BACKBONE)


def _read_kinds(fields: Fields) -> list[str]:
    """The kind of each layer."""
    config = fields.config
    said = config.get("layers_block_type", config.get("layer_types"))
    if said is None:
        pattern = config.get("hybrid_override_pattern", "ME*-")
        said = [_OF_LETTER.get(letter) for letter in str(pattern)]
    kinds = mamba.current_kinds(said)
    known = isinstance(kinds, list) and all(kind in [*_OF_LETTER.values()] for kind in kinds)
    if not isinstance(kinds, list) or not kinds or not known:
        fields.refuse(f"layers_block_type must list {', '.join(_OF_LETTER.values())}")
        return [FULL]
    return kinds


def _read_branches(fields: Fields, sizes: ModelSizes, kind: str) -> tuple[Branch, ...]:
    if kind == FULL:
        return (_attention(sizes),)
    if kind == _LINEAR:
        return (_read_mamba(fields, sizes),)
    if kind == _MLP:
        return (_mlp(fields, sizes),)
    return _read_experts(fields, sizes)


def _attention(sizes: ModelSizes) -> AttentionSpec:
    usual = family.attention(sizes, None)
    qkv, o = (_within(each) for each in usual.linears)
    return replace(usual, qkv=qkv, o=o)


def _within(linear: LinearSpec, path: str = _PATH) -> LinearSpec:
    paths = (f"{path}.{part.path.rpartition('.')[2]}" for part in linear.parts)
    return family.with_paths(linear, *paths)


def _mlp(fields: Fields, sizes: ModelSizes, path: str = _PATH) -> MlpSpec:
    biases = family.Biases(mlp=bool(fields.config.get("mlp_bias", False)))
    usual = family.plain_mlp(sizes, biases)
    return replace(usual, gate_up=_within(usual.gate_up, path), down=_within(usual.down, path))


def _read_mamba(fields: Fields, sizes: ModelSizes) -> Mamba2Spec:
    config = fields.config
    fields.only("mamba_hidden_act", "silu")
    bias = bool(config.get("use_bias", False))
    found = mamba.MambaSizes(
        fields.positive("mamba_num_heads", 128),
        fields.positive("mamba_head_dim", 64),
        fields.positive("n_groups", 8),
        fields.positive("ssm_state_size", 128),
        fields.positive("conv_kernel", 4),
        (bias, bias, bool(config.get("use_conv_bias", True))),
        (fields.number(config, "time_step_min", 0.001), float("inf")),
    )
    return mamba.mixer(fields, sizes, mamba.checked(fields, found), _PATH)


def _read_experts(fields: Fields, sizes: ModelSizes) -> tuple[MoeSpec, MlpSpec]:
    """Read experts without gate, and the MLP that every token has beside them."""
    config = fields.config
    fields.only("mlp_hidden_act", "relu2")
    number = config.get("n_routed_experts", config.get("num_local_experts"))
    counted = fields.changed(num_experts=number, num_local_experts=None)
    counts = experts.read_counts(counted, default=8, default_of_token=2)
    size = fields.positive("moe_intermediate_size", 7688)
    latent = fields.positive("moe_latent_size", sizes.hidden)
    moe = experts.moe(latent, size, counts, _NAMES, "sigmoid_top_k_normed")
    moe = replace(moe, router=replace(moe.router, in_features=sizes.hidden))
    if config.get("moe_latent_size") is not None:
        moe = replace(moe, latent=_latent(fields, sizes, latent))
    moe = experts.read_scored(fields, moe, f"{_NAMES.router}.e_score_correction_bias")
    up = replace(
        moe.gate_up, parts=moe.gate_up.parts[1:], stored=ExpertStorage(f"{_NAMES.stacked}.up_proj")
    )
    wide = sizes._replace(inner=fields.positive("moe_shared_expert_intermediate_size", 7688))
    of_all = _mlp(fields, wide, f"{_PATH}.shared_experts")
    shared = replace(
        of_all,
        gate_up=replace(of_all.gate_up, role="shared_gate_up"),
        down=replace(of_all.down, role="shared_down"),
    )
    return replace(moe, gate_up=up, activation="relu2"), shared


def _latent(fields: Fields, sizes: ModelSizes, size: int) -> tuple[LinearSpec, LinearSpec]:
    """Products before and behind experts of so many features."""
    bias = bool(fields.config.get("mlp_bias", False))
    into, out = (
        Part(f"{_PATH}.fc1_latent_proj", size),
        Part(f"{_PATH}.fc2_latent_proj", sizes.hidden),
    )
    return (
        LinearSpec("latent_in", sizes.hidden, (into,), "none", bias),
        LinearSpec("latent_out", size, (out,), "none", bias),
    )
