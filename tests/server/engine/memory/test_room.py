"""How many pages a sequence holds, and how many tokens fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.engine.memory.room import pages_held, tokens_that_fit, tokens_together

WINDOWS = st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("tokens", "windows", "pages"),
    [
        (0, (None,), 0),
        (1, (None,), 1),
        (16, (None, None), 2),
        (17, (None,), 2),
        (1000, (None, 33), 63 + 4),  # three of the window, and one that begins
        (20, (None, 33), 4),
        (1000, (1,), 2),
    ],
)
def test_pages_of_a_sequence(tokens: int, windows: tuple[int | None, ...], pages: int) -> None:
    assert pages_held(tokens, 16, windows) == pages


@given(pages=st.integers(0, 300), size=st.sampled_from([1, 4, 16]), windows=WINDOWS)
def test_one_token_more_does_not_fit(pages: int, size: int, windows: list[int | None]) -> None:
    tokens = tokens_that_fit(pages, size, windows)
    assert pages_held(tokens, size, windows) <= pages
    if tokens < 1 << 40:
        assert pages_held(tokens + 1, size, windows) > pages


def test_long_sequences_have_more_room_behind_windows() -> None:
    assert tokens_together(600, 16, (None,), each=16) == 9600
    assert tokens_together(600, 16, (None, 64, 64), each=16) == 3200
    assert tokens_together(600, 16, (None, 64, 64), each=3200) == 600 * 3200 // (200 + 2 * 6)
