"""Examples of hypothesis' strategies, the same ones at every run."""

from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

T = TypeVar("T")


def many(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def drawn(strategy: st.SearchStrategy[T], count: int) -> list[T]:
    found: list[T] = []

    @many(count)
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found
