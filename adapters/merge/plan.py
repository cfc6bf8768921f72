"""Plans a merged adapter's modules and config from its recipe and members. Pure.

Members that cannot be merged are refused here, before any weight is read.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec

from loraplex.adapters.base import BaseSpec, ModuleShape
from loraplex.adapters.coverage import Coverage, coverage_of
from loraplex.adapters.errors import AdapterError, Findings
from loraplex.adapters.merge.recipe import MergeRecipe
from loraplex.adapters.peft.lora_tensors import LoraTensors, ModuleLora, OwnBias, OwnNorm, OwnTable
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.slab.layout import room_problem

# The largest delta of a module that `ties` and `dare_*` compute in full: 1 GiB of float32.
MAX_DENSE_VALUES = 1 << 28
_ITEM_BYTES = 4

_Site = tuple[int, str]


class MergePart(msgspec.Struct, frozen=True):
    """One member's LoRA of a module. member: its place in the recipe. factor: multiplies its B."""

    member: int
    lora: ModuleLora
    factor: float


# Rank, scale and parts of a merged module.
_Merged = tuple[int, float, tuple[MergePart, ...]]


class MergedModule(msgspec.Struct, frozen=True):
    """One module of the merged adapter: `y += scale * B (A x)`, of rank `lora_rank`.

    layer, module: as in `ModuleLora`. path: in the base model. For `linear`, A and B are the parts'
    (with their factors), stacked.
    """

    layer: int
    path: str
    module: str
    shape: ModuleShape
    lora_rank: int
    scale: float
    parts: tuple[MergePart, ...]
    shares_a: ClassVar[bool] = False
    vectors: ClassVar[int] = 0

    @property
    def nbytes(self) -> int:
        return self.lora_rank * (self.shape.in_features + self.shape.out_features) * _ITEM_BYTES


class MergePlan(msgspec.Struct, frozen=True):
    """The merged adapter before it is computed. modules: by layer, then by name."""

    modules: tuple[MergedModule, ...]
    biases: ClassVar[tuple[OwnBias, ...]] = ()
    tables: ClassVar[tuple[OwnTable, ...]] = ()
    norms: ClassVar[tuple[OwnNorm, ...]] = ()
    head: ClassVar[None] = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights file without the header."""
        return sum(module.nbytes for module in self.modules)


def plan_merge(
    recipe: MergeRecipe, members: Sequence[LoraTensors], base: BaseSpec, limits: AdapterLimits
) -> MergePlan:
    """Plans a merge from the members' headers, and refuses a result that could not be served.

    members: parallel to `recipe.members`. Raises AdapterError `invalid`, `too_large`.
    """
    sites = _sites(recipe, members)
    largest = max(lora.lora_rank for parts in sites.values() for _, lora in parts)
    findings = Findings()
    modules: list[MergedModule] = []
    for layer, name in sorted(sites):
        module, parts = base.module(layer, name), sites[layer, name]
        if recipe.strategy == "linear":
            merged = _stacked(parts, recipe)
        else:
            merged = _reduced(module.shape, parts, largest)
        made = MergedModule(layer, module.path, name, module.shape, *merged)
        _check(made, recipe, limits, findings)
        modules.append(made)
    findings.raise_if_any()
    plan = MergePlan(tuple(modules))
    _check_size(plan, base, limits)
    return plan


def merged_config(modules: Sequence[MergedModule], base: BaseSpec) -> dict[str, Any]:
    """`adapter_config.json` of the merged adapter: ranks and scales as PEFT reads them."""
    ranks = {module.path: module.lora_rank for module in modules}
    alphas = {module.path: module.lora_rank * module.scale for module in modules}
    names = {module.path: module.module for module in modules}
    rank, rank_pattern = _patterns(ranks, names)
    alpha, alpha_pattern = _patterns(alphas, names)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base.names[0] if base.names else "",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(_targets(modules, base)),
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "bias": "none",
        "init_lora_weights": True,
    }


def merged_coverage(members: Sequence[LoraTensors]) -> Coverage:
    """Counts a merge's modules; missing ones are targeted, and no member has their weights."""
    present = {site for member in members for site in member.sites}
    missing = {site for member in members for site in member.missing}
    return coverage_of(present, missing - present)


