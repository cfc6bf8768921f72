"""The draw kernel against the definition of what it does, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from loraplex.server.engine.plan import RowStart
from loraplex.server.kernels.sampling.draw import DrawRows, draw_append
from loraplex.server.kernels.sampling.greedy import DrawMasks, GreedyScratch
from loraplex.server.model.sampling.sampling import RowSampling, uniform
from loraplex.server.protocol import SamplingParams
from tests.grids import beyond

NEVER = float("-inf")
# Ids that each row may choose; None = any.
Allowed = Sequence[list[int] | None]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(temperature=1.7, top_k=40),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.999999),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.7, min_p=0.02),
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=1e-40, top_p=0.5),
]


@dataclass
class Case:
    """Every parameter of PARAMS beside the others, and rows of the logits in another order."""

    logits: torch.Tensor
    seed: int
    prompt_len: int = 3
    place: int = 5

    def draw(
        self, params: list[SamplingParams], *, finite: bool = True, allowed: Allowed | None = None
    ) -> list[int]:
        n, device = len(params), self.logits.device
        sampling = RowSampling(n + 2, self.logits.shape[1], (), device)
        rows = [n - i for i in range(n)]
        sampling.start(
            RowStart(row, [0], self.prompt_len, p, self.seed_of(i), i, 0)
            for i, (row, p) in enumerate(zip(rows, params, strict=True))
        )
        tokens = torch.full((n + 3, 8), -5, dtype=torch.int32, device=device)
        packed = np.array([self.sources(n), rows, [self.place] * n], dtype=np.int32)
        masks = None if allowed is None else masks_of(allowed, self.logits)
        sources, rows_of, places = torch.from_numpy(packed).to(device)
        of = DrawRows(sources, rows_of, places, masks)
        scratch = GreedyScratch(n, device)
        found = draw_append(self.logits, of, sampling.table, tokens, scratch, finite=finite)
        assert tokens[rows, self.place].tolist() == found.clamp(min=0).tolist()
        assert int((tokens != -5).sum()) == n
        ids: list[int] = found.tolist()
        return ids

    def sources(self, n: int) -> list[int]:
        return [(5 * i + 2) % len(self.logits) for i in range(n)]

    def seed_of(self, i: int) -> int:
        return (self.seed + i) * 0x9E3779B97F4A7C15 % 2**64

    def uniform(self, i: int) -> float:
        seed = np.array([self.seed_of(i)], dtype=np.uint64).view(np.int64)
        index = torch.tensor([self.place - self.prompt_len])
        return float(uniform(torch.from_numpy(seed), torch.tensor([i]), index))

    def check(
        self, i: int, params: SamplingParams, found: int, allowed: list[int] | None = None
    ) -> None:
        """`found` is where the cumulated mass passes the row's number, up to rounding."""
        x = self.logits[self.sources(i + 1)[i]].double().cpu()
        if allowed is not None:
            masked = torch.full_like(x, NEVER)
            masked[allowed] = x[allowed]
            x = masked
        if params.temperature == 0:
            assert found == int(x.argmax())
            return
        mass = kept(x, params)
        assert mass[found] > 0
        total = float(mass.sum())
        above = float(mass[: found + 1].sum())
        target = self.uniform(i) * total
        slack = 1e-5 * total
        assert above - float(mass[found]) - slack <= target <= above + slack


