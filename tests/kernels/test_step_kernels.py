"""Kernels around a decode step: inputs, rotation with the write of keys and values, greedy ids."""

import pytest
import torch
from torch.nn import functional

from loraplex.server.kernels.attention.decode_inputs import Shifted, gather_inputs, gather_pages
from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.kernels.attention.rope_append import QkNorm, rope_append
from loraplex.server.kernels.sampling.greedy import GreedyScratch, greedy_append
from tests.grids import sparse
from tests.kernels.rotations import TURNS, as_cached, normed, rotated

PAGE = 4


@pytest.mark.parametrize(
    ("shape", "turn", "norm"),
    sparse([(4, 2, 64), (14, 2, 64), (3, 3, 48), (9, 1, 192)], list(TURNS), [None, False, True]),
)
def test_rope_append(
    device: torch.device, shape: tuple[int, int, int], turn: str, norm: bool | None
) -> None:
    """shape: heads, kv heads, head_dim. norm: over all heads, over each, None = without."""
    heads, kv_heads, head_dim = shape
    torch.manual_seed(heads)
    tokens, pages = 5, 7
    all_heads = heads + 2 * kv_heads
    qkv = torch.randn(tokens, all_heads * head_dim, device=device)
    positions = torch.tensor([9, 0, 3, 3, 21], device=device)
    slots = torch.tensor([5, 26, 0, 13, 12], device=device)
    rotation = TURNS[turn].rotation(head_dim, 30, device)
    weights = torch.randn(heads + kv_heads, head_dim, device=device)
    of_norm = None if norm is None else QkNorm(weights, 1e-5, all_heads=norm)
    k, v = (torch.full((pages, PAGE, kv_heads, head_dim), 7.0, device=device) for _ in "kv")
    expected = qkv.clone().view(tokens, all_heads, head_dim)
    qk = normed(expected[:, : heads + kv_heads], heads, of_norm)
    qk = as_cached(rotated(qk, heads, rotation, positions), rotation)

    q = rope_append(qkv, rotation, positions, slots, CachePages(k, v), of_norm)

    torch.testing.assert_close(q, qk[:, :heads], atol=1e-5, rtol=1e-5)
    flat_k, flat_v = k.flatten(0, 1), v.flatten(0, 1)
    torch.testing.assert_close(flat_k[slots], qk[:, heads:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(flat_v[slots], expected[:, heads + kv_heads :])
    others = torch.ones(pages * PAGE, dtype=torch.bool)
    others[slots.cpu()] = False
    assert bool((flat_k[others.to(device)] == 7).all())


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_rope_append_of_fewer_parts_with_normed_values(device: torch.device, parts: int) -> None:
    """As of q, k and normed v. Of q alone the pages stay as they are."""
    heads, kv_heads, head_dim = 6, 2, 20
    torch.manual_seed(parts)
    positions = torch.tensor([9, 0, 3, 3, 21], device=device)
    slots = torch.tensor([5, 26, 0, 13, 12], device=device)
    sizes = [each * head_dim for each in (heads, kv_heads, kv_heads)]
    qkv = torch.randn(5, sum(sizes), device=device)
    q, k, v = qkv.split(sizes, dim=1)
    v = v if parts == 3 else k
    normed_v = functional.rms_norm(v.unflatten(1, (kv_heads, -1)), (head_dim,), eps=1e-5)
    weights = torch.randn(heads + kv_heads, head_dim, device=device)
    context = (TURNS["halves"].rotation(head_dim, 30, device), positions, slots)
    pages = torch.full((4, 7, PAGE, kv_heads, head_dim), 7.0, device=device)
    whole = torch.cat((q, k, normed_v.flatten(1)), dim=1)
    expected = rope_append(whole, *context, CachePages(*pages[:2]), QkNorm(weights, 1e-5))

    some = qkv[:, : sum(sizes[:parts])].contiguous()
    norm = QkNorm(weights if parts > 1 else weights[:heads], 1e-5, values=True)
    found = rope_append(some, *context, CachePages(pages[2], pages[3], parts=parts), norm)

    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    if parts == 1:
        assert bool((pages[2:] == 7).all())
    else:
        torch.testing.assert_close(pages[2:], pages[:2], atol=1e-5, rtol=1e-5)


def test_gather_inputs(device: torch.device) -> None:
    tokens = torch.arange(50, dtype=torch.int32, device=device).view(5, 10)
    page_table = torch.arange(100, 130, device=device).view(2, 5, 3)
    columns = torch.tensor(
        [
            *([3, 0, 4, 4], [8, 5, 0, 0], [-1, 77, -1, -1], [0] * 4, [0] * 4),
            *([9, 0, 0, 0], [2, -1, -1, -1], [0, 8, 0, 0], [-1, 1, -1, -1]),
        ],
        dtype=torch.int32,
        device=device,
    )
    ids, positions = (torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2))
    shifts, turns = torch.tensor([0, 4, 9, -3, 1], device=device), torch.zeros_like(ids)
    gather_inputs(columns, tokens, page_table, ids, positions, Shifted(shifts, 2, turns))
    assert turns.tolist() == [2, 5, 2, 2]
    assert ids.tolist() == [38, 77, 40, 40]
    assert int(tokens[0, 5]) == 77
    assert positions.tolist() == [8, 5, 0, 0]
    assert page_table[0, 3].tolist() == [109, 110, 9]
    assert page_table[1, 0].tolist() == [115, 8, 117]
    others = page_table.flatten().tolist()
    assert [n for i, n in enumerate(others, 100) if n != i] == [9, 8]


def test_gather_pages(device: torch.device) -> None:
    page_table = torch.arange(600, device=device).view(3, 200)
    indptr = torch.tensor([0, 150, 151], dtype=torch.int32, device=device)
    lists = torch.zeros(151, dtype=torch.int32, device=device)
    gather_pages(torch.tensor([2, 0], device=device), indptr, page_table, lists)
    assert lists.tolist() == [*range(400, 550), 0]


@pytest.mark.parametrize("vocab", [7, 1024, 5000])
def test_greedy_takes_the_lowest_of_the_best(device: torch.device, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randint(0, 30, (6, vocab), device=device).float()
    logits[3, vocab // 2] = float("nan")
    logits[4, vocab - 1] = float("inf")
    logits[5, 0] = float("-inf")
    tokens = torch.full((9, 4), -5, dtype=torch.int32, device=device)
    rows = torch.tensor([8, 1, 2, 3, 4, 5], dtype=torch.int32, device=device)
    places = torch.tensor([3, -1, 0, 1, 1, 1], dtype=torch.int32, device=device)
    sampled = torch.zeros(6, dtype=torch.int32, device=device)
    greedy_append(logits, rows, places, tokens, sampled, GreedyScratch(8, device))
    expected = [int((row == row.max()).nonzero()[0]) for row in logits[:3]]
    assert sampled.tolist() == [*expected, -1, -1, -1]
    assert (int(tokens[8, 3]), int(tokens[2, 0])) == (expected[0], expected[2])
    assert tokens[1].tolist() == [-5] * 4
    assert int(tokens[3, 1]) == 0
