"""Rows in eight bits, and their products with such weights, against plain torch in float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.kernels.launch.configs import PackedConfig, load_configs
from loraplex.server.kernels.linear.few_rows import rounded_product
from loraplex.server.kernels.linear.round_rows import quantise_rows
from loraplex.server.kernels.linear.row_form import (
    FP8,
    INT8,
    RoundedRows,
    RowForm,
    allocate_rows,
    quantise_reference,
    rounded,
)
from loraplex.server.kernels.pointwise.add_norm import (
    ExpertTerms,
    add_experts_norm,
    add_norm,
    rms_norm,
)
from loraplex.server.kernels.pointwise.gated import gated
from loraplex.server.model.linear.packed import PackedWeight
from loraplex.server.model.linear.quantised import (
    QuantisedLinear,
    RoundedLinear,
    matrix_of,
    row_form,
)
from tests.kernels.batches import assert_close, interpreted
from tests.kernels.quantised import codes, fp8

CPU = torch.device("cpu")
FORMS = (
    *(RowForm(), RowForm(group=128), RowForm(most=1.5), RowForm(scale=0.02)),
    *(RowForm(dtype=INT8), RowForm(group=128, dtype=INT8), RowForm(scale=0.02, dtype=INT8)),
)
CONFIGS = (
    PackedConfig(64, 128, 4, 3, False),
    PackedConfig(16, 256, 4, 3, False, splits=3),
)


def values(rows: RoundedRows, group: int) -> torch.Tensor:
    width = rows.numbers.shape[1]
    spread = rows.scales.T.repeat_interleave(group or width, 1)[:, :width]
    return rows.numbers.float() * spread


def assert_same_rows(found: RoundedRows, expected: RoundedRows) -> None:
    """A quotient may lie on the border of two numbers, and go either way."""
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-6, atol=0.0)
    a, b = (rows.numbers.float() for rows in (found, expected))
    step = 1.0 if expected.numbers.dtype == INT8 else 2**-9
    torch.testing.assert_close(a, b, rtol=2**-3, atol=step)
    assert ((a != b).sum() <= 1 + a.numel() // 1000).all()


def drawn(rows: int, features: int, device: torch.device = CPU) -> torch.Tensor:
    """Rows of very different sizes, the first of zeros."""
    x = (
        torch.randn(rows, features, device=device)
        * torch.logspace(-3, 2, rows, device=device)[:, None]
    )
    x[0] = 0.0
    return x


@interpreted
@given(rows=st.integers(1, 5), features=st.sampled_from((16, 100, 128, 200, 300)), data=st.data())
@settings(max_examples=8)
def test_rows(rows: int, features: int, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    torch.manual_seed(features)
    x = drawn(rows, 2 * features)[:, :features]
    found = quantise_rows(x, form, programmatic_launch=False)
    assert_same_rows(found, quantise_reference(x, form))
    most = form.most if form.scale is None else form.scale * (448 if form.dtype == FP8 else 127)
    expected = values(found, form.group)
    torch.testing.assert_close(rounded(x, form), expected)
    step = 2**-9 * 0.3 if form.dtype == FP8 else 0.5001 * float(found.scales.max())
    torch.testing.assert_close(expected, x.clamp(-most, most), rtol=2**-4 + 1e-6, atol=step)


@interpreted
@pytest.mark.parametrize("form", FORMS)
def test_writers_leave_what_a_kernel_of_its_own_would(form: RowForm) -> None:
    torch.manual_seed(3)
    rows, features = 3, 200
    norm = (torch.rand(features) + 0.5, 1e-5)
    hidden, y = torch.randn(2, rows, features).half()
    found = (allocate_rows(y, form), form)
    alone = rms_norm(hidden, norm, found, programmatic_launch=False)
    assert torch.equal(alone, rms_norm(hidden, norm, programmatic_launch=False))
    assert_same_rows(found[0], quantise_reference(alone, form))
    add_norm(y, None, hidden, norm, rounding=found, programmatic_launch=False)
    assert_same_rows(found[0], quantise_reference(y, form))
    shares = torch.rand(rows, 2)
    parts = torch.randn(rows * 2, features).half()
    terms = ExpertTerms(parts, shares)
    summed = add_experts_norm(terms, hidden, norm, rounding=found, programmatic_launch=False)
    assert_same_rows(found[0], quantise_reference(summed, form))
    for inner in (100, 1500):
        pair = torch.randn(rows, 2 * inner).half()
        found = (allocate_rows(pair, form, inner), form)
        out = gated(pair, None, "silu", found, programmatic_launch=False)
        assert_same_rows(found[0], quantise_reference(out, form))


def made(dtype: torch.dtype, block: int, out_features: int, features: int) -> PackedWeight:
    """block: inputs that share a scale, 0 = all; of FP8 as many outputs do."""
    make = fp8(block or 1, block) if dtype == FP8 else codes(8, block)
    return make(out_features, features)


def check(
    dtype: torch.dtype,
    block: int,
    shape: tuple[int, int, int],
    device: torch.device = CPU,
    *,
    bias: bool,
) -> None:
    """Every configuration, and all that is around the product stays as it is."""
    rows, out_features, features = shape
    weight = made(dtype, block, out_features, features)
    matrix = matrix_of(weight.to(device))
    assert matrix is not None
    form = RowForm(group=matrix.group, dtype=dtype)
    x = quantise_reference(drawn(rows, features, device), form)
    exact = values(x, matrix.group).cpu() @ weight.dequantised(torch.empty(weight.shape)).T
    added = torch.randn(out_features, device=device).to(torch.float16) if bias else None
    wide = torch.full((rows, out_features + 8), float("nan"), dtype=torch.float16, device=device)
    for config in CONFIGS:
        rounded_product(x, matrix, added, wide[:, :out_features], config)
        expected = exact if added is None else exact + added.float().cpu()
        assert_close(wide[:, :out_features].cpu(), expected, torch.float16)
    assert not matrix.arrivals.any()
    assert wide[:, out_features:].isnan().all()


@interpreted
@given(
    dtype=st.sampled_from((FP8, INT8)),
    block=st.sampled_from((0, 32, 128)),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 90), st.sampled_from((16, 128, 300, 512))),
    bias=st.booleans(),
)
@settings(max_examples=8)
def test_products(dtype: torch.dtype, block: int, shape: tuple[int, int, int], bias: bool) -> None:
    torch.manual_seed(sum(shape))
    check(dtype, block, shape, bias=bias)


@interpreted
def test_rows_beyond_one_program() -> None:
    torch.manual_seed(0)
    check(INT8, 0, (150, 64, 256), bias=False)


@interpreted
def test_mismatches() -> None:
    matrix = matrix_of(fp8(128, 128)(64, 256))
    assert matrix is not None
    x, out = torch.randn(3, 256), torch.empty(3, 64)
    with pytest.raises(ValueError, match="scales of x are"):
        rounded_product(quantise_reference(x, RowForm()), matrix, None, out, CONFIGS[0])
    with pytest.raises(ValueError, match="do not fit"):
        rounded_product(
            quantise_reference(x, RowForm(group=128)), matrix, None, out[:2], CONFIGS[0]
        )


def linear(block: int, form: RowForm, device: torch.device = CPU) -> RoundedLinear:
    matrix = matrix_of(fp8(block or 1, block)(256, 256).to(device))
    assert matrix is not None
    return RoundedLinear(QuantisedLinear(matrix, None, torch.bfloat16), form)


def test_writers_serve_one_form_that_needs_no_number_of_the_checkpoint() -> None:
    token, blocks, measured = RowForm(), RowForm(group=128), RowForm(scale=0.02)
    assert row_form([linear(0, token), linear(0, token), linear(0, measured)]) == token
    assert row_form([linear(128, blocks)]) == blocks
    assert row_form([linear(0, token), linear(128, blocks)]) is None
    assert row_form([linear(0, measured)]) is None
    assert row_form([linear(0, blocks)]) is None  # rounded, and multiplied by other kernels


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "block"), [(FP8, 0), (FP8, 128), (INT8, 0)])
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64, 128, 200, 2000])
def test_on_a_gpu(dtype: torch.dtype, block: int, rows: int) -> None:
    """Every way of a linear, of real widths and of odd ones, against the definition in float32."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(rows)
    device = torch.device("cuda")
    for out_features, features in ((6144, 4096), (4096, 14336), (512, 384), (1000, 1544)):
        weight = made(dtype, block, out_features, features)
        matrix = matrix_of(weight.to(device))
        assert matrix is not None
        bias = torch.randn(out_features, device=device).bfloat16()
        form = RowForm(matrix.group, dtype=dtype)
        of = RoundedLinear(QuantisedLinear(matrix, bias, torch.bfloat16), form)
        x = drawn(rows, features, device).bfloat16()
        found = of.inputs(x, load_configs(device))
        assert isinstance(found, RoundedRows)
        assert_same_rows(found, quantise_reference(x, form))
        exact = weight.to(device).dequantised(torch.empty(weight.shape, device=device))
        expected = values(found, matrix.group) @ exact.T + bias.float()
        for way in of.ways(rows, load_configs(device)):
            out = of.run(found, None, way)
            torch.testing.assert_close(
                out, expected.bfloat16(), rtol=2**-7, atol=1e-2 * float(expected.std())
            )
        assert not matrix.arrivals.any()
    assert row_form([of]) == of.form
