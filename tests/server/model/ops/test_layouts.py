"""Layouts of some tokens of a step."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.model.ops.ops import StepLayout

PAGES = torch.zeros(1, 9, 4, dtype=torch.int64)


def layout_of(singles: int, lengths: list[int]) -> StepLayout:
    """Slices of rows 0, 1, 2, …; slice i begins at position 10 * i."""
    num_new = np.array([1] * singles + lengths)
    starts = np.arange(len(num_new)) * 10
    positions = np.concatenate([np.arange(n) + s for n, s in zip(num_new, starts, strict=True)])
    rows = np.repeat(np.arange(len(num_new)), num_new)
    return StepLayout(
        singles,
        np.arange(len(num_new)),
        starts,
        num_new,
        torch.from_numpy(rows),
        torch.from_numpy(positions),
        PAGES,
        torch.zeros(9, dtype=torch.int64),
        turns=torch.from_numpy(np.stack([positions, positions + 1, positions + 2])),
    )


@given(st.integers(0, 3), st.lists(st.integers(2, 6), min_size=1, max_size=3), st.data())
def test_each_token_keeps_its_row_and_position(
    singles: int, lengths: list[int], data: st.DataObject
) -> None:
    whole = layout_of(singles, lengths)
    tokens = st.integers(0, len(whole.positions) - 1)
    chosen = sorted(data.draw(st.sets(tokens, min_size=1)))
    chosen += [chosen[-1]] * data.draw(st.integers(0, 3))
    part = whole.of(np.array(chosen))
    assert part.positions.tolist() == whole.positions[chosen].tolist()
    assert part.turns is not None
    assert part.turns[2].tolist() == [place + 2 for place in part.positions.tolist()]
    rows = np.repeat(part.seq_rows, part.num_new)
    assert rows.tolist() == part.token_rows.tolist() == whole.token_rows[chosen].tolist()
    ranges = zip(part.starts, part.num_new, strict=True)
    assert [p for start, n in ranges for p in range(start, start + n)] == part.positions.tolist()
    assert (part.num_new[: part.num_decodes] == 1).all()


def test_last_tokens_of_prompts_are_decodes() -> None:
    part = layout_of(2, [3, 5]).of(np.array([0, 1, 4, 9]))
    assert part.num_decodes == 4
    assert part.starts.tolist() == [0, 10, 22, 34]


def test_what_follows_a_scored_prompt_is_a_prompt() -> None:
    part = layout_of(1, [3, 5]).of(np.array([0, 2, 3, 8]))
    assert part.num_decodes == 1
    assert part.num_new.tolist() == [1, 2, 1]


def test_a_token_that_sees_others_behind_it_is_no_decode() -> None:
    whole = layout_of(1, [3, 5])
    lasts = whole.positions.numpy().copy()
    lasts[5:7] = 22  # the second prompt's second token sees the third
    part = replace(whole, lasts=lasts).of(np.array([0, 2, 5, 6, 8]))
    assert part.num_decodes == 2
    assert part.lasts is not None
    assert part.lasts.tolist() == [0, 11, 22, 22, 24]
    assert replace(whole, lasts=lasts).of(np.array([0, 5])).num_decodes == 1
    assert whole.of(np.array([0, 5])).num_decodes == 2
