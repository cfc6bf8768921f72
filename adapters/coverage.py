"""Counts the modules that an adapter's config targets, with and without weights. Pure.

PEFT leaves a targeted module without weights as the base has it. An adapter of which some are
missing is served so, and called partial wherever it is shown.
"""

from collections.abc import Iterable

import msgspec

# A layer (-1 of `embed_tokens` and `lm_head`), a module's short name, and the expert that has it,
# where each expert has a module of its own.
Site = tuple[int, str] | tuple[int, str, int]

_SHOWN_RUNS = 8


class Coverage(msgspec.Struct, frozen=True, gc=False):
    """How much of what its config targets an adapter has weights for. modules: how many have
    weights. targeted: how many the config targets.

    layers: runs `(first, last)` of layers in which some targeted module has weights.
    targeted_layers: how many layers the config targets modules of. lacking: short names of modules
    that are missing from those layers, or beside all layers. of_images: modules with weights of a
    part for images, which are left out.
    """

    modules: int
    targeted: int
    layers: tuple[tuple[int, int], ...]
    targeted_layers: int
    lacking: tuple[str, ...] = ()
    of_images: int = 0

    @property
    def is_partial(self) -> bool:
        return self.modules < self.targeted or self.of_images > 0

    @property
    def num_layers(self) -> int:
        """The number of layers that have some weights."""
        return sum(last - first + 1 for first, last in self.layers)

    @property
    def text(self) -> str:
        """One line for people."""
        if not self.is_partial:
            return f"all {self.targeted} targeted modules have weights"
        missing = self.targeted - self.modules
        words = f"partial: {self.modules} of {self.targeted} targeted modules have weights"
        if missing:
            words += f", {missing} {'is' if missing == 1 else 'are'} missing"
        if self.num_layers < self.targeted_layers:
            words += f"; {self.num_layers} of {self.targeted_layers} layers"
            words += f": {_runs_text(self.layers)}" if self.layers else ""
        if self.lacking:
            words += f"; {', '.join(self.lacking)} not everywhere"
        if self.of_images:
            words += f"; {self.of_images} modules of the part for images are left out"
        return words


def coverage_of(present: Iterable[Site], missing: Iterable[Site], of_images: int = 0) -> Coverage:
    """Counts which targeted modules and layers have weights. present: targeted sites that have
    weights. missing: targeted sites that have none. of_images: as of `Coverage`.
    """
    there, absent = frozenset(present), frozenset(missing)
    layers = {layer for layer, *_ in there if layer >= 0}
    targeted = layers | {layer for layer, *_ in absent if layer >= 0}
    lacking = {name for layer, name, *_ in absent if layer < 0 or layer in layers}
    return Coverage(
        modules=len(there),
        targeted=len(there | absent),
        layers=_runs(sorted(layers)),
        targeted_layers=len(targeted),
        lacking=tuple(sorted(lacking)),
        of_images=of_images,
    )


def _runs(layers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return tuple(runs)


def _runs_text(runs: tuple[tuple[int, int], ...]) -> str:
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_SHOWN_RUNS]]
    return ", ".join([*shown, "…"] if len(runs) > _SHOWN_RUNS else shown)
