"""What a load test draws is what it was asked for."""

import math
import statistics
from collections import Counter
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.bench.report import Outcome, Slo, percentile, summarise, table
from launcher.bench.workload import Lengths, Popularity, Workload, arrivals


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "normal(1,2)", "uniform(1,2) in 9..3"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Lengths.parse(text)


@given(st.integers(1, 500), st.integers(0, 500), st.integers())
def test_lengths_stay_in_range(low: int, more: int, seed: int) -> None:
    lengths = Lengths.parse(f"lognormal(5.0, 0.8) in {low}..{low + more}")
    assert low <= lengths.draw(Random(seed)) <= low + more


def test_fixed_length() -> None:
    assert Lengths.parse("128").draw(Random(0)) == 128


def test_zipf_ratio() -> None:
    random = Random(1)
    popularity = Popularity.zipf(10, 1.0)
    counts = Counter(popularity.draw(random) for _ in range(40_000))
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.2)
    assert set(counts) == set(range(10))


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
