"""Numbers as safetensors stores them, to numbers as a slab stores them: exact, or rounded once."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.manifest import SlabDtype

Raw = npt.NDArray[np.uint8]
_CHUNK_ITEMS = 1 << 20
# Stored as a slab stores them: the slab's dtype, and numpy's (bfloat16 as uint16).
_AS_STORED: dict[str, tuple[SlabDtype, str]] = {
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
}
_BF16_INFINITY = 0x7F80


def _e4m3_values() -> npt.NDArray[np.float32]:
    """Every E4M3FN number (OCP 8-bit floating point, table 1): bias 7, no infinities."""
    bits = np.arange(256)
    sign, exponent, mantissa = 1 - (bits >> 7) * 2.0, (bits >> 3) & 15, (bits & 7) / 8
    values = sign * np.where(exponent == 0, mantissa, 1 + mantissa)
    values *= np.exp2(np.maximum(exponent, 1) - 7.0)
    values[(bits & 0x7F) == 0x7F] = np.nan
    return values.astype(np.float32)


_E4M3 = _e4m3_values()


def read_floats(raw: Raw, dtype: str) -> npt.NDArray[Any]:
    """float32 (float64 for `F64`) values of little-endian bytes; exact.

    dtype: one of `adapters.header.FLOAT_DTYPES`.
    """
    if dtype == "F8_E4M3":
        return _E4M3[raw]
    if dtype == "F8_E5M2":
        return (raw.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F64":
        return raw.view("<f8")
    return raw.view("<f4" if dtype == "F32" else "<f2").astype(np.float32)


def write_floats(values: npt.NDArray[Any], dtype: SlabDtype) -> npt.NDArray[Any]:
    """`values` in the slab's dtype (bfloat16 as uint16), rounded to nearest, ties to even.

    Finite values too large for the dtype become infinite: see `all_finite`.
    """
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32)
        if dtype == "float32":
            return single
        if dtype == "float16":
            return single.astype(np.float16)
    bits = np.ascontiguousarray(single).view(np.uint32)
    bias = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + bias) >> np.uint32(16)).astype(np.uint16)


def convert(raw: Raw, dtype: str, slab: SlabDtype) -> npt.NDArray[Any]:
    """Stored numbers as the slab has them; those of its own dtype are the bytes that they are."""
    same, view = _AS_STORED.get(dtype, (None, ""))
    return raw.view(view) if same == slab else write_floats(read_floats(raw, dtype), slab)


def all_finite(stored: npt.NDArray[Any]) -> bool:
    """Whether no value is NaN or infinite. uint16 is read as bfloat16."""
    if stored.dtype == np.uint16:
        exponents = stored & np.uint16(_BF16_INFINITY)
        return bool((exponents != np.uint16(_BF16_INFINITY)).all())
    return bool(np.isfinite(stored).all())


def is_finite(raw: Raw, dtype: str) -> bool:
    """Whether no stored value is NaN or infinite, or too large for float32. Bounded memory."""
    if dtype in _AS_STORED:
        numbers = raw.view(_AS_STORED[dtype][1])
        starts = range(0, len(numbers), _CHUNK_ITEMS)
        return all(all_finite(numbers[start : start + _CHUNK_ITEMS]) for start in starts)
    return all(all_finite(write_floats(chunk, "float32")) for chunk in _chunks(raw, dtype))


def float_digest(parts: Iterable[tuple[Raw, str]]) -> str:
    """sha256 (hex) of a tensor's values as float32, whatever dtype each part is stored in.

    parts: (bytes, dtype) pieces in row-major order. Equal values give equal digests.
    """
    digest = hashlib.sha256()
    for raw, dtype in parts:
        for chunk in _chunks(raw, dtype):
            digest.update(write_floats(chunk, "float32").data)
    return digest.hexdigest()


def _chunks(raw: Raw, dtype: str) -> Iterable[npt.NDArray[Any]]:
    step = _CHUNK_ITEMS * 8
    for start in range(0, len(raw), step):
        yield read_floats(raw[start : start + step], dtype)
