"""Layers of experts, as most families that have them spell these. Pure."""

from typing import NamedTuple

from loraplex.server.model.families import family
from loraplex.server.model.families.family import ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.linear_spec import ExpertStorage, LinearSpec, Part
from loraplex.server.model.spec.moe_spec import MoeSpec, RouterRule

# What other families with experts have, as their configurations spell it.
_SHARED = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size")
_GROUPS = ("n_group", "topk_group")
# Two spellings of one number.
_COUNTS = ("num_local_experts", "num_experts")


class ExpertNames(NamedTuple):
    """Names of experts' modules in a checkpoint. router: what chooses them. of: the module of one
    expert, for its number; gate, up, down: its matrices. stacked: the module that holds the weights
    of all.
    """

    router: str
    of: str
    gate: str
    up: str
    down: str
    stacked: str = "mlp.experts"


def refuse_other_routing(fields: Fields) -> None:
    """Refuse settings that are no softmax over all experts, or that bring other experts."""
    config = fields.config
    refuse_other_activation(fields)
    for key in _SHARED:
        if config.get(key):
            fields.refuse(f"{key}: experts that every token shares are not served")
    for key in _GROUPS:
        if (config.get(key) or 1) != 1:
            fields.refuse(f"{key} must be 1, got {config[key]!r}: groups of experts are not served")
    if config.get("scoring_func", "softmax") != "softmax":
        fields.refuse(f"scoring_func must be 'softmax', got {config['scoring_func']!r}")


def refuse_other_activation(fields: Fields) -> None:
    """Refuse another activation than SiLU, which alone experts have."""
    named = fields.config.get("hidden_act", "silu")
    if named not in ("silu", "swish"):
        fields.refuse(f"hidden_act must be 'silu' with experts, got {named!r}")


def read_counts(fields: Fields, *, default: int, default_of_token: int) -> tuple[int, int]:
    """The number of experts and of those that a token has; defaults: where `config.json` says
    nothing."""
    named = [key for key in _COUNTS if fields.config.get(key) is not None]
    counts = [fields.positive(key) for key in named] or [default]
    if len({*counts}) > 1:
        fields.refuse(f"{' and '.join(named)} must be the same, got {counts}")
    experts, top_k = counts[0], fields.positive("num_experts_per_tok", default_of_token)
    if top_k > experts:
        fields.refuse(f"num_experts_per_tok is {top_k}, but there are {experts} experts")
    return experts, top_k


def read_same_windows(fields: Fields, sizes: ModelSizes, window: object) -> tuple[int | None, ...]:
    """Read each layer's window, as `read_windows` does, for a family whose layers all have the
    window.
    """
    kinds = fields.config.get("layer_types") or ()
    if window and any(kind != "sliding_attention" for kind in kinds):
        fields.refuse("layer_types: in this family all layers have the window")
    return family.read_windows(fields, sizes, window)


def moe(
    hidden: int, size: int, counts: tuple[int, int], names: ExpertNames, rule: RouterRule
) -> MoeSpec:
    """Make a layer's experts, all without bias. size: of features inside one. counts: of experts,
    and of those that a token has."""
    experts, top_k = counts
    gate, up, down = (f"{names.of}.{name}" for name in (names.gate, names.up, names.down))
    return MoeSpec(
        LinearSpec(
            "experts_gate_up",
            hidden,
            (Part(gate, size), Part(up, size)),
            "column",
            experts=experts,
            stored=ExpertStorage(f"{names.stacked}.gate_up_proj"),
        ),
        LinearSpec(
            "experts_down",
            size,
            (Part(down, hidden),),
            "row",
            experts=experts,
            stored=ExpertStorage(f"{names.stacked}.down_proj"),
        ),
        top_k,
        names.router,
        rule,
    )
