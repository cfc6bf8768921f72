"""What a load test draws is what it was asked for."""

import math
import statistics
from collections import Counter
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.bench.load.workload import Lengths, Workload, arrivals
from loraplex.launcher.bench.report import Outcome, Slo, percentile, summarise, table, why_none


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "0",
            "-1",
            "x",
            "²",
            "9" * 5000,
            "normal(1,2)",
            "uniform(1.2.3,4)",
            "lognormal(nan,1)",
        ),
        *("uniform(1,2) in 9..3", "uniform(1,2) in 0..3", "uniform(20,10)", "uniform(1,99999999)"),
        *("lognormal(900,1)", "lognormal(1,900)", "lognormal(1,1) in 1..99999999"),
    ],
)
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Lengths.parse(text)


@given(st.integers(1, 500), st.integers(0, 500), st.integers())
def test_lengths_stay_in_range(low: int, more: int, seed: int) -> None:
    lengths = Lengths.parse(f"lognormal(5.0, 0.8) in {low}..{low + more}")
    assert low <= lengths.draw(Random(seed)) <= low + more


@given(st.floats(0, 20), st.floats(0, 20), st.integers())
def test_any_lognormal_length_can_be_drawn(mean: float, deviation: float, seed: int) -> None:
    lengths = Lengths.parse(f"lognormal({mean:.9f}, {deviation:.9f})")
    assert 1 <= lengths.draw(Random(seed)) <= 1 << 20


def test_fixed_length() -> None:
    assert Lengths.parse("128").draw(Random(0)) == 128


def test_zipf_ratio() -> None:
    one = Lengths.parse("1")
    names = tuple("abcdefghij")
    counts = Counter(call.adapter for call in Workload(40_000, names, 1.0, one, one).calls())
    assert counts["a"] / counts["b"] == pytest.approx(2, rel=0.1)
    assert counts["a"] / counts["j"] == pytest.approx(10, rel=0.2)
    assert set(counts) == set(names)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 2.0])
def test_arrivals_have_the_rate_and_the_variation(burstiness: float) -> None:
    times = list(islice(arrivals(Random(3), 20.0, burstiness), 20_000))
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    mean = statistics.mean(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) / mean == pytest.approx(burstiness, rel=0.1)


def test_all_at_once() -> None:
    assert set(islice(arrivals(Random(0), math.inf, 1.0), 5)) == {0.0}


def test_same_seed_same_calls() -> None:
    lengths = Lengths.parse("uniform(3,9)")
    workload = Workload(50, ("a", "b", None), 1.0, lengths, lengths, rate=5.0)
    assert workload.calls() == workload.calls()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_lies_between_extremes(values: list[float], p: float) -> None:
    assert min(values) <= percentile(values, p) <= max(values)


def test_summary_splits_by_first_use() -> None:
    first = Outcome("a", True, 0.0, [1.0, 1.1], 1.2, 10, 2)
    again = Outcome("a", False, 0.5, [0.6, 0.7, 0.8], 1.0, 10, 3)
    failed = Outcome("b", True, 0.5, [], 2.0, error="429")
    summary = summarise([first, again, failed], Slo(ttft_s=0.2))
    assert summary["output_tokens_per_s"] == 2.5
    assert summary["goodput_per_s"] == 0.5
    assert summary["errors"] == {"429": 1}
    assert summary["miss"]["ttft_ms"]["p50"] == 1000.0  # type: ignore[index]
    assert summary["hit"]["ttft_ms"]["p50"] == 100.0  # type: ignore[index]
    assert "p99 ms" in table(summary)


def test_a_gap_between_tokens_is_no_gap_between_events() -> None:
    """Nine tokens in three events, a second apart."""
    several = Outcome("a", False, 0.0, [1.0, 2.0, 3.0], 3.5, output_tokens=9)
    assert several.token_gap_s == 0.25
    assert several.gaps_s == [1.0, 1.0]
    assert Slo(itl_s=0.25).met(several)
    assert not Slo(itl_s=0.24).met(several)
    summary = summarise([several], Slo(itl_s=0.25))
    assert summary["all"]["tpot_ms"]["p50"] == 250.0  # type: ignore[index]
    assert summary["all"]["itl_ms"]["p50"] == 1000.0  # type: ignore[index]
    assert float(summary["goodput_per_s"]) > 0  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 100), max_size=9).map(sorted), st.integers(0, 50))
def test_gaps_between_tokens_span_the_answer(token_s: list[float], output_tokens: int) -> None:
    gap = Outcome("a", False, 0.0, token_s, output_tokens=output_tokens).token_gap_s
    assert (gap is None) == (output_tokens < 2 or not token_s)
    if gap is not None:
        assert gap * (output_tokens - 1) == pytest.approx(token_s[-1] - token_s[0])


def test_one_token_has_no_gap_and_can_be_good() -> None:
    one = Outcome("a", False, 0.0, [0.1], 0.1, output_tokens=1)
    assert Slo(0.2, 0.001).met(one)
    summary = summarise([one], Slo())
    assert math.isnan(summary["all"]["tpot_ms"]["p50"])  # type: ignore[index]


@pytest.mark.parametrize(
    ("adapter", "first_use", "start", "missed"),
    [
        ("a", True, None, True),
        ("a", False, None, False),
        ("a", True, "warm", False),
        ("a", False, "cold", True),
        (None, True, None, None),
        (None, False, "base", None),
    ],
)
def test_who_waited_for_an_adapter(
    adapter: str | None, first_use: bool, start: str | None, missed: bool | None
) -> None:
    assert Outcome(adapter, first_use, 0.0, start=start).missed is missed


def test_the_first_failure_of_each_kind_is_reported() -> None:
    failed = [Outcome("a", False, 0.0, error=kind, message=kind + text) for kind, text in (
        ("404", " first"), ("500", " once"), ("404", " again"),
    )]  # fmt: skip
    good = Outcome("a", False, 0.0, [0.1], 0.2, output_tokens=2, short=True)
    summary = summarise([*failed, good], Slo())
    assert summary["errors"] == {"404": 2, "500": 1}
    assert summary["first_errors"] == {"404": "404 first", "500": "500 once"}
    assert "3 failed {'404': 2, '500': 1}\n  404: 404 first\n  500: 500 once\n" in table(summary)
    assert "answers shorter than asked for: 1" in table(summary)
    assert why_none([*failed, good]) is None
    assert why_none(failed) == "none of 3 requests was answered: 404 404 first"


def test_groups_without_requests_are_left_out_of_the_table() -> None:
    shown = table(summarise([Outcome(None, True, 0.0, [0.1, 0.2], 0.2, output_tokens=2)], Slo()))
    assert "all (1) tpot" in shown
    assert "hit" not in shown
    assert "nan" not in shown
