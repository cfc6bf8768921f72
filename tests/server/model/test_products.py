"""Which way a product takes: the policy by table, and on a GPU that every way computes the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.model.products import DEFAULT, WAYS, Products, Way, fastest

OTHER, THIRD = WAYS[1], WAYS[2]


@pytest.mark.parametrize(
    ("times", "way"),
    [
        ({DEFAULT: 1.0, OTHER: 0.9, THIRD: 0.95}, OTHER),
        ({DEFAULT: 1.0, OTHER: 0.99}, DEFAULT),
        ({DEFAULT: 1.0, OTHER: 1.2}, DEFAULT),
        ({DEFAULT: 1.0}, DEFAULT),
    ],
)
def test_default_unless_another_is_plainly_faster(times: dict[Way, float], way: Way) -> None:
    assert fastest(times) == way


@given(st.lists(st.floats(0.1, 10.0), min_size=len(WAYS), max_size=len(WAYS)))
def test_never_slower_than_the_default(times: list[float]) -> None:
    measured = dict(zip(WAYS, times, strict=True))
    assert measured[fastest(measured)] <= measured[DEFAULT]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 72])
def test_every_way_computes_the_product(
    way: Way, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr("server.model.products.WAYS", (DEFAULT, way))
    monkeypatch.setattr("server.model.products.fastest", lambda times: way)
    weight = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    products = Products()
    products.measure([rows], [[weight]])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain, biased = products.linear(x, weight), products.linear(x, weight, bias)
    graph.replay()
    exact = x.float() @ weight.float().T
    torch.testing.assert_close(plain.float(), exact, atol=0.5, rtol=2e-2)
    torch.testing.assert_close(biased.float(), exact + bias.float(), atol=0.5, rtol=2e-2)
    assert torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublas
