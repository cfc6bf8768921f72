"""Puts the tensors of an adapter into the base's modules, or says why they do not fit. Pure.

Source for tensors of all experts (`target_parameters`): PEFT 0.17 to 0.21, `ParamWrapper` and
`_inject_parameters`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import msgspec

from loraplex.adapters.base import MODEL_SITES, BaseModule, BaseSpec, ExpertWeight, base_modules
from loraplex.adapters.coverage import Site
from loraplex.adapters.errors import Findings
from loraplex.adapters.peft.lora_tensors import (
    ExpertPair,
    ExpertsLora,
    LoraTensors,
    ModuleLora,
    OwnBias,
    OwnNorm,
    OwnTable,
    StackedLora,
)
from loraplex.adapters.peft.own_weights import (
    EMBEDDING,
    TablePlacer,
    are_tied,
    check_dtype,
    check_floats,
    place_head,
    place_norms,
)
from loraplex.adapters.peft.sorted_tensors import SortedTensors
from loraplex.adapters.peft.targeting import (
    INNER,
    Targeting,
    expert_path,
    holders,
    targeted_paths,
)
from loraplex.adapters.safetensors.header import TensorInfo

# Side -> tensor.
Pair = Mapping[str, TensorInfo]
_AnyLora = ModuleLora | ExpertsLora | StackedLora


# Stored names of each side.
_STORED = {"A": "lora_A", "B": "lora_B", "M": "lora_magnitude_vector", "b": "lora_B.bias"}


class Fit(NamedTuple):
    """Rank and scale of a pair that is correct."""

    lora_rank: int
    scale: float


class PairChecks:
    """Checks pairs of A and B, and adds to `findings`."""

    def __init__(self, matcher: Targeting, max_lora_rank: int, findings: Findings) -> None:
        self._matcher = matcher
        self._max_lora_rank = max_lora_rank
        self._findings = findings

    def fit(
        self, path: str, key: str, pair: Pair, inputs: int, outputs: int, experts: int = 1
    ) -> Fit | None:
        """Checks one pair; None = something is wrong.

        path: in the base. key: what patterns see. inputs, outputs: of A and B. experts: how many
        share the pair, each with a rank of its own.
        """
        if not self._is_whole(pair):
            return None
        before = len(self._findings)
        lora_rank = self._matcher.lora_rank(key)
        if lora_rank > self._max_lora_rank:
            message = f"{path}: rank {lora_rank}; at most {self._max_lora_rank} is served"
            self._findings.add("rank_too_large", path, message)
        rows = lora_rank * experts
        said = f"rank {lora_rank}" + (f" of {experts} experts" if experts > 1 else "")
        self._check(pair["A"], (rows, inputs), said, axis=0)
        self._check(pair["B"], (outputs, rows), said, axis=1)
        for side in ("M", "b"):
            if side in pair:
                check_floats(pair[side], (outputs,), self._findings)
        if len(self._findings) != before:
            return None
        return Fit(lora_rank, self._matcher.config.scale(lora_rank, self._matcher.lora_alpha(key)))

    def _is_whole(self, pair: Pair) -> bool:
        """Whether the tensors are those that the config speaks of."""
        config = self._matcher.config
        switches = {"M": ("use_dora", config.use_dora), "b": ("lora_bias", config.lora_bias)}
        needed = ["A", "B", *(side for side, (_, is_on) in switches.items() if is_on)]
        lacking = [_STORED[side] for side in needed if side not in pair]
        first = next(iter(pair.values()))
        if lacking:
            message = f"{first.name} has no {' and no '.join(lacking)} beside it"
            self._findings.add("lone_tensor", first.name, message)
        surplus = [side for side in switches if side in pair and side not in needed]
        for side in surplus:
            name, key = pair[side].name, switches[side][0]
            message = f"{name}: the config does not switch {key} on"
            self._findings.add("unknown_tensor", name, message)
        return not lacking and not surplus

    def _check(self, tensor: TensorInfo, expected: tuple[int, int], said: str, axis: int) -> None:
        """Notes what is wrong with a matrix's dtype or shape. said: the config's rank, in words.
        axis: the dimension that is the rank.
        """
        name, found = tensor.name, self._findings
        check_dtype(tensor, found)
        if tensor.shape == expected:
            return
        shapes = f"expected {list(expected)}, got {list(tensor.shape)}"
        if len(tensor.shape) == 2 and tensor.shape[1 - axis] == expected[1 - axis]:
            found.add("rank_mismatch", name, f"{name}: the config says {said}: {shapes}")
        else:
            found.add("shape_mismatch", name, f"{name}: {shapes}")


def _flattened(pair: Pair, kernel: tuple[int, ...]) -> Pair:
    """The tensors of a convolution, of these inputs, as those of a linear module."""
    found, ones = dict(pair), (1,) * (len(kernel) - 1)
    for side, tensor in pair.items() if kernel else ():
        shape = tensor.shape
        if side == "A" and shape[1:] == kernel:
            shape = (shape[0], prod(kernel))
        elif side == "B" and shape[2:] == ones:
            shape = shape[:2]
        elif side == "M" and shape[:1] == (1,) and shape[2:] == ones:
            shape = shape[1:2]
        found[side] = msgspec.structs.replace(tensor, shape=shape)
    return found


_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
# From here on A reads what a weight reads, however the weight is stored.
_BY_MEANING = (0, 19, 1)


class StackedPlace(NamedTuple):
    """The place where the LoRA of one tensor of all experts is saved.

    path: of the tensor, in the base. saved: of the module that PEFT saves it as. inputs, outputs:
    of one expert.
    """

    layer: int
    weight: ExpertWeight
    path: str
    saved: str
    experts: int
    inputs: int
    outputs: int

    def fits(self, pair: Pair, is_swapped: bool) -> bool:
        """Whether the sizes that are no rank are as they should be."""
        a, b = pair["A"].shape, pair["B"].shape
        sizes = (self.outputs, self.inputs) if is_swapped else (self.inputs, self.outputs)
        return len(a) == len(b) == 2 and (a[1], b[0]) == sizes


def stacked_places(base: BaseSpec, targeted: Mapping[str, str]) -> Iterator[StackedPlace]:
    """Yields the places of targeted tensors. targeted: their paths, among others."""
    for layer, of_layer in enumerate(base.layers):
        wanted = [each for each in of_layer.expert_weights if of_layer.whole(each.path) in targeted]
        for holder, held in groupby(wanted, key=lambda weight: weight.holder):
            for depth, weight in enumerate(reversed(list(held))):
                parts = [of_layer.modules[name] for name in weight.parts]
                yield StackedPlace(
                    layer=layer,
                    weight=weight,
                    path=of_layer.whole(weight.path),
                    saved=of_layer.whole(holder) + INNER * depth,
                    experts=parts[0].experts,
                    inputs=parts[0].in_features,
                    outputs=sum(part.out_features for part in parts),
                )


def is_swapped(found: Sequence[tuple[StackedPlace, Pair]], peft_version: str) -> bool | None:
    """Whether A and B of all these have changed roles; None = it cannot be known.

    PEFT has taken the sizes of a tensor in the order in which they are stored. Shapes say so, but
    for tensors that are square; these are as the others are, or as PEFT's version says.
    """
    whole = [(place, pair) for place, pair in found if pair.keys() == {"A", "B"}]
    ways = {(place.fits(pair, False), place.fits(pair, True)) for place, pair in whole}
    if (True, False) in ways:
        return False
    if (False, True) in ways:
        return True
    if (True, True) in ways:
        return _swapped_by(peft_version, is_transposed=found[0][0].weight.transposed)
    return False


def _swapped_by(peft_version: str, is_transposed: bool) -> bool | None:
    """Whether a release of PEFT swapped A and B of square tensors; None = not known.

    Later releases ask the model about transposed tensors, and only transformers 5 answers.
    """
    release = _RELEASE.fullmatch(peft_version)
    if release is None:
        return None
    version = tuple(map(int, release.groups()))
    if not is_transposed:
        return version < _BY_MEANING
    return False if version < (0, 19, 0) else None


def stacked_loras(
    base: BaseSpec, place: StackedPlace, pair: Pair, fit: Fit, swapped: bool
) -> Iterator[StackedLora]:
    """Yields a LoRA for each module that the tensor holds rows of."""
    names = place.weight.parts
    for index, name in enumerate(names):
        count = base.modules_of(place.layer)[name].out_features
        rows = range(index * count, (index + 1) * count)
        if place.weight.interleaved:
            rows = range(index, len(names) * count, len(names))
        yield StackedLora(
            layer=place.layer,
            module=name,
            lora_rank=fit.lora_rank,
            scale=fit.scale,
            a=pair["A"],
            b=pair["B"],
            rows=rows,
            is_swapped=swapped,
            has_others=len(names) > 1,
        )


def _resized(module: BaseModule, size: int) -> BaseModule:
    """Returns a table of so many tokens; 0 = it is as the base has it."""
    features = "in_features" if module.name == EMBEDDING else "out_features"
    shape = msgspec.structs.replace(module.shape, **{features: size}) if size else module.shape
    return msgspec.structs.replace(module, shape=shape)


class ModulePlacer:
    """Places all tensors of an adapter, and adds to `findings`. targeted: as of targeted_paths."""

    def __init__(
        self,
        matcher: Targeting,
        found: SortedTensors,
        base: BaseSpec,
        max_lora_rank: int,
        findings: Findings,
    ) -> None:
        self._matcher = matcher
        self._found = found
        self._base = base
        self._findings = findings
        self._checks = PairChecks(matcher, max_lora_rank, findings)
        self.targeted = targeted_paths(matcher, base, found.naming)
        self._missing: list[Site] = []

    def place(self) -> LoraTensors:
        modules: list[_AnyLora] = []
        tables = self._tables()
        whole = {table.module: table.size for table in tables if not table.ids}
        stacked = {(lora.layer, lora.module): lora for lora in self._stacked()}
        # A model of transformers 5 has no module for each expert: there `gate_proj` in
        # `target_modules` does not mean the experts.
        of_experts = self._found.has_experts
        for module in base_modules(self._base):
            lora: _AnyLora | None
            if not module.shape.is_of_experts:
                resized = _resized(module, whole.get(module.name, 0))
                lora = self._module(resized, module.path, (module.layer, module.name))
            elif of_experts:
                lora = self._experts(module)
            else:
                lora = stacked.get((module.layer, module.name))
            if lora is not None:
                modules.append(lora)
        found, missing = self._found, tuple(self._missing)
        biases = tuple(self._biases(whole))
        added = {lora.module: lora for lora in modules if lora.layer < 0 and lora.module in whole}
        tables = tuple(self._with_lora(table, added.get(table.module)) for table in tables)
        modules = [lora for lora in modules if lora.layer >= 0 or lora.module not in added]
        return LoraTensors(
            self._matcher.config,
            tuple(modules),
            found.copies,
            missing,
            found.naming,
            biases,
            tables,
            place_head(self._matcher.config, found.whole, self._base, self._findings),
            tuple(self._norms()),
            len(found.of_images),
        )

    def _tables(self) -> tuple[OwnTable, ...]:
        config, found = self._matcher.config, self._found
        return TablePlacer(config, found.tables, found.rows, self._base, self._findings).place()

    def _with_lora(self, table: OwnTable, lora: _AnyLora | None) -> OwnTable:
        """Joins a table that the training has resized with its LoRA."""
        if not isinstance(lora, ModuleLora):
            return table
        if lora.vectors or table.trained is not None:
            kind = "trainable_token_indices" if table.trained is not None else "DoRA or lora_bias"
            message = f"{table.module}: {kind} beside LoRA of a resized table is not supported"
            self._findings.add("unsupported_feature", table.module, message)
        return msgspec.structs.replace(table, lora=lora)

    def _norms(self) -> Iterator[OwnNorm]:
        config, found = self._matcher.config, self._found
        return place_norms(config, found.whole, self._base, found.naming, self._findings)

    def _biases(self, tables: Mapping[str, int]) -> Iterator[OwnBias]:
        """Yields biases that replace the base's, and notes copies of these. tables: the adapter's
        own, by short name, with their tokens."""
        is_none = self._matcher.config.bias == "none"
        for module in base_modules(self._base):
            tensor, is_own = self._found.biases.get(module.path), module.name in tables
            if tensor is None:
                if is_own and module.shape.has_bias:
                    message = f"the file has weights of {module.path}, and no bias of it"
                    self._findings.add("missing_tensor", module.path, message)
                continue
            if is_none and not is_own and self._is_copied(module):
                self._found.copies += ((f"{module.name}.bias", tensor),)
                continue
            is_wrapped = module.path in self._found.wrapped_biases
            problem = None if is_own else self._bias_problem(module, is_wrapped=is_wrapped)
            if problem is not None:
                code, words = problem
                self._findings.add(code, tensor.name, f"{tensor.name}: {words}")
                continue
            size = tables.get(module.name, module.shape.out_features)
            check_floats(tensor, (size,), self._findings)
            yield OwnBias(module.layer, module.name, tensor)

    def _is_copied(self, module: BaseModule) -> bool:
        """Whether a bias can be compared with the base's, as PEFT saves that of a targeted head."""
        known = self._base.is_inferred or f"{module.name}.bias" in self._base.embedding_digests
        return known and module.name in MODEL_SITES

    def _bias_problem(self, module: BaseModule, *, is_wrapped: bool) -> tuple[str, str] | None:
        """Why a bias cannot be placed, as a code and words; None when it can. is_wrapped: as the
        tensor is spelled.
        """
        config, is_targeted = self._matcher.config, module.path in self.targeted
        if config.bias == "none":
            return "unknown_tensor", "a bias, and the config has none (bias)"
        if not module.shape.has_bias and not self._base.is_inferred:
            return "unknown_tensor", f"{module.path} has no bias in the base model"
        if config.bias == "lora_only" and not is_targeted:
            return "untargeted_tensor", f"the config does not target {module.path}"
        if is_wrapped is not is_targeted:
            stored = "base_layer.bias" if is_targeted else "bias"
            return "misplaced_tensor", f"the bias of {module.path} is stored as {stored}"
        return None

    def _module(self, module: BaseModule, path: str, site: Site) -> ModuleLora | None:
        """Places a module's LoRA. path, site: of the module itself, or of one expert's."""
        pair = _flattened(self._found.pairs.get(path, {}), module.shape.kernel)
        key = self.targeted.get(path)
        if not pair:
            if key is not None and not self._may_be_no_linear(module):
                self._lacks(path, (site,))
            return None
        if key is None:
            self._untargeted(path, pair)
            return None
        shape = module.shape
        fit = self._checks.fit(path, key, pair, shape.in_features, shape.out_features)
        if fit is None:
            return None
        a, b, lengths, bias = pair["A"], pair["B"], pair.get("M"), pair.get("b")
        return ModuleLora(module.layer, module.name, *fit, a, b, lengths, bias)

    def _may_be_no_linear(self, module: BaseModule) -> bool:
        """Whether `all-linear` may have left the module out: newer versions of transformers have
        no linear modules in routers.
        """
        is_of_layer = module.layer >= 0 and self._matcher.targets_all_linear
        return is_of_layer and module.name in self._base.layers[module.layer].sites.get(
            "router", ()
        )

    def _experts(self, module: BaseModule) -> ExpertsLora | None:
        """Joins the LoRA of all experts, where each expert has modules."""
        found: dict[int, ModuleLora] = {}
        for expert in range(module.shape.experts):
            path = expert_path(module.path, expert)
            lora = self._module(module, path, (module.layer, module.name, expert))
            if lora is not None:
                found[expert] = lora
        if not found:
            return None
        scale = max((lora.scale for lora in found.values()), key=abs)
        return ExpertsLora(
            module.layer,
            module.name,
            max(lora.lora_rank for lora in found.values()),
            scale,
            tuple(
                ExpertPair(expert, lora.lora_rank, lora.scale / scale, lora.a, lora.b)
                for expert, lora in found.items()
            ),
        )

    def _stacked(self) -> Sequence[StackedLora]:
        """Lists the LoRA of experts, where one tensor holds all of them."""
        pairs, loras = self._found.pairs, list[StackedLora]()
        places = list(stacked_places(self._base, self.targeted))
        there = [(place, pairs[place.saved]) for place in places if place.saved in pairs]
        known = {place.saved for place in places}
        for holder in holders(self._base):
            if holder in pairs and holder not in known:
                self._untargeted(holder, pairs[holder])
        if self._found.has_experts:
            self._refuse_both(there)
            return loras
        for place in places:
            if place.saved not in pairs:
                self._lacks(place.path, [(place.layer, name) for name in place.weight.parts])
        swapped = is_swapped(there, self._matcher.config.peft_version) if there else False
        if swapped is None:
            self._refuse_square(*there[0])
            return loras
        for place, pair in there:
            sizes = (place.inputs, place.outputs)
            inputs, outputs = sizes[::-1] if swapped else sizes
            key = self.targeted[place.path]
            fit = self._checks.fit(place.path, key, pair, inputs, outputs, place.experts)
            if fit is not None:
                loras += stacked_loras(self._base, place, pair, fit, swapped)
        return loras

    def _lacks(self, path: str, sites: Sequence[Site]) -> None:
        """Notes that a module is targeted and has no tensors. Of tied tables both have some."""
        config = self._matcher.config
        is_tied = are_tied(config, self._base) and path in self._base.tables
        if config.starts_at_zero and not is_tied:
            self._missing += sites
            return
        words = "the table tied to it has some" if is_tied else "its initial values are random"
        message = f"{path} is targeted, has no tensors, and {words}"
        self._findings.add("missing_tensor", path, message)

    def _untargeted(self, path: str, pair: Pair) -> None:
        message = f"{path} has tensors but the config does not target it"
        self._findings.add("untargeted_tensor", next(iter(pair.values())).name, message)

    def _refuse_both(self, there: Sequence[tuple[StackedPlace, Pair]]) -> None:
        for place, pair in there[:1]:
            name = next(iter(pair.values())).name
            message = (
                f"{name}: LoRA on {place.weight.path} beside LoRA on modules of each expert; one "
                "adapter has one of the two"
            )
            self._findings.add("mixed_experts", name, message)

    def _refuse_square(self, place: StackedPlace, pair: Pair) -> None:
        name, version = pair["A"].name, self._matcher.config.peft_version or "not named"
        message = (
            f"{name}: the experts' matrices in {place.weight.path} are square, "
            f"{place.outputs} x {place.inputs}, so that A and B may have changed roles; the "
            f"config's peft_version ({version}) does not settle it"
        )
        self._findings.add("ambiguous_layout", name, message)
