"""Numbers of rows of steps: none is too small, and padding stays small."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.engine.plan import SeqSlice, StepPlan
from loraplex.server.model.ops.sizes import (
    MOST_PADDING,
    graph_sizes,
    padded,
    row_sizes,
    token_sizes,
)
from loraplex.server.model.steps.rows import Rows
from loraplex.server.model.steps.step import Step

ROWS = Rows(max_rows=64, max_context=256, page_size=16, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("most", "count", "last"),
    [(1, 1, (1,)), (5, 4, (4, 8)), (256, 35, (248, 256)), (300, 37, (288, 320)),
     (1000, 59, (992, 1024)), (5000, 59, (992, 1024))],
)  # fmt: skip
def test_sizes_of_decode_graphs(most: int, count: int, last: tuple[int, ...]) -> None:
    sizes = graph_sizes(most)
    assert len(sizes) == count
    assert sizes[-len(last) :] == last


@pytest.mark.parametrize(
    ("max_tokens", "layer_weights", "last"),
    [
        (8192, 218_000_000, (1920, 2048)),  # Llama-3.1-8B
        (8192, 101_000_000, (2048, 2304)),  # Llama-3.2-3B
        (8192, 61_000_000, (3840, 4096)),  # Llama-3.2-1B
        (8192, 15_000_000, (7680, 8192)),  # Qwen2.5-0.5B
        (5000, 15_000_000, (4608, 5120)),
        (2048, 15_000_000, (1920, 2048)),
        (300, 15_000_000, (256, 320)),
        (1, 15_000_000, (32,)),
    ],
)
def test_sizes_of_graphs_with_prompts(
    max_tokens: int, layer_weights: int, last: tuple[int, ...]
) -> None:
    sizes = token_sizes(max_tokens, layer_weights, 64 * 4096)
    assert sizes[-len(last) :] == last
    assert list(sizes) == sorted(set(sizes))


@given(
    st.integers(1, 3000),
    st.integers(1, 20_000),
    st.integers(10_000, 10**9),
    st.integers(0, 300).map(lambda context: 64 * context),
)
def test_what_pads_the_tokens_of_a_captured_step_fits_in_its_graphs(
    max_rows: int, max_tokens: int, layer_weights: int, most_of_prompts: int
) -> None:
    sizes = token_sizes(max_tokens, layer_weights, most_of_prompts)
    assert all(size <= most_of_prompts for size in sizes)
    if sizes:
        most, rows = min(sizes[-1], max_tokens), row_sizes(max_rows, max_tokens)
        assert len(padded(np.arange(most), rows)) <= sizes[-1]


@given(st.integers(1, 3000), st.integers(1, 20_000))
def test_sizes_outside_graphs(max_rows: int, max_tokens: int) -> None:
    sizes = row_sizes(max_rows, max_tokens)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_tokens
    assert np.diff((0, *sizes)).max() <= MOST_PADDING + 1


@pytest.mark.parametrize(
    ("given_", "sizes", "expected"),
    [
        ([], (2, 4), []),
        ([3, 9], (2, 4), [3, 9]),
        ([3, 5, 9], (2, 4), [3, 5, 9, 9]),
        ([3, 5, 9], (), [3, 5, 9]),
    ],
)
def test_the_last_index_pads(
    given_: list[int], sizes: tuple[int, ...], expected: list[int]
) -> None:
    assert padded(np.array(given_, dtype=np.int64), sizes).tolist() == expected


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = draw(st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True))
    lengths = [draw(st.integers(1, 5)) for _ in rows]
    slices = [
        SeqSlice(
            "prompt" if length > 1 else draw(st.sampled_from(["prompt", "decode"])),
            row,
            start=draw(st.integers(0, 100)),
            num_new=length,
            token_ids=[],
            adapter_slot=draw(st.integers(-1, 2)),
            sample=draw(st.booleans()),
        )
        for row, length in zip(rows, lengths, strict=True)
    ]
    return StepPlan(0, slices, [], [], [])


@given(plans(), st.integers(0, 40))
def test_a_padded_step_is_the_same_step(plan: StepPlan, padding: int) -> None:
    tokens = plan.num_tokens + padding
    exact, step = (Step.build(plan, ROWS, n) for n in (plan.num_tokens, tokens))
    assert step.slices == exact.slices
    for name in ("order", "seq_rows", "starts", "num_new", "samples"):
        assert getattr(step, name).tolist() == getattr(exact, name).tolist()
    rows, positions = step.layout.token_rows, step.layout.positions
    assert len(rows) == len(positions) == len(step.token_slots) == tokens
    for place, (end, other) in enumerate(zip(step.ends, exact.ends, strict=True)):
        assert rows[end] == exact.layout.token_rows[other] == step.seq_rows[place]
        assert positions[end] == exact.layout.positions[other]
        assert step.token_slots[end] == exact.token_slots[other]
    added = rows == ROWS.scratch
    assert int(added.sum()) == padding
    assert (positions[added] == 0).all()
    assert (step.token_slots[added.numpy()] == -1).all()
    kinds = step.layout.num_new > 1
    assert (np.diff(kinds.astype(int)) >= 0).all(), "decodes come first"
    assert step.layout.num_decodes == int((~kinds).sum())
