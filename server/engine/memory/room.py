"""How many pages a sequence holds, and how long one can be. Pure."""

from collections.abc import Sequence


def pages_held(tokens: int, page_size: int, windows: Sequence[int | None]) -> int:
    """The most pages that a sequence of so many tokens holds at once. windows: of each group."""
    pages = -(-tokens // page_size)
    return sum(
        pages if window is None else min(pages, -(-(window - 1) // page_size) + 2)
        for window in windows
    )


def tokens_together(
    num_pages: int, page_size: int, windows: Sequence[int | None], each: int
) -> int:
    """Tokens of sequences of `each` tokens that fit in `num_pages` pages together; 0 where none
    holds a page."""
    held = pages_held(each, page_size, windows)
    return num_pages * each // held if held else 0


def tokens_that_fit(num_pages: int, page_size: int, windows: Sequence[int | None]) -> int:
    """Tokens of the longest sequence that fits in `num_pages` pages; at most 2^40.

    The bound holds where windows limit all layers.
    """
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        if pages_held(middle, page_size, windows) <= num_pages:
            low = middle
        else:
            high = middle - 1
    return low
