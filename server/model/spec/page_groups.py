"""Layers in groups that have pages of their own, so that pages behind a window can go. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec

NO_PAGES = (-1, -1)
# Of the pages' room, the part that may be empty: of more, layers of all windows share groups.
_MOST_EMPTY = 0.25


class LayerPages(NamedTuple):
    """The form of keys and the window that layers have in common. heads, size: number and size of
    keys. window: None = layers see all tokens."""

    heads: int
    size: int
    window: int | None

    @property
    def features(self) -> int:
        """Features of one token's keys in one layer."""
        return self.heads * self.size


@dataclass(frozen=True, slots=True)
class PageGroups:
    """Layers of one form (number and size of heads of keys) in groups. A page holds the keys and
    values of some tokens in all layers of one group, and each group has its own page table: pages
    are of one size, and any group may have any page.

    windows: of each group, the tokens that its layers see at most; None = all. Groups of layers
    that see all come first. layers: of each layer, its group and its place in the group's pages;
    NO_PAGES of a layer that has no keys and values; of one that reads another layer's, that layer's
    place.
    width: features of one token's keys that a page has room for, and of as many of its values.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, int], ...]
    width: int

    def group(self, layer: int) -> int:
        return self.layers[layer][0]


def page_groups(model: ModelSpec) -> PageGroups:
    """Group the layers of a model by form and window, as `group_layers` does; no group where no
    layer keeps keys and values."""
    if not model.is_causal or not model.attentions:
        return PageGroups((), (), 0)
    attentions = model.attentions
    own = {layer: each for layer, each in attentions.items() if each.keys_of is None}
    found = group_layers([_pages(each, model.max_context) for each in own.values()])
    places = dict(zip(own, found.layers, strict=True))
    for layer, each in attentions.items():
        if each.keys_of is not None:
            places[layer] = places[each.keys_of]
    of_each = (places.get(layer, NO_PAGES) for layer in range(model.num_layers))
    return replace(found, layers=tuple(of_each))


def page_heads(model: ModelSpec) -> int:
    """Most heads of keys, in all layers of a group together, that a page has room for."""
    width, attentions = page_groups(model).width, model.attentions.values()
    return width // min((of.kv_size // of.num_kv_heads for of in attentions), default=1)


def _pages(attention: AttentionSpec, max_context: int) -> LayerPages:
    window = attention.window
    if window is not None and window >= max_context:
        window = None
    heads = attention.num_kv_heads
    return LayerPages(heads, attention.kv_size // heads, window)


def group_layers(layers: Sequence[LayerPages]) -> PageGroups:
    """Group layers of one form and window: in one group, or in several where they are more than a
    page holds.

    A page holds the layers that see all tokens, of the form where these need least room. Without
    such layers it holds those of the form and window that need least. Any one layer fits a page.

    Layers of a form share groups whatever their windows, if more than a quarter of the pages' room
    would be empty otherwise, and sharing leaves less. All then have the form's widest window.
    """
    found = _grouped(layers)
    if _empty(found, layers) <= _MOST_EMPTY:
        return found
    together = _grouped([layer._replace(window=_widest(layers, layer)) for layer in layers])
    return min(found, together, key=lambda groups: _empty(groups, layers))


def _grouped(layers: Sequence[LayerPages]) -> PageGroups:
    members = defaultdict[LayerPages, list[int]](list)
    for number, layer in enumerate(layers):
        members[layer].append(number)
    sizes = {kind: kind.features * len(of_kind) for kind, of_kind in members.items()}
    see_all = [size for kind, size in sizes.items() if kind.window is None]
    width = max(min(see_all or sizes.values()), *(kind.features for kind in members))
    windows: list[int | None] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(layers)
    for kind in sorted(members, key=lambda kind: kind.window or 0):
        parts = -(-len(members[kind]) // (width // kind.features))
        for number, member in enumerate(members[kind]):
            place, part = divmod(number, parts)
            places[member] = (len(windows) + part, place)
        windows += [kind.window] * parts
    return PageGroups(tuple(windows), tuple(places), width)


def _empty(groups: PageGroups, layers: Sequence[LayerPages]) -> float:
    """The part of the pages' room that no layer has."""
    return 1 - sum(layer.features for layer in layers) / (len(groups.windows) * groups.width)


def _widest(layers: Sequence[LayerPages], like: LayerPages) -> int | None:
    """The widest window of layers of this form."""
    windows = {layer.window for layer in layers if layer[:2] == like[:2]}
    return None if None in windows else max(window for window in windows if window is not None)
