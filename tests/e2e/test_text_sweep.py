"""Patterns, grammars and tags of a real server: no answer, greedy or hot, is of another form."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import httpx
import msgspec
import pytest

from loraplex.router.shape.shape import Tag
from tests.e2e.sweeping import TEMPERATURES, Asked, ended_share, outcomes
from tests.router.shape.drawn import drawn
from tests.router.shape.made_texts import (
    NODES,
    Node,
    check_tags,
    lark_source,
    made_tags,
    pattern,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]

MODELS = ("loraplex/demo", "json", "pirate")
MAX_TOKENS = 300
TRIGGERS = ("e", " ", "<t", "or")  # most of them common: free text comes to tags

Form = tuple[dict[str, Any], Callable[[str], object]]


def swept(http: httpx.Client, forms: Sequence[Form]) -> Counter[str]:
    """Each form of each model, greedy and hot."""
    cases = [
        Asked({"response_format": form}, check, model, temperature, MAX_TOKENS)
        for (form, check), model, temperature in product(forms, MODELS, TEMPERATURES)
    ]
    ends = Counter(outcomes(http, cases))
    print(f"{len(forms)} forms, {len(cases)} requests: {dict(ends)}")
    assert not ends["refused"]
    return ends


def check_match(node: Node, text: str) -> None:
    assert re.fullmatch(pattern(node), text), (pattern(node), text)


def test_patterns(http: httpx.Client) -> None:
    forms = [
        ({"type": "regex", "value": pattern(node)}, partial(check_match, node))
        for node in drawn(NODES, 100)
    ]
    assert ended_share(swept(http, forms)) >= 0.8


def test_grammars(http: httpx.Client) -> None:
    forms = [
        ({"type": "grammar", "grammar": lark_source(node)}, partial(check_match, node))
        for node in drawn(NODES, 50)
    ]
    assert ended_share(swept(http, forms)) >= 0.8


def tags_form(tags: tuple[Tag, ...], trigger: str) -> dict[str, Any]:
    structures = [msgspec.to_builtins(tag) for tag in tags]
    return {"type": "structural_tag", "structures": structures, "triggers": [trigger]}


def test_tags(http: httpx.Client) -> None:
    """Free text ends when the model ends it: how many do is told, not asked for."""
    found: list[int] = []

    def check(tags: tuple[Tag, ...], trigger: str, text: str) -> None:
        found.append(check_tags(tags, trigger, text))

    forms = [
        (tags_form(tags, trigger), partial(check, tags, trigger))
        for trigger in TRIGGERS
        for tags in drawn(made_tags(trigger), 10)
    ]
    assert len(forms) == 40
    ends = swept(http, forms)
    print(f"{sum(found)} tags in {len(found)} whole answers")
    assert ends["stop"] == len(found) > 0
    assert sum(found) > 0