def kept(x: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Mass of each id beside that of the best; float64 `[vocab]`."""
    mass = ((x - x.max()) / params.temperature).exp()
    if 0 < params.top_k < len(x):
        mass = mass.where(x >= x.topk(params.top_k).values[-1], 0.0)
    if params.top_p < 1:
        order = mass.argsort(descending=True)
        before = mass[order].cumsum(0) - mass[order]
        last = int((before < params.top_p * mass.sum()).sum()) - 1
        mass = mass.where(mass >= mass[order[last]], 0.0)
    return mass.where(mass >= params.min_p, 0.0)


def masks_of(allowed: Allowed, logits: torch.Tensor) -> DrawMasks:
    """Masks in reverse order of rows; bits beyond the vocabulary are set."""
    vocab = logits.shape[1]
    masked = [i for i, ids in enumerate(allowed) if ids is not None][::-1]
    bits = np.zeros((len(masked), -(-vocab // 32) * 32), dtype=np.uint8)
    bits[:, vocab:] = 1
    of = np.full(len(allowed), -1, dtype=np.int32)
    for mask, i in enumerate(masked):
        bits[mask, allowed[i] or []] = 1
        of[i] = mask
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return DrawMasks(*(torch.from_numpy(a).to(logits.device) for a in (words, of)))


def random_masks(rows: int, vocab: int, seed: int) -> list[list[int] | None]:
    """Few ids, half of them, all but one, one alone, and none at all without a mask."""
    rng = np.random.default_rng(seed)
    found: list[list[int] | None] = []
    for row in range(rows):
        order = rng.permutation(vocab).tolist()
        found.append((None, order[:3], order[: vocab // 2], order[1:], order[:1])[row % 5])
    return found


def random_logits(shape: tuple[int, int], seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3 - 1).to(device)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    beyond(
        3,
        [
            (5, torch.float32),
            (1000, torch.float16),
            (10_000, torch.bfloat16),
            (1000, torch.bfloat16),
            (20_000, torch.float32),
            (20_000, torch.bfloat16),
        ],
    ),
)
@pytest.mark.parametrize("seed", beyond(1, [0, 1]))
def test_draws_are_those_of_the_definition(
    device: torch.device, vocab: int, dtype: torch.dtype, seed: int
) -> None:
    case = Case(random_logits((4, vocab), seed, device).to(dtype), seed)
    for i, (params, found) in enumerate(zip(PARAMS, case.draw(PARAMS), strict=True)):
        case.check(i, params, found)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    beyond(
        2,
        [
            (5, torch.bfloat16),
            (10_007, torch.float32),
            (5, torch.float32),
            (1000, torch.float16),
            (1000, torch.bfloat16),
        ],
    ),
)
@pytest.mark.parametrize("seed", beyond(1, [0, 1]))
def test_masked_draws_are_those_of_the_definition(
    device: torch.device, vocab: int, dtype: torch.dtype, seed: int
) -> None:
    case = Case(random_logits((4, vocab), seed, device).to(dtype), seed)
    allowed = random_masks(len(PARAMS), vocab, seed)
    found = case.draw(PARAMS, allowed=allowed)
    for i, (params, ids, token) in enumerate(zip(PARAMS, allowed, found, strict=True)):
        assert ids is None or token in ids
        case.check(i, params, token, ids)


def test_a_mask_of_all_ids_changes_no_draw(device: torch.device) -> None:
    case = Case(random_logits((4, 3001), 7, device).half(), 7)
    every: Allowed = [list(range(3001))] * len(PARAMS)
    assert case.draw(PARAMS, allowed=every) == case.draw(PARAMS)


def test_masks_change_no_draw_of_rows_without_one(device: torch.device) -> None:
    case = Case(random_logits((3, 2500), 8, device), 8)
    free = case.draw(PARAMS)
    allowed: Allowed = [[9, 2400] if i % 2 else None for i in range(len(PARAMS))]
    masked = case.draw(PARAMS, allowed=allowed)
    assert masked[::2] == free[::2]
    assert set(masked[1::2]) <= {9, 2400}


def test_a_mask_of_no_ids_fails_its_row_alone(device: torch.device) -> None:
    case = Case(random_logits((3, 700), 2, device), 2)
    expected = case.draw(PARAMS)
    allowed: Allowed = [[] if i % 3 == 1 else None for i in range(len(PARAMS))]
    for i, (found, free) in enumerate(
        zip(case.draw(PARAMS, allowed=allowed), expected, strict=True)
    ):
        assert found == (-1 if i % 3 == 1 else free)


def test_a_logit_that_is_not_finite_fails_its_row_though_masked(device: torch.device) -> None:
    logits = random_logits((3, 1500), 1, device)
    logits[0, 3], logits[1, 1400], logits[2, 8] = float("nan"), float("inf"), NEVER
    allowed: Allowed = [[5, 900]] * 6
    assert Case(logits, 1).draw(PARAMS[:6], allowed=allowed) == [-1] * 6
    bent = Case(logits, 1).draw(PARAMS[:6], allowed=allowed, finite=False)
    assert [token in (5, 900) for token in bent] == [source == 2 for source in (2, 1, 0) * 2]


def test_equal_logits_are_kept_or_cut_off_together(device: torch.device) -> None:
    logits = torch.zeros(1, 300, device=device)
    logits[0, 50:100] = -0.0
    logits[0, 100:] = -1.0
    found = Case(logits, 3).draw([SamplingParams(top_k=7), SamplingParams(top_p=0.01)] * 12)
    assert max(found) < 100
    assert len(set(found)) > 15


def test_what_is_not_finite_fails_alone(device: torch.device) -> None:
    logits = random_logits((4, 1500), 1, device)
    expected = Case(logits, 1).draw(PARAMS)
    broken = logits.clone()
    broken[0, 3], broken[1, 1400] = float("nan"), float("inf")
    broken[2, 700] = NEVER
    for finite, bad in ((True, {0, 1, 2}), (False, {0, 1})):
        case = Case(broken, 1)
        found = case.draw(PARAMS, finite=finite)
        for i, source in enumerate(case.sources(len(PARAMS))):
            if source in bad:
                assert found[i] == -1
            elif source == 2:
                assert found[i] not in (-1, 700)
            else:
                assert found[i] == expected[i]


def test_nothing_can_be_chosen(device: torch.device) -> None:
    logits = torch.full((1, 40), NEVER, device=device)
    assert Case(logits, 0).draw(PARAMS, finite=False) == [-1] * len(PARAMS)


def test_ids_at_minus_infinity_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((1, 3000), NEVER, device=device)
    logits[0, [17, 2900]] = 1.0
    found = Case(logits, 5).draw(PARAMS, finite=False)
    assert set(found) == {17, 2900}


def test_neighbours_do_not_change_a_draw(device: torch.device) -> None:
    case = Case(random_logits((1, 5000), 9, device), 4)
    together = case.draw(PARAMS)
    others = [SamplingParams(top_p=0.3)] * 7
    assert case.draw(others + PARAMS[7:])[7:] == together[7:]
