"""Products of rows with their experts' quantised matrices, against torch's with their values."""

from dataclasses import replace

import pytest
import torch

from loraplex.server.kernels.moe.grouped import GroupedShape, grouped_product
from loraplex.server.kernels.pointwise.gated import GatedActivation
from loraplex.server.model.linear.packed import joined
from loraplex.server.model.linear.quantised import matrix_of
from tests.grids import sparse
from tests.kernels.batches import interpreted
from tests.kernels.quantised import LAYOUTS, codes
from tests.kernels.test_moe import LARGE, SMALL, chosen_of, tiles_of

EXPERTS, TOP_K = 5, 2
LAYOUTS_OF_EXPERTS = {
    name: make
    for name, make in LAYOUTS.items()
    # An order is each matrix's own; blocks of 32 rows do not divide 80.
    if name not in ("int4-order", "int8", "fp8-blocks")
} | {"mxfp4": codes(4, 32, table=True, dtype=torch.bfloat16)}


@interpreted
@pytest.mark.parametrize(
    ("name", "way"),
    sparse(list(LAYOUTS_OF_EXPERTS), [(SMALL, None), (SMALL, "clamped_swiglu"), (LARGE, None)]),
)
# Infinity is meant.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
def test_rows_meet_their_experts(
    name: str, way: tuple[GroupedShape, GatedActivation | None]
) -> None:
    torch.manual_seed(0)
    shape, activation = way
    device, (features, out), tokens = torch.device("cpu"), (128, 80), 9
    weights = [LAYOUTS_OF_EXPERTS[name](out, features) for _ in range(EXPERTS)]
    whole = joined(weights)
    assert whole is not None
    matrix = matrix_of(whole)
    assert matrix is not None
    matrix = replace(matrix, matrices=EXPERTS)
    values = torch.stack([each.dequantised(torch.empty(each.shape)) for each in weights])
    chosen = chosen_of(tokens, TOP_K, EXPERTS, device)
    tiles = tiles_of(chosen, EXPERTS, shape)
    bias = torch.randn(EXPERTS, out)
    x = torch.randn(tokens, features) / features**0.5
    context = (bias, tiles, shape, activation)
    found = grouped_product(x, matrix, *context, programmatic_launch=False)
    expected = grouped_product(x, values, *context, programmatic_launch=False)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_one_matrix_of_several() -> None:
    for name in ("fp8-wide-blocks", "int4-zeros", "int8-rows"):
        weights = [LAYOUTS[name](32, 128) for _ in range(3)]
        whole = joined(weights)
        assert whole is not None
        matrix = matrix_of(whole)
        assert matrix is not None
        for number, weight in enumerate(weights):
            one, of = matrix_of(weight), replace(matrix, matrices=3).matrix(number)
            assert one is not None
            assert of.shape == one.shape
            assert torch.equal(of.numbers, one.numbers)
            assert torch.equal(of.scales, one.scales)
