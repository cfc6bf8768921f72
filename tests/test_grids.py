"""What an ordinary run takes of a grid."""

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.grids import MARK, beyond, examples, sparse


def ordinary(cases: list[Any]) -> list[tuple[Any, ...]]:
    """Cases without the mark; a bare value is a case of one."""
    marked = [one for one in cases if isinstance(one, type(pytest.param())) and MARK in one.marks]
    kept = [one for one in cases if one not in marked]
    return [tuple(one.values) if hasattr(one, "values") else (one,) for one in kept]


@pytest.mark.parametrize("lengths", [(1,), (3,), (2, 2), (2, 5), (5, 2), (2, 3, 4)])
def test_a_sparse_grid_holds_each_value_and_an_exhaustive_one_all(lengths: tuple[int, ...]) -> None:
    axes = [[f"{axis}-{i}" for i in range(length)] for axis, length in enumerate(lengths)]
    cases = sparse(*axes)
    assert [tuple(case.values) for case in cases] == list(itertools.product(*axes))
    kept = ordinary(cases)
    assert len(kept) == max(lengths)
    for axis, values in enumerate(axes):
        assert {case[axis] for case in kept} == set(values)


def test_the_first_cases_are_ordinary() -> None:
    cases = beyond(1, [1, 2, 3])
    assert ordinary(cases) == [(1,)]
    assert [case.values for case in cases[1:]] == [(2,), (3,)]


def test_a_check_is_drawn_as_often_as_asked() -> None:
    seen: list[int] = []
    test = examples(5, 20, st.integers())(lambda number: seen.append(number))
    test(20)
    assert len(seen) == 20
    (cases,) = (mark.args[1] for mark in test.pytestmark)  # type: ignore[attr-defined]
    assert ordinary(cases) == [(5,)]
    with pytest.raises(AssertionError):
        examples(5, 20, st.integers())(_fails)(5)


def _fails(number: int) -> None:
    assert number < 0
