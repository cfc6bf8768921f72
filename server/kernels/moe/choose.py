"""From a router's logits to each token's experts, their weights, and tiles of rows by expert."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.moe.grouped import ExpertTiles, expert_tiles, max_tiles

# The most rows whose places one program finds sooner than two kernels do.
_MOST_COMPARED = 32


class ChoiceRule(NamedTuple):
    """How experts are chosen by logits, and weighed.

    A token's experts are those of the largest scores: the softmax of its logits; sigmoid: each
    one's sigmoid. Their scores are their weights. of_chosen: divided by their sum, which is at
    least `floor`, and `added` to it. factor: of weights. rounded: their dtype; None = float32.
    correction: float32 `[experts]`, which is added to scores where experts are chosen. groups: how
    many experts are in, and of how many experts are chosen: those whose `of_group` largest scores,
    one or two, have the largest sums. scales: float32 `[experts]`, which multiply weights at last.
    """

    of_chosen: bool = False
    rounded: torch.dtype | None = None
    sigmoid: bool = False
    floor: float = 0.0
    added: float = 0.0
    factor: float = 1.0
    groups: tuple[int, int] = (1, 1)
    of_group: int = 2
    correction: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @property
    def by_scores(self) -> bool:
        """Whether experts are chosen by other numbers than logits."""
        return self.correction is not None or self.groups[0] != self.groups[1]

    @property
    def form(self) -> "_RuleForm":
        """The part of the rule that kernels are compiled for."""
        shared = self.by_scores or self.floor > 0 or self.added > 0
        return _RuleForm(
            self.of_chosen,
            str(self.rounded).removeprefix("torch."),
            self.sigmoid,
            shared and not self.sigmoid,
            self.floor,
            self.added,
            self.factor,
            *self.groups,
            self.of_group,
            self.by_scores,
            self.correction is not None,
            self.scales is not None,
        )


class _RuleForm(NamedTuple):
    """Constants of a kernel, as of ChoiceRule. groups, best: how many there are, and of how many
    experts are chosen. shared: scores are divided by their sum. corrected, scaled: whether the rule
    has such numbers. All can be JSON, as Triton writes constants.
    """

    of_chosen: bool
    rounded: str
    sigmoid: bool
    shared: bool
    floor: float
    added: float
    factor: float
    groups: int
    best: int
    of_group: int
    by_scores: bool
    corrected: bool
    scaled: bool


def assign_experts(
    logits: torch.Tensor,
    top_k: int,
    tile_rows: int,
    rule: ChoiceRule,
    chosen: torch.Tensor | None = None,
    *,
    programmatic_launch: bool,
) -> tuple[ExpertTiles, torch.Tensor]:
    """Choose each token's experts, and sort the rows into tiles. logits: `[tokens, experts]`, at
    least one token, contiguous -> tiles of the rows of those that `choose_experts` gives, and
    their weights, float32 `[tokens, top_k]`. One kernel for a few tokens, two for more; nothing
    waits for the device. chosen: where experts are written, int32 `[tokens, top_k]`, contiguous;
    None = anywhere.
    """
    tokens, experts = logits.shape
    block_t, block_k = triton.next_power_of_2(tokens), triton.next_power_of_2(top_k)
    if block_t * block_k > _MOST_COMPARED:
        early = programmatic_launch
        chosen, weights = choose_experts(logits, top_k, rule, chosen, programmatic_launch=early)
        return expert_tiles(chosen, experts, tile_rows, programmatic_launch=early), weights
    rows = tokens * top_k
    most = max_tiles(rows, tile_rows, experts)
    order = logits.new_empty(rows, dtype=torch.int32)
    chosen = torch.empty_like(order) if chosen is None else chosen.view(rows)
    tiles = logits.new_empty(most, 3, dtype=torch.int32)
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    _assign_kernel[(1,)](
        logits,
        chosen,
        order,
        tiles,
        weights,
        logits if rule.correction is None else rule.correction,
        logits if rule.scales is None else rule.scales,
        tokens,
        most,
        EXPERTS=experts,
        TOP_K=top_k,
        TILE_ROWS=tile_rows,
        BLOCK_T=block_t,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_K=block_k,
        BLOCK_TILES=triton.next_power_of_2(most),
        RULE=rule.form,
        PDL=programmatic_launch,
        num_warps=min(8, max(1, block_t * block_k // 16)),
        launch_pdl=programmatic_launch,
    )
    return ExpertTiles(chosen, order, tiles, tile_rows, top_k), weights


def choose_experts(
    logits: torch.Tensor,
    top_k: int,
    rule: ChoiceRule,
    chosen: torch.Tensor | None = None,
    *,
    programmatic_launch: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` experts of each token. logits: `[tokens, experts]`, contiguous -> experts
    int32 `[tokens, top_k]`, those of the largest scores first, of equal ones that of the lowest
    number; and their weights, float32. Logits that are not finite choose any experts. chosen: as of
    `assign_experts`. One kernel.
    """
    tokens, experts = logits.shape
    if chosen is None:
        chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            logits,
            chosen,
            weights,
            logits if rule.correction is None else rule.correction,
            logits if rule.scales is None else rule.scales,
            EXPERTS=experts,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            RULE=rule.form,
            PDL=programmatic_launch,
            num_warps=1,
            launch_pdl=programmatic_launch,
        )
    return chosen, weights


