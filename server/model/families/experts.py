"""Layers of experts, as most families that have them spell these. Pure."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loraplex.adapters.base import Role
from loraplex.server.model.families import family
from loraplex.server.model.families.family import ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.linear_spec import ExpertStorage, LinearSpec, Part
from loraplex.server.model.spec.model_spec import FeedForward, LayerSpec, MlpSpec, ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec, RouterRule

# The least sum that weights of experts are divided by.
_FLOOR = 1e-20
# Scores of a group that count.
_BEST_OF_GROUP = 2
# What other families with experts have, as their configurations spell it.
_SHARED = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size")
_GROUPS = ("n_group", "topk_group")
# Two spellings of one number.
_COUNTS = ("num_local_experts", "num_experts")


class ExpertNames(NamedTuple):
    """Names of experts' modules in a checkpoint. router: what chooses them; other_router: the
    same in other versions of transformers, "" = as `router`. of: the module of one
    expert, for its number; gate, up, down: its matrices. stacked: the module that holds the weights
    of all.
    """

    router: str
    of: str
    gate: str
    up: str
    down: str
    stacked: str = "mlp.experts"
    other_router: str = ""


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
    """Read windows, as `read_windows` does, of a family whose layers all have one."""
    kinds = fields.listed("layer_types")
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
        _chooser("router", hidden, experts, names.router, names.other_router),
        rule,
    )


def _chooser(role: Role, hidden: int, outputs: int, path: str, other: str = "") -> LinearSpec:
    """Make a product that every device computes whole. other: its path elsewhere, if any."""
    part = Part(path, outputs, aliases=(other,) if other else ())
    return LinearSpec(role, hidden, (part,), "none")


def shared(
    sizes: ModelSizes, size: int, path: str = "mlp.shared_experts", out_gate: str = ""
) -> MlpSpec:
    """Make the MLP that every token uses beside its experts. size: of features inside. out_gate:
    path of its gate; "" = none.
    """
    up = tuple(Part(f"{path}.{name}_proj", size) for name in ("gate", "up"))
    down = (Part(f"{path}.down_proj", sizes.hidden),)
    return MlpSpec(
        LinearSpec("shared_gate_up", sizes.hidden, up, "column"),
        LinearSpec("shared_down", size, down, "row"),
        out_gate=_chooser("shared_out_gate", sizes.hidden, 1, out_gate) if out_gate else None,
    )


def with_experts(
    model: ModelSpec, branches: Sequence[FeedForward], sparse: Collection[int] | None = None
) -> ModelSpec:
    """Return the model with these branches in the last step of some layers. sparse: numbers of
    those; None = of all.
    """
    layers = [
        layer if sparse is not None and number not in sparse else _ending(layer, branches)
        for number, layer in enumerate(model.layers)
    ]
    return replace(model, layers=tuple(layers))


def _ending(layer: LayerSpec, branches: Sequence[FeedForward]) -> LayerSpec:
    *others, feed = layer.steps
    return LayerSpec((*others, replace(feed, branches=tuple(branches))))


def read_scored(
    fields: Fields, moe: MoeSpec, correction: str, *, factor: float = 1.0, normed: bool = True
) -> MoeSpec:
    """Return experts whose router takes sigmoids, corrected and in groups (DeepSeek-V3).

    correction: its path. factor, normed: where `config.json` says nothing.
    """
    config = fields.config
    normed = bool(config.get("norm_topk_prob", normed))
    return replace(
        moe,
        rule="sigmoid_top_k_normed" if normed else "sigmoid_top_k",
        wide_router=True,
        wide_weights=True,
        correction=(correction, (moe.experts,)),
        groups=read_groups(fields, moe, _BEST_OF_GROUP),
        norm_floor=_FLOOR,
        factor=fields.number(config, "routed_scaling_factor", factor),
    )


def read_groups(fields: Fields, moe: MoeSpec, best_of_group: int) -> tuple[int, int]:
    """Read how many groups of experts there are, and how many of these a token may choose from.
    best_of_group: scores of a group that count."""
    groups, best = fields.positive("n_group", 1), fields.positive("topk_group", 1)
    if moe.experts % groups or best > groups or moe.top_k * groups > moe.experts * best:
        fields.refuse(f"{moe.experts} experts in {groups} groups, of which {best} are chosen")
    elif groups > 1 and moe.experts // groups < best_of_group:
        fields.refuse(f"n_group: a group must have {best_of_group} experts, got {groups} groups")
    return groups, best


def read_first_dense(fields: Fields, sizes: ModelSizes, usual: int) -> frozenset[int]:
    """The layers with experts: those behind the first ones, whose number `config.json` says."""
    return frozenset(range(fields.count("first_k_dense_replace", usual), sizes.layers))
