"""Experts' kernels against the obvious loops: choice, tiles, products, LoRA, weighted sum."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.moe.choose import ChoiceRule, assign_experts, choose_experts
from loraplex.server.kernels.moe.expert_lora import ExpertLora, add_expert_lora
from loraplex.server.kernels.moe.grouped import (
    ExpertTiles,
    GroupedShape,
    expert_tiles,
    grouped_product,
    grouped_shape,
    row_product,
    rows_are_few,
    tokens_of_each_shape,
)
from loraplex.server.kernels.moe.row_lora import activated_row_lora, add_row_lora
from loraplex.server.kernels.pointwise.add_norm import ExpertTerms, add_experts_norm
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.linear.linear import MoeWeights
from loraplex.server.model.ops.cuda.experts_cuda import choice_rule
from loraplex.server.model.ops.products_torch import routed, wide_logits
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.moe_spec import MoeSpec
from tests.grids import sparse

SMALL = GroupedShape(16, 32, 32, 4, 2)
LARGE = GroupedShape(64, 32, 16, 4, 2)


def chosen_of(tokens: int, top_k: int, experts: int, device: torch.device) -> torch.Tensor:
    """Random, and no expert twice for a token."""
    torch.manual_seed(tokens + experts)
    scores = torch.rand(tokens, experts)
    scores[:, 0] += 0.5  # one has many rows
    return scores.topk(top_k).indices.to(device, torch.int32)


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(8, 2, 5), (128, 8, 3), (32, 4, 1), (6, 6, 2), (5, 1, 40)]
)
@pytest.mark.parametrize("of_chosen", [False, True])
def test_the_largest_logits_choose(
    device: torch.device, experts: int, top_k: int, tokens: int, of_chosen: bool
) -> None:
    torch.manual_seed(experts)
    logits = torch.randn(tokens, experts).to(device) * 3
    chosen, weights = choose_experts(
        logits, top_k, ChoiceRule(of_chosen=of_chosen), programmatic_launch=False
    )
    expected = logits.topk(top_k)
    assert torch.equal(chosen.long(), expected.indices)
    shares = logits.softmax(-1).gather(1, expected.indices)
    if of_chosen:
        shares = expected.values.softmax(-1)
    torch.testing.assert_close(weights, shares)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_are_rounded(device: torch.device, dtype: torch.dtype) -> None:
    """Whatever the dtype of logits."""
    logits, rule = torch.randn(4, 8).to(device, dtype), ChoiceRule(of_chosen=True)
    rounded = rule._replace(rounded=torch.float16)
    _, weights = choose_experts(logits, 3, rounded, programmatic_launch=False)
    assert torch.equal(weights, weights.half().float())
    _, wide = choose_experts(logits, 3, rule, programmatic_launch=False)
    assert not torch.equal(wide, weights)


def test_weights_are_scaled_by_expert(device: torch.device) -> None:
    logits, scales = torch.randn(5, 8).to(device), torch.rand(8).to(device) + 0.5
    rule = ChoiceRule(of_chosen=True)
    chosen, weights = choose_experts(logits, 3, rule, programmatic_launch=False)
    _, scaled = choose_experts(logits, 3, rule._replace(scales=scales), programmatic_launch=False)
    torch.testing.assert_close(scaled, weights * scales[chosen.long()])


@pytest.mark.parametrize(
    ("normed", "changes"),
    [
        (True, {"rule": "sigmoid_top_k_normed", "norm_floor": 1e-20, "factor": 2.5}),
        (True, {"rule": "sigmoid_top_k_normed", "norm_added": 0.5, "groups": (4, 2)}),
        (False, {"rule": "sigmoid_top_k", "factor": 1.7, "groups": (6, 3)}),
        (False, {"rule": "sigmoid_top_k", "correction": False}),
        (False, {"rule": "sigmoid_top_k", "correction": False, "groups": (3, 2)}),
        (True, {"rule": "softmax_top_k_normed", "norm_floor": 0.4}),
        (False, {"rule": "softmax_top_k", "groups": (2, 1)}),
        (False, {"rule": "softmax_top_k", "groups": (4, 2), "best_of_group": 1}),
    ],
)
@pytest.mark.parametrize("tokens", [3, 50])
def test_scores_choose_as_the_definition_does(
    device: torch.device, normed: bool, changes: dict[str, Any], tokens: int
) -> None:
    """Corrected, in groups, divided and multiplied: as of a router in torch."""
    experts, top_k = 12, 4
    logits = torch.randn(tokens, experts).to(device) * 2
    correction = torch.randn(experts).to(device) * 0.4 if changes.get("correction", True) else None
    given = {key: value for key, value in changes.items() if key != "correction"}
    part = Part("gate", experts)
    linear = LinearSpec("router", 8, (part,), "none", experts=experts)
    spec = MoeSpec(linear, linear, top_k, linear, wide_weights=True, **given)
    matrix: Any = SimpleNamespace(run=lambda x: x)
    weights = MoeWeights(spec, matrix, matrix, matrix, correction)
    expected, shares = routed(logits, weights, None, SimpleNamespace())  # type: ignore[arg-type]
    rule = choice_rule(weights, torch.float32)
    assert rule.of_chosen is normed
    chosen, found = choose_experts(logits, top_k, rule, programmatic_launch=False)
    assert torch.equal(chosen.long(), expected)
    torch.testing.assert_close(found, shares)
    tiles, assigned = assign_experts(logits, top_k, 16, rule, programmatic_launch=False)
    assert torch.equal(tiles.experts.view_as(chosen), chosen)
    torch.testing.assert_close(assigned, shares)


def test_a_routers_logits_are_wide(device: torch.device) -> None:
    x, weight = torch.randn(5, 96).to(device).half(), torch.randn(12, 96).to(device).half()
    found = wide_logits(x, DenseLinear(weight))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x.float() @ weight.float().T, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_choose_experts_that_are_there(
    device: torch.device, value: float
) -> None:
    logits = torch.randn(3, 6).to(device)
    logits[1, ::2] = value
    logits[2] = value
    correction = torch.tensor([0.5, value, 0, 0, 0, 0], device=device)
    for rule in (ChoiceRule(of_chosen=True), ChoiceRule(sigmoid=True, correction=correction)):
        for groups in ((1, 1), (3, 2)):
            of = rule._replace(groups=groups)
            chosen, _ = choose_experts(logits, 4, of, programmatic_launch=False)
            for row in chosen.tolist():
                assert len(set(row)) == 4
                assert set(row) <= set(range(6))


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 2, 8), (33, 4, 6), (300, 8, 128), (700, 2, 3), (40, 1, 5)]
)
def test_every_row_is_in_one_tile_of_its_expert(
    device: torch.device, tile_rows: int, tokens: int, top_k: int, experts: int
) -> None:
    chosen = chosen_of(tokens, top_k, experts, device)
    tiles = expert_tiles(chosen, experts, tile_rows, programmatic_launch=False)
    of_row, seen = chosen.flatten().tolist(), list[int]()
    ended = False
    for expert, first, count in tiles.tiles.tolist():
        ended = ended or count == 0
        assert count == 0 or not ended
        if count:
            assert 0 < count <= tile_rows
            rows = tiles.order[first : first + count].tolist()
            assert {of_row[row] for row in rows} == {expert}
            seen += rows
    assert sorted(seen) == list(range(tokens * top_k))
    assert seen == sorted(seen, key=lambda row: (of_row[row], row))


def test_shapes_are_of_numbers_of_tokens() -> None:
    for top_k, experts in ((8, 128), (2, 8), (4, 32), (1, 16)):
        shapes = {grouped_shape(n, top_k, experts) for n in tokens_of_each_shape(top_k, experts)}
        assert shapes == {grouped_shape(n, top_k, experts) for n in range(1, 3000)}


def tiles_of(chosen: torch.Tensor, experts: int, shape: GroupedShape) -> ExpertTiles:
    return expert_tiles(chosen, experts, shape.tile_rows, programmatic_launch=False)


@pytest.mark.parametrize(
    ("shape", "tokens", "sizes", "bias"),
    sparse([SMALL, LARGE], [1, 37], [(64, 32), (72, 40), (48, 100)], [False, True]),
)
def test_rows_meet_their_experts(
    device: torch.device, shape: GroupedShape, tokens: int, sizes: tuple[int, int], bias: bool
) -> None:
    experts, top_k, (features, out) = 5, 2, sizes
    chosen = chosen_of(tokens, top_k, experts, device)
    weight = torch.randn(experts, out, features).to(device)
    biases = torch.randn(experts, out).to(device) if bias else None
    tiles = tiles_of(chosen, experts, shape)
    for x in (torch.randn(tokens, features), torch.randn(tokens * top_k, features)):
        x = x.to(device)
        y = grouped_product(x, weight, biases, tiles, shape, programmatic_launch=False)
        each = x.repeat_interleave(tokens * top_k // len(x), 0)
        of = chosen.flatten().long()
        expected = torch.einsum("rk,rnk->rn", each, weight[of])
        if biases is not None:
            expected = expected + biases[of]
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


# Infinity is meant.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu", "relu2"])
def test_gate_and_up_are_activated(device: torch.device, activation: str, bias: bool) -> None:
    chosen = chosen_of(20, 2, 4, device)
    x, weight = torch.randn(20, 48).to(device) * 2, torch.randn(4, 80, 48).to(device)
    biases = torch.randn(4, 80).to(device) if bias else None
    tiles = tiles_of(chosen, 4, SMALL)
    found = grouped_product(x, weight, biases, tiles, SMALL, activation, programmatic_launch=False)  # type: ignore[arg-type]
    product = grouped_product(x, weight, biases, tiles, SMALL, programmatic_launch=False)
    gate, up = product.chunk(2, dim=-1)
    if activation == "relu2":
        expected = functional.relu(product).square()
    elif activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        expected = gate * torch.sigmoid(1.702 * gate) * up
    elif activation == "silu":
        expected = functional.silu(gate) * up
    else:
        expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 64, 300, 2000])
@pytest.mark.parametrize(
    ("experts", "top_k", "sizes"),
    [(128, 8, (2048, 768)), (8, 2, (4096, 2048)), (32, 4, (2880, 2880))],
)
def test_half_precision(experts: int, top_k: int, sizes: tuple[int, int], tokens: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device, (hidden, inner) = torch.device("cuda"), sizes
    chosen = chosen_of(tokens, top_k, experts, device)
    shape = grouped_shape(tokens, top_k, experts)
    tiles = tiles_of(chosen, experts, shape)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    weight = torch.randn(experts, 2 * inner, hidden, device=device).bfloat16() * 0.02
    bias = torch.randn(experts, 2 * inner, device=device).bfloat16()
    found = grouped_product(x, weight, bias, tiles, shape, programmatic_launch=False)
    expected = torch.empty_like(found)
    for expert in range(experts):
        rows = (chosen.flatten() == expert).nonzero()[:, 0]
        expected[rows] = functional.linear(x[rows // top_k], weight[expert], bias[expert])
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    if rows_are_few(tokens, top_k, experts):
        found = row_product(x, weight, bias, tiles.experts, programmatic_launch=True)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


# Infinity is meant.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize(
    ("tokens", "sizes", "activation"),
    [
        (1, (2048, 12), None),
        (2, (1100, 24), "silu"),
        (3, (40, 10), "clamped_swiglu"),
        (1, (96, 9), "relu2"),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_take_the_same_product(
    device: torch.device, tokens: int, sizes: tuple[int, int], activation: str | None, bias: bool
) -> None:
    experts, top_k, (features, out) = 5, 2, sizes
    chosen = chosen_of(tokens, top_k, experts, device)
    weight = torch.randn(experts, out, features).to(device) * features**-0.5
    biases = torch.randn(experts, out).to(device) if bias else None
    tiles = tiles_of(chosen, experts, SMALL)
    for x in (torch.randn(tokens, features), torch.randn(tokens * top_k, features)):
        of = (x.to(device), weight, biases)
        wanted = grouped_product(*of, tiles, SMALL, activation, programmatic_launch=False)  # type: ignore[arg-type]
        found = row_product(*of, tiles.experts, activation, programmatic_launch=False)  # type: ignore[arg-type]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_tiles_of_another_shape_are_refused() -> None:
    order, tiles = torch.zeros(4, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="tiles of 16 rows"):
        grouped_product(
            torch.zeros(2, 16),
            torch.zeros(2, 16, 16),
            None,
            ExpertTiles(order, order, tiles, 16, 2),
            LARGE,
            programmatic_launch=False,
        )


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 128), (5, 2, 8), (16, 8, 32)])
@pytest.mark.parametrize("tile_rows", [4, 16])
def test_a_few_tokens_are_assigned_as_many(
    device: torch.device, tile_rows: int, tokens: int, top_k: int, experts: int
) -> None:
    logits = torch.randn(tokens, experts).to(device)
    logits[:, 1] += 2  # one has many rows
    rule = ChoiceRule(of_chosen=True, scales=torch.rand(experts).to(device))
    tiles, weights = assign_experts(logits, top_k, tile_rows, rule, programmatic_launch=False)
    chosen, expected = choose_experts(logits, top_k, rule, programmatic_launch=False)
    separate = expert_tiles(chosen, experts, tile_rows, programmatic_launch=False)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(tiles.order, separate.order)
    counts = separate.tiles[:, 2]
    assert torch.equal(tiles.tiles[:, 2], counts)
    assert torch.equal(tiles.tiles[counts > 0], separate.tiles[counts > 0])


@pytest.mark.parametrize(("normed", "beside"), [(False, True), (True, False), (True, True)])
def test_results_are_summed_by_weight(device: torch.device, normed: bool, beside: bool) -> None:
    results, weights = torch.randn(3 * 4, 1100).to(device), torch.rand(3, 4).to(device)
    hidden, scale = torch.randn(3, 1100).to(device), torch.rand(1100).to(device)
    of_all = torch.randn(3, 1100).to(device) if beside else torch.zeros(3, 1100, device=device)
    summed = of_all + (results.view(3, 4, 1100) * weights[..., None]).sum(1)
    total = hidden + 0.5 * summed
    norm = (scale, 1e-5) if normed else None
    terms = ExpertTerms(results, weights, of_all if beside else None)
    y = add_experts_norm(terms, hidden, norm, None, (0.5, 1.0), programmatic_launch=False)
    torch.testing.assert_close(hidden, total)
    expected = functional.rms_norm(total, (1100,), scale, 1e-5) if normed else total
    torch.testing.assert_close(y, expected)


def test_results_of_other_rows_are_refused() -> None:
    terms, hidden = ExpertTerms(torch.zeros(5, 8), torch.zeros(2, 2)), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"\[5, 8\]"):
        add_experts_norm(terms, hidden, None, programmatic_launch=False)


class _Adapter:
    """A and B of all experts, of some ranks; shared: one A for all projections."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        experts: int,
        sizes: tuple[int, tuple[int, ...]],
        device: torch.device,
        *,
        shared: bool = False,
    ) -> None:
        features, widths = sizes
        self.ranks, self.scales = ranks, [0.5 + i for i in range(len(ranks))]
        self.rows_of_a = max(ranks) if shared else sum(ranks)
        self.a = torch.randn(experts, self.rows_of_a, features).to(device)
        self.b = [torch.randn(experts, w, r).to(device) for w, r in zip(widths, ranks, strict=True)]
        self.begins = [0 if shared else sum(ranks[:i]) for i in range(len(ranks))]

    def write(self, table: LoraTable, slot: int, site: int) -> None:
        pointers = [b.data_ptr() for b in self.b]
        context = (self.a.data_ptr(), pointers, self.ranks, self.scales, self.rows_of_a)
        table.write(slot, site, *context)
        table.upload(slot)

    def delta(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        bridge = self.a[expert] @ x
        parts = zip(self.b, self.begins, self.ranks, self.scales, strict=True)
        return torch.cat([s * b[expert] @ bridge[i : i + r] for b, i, r, s in parts])


# Infinity is meant.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize(
    ("widths", "tokens", "tile_rows", "of_rows"),
    sparse([(40, 40), (150,), (48, 24)], [1, 30], [16, 64], [False, True]),
)
def test_each_row_gets_the_lora_of_its_adapter_and_expert(
    device: torch.device, widths: tuple[int, ...], tokens: int, tile_rows: int, of_rows: bool
) -> None:
    experts, top_k, features, site = 4, 2, 72, 1
    chosen = chosen_of(tokens, top_k, experts, device)
    table = LoraTable(2, 5, device)
    parts = len(widths)
    sizes = (features, widths)
    adapters = {
        0: _Adapter((3, 20)[:parts], experts, sizes, device),
        1: _Adapter((8, 8)[:parts], experts, sizes, device, shared=parts == 2),
        3: _Adapter((100, 1)[:parts], experts, sizes, device),
        4: _Adapter((0, 5)[:parts] if parts == 2 else (5,), experts, sizes, device),
    }
    for slot, adapter in adapters.items():
        adapter.write(table, slot, site)
    slots = torch.tensor([(3, 0, -1, 1, 2, 4)[i % 6] for i in range(tokens)], dtype=torch.int32)
    tiles = expert_tiles(chosen, experts, tile_rows, programmatic_launch=False)
    x = torch.randn(tokens * top_k if of_rows else tokens, features).to(device)
    y = torch.randn(tokens * top_k, sum(widths)).to(device)
    expected = y.clone()
    for row, expert in enumerate(chosen.flatten().tolist()):
        slot = int(slots[row // top_k])
        if slot in adapters:
            expected[row] += adapters[slot].delta(expert, x[row if of_rows else row // top_k])
    of = (tiles, ExpertLora(table, site, widths, slots.to(device)))
    if len(set(widths)) == 1:
        inner = activated_row_lora(x, y, *of, "silu", programmatic_launch=False)
        gate, up = expected.chunk(2, dim=-1)
        torch.testing.assert_close(inner, functional.silu(gate) * up, atol=1e-2, rtol=1e-3)
    by_row = y.clone()
    add_expert_lora(x, y, *of, programmatic_launch=False)
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-3)
    if parts == 1:
        inner = activated_row_lora(x, by_row, *of, "relu2", programmatic_launch=False)
        squares = functional.relu(expected).square()
        torch.testing.assert_close(inner, squares, atol=1e-2, rtol=1e-3)
        add_row_lora(x, by_row, *of, programmatic_launch=False)
        torch.testing.assert_close(by_row, expected, atol=1e-3, rtol=1e-3)


def test_lora_of_other_features_is_refused() -> None:
    table = LoraTable(1, 1, "cpu")
    tiles = ExpertTiles(torch.zeros(4).int(), torch.zeros(4).int(), torch.zeros(4, 3).int(), 16, 2)
    lora = ExpertLora(table, 0, (4, 4), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="features"):
        add_expert_lora(
            torch.zeros(2, 8), torch.zeros(4, 9), tiles, lora, programmatic_launch=False
        )


def test_rows_take_projections_of_one_form() -> None:
    table = LoraTable(1, 1, "cpu")
    tiles = ExpertTiles(torch.zeros(4).int(), torch.zeros(4).int(), torch.zeros(4, 3).int(), 16, 2)
    lora = ExpertLora(table, 0, (4, 2), torch.zeros(2, dtype=torch.int32))
    x, y = torch.zeros(2, 8), torch.zeros(4, 6)
    with pytest.raises(ValueError, match="as wide as each other"):
        activated_row_lora(x, y, tiles, lora, "silu", programmatic_launch=False)
    with pytest.raises(ValueError, match="more than one projection"):
        add_row_lora(x, y, tiles, lora, programmatic_launch=False)
