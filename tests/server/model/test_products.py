"""Which way a product takes: the policy by table, and on a GPU that every way computes the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.kernels.configs import load_configs, read_configs
from server.model.products import DEFAULT, LIBRARIES, Products, Way, choose, fastest

OTHER, THIRD = LIBRARIES[1], LIBRARIES[2]
SM90 = read_configs("sm90", 132, programmatic_launch=True)
OURS = SM90.skinny(1)[0]


@pytest.mark.parametrize(
    ("times", "way"),
    [
        ({DEFAULT: 1.0, OTHER: 0.9, THIRD: 0.95}, OTHER),
        ({DEFAULT: 1.0, OTHER: 0.99}, DEFAULT),
        ({DEFAULT: 1.0, OTHER: 1.2}, DEFAULT),
        ({DEFAULT: 1.0}, DEFAULT),
        ({DEFAULT: 1.0, OTHER: 0.9, OURS: 0.8}, OURS),
    ],
)
def test_default_unless_another_is_plainly_faster(times: dict[Way, float], way: Way) -> None:
    assert fastest(times) == way


@given(st.lists(st.floats(0.1, 10.0), min_size=len(LIBRARIES), max_size=len(LIBRARIES)))
def test_never_slower_than_the_default(times: list[float]) -> None:
    measured: dict[Way, float] = dict(zip(LIBRARIES, times, strict=True))
    assert measured[fastest(measured)] <= measured[DEFAULT]


def test_beside_lora_ours_is_for_one_row() -> None:
    times: dict[Way, float] = {DEFAULT: 1.0, OTHER: 0.9, OURS: 0.8}
    one, two = choose(times, 1), choose(times, 2)
    assert (one.alone, one.beside) == (OURS, OURS)
    assert (two.alone, two.beside) == (OURS, OTHER)


EVERY_WAY = [
    (rows, way) for rows in (1, 3, 8, 13, 32, 72) for way in (*LIBRARIES, *SM90.skinny(rows))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "way"), EVERY_WAY, ids=str)
def test_every_way_computes_the_product(
    rows: int, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr("server.model.products.fastest", lambda times: way)
    weight = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    products = Products(load_configs("cuda"))
    products.measure([rows], [[weight]])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain, biased = products.linear(x, weight), products.linear(x, weight, bias)
    graph.replay()
    exact = x.float() @ weight.float().T
    torch.testing.assert_close(plain.float(), exact, atol=0.5, rtol=2e-2)
    torch.testing.assert_close(biased.float(), exact + bias.float(), atol=0.5, rtol=2e-2)
    assert torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublas
