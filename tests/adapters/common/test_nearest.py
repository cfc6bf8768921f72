"""Words that a person may have meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.common.nearest import did_you_mean, nearest, one_edit_away

WORDS = st.text("abc-", min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("PROT", "PORT"),
        ("PORTT", "PORT"),
        ("promt", "PROMPT"),
        ("kv-memroy", "KV-MEMORY"),
        ("kvmemory", "KV-MEMORY"),
        ("kvmemroy", "KV-MEMORY"),
        ("memory", "KV-MEMORY"),
        ("xyz", None),
        ("", None),
    ],
)
def test_one_edit_wins_over_what_is_alike(word: str, meant: str | None) -> None:
    assert nearest(word, ["PROMPT", "PORT", "KV-MEMORY", "HOST"]) == meant


def test_nothing_known_means_nothing() -> None:
    assert nearest("word", []) is None
    assert did_you_mean(None) == ""
    assert did_you_mean("port") == "; did you mean port?"


@given(WORDS, WORDS)
def test_one_edit_is_found_from_both_sides(word: str, other: str) -> None:
    found = one_edit_away(word, {other}.__contains__)
    assert (found == other) == (one_edit_away(other, {word}.__contains__) == word)
    assert found in (None, other)
    assert found is None or (word != other and abs(len(word) - len(other)) <= 1)
    swapped = word[1:2] + word[:1] + word[2:]
    assert swapped == word or one_edit_away(swapped, {word}.__contains__) == word


def test_long_words_cost_nothing() -> None:
    asked: list[str] = []

    def is_known(name: str) -> bool:
        asked.append(name)
        return False

    assert one_edit_away("x" * 65, is_known) is None
    assert asked == []
    assert one_edit_away("x" * 64, is_known) is None
    assert len(asked) < 6000
