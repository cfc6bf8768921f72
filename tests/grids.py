"""Grids of cases, of which an ordinary run takes a few that hold each value."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

MARK = pytest.mark.exhaustive


def sparse(*axes: Sequence[Any]) -> list[Any]:
    """All combinations, for `parametrize`. The ordinary run has those on the diagonal, which hold
    each value of each axis; the others are exhaustive."""
    longest = max(map(len, axes))
    ordinary = {tuple(i % len(axis) for axis in axes) for i in range(longest)}
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=[] if place in ordinary else MARK,
        )
        for place in places
    ]


def beyond(ordinary: int, cases: Sequence[Any]) -> list[Any]:
    """Cases, of which the first are for an ordinary run, and the others exhaustive."""
    return [
        *cases[:ordinary],
        *(
            pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=MARK)
            for case in cases[ordinary:]
        ),
    ]


def examples(
    ordinary: int, exhaustive: int, *strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Makes a check of drawn values a test: of a few examples, and an exhaustive one of many."""

    def made(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("count", beyond(1, [ordinary, exhaustive]))
        def test(count: int) -> None:
            settings(max_examples=count)(given(*strategies)(check))()

        return test

    return made
