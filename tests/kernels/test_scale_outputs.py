"""Factors and addends of the base's own product, row by row."""

import numpy as np
import pytest
import torch

from loraplex.server.kernels.lora.expand import scale_outputs
from loraplex.server.kernels.lora.table import VectorTable


@pytest.mark.parametrize("features", [1, 96, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_adapters_that_have_them(
    device: torch.device, features: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(features)
    table = VectorTable(3, 4, device)
    vectors = torch.randn(2, 2, features + features % 2 + 2, device=device)[..., :features]
    vectors = vectors.contiguous()
    kept = [vectors[0].clone(), vectors[1].clone()]
    for slot, numbers in zip((0, 2), kept, strict=True):
        table.write(slot, np.array([1]), np.array([numbers.data_ptr()]))
        table.upload(slot)
    table.write(3, np.array([0]), np.array([kept[0].data_ptr()]))
    table.upload(3)
    slots = torch.tensor([2, -1, 0, 1, 2, 3], dtype=torch.int32, device=device)
    y = torch.randn(6, features, device=device).to(dtype)
    expected = y.clone()
    for row, of in ((0, 1), (2, 0), (4, 1)):
        expected[row] = (y[row].float() * kept[of][0] + kept[of][1]).to(dtype)
    scale_outputs(y, slots, table, 1)
    torch.testing.assert_close(y, expected)
    untouched = y[[1, 3, 5]]
    assert torch.equal(untouched, expected[[1, 3, 5]])


def test_a_slot_written_again_has_what_it_has_now(device: torch.device) -> None:
    table = VectorTable(2, 1, device)
    numbers = torch.zeros(2, 4, device=device)
    table.write(0, np.array([0]), np.array([numbers.data_ptr()]))
    table.write(0, np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    table.upload(0)
    y, slots = torch.ones(1, 4, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    scale_outputs(y, slots, table, 0)
    assert y.eq(1).all()


def test_mismatches_are_refused() -> None:
    table, y = VectorTable(2, 2, "cpu"), torch.zeros(3, 8)
    slots = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="contiguous"):
        scale_outputs(torch.zeros(8, 3).T, slots, table, 0)
    with pytest.raises(ValueError, match="slots"):
        scale_outputs(y, slots.long(), table, 0)
    with pytest.raises(ValueError, match="site 2"):
        scale_outputs(y, slots, table, 2)
    with pytest.raises(ValueError, match="multiple of 16"):
        table.write(0, np.array([0]), np.array([8]))
