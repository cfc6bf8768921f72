"""Which constrained sequences a step takes."""

import math
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.constraints.constraint import Constraint
from loraplex.server.constraints.rules import TokenRules, mask_words
from loraplex.server.engine.scheduling.mask_share import MaskShare
from loraplex.server.engine.scheduling.sequence import Precedence, Sequence
from loraplex.server.protocol import SamplingParams
from tests.server.engine.harness import make_request

VOCAB = 100
RULES = TokenRules.of(SamplingParams(), (2,), VOCAB)
LEAST_S = MaskShare().share_s


def row(key: int, cost: float | None, tenant: str = "", ready: bool = False) -> Sequence:
    """cost: of a mask, None = no constraint."""
    request = make_request([5, 6], tenant=tenant)
    sequence = Sequence(key, request, Precedence(0, key), 64, None)
    if cost is not None:
        sequence.constraint = Constraint(None, RULES, 0)
        sequence.constraint.mask_s = cost
        if ready:
            sequence.constraint.keep(np.full(mask_words(VOCAB), -1, np.int32))
    return sequence


def taken(share: MaskShare, rows: list[Sequence], step_s: float = 0.0) -> list[int]:
    share.begin_plan(rows, step_s)
    return [each.key for each in rows if share.takes(each)]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([None, None], [0, 1]),
        ([0.1 * LEAST_S] * 9, list(range(9))),
        ([2 * LEAST_S, None, 0.5 * LEAST_S], [1, 2]),
        ([0.75 * LEAST_S, 0.75 * LEAST_S, 0.25 * LEAST_S], [0, 2]),
        ([math.inf, None], [1]),
    ],
)
def test_what_fits_goes_along(costs: list[float | None], expected: list[int]) -> None:
    assert taken(MaskShare(), [row(i, cost) for i, cost in enumerate(costs)]) == expected


def test_the_share_grows_with_the_steps_and_the_threads() -> None:
    share, rows = MaskShare(), [row(i, LEAST_S) for i in range(4)]
    share.threads = 3
    assert len(taken(share, rows)) == 3
    share.threads = 1
    rows = [row(i, LEAST_S) for i in range(4)]
    assert len(taken(share, rows, step_s=1.0)) == 4
    assert share.share_s == 0.125
    assert share.late_s == 2 * share.share_s


def test_a_mask_that_is_there_costs_nothing_and_a_busy_one_is_not_waited_for() -> None:
    share = MaskShare()
    ready, busy = row(0, 9.0, ready=True), row(1, 0.0)
    assert busy.constraint is not None
    busy.constraint.is_busy = True
    assert taken(share, [ready, busy, row(2, LEAST_S)]) == [0, 2]
    assert not share.take_wishes()


def test_the_others_are_filled_aside_once_their_last_token_is_known() -> None:
    share, costly = MaskShare(), row(0, 1.0, "a")
    costly.pending = 1
    assert not taken(share, [costly])
    assert not share.take_wishes()
    costly.pending = 0
    assert not taken(share, [costly])
    assert [(w.constraint, w.tenant) for w in share.take_wishes()] == [(costly.constraint, "a")]
    assert not taken(share, [costly])  # it is busy now
    assert not share.take_wishes()


def test_a_late_one_is_filled_aside_whatever_it_cost_before() -> None:
    share, late = MaskShare(), row(0, 0.0)
    assert late.constraint is not None
    late.constraint.is_late = True
    assert not taken(share, [late])
    assert len(share.take_wishes()) == 1


def test_one_without_a_row_waits_for_its_mask_as_well() -> None:
    share = MaskShare()
    share.begin_plan([], 0.0)
    assert share.admits(row(0, None))
    assert share.admits(row(1, 0.7 * LEAST_S))
    assert not share.admits(row(2, 0.7 * LEAST_S))
    assert share.admits(row(3, 0.7 * LEAST_S, ready=True))
    assert len(share.take_wishes()) == 1


def test_drafts_take_what_the_masks_of_rows_leave() -> None:
    share, free, bound = MaskShare(), row(0, None), row(1, LEAST_S / 4)
    share.begin_plan([free, bound], 0.0)
    assert (share.room_for_draft(free, 8), share.room_for_draft(bound, 8)) == (8, 3)
    share.add_draft(bound, [5, 6])
    assert share.room_for_draft(bound, 8) == 1


ROWS = st.lists(
    st.tuples(st.floats(0, 2 * LEAST_S), st.sampled_from("abc")), min_size=1, max_size=30
)


@given(ROWS, st.integers(1, 4))
def test_the_bound_holds_and_no_tenant_takes_anothers_part(
    costs: list[tuple[float, str]], threads: int
) -> None:
    share, number = MaskShare(), count()
    share.threads = threads
    rows = [row(next(number), cost, tenant) for cost, tenant in costs]
    keys = set(taken(share, rows))
    bound = threads * share.share_s
    spent = {tenant: 0.0 for _, tenant in costs}
    for key in keys:
        spent[costs[key][1]] += costs[key][0]
    assert sum(spent.values()) <= bound * (1 + 1e-9)
    for tenant in spent:
        mine = [key for key, (_, of) in enumerate(costs) if of == tenant]
        left_out = [costs[key][0] for key in mine if key not in keys]
        part = bound / len(spent)
        # What is left out would not have fitted into the rest of its tenant's part.
        assert all(spent[tenant] + cost >= part * (1 - 1e-9) for cost in left_out)


@given(ROWS)
def test_nobody_starves(costs: list[tuple[float, str]]) -> None:
    """Each round's wishes are filled aside, one at a time; each row draws when it is taken."""
    share = MaskShare()
    rows = [row(key, cost, tenant) for key, (cost, tenant) in enumerate(costs)]
    drawn, queue = dict.fromkeys(range(len(rows)), 0), list[Constraint]()
    for _ in range(3 * len(rows)):
        for key in taken(share, rows):
            drawn[key] += 1
            constraint = rows[key].constraint
            assert constraint is not None
            constraint.fill(np.zeros(mask_words(VOCAB), np.int32))
        queue += [wish.constraint for wish in share.take_wishes()]
        if queue:
            filled = queue.pop(0)
            filled.keep(np.full(mask_words(VOCAB), -1, np.int32))
            filled.is_busy = False
    assert min(drawn.values()) >= 1
