"""What the options of `loraplex bench` take, and how they say no."""

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.__main__ import main
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


SERVE = ("serve", "--url", "http://127.0.0.1:9")
DECODE = ("decode", "--config", "llama-3.1-8b", "--dummy-weights")
MAKE = ("make-model", "--config", "llama-3.1-8b")
STREAMS = ("streams", "--url", "http://127.0.0.1:9", "--window", "w")


@pytest.mark.parametrize(
    "words",
    [
        *((*SERVE, option, "0") for option in ("--concurrency", "--rate", "--burstiness")),
        *((*SERVE, option, "0") for option in ("--requests", "--processes", "--slo-ttft-ms")),
        *((*SERVE, option, "-2") for option in ("--requests", "--first", "--count", "--rate")),
        *((*SERVE, option, "nan") for option in ("--zipf", "--rate", "--burstiness")),
        *((*SERVE, "--burstiness", text) for text in ("1e-200", "1e200")),
        *((*SERVE, "--extra", text) for text in ("{", "[]", "x")),
        (*SERVE, "--prompt", "uniform(20,10)"),
        (*SERVE, "--output", "lognormal(900,1)"),
        (*SERVE, "--api", "none"),
        *((*STREAMS, option, "-1") for option in ("--streams", "--stream-adapters", "--settle")),
        *((*STREAMS, option, "0") for option in ("--streams", "--seconds", "--new-output")),
        (*STREAMS, "--window", "x:new=-1"),
        (
            "adapters",
            "load",
            "--url",
            "http://127.0.0.1:9",
            "--adapters-in",
            ".",
            "--concurrency",
            "0",
        ),
        ("adapters", "load", "--url", "http://127.0.0.1:9"),
        ("cold-adapters", "--config", "x", "--adapters-in", ".", "--rounds", "0"),
        ("adapter-copies", "--config", "llama-3.1-8b", "--device", "cpu", "--adapters", "0"),
        *((*MAKE, option, "-1") for option in ("--rank", "--threads", "--adapters", "--first")),
        *((*DECODE, option, "x") for option in ("--batch", "--adapters", "--rank")),
        ("overload", "--times", "nan"),
        ("overload", "--seconds", "1"),
        ("router", "--requests", "0"),
        ("placement", "--workers", "0"),
        ("placement", "--zipf", "nan"),
        ("fairness", "--seconds", "3"),
        ("lora-kernels", "--replays", "0"),
    ],
)
def test_nothing_is_begun(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *words])
    told = capsys.readouterr()
    assert (left.value.code, told.out) == (2, "")
    last = told.err.splitlines()[-1]
    assert "invalid _" not in last
    assert any(word in last for word in ("expected", "invalid choice", "is no window", "required"))


def test_more_processes_than_callers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *SERVE, "--processes", "3", "--concurrency", "2"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "loraplex: --processes must be at most --concurrency\n"
