"""Copies of whole states: each row and each snapshot has the bytes that it should have."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.engine.plan import StateCopy
from loraplex.server.model.ops.row_states import RowStates
from loraplex.server.model.spec.state_spec import StateForm

WINDOW, MEMORY = StateForm((3, 5)), StateForm((2, 4), wide=True)
MODEL: Any = SimpleNamespace(
    states={1: (WINDOW, MEMORY), 2: (WINDOW,), 5: (WINDOW, MEMORY)}, state_inputs={}
)
ROWS, SNAPSHOTS = 3, 2
COPIES = st.builds(StateCopy, st.integers(0, ROWS - 1), st.integers(0, SNAPSHOTS - 1))


@given(st.lists(st.tuples(st.sampled_from(["save", "restore", "write"]), COPIES), max_size=12))
@settings(max_examples=40)
def test_copies_are_whole_and_touch_nothing_else(orders: list[tuple[str, StateCopy]]) -> None:
    states = RowStates(MODEL, ROWS, torch.bfloat16, torch.device("cpu"), snapshots=SNAPSHOTS)
    tensors = [state for layer in MODEL.states for state in states.of(layer)]
    rows, kept = [0] * (ROWS + 1), [0] * SNAPSHOTS
    for number, (order, copy) in enumerate(orders, start=1):
        if order == "save":
            states.save([copy])
            kept[copy.snapshot] = rows[copy.seq_row]
        elif order == "restore":
            states.restore([copy])
            rows[copy.seq_row] = kept[copy.snapshot]
        else:
            rows[copy.seq_row] = number
            for place, state in enumerate(tensors):
                state[copy.seq_row] = number * 16 + place
    for place, state in enumerate(tensors):
        for row, number in enumerate(rows):
            assert (state[row] == (number * 16 + place if number else 0)).all()