def _unmergeable(member: LoraTensors) -> str | None:
    if len(member.ordinary) < len(member.modules):
        return "changes experts; LoRA on experts cannot be merged"
    if member.config.alora_invocation_tokens:
        return "is activated by tokens of the prompt; such adapters cannot be merged"
    if member.config.use_dora:
        return "is DoRA; its magnitudes are of its own delta, and PEFT loses them in a merge"
    if member.biases or member.config.lora_bias:
        return "has biases; PEFT merges none"
    if member.tables:
        return "has rows of the embedding or the head in place of the base's; these are not merged"
    if member.norms:
        return "has weights of norms in place of the base's; these are not merged"
    if member.head is not None:
        return "has a score head of its own; such heads are not merged"
    return None


def _sites(
    recipe: MergeRecipe, members: Sequence[LoraTensors]
) -> Mapping[_Site, list[tuple[int, ModuleLora]]]:
    """Each member's LoRA of each module. Raises AdapterError `invalid` for what is not merged."""
    sites: defaultdict[_Site, list[tuple[int, ModuleLora]]] = defaultdict(list)
    findings = Findings()
    for index, member in enumerate(members):
        for lora in member.ordinary:
            sites[lora.layer, lora.module].append((index, lora))
        problem = _unmergeable(member)
        if problem is not None:
            digest = recipe.members[index].digest
            findings.add("unsupported_merge", digest, f"{digest} {problem}")
    findings.raise_if_any()
    return sites


def _check_size(plan: MergePlan, base: BaseSpec, limits: AdapterLimits) -> None:
    if plan.nbytes > limits.max_bytes:
        message = (
            f"the merged adapter has {plan.nbytes} bytes; at most {limits.max_bytes} are accepted"
        )
        raise AdapterError("too_large", message)
    problem = None if limits.room is None else room_problem(plan, base, limits.room)
    if problem is not None:
        raise AdapterError("too_large", f"merged, {problem}")


def _stacked(parts: Iterable[tuple[int, ModuleLora]], recipe: MergeRecipe) -> _Merged:
    """Stacks the parts of a module. The largest scale stays out of the weights, so that a lone or
    equal factor rounds nothing.
    """
    scales = {index: recipe.members[index].weight * lora.scale for index, lora in parts}
    common = max(scales.values(), key=abs)
    merged = tuple(MergePart(index, lora, scales[index] / common) for index, lora in parts)
    return sum(lora.lora_rank for _, lora in parts), common, merged


def _reduced(
    shape: ModuleShape, parts: Iterable[tuple[int, ModuleLora]], largest_rank: int
) -> _Merged:
    merged = tuple(MergePart(index, lora, lora.scale) for index, lora in parts)
    return min(largest_rank, shape.in_features, shape.out_features), 1.0, merged


def _check(
    module: MergedModule, recipe: MergeRecipe, limits: AdapterLimits, findings: Findings
) -> None:
    if module.lora_rank > limits.max_lora_rank:
        ranks = " + ".join(str(part.lora.lora_rank) for part in module.parts)
        message = (
            f"{module.path}: a linear merge has the sum of the ranks, {ranks} = "
            f"{module.lora_rank}; at most {limits.max_lora_rank} is served (option max_lora_rank)"
        )
        findings.add("rank_too_large", module.path, message)
    values = module.shape.in_features * module.shape.out_features
    if recipe.strategy != "linear" and values > MAX_DENSE_VALUES:
        message = (
            f"{module.path}: {recipe.strategy!r} needs all {values} values of its delta; at most "
            f"{MAX_DENSE_VALUES} are computed. Use 'linear', or adapters that leave it alone."
        )
        findings.add("module_too_large", module.path, message)


def _patterns(
    values: Mapping[str, float], names: Mapping[str, str]
) -> tuple[float, dict[str, float]]:
    """Patterns for values of modules: a default, and what differs from it. What differs is given by
    module name where all layers agree, else by path."""
    default = Counter(values.values()).most_common(1)[0][0]
    of_name: defaultdict[str, set[float]] = defaultdict(set)
    for path, value in values.items():
        of_name[names[path]].add(value)
    pattern: dict[str, float] = {}
    for path, value in values.items():
        if len(of_name[names[path]]) == 1:
            if value != default:
                pattern[names[path]] = value
        elif value != default:
            pattern[path] = value
    return default, pattern


def _targets(modules: Sequence[MergedModule], base: BaseSpec) -> set[str]:
    """Lists targets: short names where every layer is merged, else whole paths."""
    counts = Counter(module.module for module in modules)
    known = Counter(chain(base.model_modules, *(layer.modules for layer in base.layers)))
    return {
        module.module if counts[module.module] == known[module.module] else module.path
        for module in modules
    }
