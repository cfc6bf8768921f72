"""Layers in groups that have pages of their own, so that pages behind a window can go. Pure."""

from collections import Counter
from dataclasses import dataclass

from loraplex.server.model.spec.model_spec import ModelSpec

# Of a page's places, those that may be empty: of more, one group holds all layers.
_MOST_EMPTY = 0.25


@dataclass(frozen=True, slots=True)
class PageGroups:
    """Layers in groups of up to `places`. A page holds the keys and values of some tokens in all
    layers of one group, and each group has its own page table: pages are of one size, and any group
    may have any page.

    windows: of each group, the tokens that its layers see at most; None = all. A group of layers
    that see all comes first. layers: of each layer, its group and its place in the group's pages.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, int], ...]
    places: int

    def group(self, layer: int) -> int:
        return self.layers[layer][0]


def page_groups(model: ModelSpec) -> PageGroups:
    """Layers of one window make a group, or several where they are more than the layers that see
    all. Where pages would be left with many empty places all layers make one group, and nothing is
    freed before its sequence ends."""
    windows = [None if w is None or w >= model.max_context else w for w in model.windows]
    sizes = Counter(windows)
    places = sizes.get(None) or min(sizes.values())
    groups: list[int | None] = []
    of_layer: list[tuple[int, int]] = [(0, 0)] * len(windows)
    for window in sorted(sizes, key=lambda window: window or 0):
        members = [layer for layer, of in enumerate(windows) if of == window]
        parts = -(-len(members) // places)
        for number, layer in enumerate(members):
            place, part = divmod(number, parts)
            of_layer[layer] = (len(groups) + part, place)
        groups += [window] * parts
    empty = 1 - len(windows) / (len(groups) * places)
    if empty > _MOST_EMPTY:
        together = tuple((0, layer) for layer in range(len(windows)))
        return PageGroups((_widest(windows),), together, len(windows))
    return PageGroups(tuple(groups), tuple(of_layer), places)


def _widest(windows: list[int | None]) -> int | None:
    seen = [window for window in windows if window is not None]
    return max(seen) if len(seen) == len(windows) else None
