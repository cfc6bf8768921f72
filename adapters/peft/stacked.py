"""LoRA on tensors of all experts, PEFT's `target_parameters`: names, and which way round. Pure.

Source: PEFT 0.17 to 0.21, `ParamWrapper` and `_inject_parameters`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from loraplex.adapters.base import BaseSpec, ExpertWeight, layer_path
from loraplex.adapters.peft.lora_tensors import StackedLora
from loraplex.adapters.peft.pairs import Fit, Pair
from loraplex.adapters.peft.targeted import stacked_weights

# PEFT wraps a module once for each targeted tensor of it, the first one innermost.
_INNER = ".base_layer"
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
# From here on A reads what a weight reads, however the weight is stored.
_BY_MEANING = (0, 19, 1)


class StackedPlace(NamedTuple):
    """Where the LoRA of one tensor of all experts is saved.

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


def holders(base: BaseSpec) -> Iterator[str]:
    """Names of modules as which LoRA on tensors of all experts may be saved."""
    for layer in range(base.num_layers):
        weights = list(stacked_weights(base, layer))
        for holder, held in groupby(weights, key=lambda weight: weight.holder):
            for depth in range(len(list(held))):
                yield layer_path(layer, holder) + _INNER * depth


def stacked_places(base: BaseSpec, targeted: Mapping[str, str]) -> Iterator[StackedPlace]:
    """Of the tensors that the config targets. targeted: their paths, among others."""
    for layer in range(base.num_layers):
        wanted = [
            weight
            for weight in stacked_weights(base, layer)
            if layer_path(layer, weight.path) in targeted
        ]
        for holder, held in groupby(wanted, key=lambda weight: weight.holder):
            for depth, weight in enumerate(reversed(list(held))):
                parts = [base.layer_modules[name] for name in weight.parts]
                yield StackedPlace(
                    layer=layer,
                    weight=weight,
                    path=layer_path(layer, weight.path),
                    saved=layer_path(layer, holder) + _INNER * depth,
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
    """What a release of PEFT made of square tensors. Of transposed ones a later release asks the
    model whether they are, which only transformers 5 answers: then it is not known."""
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
    """One for each module that the tensor holds rows of."""
    names = place.weight.parts
    for index, name in enumerate(names):
        count = base.layer_modules[name].out_features
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
