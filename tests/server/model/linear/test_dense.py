"""A dense matrix multiplies as its own values say, and knows what it takes."""

import pytest
import torch

from loraplex.server.model.linear.dense import DenseLinear


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("given_out", [False, True])
def test_the_product_is_that_of_its_dequantised_matrix(biased: bool, given_out: bool) -> None:
    bias = torch.randn(5) if biased else None
    linear = DenseLinear(torch.randn(5, 7), bias)
    x, room = linear.operands(3)
    assert x.shape == (3, linear.in_features)
    out = room if given_out else None
    y = linear.run(x, out)
    assert out is None or y is out
    expected = x @ linear.dequantised().T + (0 if bias is None else bias)
    torch.testing.assert_close(y, expected)


def test_bytes_are_those_of_weight_and_bias() -> None:
    weight = torch.zeros(6, 4, dtype=torch.bfloat16)
    assert DenseLinear(weight).nbytes == 48
    assert DenseLinear(weight, torch.zeros(6, dtype=torch.bfloat16)).nbytes == 60