@triton.jit
def _choose_kernel(
    logits_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RULE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes a token."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    scores, keys = _scores(logits_ptr, correction_ptr, token, EXPERTS, BLOCK_E, RULE)
    chosen, weights = _chosen(scores, keys, TOP_K, BLOCK_E, BLOCK_K)
    weights = _weighed(weights, scores, chosen, scales_ptr, TOP_K, BLOCK_K, RULE)
    k = tl.arange(0, BLOCK_K)[None, :]
    at = token[:, None] * TOP_K + k
    tl.store(chosen_ptr + at, chosen, mask=k < TOP_K)
    tl.store(weights_ptr + at, weights, mask=k < TOP_K)


@triton.jit(do_not_specialize=["tokens", "most_tiles"])
def _assign_kernel(
    logits_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    tokens: tl.tensor,
    most_tiles: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    RULE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program takes all tokens. A row's place is the number of rows before it."""
    follow(PDL)
    token, k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)[None, :]
    there = tl.minimum(token, tokens - 1)
    scores, keys = _scores(logits_ptr, correction_ptr, there, EXPERTS, BLOCK_E, RULE)
    chosen, weights = _chosen(scores, keys, TOP_K, BLOCK_E, BLOCK_K)
    weights = _weighed(weights, scores, chosen, scales_ptr, TOP_K, BLOCK_K, RULE)
    row = token[:, None] * TOP_K + k
    live = (token < tokens)[:, None] & (k < TOP_K)
    tl.store(chosen_ptr + row, chosen, mask=live)
    tl.store(weights_ptr + row, weights, mask=live)
    ROWS: tl.constexpr = BLOCK_T * BLOCK_K
    # Rows that are not there come last, as those of an expert that is not there.
    expert = tl.reshape(tl.where(live, chosen, BLOCK_E), (ROWS,))
    row, live = tl.reshape(row, (ROWS,)), tl.reshape(live, (ROWS,))
    key = expert * ROWS + tl.where(live, row, ROWS - 1)
    before = key[None, :] < key[:, None]
    same = expert[None, :] == expert[:, None]
    place = tl.sum(before.to(tl.int32), axis=1)
    done = tl.sum((before & same).to(tl.int32), axis=1)
    count = tl.sum(same.to(tl.int32), axis=1)
    leads = (live & (done % TILE_ROWS == 0)).to(tl.int32)
    tile = tl.sum(tl.where(before, leads[None, :], 0), axis=1)
    tl.store(order_ptr + place, row, mask=live)
    of_tile = tiles_ptr + tile * 3
    tl.store(of_tile, expert, mask=leads > 0)
    tl.store(of_tile + 1, place, mask=leads > 0)
    tl.store(of_tile + 2, tl.minimum(count - done, TILE_ROWS), mask=leads > 0)
    t = tl.arange(0, BLOCK_TILES)
    unused = (t >= tl.sum(leads, axis=0)) & (t < most_tiles)
    tl.store(tiles_ptr + t * 3 + 2, 0, mask=unused)


@triton.jit
def _scores(
    logits_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    token: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RULE: tl.constexpr,
) -> tuple[Any, Any]:
    """token: `[T]` -> scores and by what experts are chosen, float32 `[T, BLOCK_E]`. A softmax is
    divided by its sum only if the rule says so."""
    e = tl.arange(0, BLOCK_E)[None, :]
    at = logits_ptr + token[:, None] * EXPERTS + e
    logits = tl.load(at, mask=e < EXPERTS, other=0.0).to(tl.float32)
    # What is not a number is below all numbers, what is chosen or not there below that.
    keys = _numbers(logits, e, EXPERTS)
    if RULE.sigmoid:
        scores = 1.0 / (1.0 + tl.exp2(keys * -1.4426950408889634))
    else:
        top = tl.max(keys, axis=1)
        scores = tl.exp2((keys - top[:, None]) * 1.4426950408889634)
    if RULE.shared:
        scores = scores / tl.sum(scores, axis=1)[:, None]
    if RULE.by_scores:
        keys = scores
        if RULE.corrected:
            keys += tl.load(correction_ptr + e, mask=e < EXPERTS, other=0.0)
        keys = _numbers(keys, e, EXPERTS)
    if RULE.best < RULE.groups:
        keys = _of_groups(keys, e, EXPERTS // RULE.groups, BLOCK_E, RULE)
    return scores, keys


@triton.jit
def _numbers(x: tl.tensor, e: tl.tensor, EXPERTS: tl.constexpr) -> Any:
    finite = tl.where(x == x, tl.minimum(tl.maximum(x, -1e38), 1e38), -1e38)
    return tl.where(e < EXPERTS, finite, float("-inf"))


@triton.jit
def _of_groups(
    keys: tl.tensor,
    e: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RULE: tl.constexpr,
) -> Any:
    """Keys `[T, BLOCK_E]` of the best groups of SIZE experts; of others minus infinity."""
    GROUPS: tl.constexpr = RULE.groups
    BEST: tl.constexpr = RULE.best
    sums = tl.where((e < GROUPS) & (keys == keys), 0.0, float("-inf"))  # a column for each group
    for i in tl.static_range(GROUPS):
        mine = tl.where(e // SIZE == i, keys, float("-inf"))
        first = tl.max(mine, axis=1)
        if RULE.of_group == 2:
            place = tl.min(tl.where(mine == first[:, None], e, BLOCK_E), axis=1)
            first += tl.max(tl.where(e == place[:, None], float("-inf"), mine), axis=1)
        sums = tl.where(e == i, first[:, None], sums)
    kept = tl.full(keys.shape, float("-inf"), tl.float32)
    for _ in tl.static_range(BEST):
        best = tl.max(sums, axis=1)
        group = tl.min(tl.where(sums == best[:, None], e, BLOCK_E), axis=1)
        kept = tl.where(e // SIZE == group[:, None], keys, kept)
        sums = tl.where(e == group[:, None], float("-inf"), sums)
    return kept


@triton.jit
def _chosen(
    scores: tl.tensor,
    keys: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[Any, Any]:
    """Experts of the largest keys, int32 `[T, BLOCK_K]`, and their scores. No expert is chosen
    twice, and none that is not there."""
    e, k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((keys.shape[0], BLOCK_K), tl.int32)
    weights = chosen.to(tl.float32)
    for i in tl.static_range(TOP_K):
        largest = tl.max(keys, axis=1)
        expert = tl.min(tl.where(keys == largest[:, None], e, BLOCK_E), axis=1)
        taken = e == expert[:, None]
        share = tl.sum(tl.where(taken, scores, 0.0), axis=1)
        chosen = tl.where(k == i, expert[:, None], chosen)
        weights = tl.where(k == i, share[:, None], weights)
        keys = tl.where(taken, float("-inf"), keys)
    return chosen, weights


@triton.jit
def _weighed(
    weights: tl.tensor,
    scores: tl.tensor,
    chosen: tl.tensor,
    scales_ptr: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RULE: tl.constexpr,
) -> Any:
    """Weights of the chosen, float32 `[T, BLOCK_K]`. weights: their scores."""
    if RULE.of_chosen:
        total = tl.maximum(tl.sum(weights, axis=1), RULE.floor) + RULE.added
        weights = weights / total[:, None]
    elif not RULE.sigmoid:
        weights = weights / tl.sum(scores, axis=1)[:, None]
    weights *= RULE.factor
    if RULE.rounded == "bfloat16":
        weights = weights.to(tl.bfloat16).to(tl.float32)
    if RULE.rounded == "float16":
        weights = weights.to(tl.float16).to(tl.float32)
    if RULE.scaled:
        k = tl.arange(0, BLOCK_K)[None, :]
        weights *= tl.load(scales_ptr + chosen, mask=k < TOP_K, other=0.0)
    return weights
