"""Layers of a model in groups that share pages."""

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.known_models import served_families
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.page_groups import NO_PAGES, LayerPages, group_layers, page_groups


class _Model:
    """What a grouping looks at."""

    def __init__(self, *windows: int | None, max_context: int = 4096) -> None:
        of_each = {"num_kv_heads": 1, "kv_size": 1, "keys_of": None}
        attentions = [SimpleNamespace(window=window, **of_each) for window in windows]
        self.attentions = dict(enumerate(attentions))
        self.num_layers = len(attentions)
        self.max_context, self.is_causal = max_context, True


def groups_of(*windows: int | None, max_context: int = 4096):  # type: ignore[no-untyped-def]
    return page_groups(_Model(*windows, max_context=max_context))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("windows", "expected", "places"),
    [
        ((None,) * 4, (None,), 4),
        ((512,) * 3, (512,), 3),
        ((512, None) * 3, (None, 512), 3),
        (((512,) * 5 + (None,)) * 2, (None, *(512,) * 5), 2),
        (((512,) * 4 + (None,)) * 2 + (512,), (None, *(512,) * 5), 2),  # one place stays empty
        ((None,) * 6 + (512,) * 2, (None,), 8),  # four would stay empty
        ((9999,) * 3, (None,), 3),  # no context is so long
        ((512, 128) * 2, (128, 512), 2),
    ],
)
def test_layers_of_one_window_share_pages(
    windows: tuple[int | None, ...], expected: tuple[int | None, ...], places: int
) -> None:
    groups = groups_of(*windows)
    assert (groups.windows, groups.width) == (expected, places)


def test_layers_that_keep_a_state_have_no_pages() -> None:
    model = _Model(None, None)
    model.attentions = {1: model.attentions[0], 3: model.attentions[1]}
    model.num_layers = 5
    groups = page_groups(model)  # type: ignore[arg-type]
    assert (groups.windows, groups.width) == ((None,), 2)
    assert groups.layers == (NO_PAGES, (0, 0), NO_PAGES, (0, 1), NO_PAGES)


@given(st.lists(st.sampled_from([None, 128, 512]), min_size=1, max_size=40))
def test_every_layer_has_a_place_of_its_own(windows: list[int | None]) -> None:
    groups = groups_of(*windows)
    assert len(set(groups.layers)) == len(windows)
    assert Counter(group for group, _ in groups.layers).keys() == set(range(len(groups.windows)))
    for layer, (group, place) in enumerate(groups.layers):
        assert 0 <= place < groups.width
        of_group, own = groups.windows[group], windows[layer]
        assert of_group is None or (own is not None and own <= of_group)
    assert len(windows) >= 0.75 * len(groups.windows) * groups.width
    assert None not in groups.windows[1:]


@pytest.mark.parametrize(
    ("family", "groups"), [("gemma2", 2), ("gemma3_text", 7), ("gpt_oss", 2), ("olmo3", 4)]
)
def test_known_models(family: str, groups: int) -> None:
    model: ModelSpec = read_model(served_families()[family].config)
    assert len(page_groups(model).windows) == groups


ALL, LESS = LayerPages(4, 512, None), LayerPages(16, 256, 1024)
TWICE = LESS._replace(window=2048)
WIDE = LayerPages(1, 8192, None)


@pytest.mark.parametrize(
    ("layers", "windows", "width"),
    [
        # Each group fills its pages: ten layers of the one form, five of the other.
        (([LESS] * 5 + [ALL]) * 10, (None, *[1024] * 10), 10 * 2048),
        # One place stays empty.
        ([LESS] * 11 + [ALL] * 8, (None, *[1024] * 3), 8 * 2048),
        # The form that needs least sets the width; the other has as many groups as that takes.
        ([ALL] * 4 + [WIDE] * 2, (None, None, None), 8192),
        # Windows of one form share a group where apart they would leave too much empty.
        ([ALL] * 8 + [LESS] * 3 + [TWICE], (None, 2048), 8 * 2048),
        # What no grouping can fill stays empty, and windows stay apart.
        ([ALL, LayerPages(1, 16, 1024)], (None, 1024), 2048),
    ],
)
def test_layers_of_one_form_fill_pages(
    layers: list[LayerPages], windows: tuple[int | None, ...], width: int
) -> None:
    groups = group_layers(layers)
    assert (groups.windows, groups.width) == (windows, width)


forms = st.builds(LayerPages, st.integers(1, 4), st.sampled_from([16, 32]), st.just(None))


@given(st.lists(forms | forms.map(lambda form: form._replace(window=128)), min_size=1, max_size=40))
def test_layers_of_several_forms_have_places_in_pages_of_their_form(
    layers: list[LayerPages],
) -> None:
    groups = group_layers(layers)
    assert len(set(groups.layers)) == len(layers)
    of_group: dict[int, LayerPages] = {}
    for layer, (group, place) in zip(layers, groups.layers, strict=True):
        assert (place + 1) * layer.features <= groups.width
        assert of_group.setdefault(group, layer)[:2] == layer[:2]
        assert groups.windows[group] in (None, layer.window)
    assert of_group.keys() == set(range(len(groups.windows)))
    assert groups.windows == tuple(sorted(groups.windows, key=lambda window: window or 0))


def test_tokens_that_see_all_keep_no_pages() -> None:
    model = _Model(None, 5)
    model.is_causal = False
    assert page_groups(model).windows == ()  # type: ignore[arg-type]
