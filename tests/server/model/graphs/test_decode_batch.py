"""Which steps a decode graph can take, and the columns it reads."""

import numpy as np

from loraplex.server.engine.plan import PageGrant, SeqSlice, StepPlan
from loraplex.server.model.graphs.decode_batch import (
    APPEND,
    POSITION,
    ROW,
    SLOT,
    TOKEN,
    DecodeBatch,
    num_columns,
    page_column,
)


def plan(slices: list[SeqSlice], grants: list[PageGrant] | None = None) -> StepPlan:
    return StepPlan(1, slices, [], grants or [], [])


def test_columns() -> None:
    batch = DecodeBatch.of(
        plan(
            [
                SeqSlice("decode", 7, 30, 1, [], -1, True),
                SeqSlice("decode", 2, 16, 1, [], 5, True),
                SeqSlice("prompt", 4, 3, 1, [99], -1, False),
            ],
            [PageGrant(2, 1, [40]), PageGrant(4, 0, [8, 9]), PageGrant(50, 0, [3])],
        )
    )
    assert batch is not None
    columns = batch.columns
    assert columns[ROW].tolist() == [7, 2, 4]
    assert columns[POSITION].tolist() == [30, 16, 3]
    assert columns[TOKEN].tolist() == [-1, -1, 99]
    assert columns[APPEND].tolist() == [31, 17, -1]
    assert columns[SLOT].tolist() == [-1, 5, -1]
    page = page_column(0)
    assert (columns[page, 1], columns[page + 1].tolist()) == (40, [-1, 1, -1])
    assert [grant.seq_row for grant in batch.grants] == [4, 50]
    assert batch.contexts.tolist() == [31, 17, 4]
    assert columns.dtype == np.int32


def test_each_group_of_layers_has_columns_of_its_own() -> None:
    grants = [PageGrant(1, 9, [5]), PageGrant(1, 9, [6], 1), PageGrant(1, 10, [7], 1)]
    batch = DecodeBatch.of(plan([SeqSlice("decode", 1, 144, 1, [], -1, True)], grants), 3)
    assert batch is not None
    assert len(batch.columns) == num_columns(3)
    pages = batch.columns[page_column(0) :, 0].tolist()
    assert pages == [5, 9, 6, 9, 0, -1]
    assert batch.grants == (grants[2],)


def test_a_second_page_for_a_row_is_granted_apart() -> None:
    grants = [PageGrant(1, 0, [5]), PageGrant(1, 1, [6])]
    batch = DecodeBatch.of(plan([SeqSlice("prompt", 1, 0, 1, [4], -1, True)], grants))
    assert batch is not None
    assert batch.grants == (grants[1],)


def test_steps_that_are_not_decodes_alone() -> None:
    decode = SeqSlice("decode", 1, 4, 1, [], -1, True)
    assert DecodeBatch.of(plan([])) is None
    assert DecodeBatch.of(plan([decode, SeqSlice("prompt", 2, 0, 2, [1, 2], -1, True)])) is None
    assert DecodeBatch.of(plan([decode, SeqSlice("prompt", 2, 0, 1, [1], -1, False, True)])) is None
