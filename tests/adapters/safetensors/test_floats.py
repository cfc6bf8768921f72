"""Conversions of floats against torch's."""

import typing
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.manifest import SlabDtype
from loraplex.adapters.safetensors.floats import (
    FloatDigest,
    convert,
    convert_into,
    fits,
    float_digest,
    is_finite,
    may_overflow,
    read_floats,
)

TORCH: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
Stored = Literal["F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2"]


def raw_of(tensor: torch.Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.array(tensor.contiguous().view(torch.uint8).numpy().reshape(-1), dtype=np.uint8)


@settings(max_examples=300)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=20),
    st.sampled_from(tuple(typing.get_args(Stored))),
    st.sampled_from(("float32", "float16", "bfloat16")),
)
def test_converts_as_torch_does(values: list[float], stored: Stored, target: SlabDtype) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(torch.float32).to(TORCH[stored])
    if not bool(torch.isfinite(tensor.to(torch.float32)).all()):
        assert not is_finite(raw_of(tensor), stored)
        return
    expected = tensor.to(torch.float32).to(TORCH[target])
    ours = convert(raw_of(tensor), stored, target)
    assert ours.tobytes() == raw_of(expected).tobytes()
    written = np.zeros(ours.nbytes, np.uint8)
    convert_into(raw_of(tensor), stored, written, target)
    assert written.tobytes() == ours.tobytes()
    fitting = bool(torch.isfinite(expected).all())
    assert fits(raw_of(tensor), stored, target) is fitting
    assert may_overflow(stored, target) or fitting


def test_every_float8_is_read_exactly() -> None:
    bits = np.arange(256, dtype=np.uint8)
    for stored, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        expected = torch.from_numpy(bits).view(dtype).to(torch.float32).numpy()
        np.testing.assert_array_equal(read_floats(bits, stored), expected)


def test_every_bfloat16_and_float16_is_read_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    for stored, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        expected = (
            torch.from_numpy(bits.view(np.int16).copy()).view(dtype).to(torch.float32).numpy()
        )
        np.testing.assert_array_equal(read_floats(bits.view(np.uint8), stored), expected)


@pytest.mark.parametrize("stored", ["F8_E4M3", "F8_E5M2", "F16", "BF16"])
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_every_pattern_of_bits_is_judged_and_converted(stored: Stored, target: SlabDtype) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    numbers = torch.from_numpy(raw).view(TORCH[stored])
    finite = torch.isfinite(numbers.to(torch.float32))
    item = numbers.element_size()
    for start in range(0, len(raw) // item, 97):
        some = raw[start * item : (start + 97) * item]
        assert is_finite(some, stored) is bool(finite[start : start + 97].all())
    good = raw.reshape(-1, item)[finite.numpy()].reshape(-1)[: -item or None]
    out = np.zeros(len(good) // item * TORCH[target].itemsize, np.uint8)
    convert_into(good, stored, out, target)
    expected = numbers[finite][:-1].to(torch.float32).to(TORCH[target])
    assert out.tobytes() == raw_of(expected).tobytes()
    assert may_overflow(stored, target) is not bool(torch.isfinite(expected).all())


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["F32", "F64"])
def test_the_first_number_that_is_too_large_is_known(stored: Stored, target: SlabDtype) -> None:
    """A bisection over all bit patterns, by torch's rounding."""
    integer = np.dtype(f"<i{TORCH[stored].itemsize}")

    def fitting(bits: int) -> tuple[bool, bool]:
        raw = np.array([bits], dtype=integer).view(np.uint8)
        number = torch.from_numpy(raw).view(TORCH[stored])
        rounded = number.to(torch.float32).to(TORCH[target])
        return fits(raw, stored, target), bool(torch.isfinite(rounded).all())

    low, high = 0, int(np.array([np.inf], dtype=f"<f{integer.itemsize}").view(integer)[0])
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle)[1] else (low, middle)
    assert fitting(low) == (True, True)
    assert fitting(high) == (False, False)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_number_is_finite_and_the_next_is_not(stored: Stored, sign: float) -> None:
    largest = min(torch.finfo(TORCH[stored]).max, (2.0 - 2.0**-23) * 2.0**127)
    tensor = torch.tensor([0.0, sign * largest, 1.0], dtype=TORCH[stored])
    assert is_finite(raw_of(tensor), stored)
    if stored == "F64":  # what rounds to the largest of float32, and what rounds to infinity
        edge = sign * (2.0**128 - 2.0**103)
        below = float(np.nextafter(edge, 0.0))
        assert is_finite(raw_of(torch.tensor([below], dtype=torch.float64)), stored)
        assert not is_finite(raw_of(torch.tensor([edge], dtype=torch.float64)), stored)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_value_is_found(stored: Stored, bad: float) -> None:
    tensor = torch.zeros(3_000_000, dtype=TORCH[stored])
    assert is_finite(raw_of(tensor), stored)
    tensor[2_999_999] = bad
    assert not is_finite(raw_of(tensor), stored)


@pytest.mark.parametrize("count", [0, 3_000, 1 << 22, 5_000_000])
def test_equal_values_have_equal_digests_whatever_their_dtype_and_pieces(count: int) -> None:
    tensor = torch.randn(count).to(torch.bfloat16)
    digests = set()
    for stored in ("F32", "BF16", "F64"):
        raw, in_pieces = raw_of(tensor.to(TORCH[stored])), FloatDigest()
        for piece in np.split(raw, [len(raw) // 3 // 8 * 8, len(raw) // 2 // 8 * 8]):
            in_pieces.update(piece, stored)
            in_pieces.hexdigest()  # changes nothing
        digests |= {float_digest(raw, stored), in_pieces.hexdigest()}
    assert len(digests) == 1
    for other in (torch.cat((tensor + 1, torch.ones(1))), torch.cat((tensor, torch.zeros(1)))):
        assert float_digest(raw_of(other.to(torch.bfloat16)), "BF16") not in digests
