"""Which way a product takes: the policy by table, and on a GPU that every way computes the same."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.kernels.launch.configs import SkinnyConfig, load_configs, read_configs
from loraplex.server.kernels.linear import skinny
from loraplex.server.kernels.linear.skinny import skinny_product
from loraplex.server.model.linear.dense import DEFAULT, LIBRARIES, DenseLinear, Way
from loraplex.server.model.ops.cuda import lora_linear
from loraplex.server.model.ops.cuda.lora_linear import Products, choose, fastest
from tests.kernels.batches import interpreted

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


def test_ours_is_not_beside_lora() -> None:
    choice = choose({DEFAULT: 1.0, OTHER: 0.9, OURS: 0.8}, DenseLinear(torch.zeros(4, 4)))
    assert (choice.alone, choice.beside) == (OURS, OTHER)


@interpreted
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("given_out", [False, True])
def test_a_captured_step_takes_what_was_chosen(
    rows: int, given_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of graphs, and beside LoRA, no kernel of ours runs."""
    ran: list[SkinnyConfig] = []

    def noted(*arguments: Any) -> None:
        ran.append(arguments[-1])
        skinny_product(*arguments)

    configs = load_configs("cpu")
    (ours,) = configs.skinny(rows)
    times: dict[Way, float] = {**dict.fromkeys(LIBRARIES, 1.0), ours: 0.5}
    monkeypatch.setattr(lora_linear, "_times", lambda *_: times)
    monkeypatch.setattr(skinny, "skinny_product", noted)
    weight, bias, x = torch.randn(48, 32), torch.randn(48), torch.randn(rows, 32)
    of = Products(configs)
    of.measure([rows], [[DenseLinear(weight, bias)]])

    def check(beside_lora: bool) -> int:
        """How often our kernel ran by then."""
        for b in (None, bias):
            out = torch.empty(rows, 48) if given_out else None
            y = of.linear(x, DenseLinear(weight, b), out, beside_lora=beside_lora)
            assert out is None or y is out
            torch.testing.assert_close(y, x @ weight.T + (0 if b is None else b))
        return len(ran)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert check(False) == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert check(False) == 2
    assert check(True) == 2
    assert set(ran) == {ours}


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
    monkeypatch.setattr("loraplex.server.model.ops.cuda.lora_linear.fastest", lambda times: way)
    weight = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    of = Products(load_configs("cuda"))
    of.measure([rows], [[DenseLinear(weight, bias)]])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain = of.linear(x, DenseLinear(weight))
        biased = of.linear(x, DenseLinear(weight, bias))
    graph.replay()
    exact = x.float() @ weight.float().T
    torch.testing.assert_close(plain.float(), exact, atol=0.5, rtol=2e-2)
    torch.testing.assert_close(biased.float(), exact + bias.float(), atol=0.5, rtol=2e-2)
    assert torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublas
