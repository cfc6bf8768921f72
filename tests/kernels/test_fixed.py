"""The product of one shape: against torch's, and with the same bits in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.kernels.linear.skinny import fixed_product
from tests.kernels.batches import assert_close, interpreted
from tests.kernels.interpreter import exact_products

STAGES = 2


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), float("nan"), dtype=x.dtype, device=x.device)
    fixed_product(x, weight, bias, out, STAGES)
    return out


def operands(
    rows: int, n: int, features: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, features + 8).to(device, dtype)[:, :features]
    weight = (torch.randn(n, features) / features**0.5).to(device, dtype)
    return x, weight, torch.randn(n).to(device, dtype)


@interpreted
@given(
    rows=st.integers(1, 130),
    n=st.integers(1, 140),
    features=st.integers(1, 150),
    dtype=st.sampled_from((torch.float32, torch.float16)),
)
@settings(max_examples=10)
def test_any_shape(rows: int, n: int, features: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, n, features, dtype, torch.device("cpu"))
    exact = x.float() @ weight.float().T
    assert_close(product(x, weight, None), exact, dtype)
    assert_close(product(x, weight, bias), exact + bias.float(), dtype)


@pytest.mark.parametrize("features", [256, 136])
def test_the_same_bits_in_any_batch(device: torch.device, features: int) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows, n = (140, 130) if device.type == "cpu" else (700, 1024)
    x, weight, bias = operands(rows, n, features, dtype, device)
    with exact_products():
        whole = product(x, weight, bias)
        for part in ((0, 1), (63, 64), (64, 65), (5, 70), (rows - 1, rows)):
            assert torch.equal(product(x[slice(*part)], weight, bias), whole[slice(*part)])
        order = torch.randperm(rows)
        assert torch.equal(product(x[order], weight, bias), whole[order])


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(3, 16), torch.zeros(4, 17)
    with pytest.raises(ValueError, match="do not fit"):
        product(x, weight, None)
    assert product(torch.zeros(0, 17), weight, None).shape == (0, 4)
