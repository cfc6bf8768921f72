"""Work on the store, again and again."""

import pytest

from loraplex.router.shared.replica import every
from loraplex.router.shared.store import StoreDown


async def test_a_store_that_is_down_ends_no_loop_and_other_errors_do() -> None:
    ends = [StoreDown("down"), None, StoreDown("down"), ValueError("unforeseen")]

    async def work() -> None:
        end = ends.pop(0)
        if end is not None:
            raise end

    with pytest.raises(ValueError, match="unforeseen"):
        await every(0.0, work)
    assert not ends
