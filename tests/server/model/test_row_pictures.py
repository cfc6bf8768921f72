"""Results of a row's pictures, where tokens of text lie between placeholders."""

import msgspec
import numpy as np
import pytest

from loraplex.server.engine.plan import PlacedPicture
from loraplex.server.model.steps.rows import RowPictures
from tests.server.engine.scheduling.test_pictures import PICTURES, TOKEN

FLAT = msgspec.structs.replace(PICTURES, is_flat=True)
# A picture of six tokens in three rows, and one of one token.
ROWS = [1, *[TOKEN] * 2, 5, *[TOKEN] * 2, 5, *[TOKEN] * 2, 2, TOKEN, 3]
OF = (PlacedPicture(1, (1, 6, 4), (7, 2)), PlacedPicture(10, (1, 2, 2), (5,)))


@pytest.mark.parametrize("step", range(1, 13))
def test_results_lie_at_placeholders_alone(step: int) -> None:
    own = RowPictures(OF, ROWS, FLAT)
    at, rows = list[int](), list[int]()
    for start in range(0, len(ROWS), step):
        places, of_results = own.results(start, min(step, len(ROWS) - start))
        at += (places + start).tolist()
        rows += of_results.tolist()
    assert at == np.flatnonzero(np.array(ROWS) == TOKEN).tolist()
    assert rows == [28, 29, 30, 31, 8, 9, 20]
    assert (own.end, own.offset) == (11, 0)


@pytest.mark.parametrize("step", range(1, 13))
def test_tokens_of_a_joined_picture_see_all_of_it(step: int) -> None:
    own, found = RowPictures(OF, ROWS, FLAT), list[int]()
    for start in range(0, len(ROWS), step):
        found += own.lasts(start, min(step, len(ROWS) - start)).tolist()
    assert found == [0, *[8] * 8, 9, 10, 11]
