"""Products with quantised weights against torch's with what they stand for, in odd shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.kernels.launch.configs import PackedConfig, load_configs
from loraplex.server.kernels.linear.few_rows import MAX_ROWS, packed_product
from loraplex.server.kernels.linear.packed import dequantise
from loraplex.server.model.linear.packed import PackedWeight
from loraplex.server.model.linear.quantised import QuantisedLinear, matrix_of
from tests.grids import beyond, sparse
from tests.kernels.batches import assert_close, interpreted
from tests.kernels.quantised import LAYOUTS, codes, fp8

# A layout of each kind of numbers; one of them has zeros and an order of inputs.
FEW = ["fp8-blocks", "int4-order", "nf4", "int8-rows"]
CONFIGS = (
    PackedConfig(16, 32, 2, 3, False),
    PackedConfig(16, 64, 4, 3, False, parts=4),
    PackedConfig(32, 64, 4, 3, False, splits=3),
)


def values(weight: PackedWeight) -> torch.Tensor:
    return weight.dequantised(torch.empty(weight.shape))


def check(
    name: str, rows: int, out_features: int, features: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = LAYOUTS[name](out_features, features)
    exact = values(weight)
    matrix = matrix_of(weight.to(device))
    assert matrix is not None
    x = (torch.randn(rows, features) / features**0.5).to(dtype).to(device)
    bias = torch.randn(out_features).to(dtype).to(device)
    wide = torch.full((rows, out_features + 8), float("nan"), dtype=dtype, device=device)
    out = wide[:, :out_features]
    expected = x.float().cpu() @ exact.T
    for config in CONFIGS:
        packed_product(x, matrix, None, out, config)
        assert_close(out.cpu(), expected, dtype)
    assert not matrix.arrivals.any()
    packed_product(x, matrix, bias, out, CONFIGS[0])
    assert_close(out.cpu(), expected + bias.float().cpu(), dtype)
    assert wide[:, out_features:].isnan().all()


@interpreted
@pytest.mark.parametrize("name", beyond(4, FEW + [name for name in LAYOUTS if name not in FEW]))
@given(data=st.data())
@settings(max_examples=4)
def test_any_shape(name: str, data: st.DataObject) -> None:
    rows, out_features = data.draw(st.integers(1, MAX_ROWS)), data.draw(st.integers(1, 70))
    unit = 128 if "4" in name else 2
    features = unit * data.draw(st.integers(1, 256 // unit))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float16)))
    torch.manual_seed(rows)
    check(name, rows, out_features, features, dtype, torch.device("cpu"))


@interpreted
@pytest.mark.parametrize("name", LAYOUTS)
def test_whole_blocks(name: str) -> None:
    """Without masks."""
    for rows in (1, 16):
        check(name, rows, 64, 256, torch.float32, torch.device("cpu"))


@interpreted
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_out_is_what_it_stands_for(name: str) -> None:
    for shape in ((33, 128), (16, 512)):
        weight = LAYOUTS[name](*shape)
        matrix = matrix_of(weight)
        assert matrix is not None
        out = torch.full(shape, float("nan"))
        dequantise(matrix, out, programmatic_launch=False)
        torch.testing.assert_close(out, values(weight), rtol=2**-22, atol=0.0)


@interpreted
@pytest.mark.parametrize(("name", "rows"), sparse(list(LAYOUTS), [1, 3, 33, 65]))
def test_every_way_of_a_linear(name: str, rows: int) -> None:
    weight = LAYOUTS[name](48, 128)
    matrix = matrix_of(weight)
    assert matrix is not None
    bias = torch.randn(48)
    linear = QuantisedLinear(matrix, bias, torch.float32)
    assert linear.nbytes > 0
    configs = load_configs("cpu")
    x, out = linear.operands(rows)
    expected = x @ values(weight).T + bias
    for way in linear.ways(rows, configs):
        torch.testing.assert_close(linear.run(x, out, way), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(linear.run(x, None, way), expected, rtol=1e-4, atol=1e-4)


def test_what_the_kernels_do_not_read() -> None:
    assert matrix_of(LAYOUTS["int4"](8, 96)) is None
    assert matrix_of(codes(4, 48)(8, 192)) is None
    assert matrix_of(fp8(1, 48)(8, 192)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64, 100])
def test_on_a_gpu(name: str, rows: int) -> None:
    """Every configuration of the device, of real widths; what is written out, too."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(rows)
    device, dtype = torch.device("cuda"), torch.bfloat16
    for out_features, features in ((6144, 4096), (1000, 1536)):
        weight = LAYOUTS[name](out_features, features)
        exact = values(weight)
        matrix = matrix_of(weight.to(device))
        assert matrix is not None
        linear = QuantisedLinear(matrix, None, dtype)
        written = linear.dequantised().float().cpu()
        assert torch.equal(written, exact.to(dtype).float())
        x = (torch.randn(rows, features) / features**0.5).to(dtype).to(device)
        expected = x.float().cpu() @ exact.T
        for way in linear.ways(rows, load_configs(device)):
            assert_close(linear.run(x, None, way).cpu(), expected, dtype)
