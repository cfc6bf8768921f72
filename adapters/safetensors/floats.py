"""Converts numbers from safetensors' form to a slab's: exact, or rounded once."""

import hashlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from loraplex.adapters.manifest import SlabDtype

Raw = npt.NDArray[np.uint8]
_CHUNK_BYTES = 1 << 18
_PIECE_VALUES = 1 << 22
# Stored as a slab stores them: the slab's dtype, and numpy's (bfloat16 as uint16).
_AS_STORED: dict[str, tuple[SlabDtype, str]] = {
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
}
STORED_AS: dict[SlabDtype, str] = {slab: stored for stored, (slab, _) in _AS_STORED.items()}
_SLAB_VIEW: dict[SlabDtype, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
# Bytes of a number, and the bits of the smallest positive value that float32 cannot hold: infinite,
# NaN, or (in 64 bits) rounded to infinity. As bits, larger magnitudes are larger.
_NOT_FINITE: dict[str, tuple[int, int]] = {
    "F8_E4M3": (1, 0x7F),
    "F8_E5M2": (1, 0x7C),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F32": (4, 0x7F80_0000),
    "F64": (8, 0x47EF_FFFF_F000_0000),
}
# The bits of the smallest stored value that becomes infinite in a slab; F64 is rounded to float32
# first. Other pairs never overflow.
_TOO_LARGE: dict[tuple[str, SlabDtype], int] = {
    ("F32", "bfloat16"): 0x7F7F_8000,
    ("F32", "float16"): 0x477F_F000,
    ("BF16", "float16"): 0x4780,
    ("F64", "float32"): 0x47EF_FFFF_F000_0000,
    ("F64", "bfloat16"): 0x47EF_EFFF_F000_0000,
    ("F64", "float16"): 0x40EF_FDFF_F000_0000,
}


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
    """float32 (float64 for `F64`) values of little-endian bytes; exact. dtype: one of
    `loraplex.adapters.safetensors.header.FLOAT_DTYPES`."""
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
    """Returns `values` in the slab's dtype (bfloat16 as uint16), rounded to nearest, ties to even.
    Finite values too large for the dtype become infinite: see `fits`."""
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32, copy=False)
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


def convert_into(raw: Raw, dtype: str, out: Raw, slab: SlabDtype) -> None:
    """Converts into `out`, the slab's own bytes. It is quick for pieces that a core's cache holds:
    it touches little other memory."""
    if dtype == "F32" and slab == "bfloat16":
        bits = raw.view("<u4")
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        out.view("<u2")[:] = rounded.view("<u2")[1::2]
    elif _NOT_FINITE[dtype][0] <= 2 and _AS_STORED.get(dtype, ("",))[0] != slab:
        _look_up(raw, dtype, out, slab)
    else:
        out.view(_SLAB_VIEW[slab])[:] = convert(raw, dtype, slab)


def _look_up(raw: Raw, dtype: str, out: Raw, slab: SlabDtype) -> None:
    """Converts numbers by a table: of 16 bits one by one, of 8 bits in pairs."""
    table = _table(dtype, slab)
    pairs = len(raw) // 2
    found = out[: pairs * table.itemsize].view(table.dtype)
    # "clip" makes no difference to indices that are all in range, but numpy then needs no copy.
    np.take(table, raw[: 2 * pairs].view("<u2"), mode="clip", out=found)
    if len(raw) % 2:
        out[found.nbytes :].view(_SLAB_VIEW[slab])[:] = convert(raw[-1:], dtype, slab)


@cache
def _table(dtype: str, slab: SlabDtype) -> npt.NDArray[Any]:
    """Converts any two stored bytes."""
    every = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    with np.errstate(all="ignore"):
        converted = convert(every, dtype, slab)
    return converted.view(f"<u{converted.nbytes >> 16}")


def is_finite(raw: Raw, dtype: str) -> bool:
    """Whether no stored value is NaN or infinite, or too large for float32."""
    return _all_below(raw, *_NOT_FINITE[dtype])


def may_overflow(dtype: str, slab: SlabDtype) -> bool:
    """Whether a finite stored number can be too large for the slab."""
    return (dtype, slab) in _TOO_LARGE


def fits(raw: Raw, dtype: str, slab: SlabDtype) -> bool:
    """Whether every stored value is finite in the slab, too."""
    nbytes, limit = _NOT_FINITE[dtype]
    return _all_below(raw, nbytes, _TOO_LARGE.get((dtype, slab), limit))


def _all_below(raw: Raw, nbytes: int, limit: int) -> bool:
    """Whether the magnitudes of all numbers are below the one with these bits."""
    if not len(raw):
        return True
    signed, unsigned = raw.view(f"<i{nbytes}"), raw.view(f"<u{nbytes}")
    # The largest of the signed is the largest positive number, of the unsigned a negative one's.
    return bool(signed.max() < limit) and bool(unsigned.max() < limit + (1 << (8 * nbytes - 1)))


class FloatDigest:
    """SHA-256 of a tensor's values as float32, equal for equal values of whatever dtype: of the
    SHA-256 of each `_PIECE_VALUES`, so that several can be computed at once."""

    def __init__(self) -> None:
        self._digests = list[bytes]()  # of pieces that are whole
        self._piece, self._room = hashlib.sha256(), _PIECE_VALUES

    def update(self, raw: Raw, dtype: str) -> None:
        """Adds the next values, in row-major order."""
        while len(raw):
            size = self._room * _NOT_FINITE[dtype][0]
            piece, raw = raw[:size], raw[size:]
            _add(self._piece, piece, dtype)
            self._room -= len(piece) // _NOT_FINITE[dtype][0]
            if not self._room:
                self._digests.append(self._piece.digest())
                self._piece, self._room = hashlib.sha256(), _PIECE_VALUES

    def hexdigest(self) -> str:
        """Returns the digest of the values so far."""
        last = [self._piece.digest()] if self._room < _PIECE_VALUES else []
        return hashlib.sha256(b"".join((*self._digests, *last))).hexdigest()


def float_digest(raw: Raw, dtype: str, run: Callable[..., Iterable[bytes]] = map) -> str:
    """Returns the `FloatDigest` (hex) of a tensor. run: `map`, or one that runs several at once."""
    size = _PIECE_VALUES * _NOT_FINITE[dtype][0]
    pieces = [raw[first : first + size] for first in range(0, len(raw), size)]
    return hashlib.sha256(b"".join(run(partial(_piece_digest, dtype=dtype), pieces))).hexdigest()


def _piece_digest(raw: Raw, dtype: str) -> bytes:
    found = hashlib.sha256()
    _add(found, raw, dtype)
    return found.digest()


def _add(digest: "hashlib._Hash", raw: Raw, dtype: str) -> None:
    for start in range(0, len(raw), _CHUNK_BYTES):
        values = read_floats(raw[start : start + _CHUNK_BYTES], dtype)
        digest.update(write_floats(values, "float32").data)
