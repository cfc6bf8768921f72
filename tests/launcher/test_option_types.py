"""Values of options, and the words of refusals."""

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.option_types import (
    above,
    burstiness,
    lora_rank,
    number,
    rate,
    whole,
    wholes,
)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (whole(0), "0", 0),
        (whole(1, 8), " 8 ", 8),
        (wholes(1), "3", (3,)),
        (wholes(0), "3,0,7", (3, 0, 7)),
        (number(0), "0", 0.0),
        (above(0), "1e-9", 1e-9),
        (rate, "2.5", 2.5),
        (rate, "inf", math.inf),
        (lora_rank, "256", 256),
        (burstiness, "0.5", 0.5),
    ],
)
def test_values(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (whole(1), "0", "expected a whole number of at least 1, got '0'"),
        (whole(1), "1.5", "expected a whole number of at least 1, got '1.5'"),
        (whole(1, 256), "257", "expected a whole number from 1 to 256, got '257'"),
        (whole(1), "9" * 5000, f"expected a whole number of at least 1, got '{'9' * 80}'"),
        (wholes(1), "", "expected a whole number of at least 1, got ''"),
        (wholes(1), "1,,2", "expected a whole number of at least 1, got ''"),
        (wholes(1), "1,0", "expected a whole number of at least 1, got '0'"),
        (number(2), "1", "expected a number of at least 2, got '1'"),
        (number(0), "nan", "expected a number of at least 0, got 'nan'"),
        (number(0), "inf", "expected a number from 0 to 1e+09, got 'inf'"),
        (whole(1), "1000000001", "expected a whole number from 1 to 1000000000, got '1000000001'"),
        (above(0), "0", "expected a number above 0, got '0'"),
        (above(3), "nan", "expected a number above 3, got 'nan'"),
        (rate, "0", "expected 0.001 to 1e+06 or inf a second, got '0'"),
        (rate, "-inf", "expected 0.001 to 1e+06 or inf a second, got '-inf'"),
        (rate, "x", "expected 0.001 to 1e+06 or inf a second, got 'x'"),
        (burstiness, "0", "expected a number from 0.01 to 100, got '0'"),
    ],
)
def test_words(read: Callable[[str], Any], text: str, words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        read(text)
    assert str(error.value) == words


@given(st.text(max_size=30) | st.floats().map(str) | st.integers().map(str))
def test_any_text_has_a_value_within_bounds_or_words(text: str) -> None:
    bounds = {whole(1, 9): (1, 9), number(0): (0, 1e9), above(0): (0, 1e9), rate: (0, math.inf)}
    for read, (low, high) in bounds.items():
        with contextlib.suppress(argparse.ArgumentTypeError):
            assert low <= read(text) <= high
