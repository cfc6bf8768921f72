"""Puts the tensors of an adapter into the base's modules, or says why they do not fit. Pure."""

from collections.abc import Iterator, Sequence

from loraplex.adapters.base import BaseModule, BaseSpec, base_modules
from loraplex.adapters.coverage import Site
from loraplex.adapters.peft.lora_tensors import (
    ExpertPair,
    ExpertsLora,
    LoraTensors,
    ModuleLora,
    OwnBias,
    OwnTable,
    StackedLora,
)
from loraplex.adapters.peft.own_head import place_head
from loraplex.adapters.peft.own_norms import place_norms
from loraplex.adapters.peft.own_tables import TablePlacer
from loraplex.adapters.peft.pairs import Pair, PairChecks
from loraplex.adapters.peft.sorted_tensors import SortedTensors
from loraplex.adapters.peft.stacked import (
    StackedPlace,
    holders,
    is_swapped,
    stacked_loras,
    stacked_places,
)
from loraplex.adapters.peft.targeted import expert_path, targeted_paths
from loraplex.adapters.peft.targeting import Targeting
from loraplex.adapters.violations import Findings


class ModulePlacer:
    """What is wrong is added to `findings`."""

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
        self._targeted = targeted_paths(matcher, base, found.naming)
        self._missing: list[Site] = []

    def place(self) -> LoraTensors:
        modules: list[ModuleLora | ExpertsLora | StackedLora] = []
        stacked = {(lora.layer, lora.module): lora for lora in self._stacked()}
        of_experts = self._has_expert_modules()
        for module in base_modules(self._base):
            lora: ModuleLora | ExpertsLora | StackedLora | None
            if not module.shape.is_of_experts:
                lora = self._module(module, module.path, (module.layer, module.name))
            elif of_experts:
                lora = self._experts(module)
            else:
                lora = stacked.get((module.layer, module.name))
            if lora is not None:
                modules.append(lora)
        found, missing, biases = self._found, tuple(self._missing), tuple(self._biases())
        return LoraTensors(
            self._matcher.config,
            tuple(modules),
            found.copies,
            missing,
            found.naming,
            biases,
            self._tables(),
            place_head(self._matcher.config, found.head, self._base, self._findings),
            tuple(place_norms(self._matcher.config, found.norms, self._base, self._findings)),
        )

    def _tables(self) -> tuple[OwnTable, ...]:
        config, found = self._matcher.config, self._found
        return TablePlacer(config, found.tables, found.rows, self._base, self._findings).place()

    def _biases(self) -> Iterator[OwnBias]:
        """In place of the base's."""
        for module in base_modules(self._base):
            if module.path not in self._found.biases:
                continue
            tensor, name = self._found.biases[module.path]
            problem = self._bias_problem(module, is_wrapped=name.is_wrapped)
            if problem is not None:
                code, words = problem
                self._findings.add(code, tensor.name, f"{tensor.name}: {words}")
                continue
            self._checks.check_outputs(tensor, module.shape.out_features)
            yield OwnBias(module.layer, module.name, tensor)

    def _bias_problem(self, module: BaseModule, *, is_wrapped: bool) -> tuple[str, str] | None:
        """is_wrapped: as the tensor is spelled."""
        config, is_targeted = self._matcher.config, module.path in self._targeted
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
        """path, site: of the module itself, or of one expert's."""
        pair, key = self._found.pairs.get(path, {}), self._targeted.get(path)
        if not pair:
            if key is not None:
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

    def _experts(self, module: BaseModule) -> ExpertsLora | None:
        """Of a model in which each expert has modules of its own."""
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

    def _has_expert_modules(self) -> bool:
        """Whether the trained model had a module for each expert. One of transformers 5 has none:
        there `gate_proj` in `target_modules` does not mean the experts."""
        return self._found.has_experts

    def _stacked(self) -> Sequence[StackedLora]:
        """Of a model in which one tensor holds all experts."""
        pairs, loras = self._found.pairs, list[StackedLora]()
        places = list(stacked_places(self._base, self._targeted))
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
            key = self._targeted[place.path]
            fit = self._checks.fit(place.path, key, pair, inputs, outputs, place.experts)
            if fit is not None:
                loras += stacked_loras(self._base, place, pair, fit, swapped)
        return loras

    def _lacks(self, path: str, sites: Sequence[Site]) -> None:
        """A module is targeted and has no tensors."""
        if self._matcher.config.starts_at_zero:
            self._missing += sites
            return
        message = f"{path} is targeted, has no tensors, and its initial values are random"
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
