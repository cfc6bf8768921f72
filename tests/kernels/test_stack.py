"""Where B of a batch's adapters lies, against the same told in Python."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.kernels.linear.stack import Stack, allocate_stack, stack_rows
from loraplex.server.kernels.lora.table import MAX_PROJECTIONS, LoraTable
from tests.kernels.batches import interpreted

SITES, SLOTS = 2, 4
Ranks = Sequence[Sequence[Sequence[int]]]  # by slot, site and projection


def make_table(ranks: Ranks) -> LoraTable:
    table = LoraTable(SITES, SLOTS, "cpu")
    for slot, of_sites in enumerate(ranks):
        for site, of in enumerate(of_sites):
            addresses = [address(slot, site, p) for p in range(MAX_PROJECTIONS)]
            table.write(slot, site, 16, addresses, of, [slot + p / 4 for p in range(len(of))])
    return table


def address(slot: int, site: int, p: int) -> int:
    return (1 + p + MAX_PROJECTIONS * (site + SITES * slot)) << 20


def check(stack: Stack, slots: Sequence[int], ranks: Ranks, site: int, p: int) -> None:
    """Of a projection."""
    entries: list[tuple[int, int, int]] = []
    begins: dict[int, int] = {}
    firsts = {slot: sum(ranks[slot][site][:p]) for slot in slots if slot >= 0}
    for slot in slots:
        if slot >= 0 and slot not in begins:
            begins[slot] = 8 * len(entries)
            rank = ranks[slot][site][p]
            size = stack.dtype.itemsize
            entries += [
                (address(slot, site, p) + r * size, rank, rank - r) for r in range(0, rank, 8)
            ]
    count = len(entries)
    whole = max(-(-count // 32), 1) * 32
    told = [of[site, p, :whole].tolist() for of in (stack.starts, stack.ranks, stack.left)]
    assert [*zip(*told, strict=True)] == entries + [(0, 0, 0)] * (whole - count)
    odd = any(
        ranks[slot][site][p] % 8 or first % 8
        for slot, first in firsts.items()
        if ranks[slot][site][p] > 0
    )
    assert stack.counts[site, p].tolist() == ([0, count] if odd else [count, 0])
    for row, slot in enumerate(slots):
        begin, end, shift = stack.spans[site, p, :, row].tolist()
        if slot < 0:
            assert begin == end
        else:
            assert (begin, end - begin) == (begins[slot], ranks[slot][site][p])
            assert begin + shift == firsts[slot]
            if ranks[slot][site][p] > 0:
                assert float(stack.scales[site, p, row]) == slot + p / 4


@interpreted
@given(data=st.data())
@settings(max_examples=30)
def test_any_adapters(data: st.DataObject) -> None:
    rank = st.one_of(st.sampled_from((0, 8, 16, 256)), st.integers(0, 70))
    of_slot = st.lists(st.lists(rank, min_size=3, max_size=3), min_size=SITES, max_size=SITES)
    ranks = data.draw(st.lists(of_slot, min_size=SLOTS, max_size=SLOTS))
    slots = data.draw(st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=9))
    stack = allocate_stack(len(slots) + data.draw(st.integers(0, 2)), SITES, torch.bfloat16, "cpu")
    for of in (stack.starts, stack.ranks, stack.left, stack.spans, stack.counts, stack.arrivals):
        of.fill_(77)
    stack_rows(torch.tensor(slots, dtype=torch.int32), stack, make_table(ranks))
    assert not stack.arrivals.any()
    for site in range(SITES):
        for p in range(MAX_PROJECTIONS):
            check(stack, slots, ranks, site, p)


def test_what_it_refuses() -> None:
    table = LoraTable(SITES, SLOTS, "cpu")
    stack = allocate_stack(2, SITES, torch.float32, "cpu")
    slots = torch.zeros(2, dtype=torch.int32)
    refused = [
        (slots.long(), stack, "slots must be contiguous int32"),
        (slots[:, None], stack, "slots must be contiguous int32"),
        (slots[:0], stack, "a stack of 2 rows and 2 sites, 0 rows"),
        (torch.zeros(3, dtype=torch.int32), stack, "3 rows and 2 sites"),
        (slots, allocate_stack(2, 1, torch.float32, "cpu"), "2 rows and 1 sites, 2 rows and 2"),
    ]
    for wrong, of, message in refused:
        with pytest.raises(ValueError, match=message):
            stack_rows(wrong, of, table)
    for rows, sites in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one row and site"):
            allocate_stack(rows, sites, torch.float32, "cpu")
