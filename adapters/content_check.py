"""Checks of weights as they are read: their digest, and a fingerprint to recognise them by.

Both are made of parts that threads compute apart.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from loraplex.adapters.manifest import DIGEST_FORM, AdapterText
from loraplex.adapters.peft.config import PeftConfig
from loraplex.adapters.safetensors.file import Weights
from loraplex.adapters.safetensors.floats import Raw
from loraplex.adapters.safetensors.header import TensorInfo

# Work of one thread at a time: enough that handing it over does not count.
LEAF_BYTES = 4 << 20
_MIX = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


class Run(Protocol):
    """`map`, or that of an executor's threads."""

    def __call__(self, work: Callable[[Any], Any], parts: Iterable[Any], /) -> Iterator[Any]: ...


def content_digest(config: PeftConfig, text: AdapterText, weights: Weights, run: Run = map) -> str:
    """sha256 hex over an adapter's config, its texts and the leaves of its weights file.

    The texts are the default chat template, special tokens, ends of an answer, other templates,
    classes and added tokens. Each part comes with its length. A leaf is the sha256 of `LEAF_BYTES`
    of the file, which is read whole.
    """
    template, ends, classes, added = text
    tokens, named = (template.special_tokens, template.named) if template else ({}, {})
    default = (template.source or "") if template else ""
    texts = (tokens, ends, named, classes, added)
    parts = [msgspec.json.encode(config), default.encode()]
    parts += [msgspec.json.encode(part, order=_order(part)) for part in texts]
    digest = hashlib.sha256(f"loraplex adapter, form {DIGEST_FORM}".encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(weights.nbytes.to_bytes(8, "little"))
    for leaf in run(partial(_leaf, weights), range(0, weights.nbytes, LEAF_BYTES)):
        digest.update(leaf)
    return digest.hexdigest()


def _leaf(weights: Weights, start: int) -> bytes:
    piece = buffer(min(LEAF_BYTES, weights.nbytes - start))
    weights.read_into(start, piece)
    return hashlib.sha256(piece.data).digest()


_own = threading.local()


def buffer(nbytes: int) -> Raw:
    """Memory of this thread, up to `LEAF_BYTES`, until the thread asks again."""
    if not hasattr(_own, "buffer"):
        _own.buffer = np.empty(LEAF_BYTES, np.uint8)
    found: Raw = _own.buffer[:nbytes]
    return found


def _order(part: object) -> Literal["sorted"] | None:
    """Chooses the order of keys: the order of a table carries no meaning."""
    return "sorted" if isinstance(part, dict) else None


class Fingerprint:
    """A sum over pieces, quick to make. It detects what a disk has garbled, not what was forged."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, piece: Raw) -> None:
        """Adds the next piece. The same pieces in the same order make the same value."""
        self.value = (self.value * _MIX + _sum(piece) + len(piece)) & _MASK


def fingerprint_of(tensor: TensorInfo, piece: Raw) -> int:
    """The part of a piece in the fingerprint of tensors. Such parts are added up in any order.

    The piece begins at a multiple of 8 bytes from the tensor's start.
    """
    return _weighted(tensor, _sum(piece), len(piece))


def fingerprint_of_run(tensors: Sequence[TensorInfo], piece: Raw) -> int:
    """The same of a piece of a run, see `pieces_of`: of one tensor, or of several whole ones."""
    if len(tensors) == 1:
        return fingerprint_of(tensors[0], piece)
    start = tensors[0].start
    offsets = [tensor.start - start for tensor in tensors]
    if any(offset % 8 for offset in (*offsets, len(piece))):
        slices = (piece[t.start - start : t.end - start] for t in tensors)
        return sum(map(fingerprint_of, tensors, slices)) & _MASK
    sums = np.add.reduceat(piece.view("<u8"), [offset // 8 for offset in offsets])
    parts = zip(tensors, sums.tolist(), strict=True)
    return sum(_weighted(tensor, total, tensor.nbytes) for tensor, total in parts) & _MASK


def _weighted(tensor: TensorInfo, total: int, nbytes: int) -> int:
    return (((tensor.start + 1) * _MIX | 1) * (total + nbytes)) & _MASK


def _sum(piece: Raw) -> int:
    words = len(piece) // 8
    total = int(np.add.reduce(piece[: 8 * words].view("<u8")))
    return total + int.from_bytes(piece[8 * words :].tobytes(), "little")


class Seal(NamedTuple):
    """Recognises weights whose digest this process has computed.

    identity: `WeightsFile.identity` when the digest was computed. fingerprint: of their LoRA
    tensors, see `fingerprint_of`.
    """

    identity: tuple[int, ...]
    fingerprint: int

    def holds(self, fingerprint: int) -> bool:
        """Whether what was read is what was judged. fingerprint: the sum of all parts."""
        return fingerprint & _MASK == self.fingerprint & _MASK


def runs_of(tensors: Iterable[TensorInfo]) -> Iterator[tuple[TensorInfo, ...]]:
    """Yields tensors that lie side by side and are alike, together up to `LEAF_BYTES`; a larger
    one alone. Empty tensors are left out.
    """
    found: list[TensorInfo] = []
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        follows = found and found[-1].end == tensor.start and found[-1].dtype == tensor.dtype
        if found and not (follows and tensor.end - found[0].start <= LEAF_BYTES):
            yield tuple(found)
            found = []
        found.append(tensor)
    if found:
        yield tuple(found)


def pieces_of(run: Sequence[TensorInfo], weights: Weights) -> Iterator[tuple[int, Raw]]:
    """Yields the position and the bytes of each piece of a run. The next overwrites them."""
    start, end = run[0].start, run[-1].end
    for position in range(start, end, LEAF_BYTES):
        piece = buffer(min(LEAF_BYTES, end - position))
        weights.read_into(position, piece)
        yield position, piece


def seal_of(weights: Weights, tensors: Iterable[TensorInfo], run: Run = map) -> int:
    """The fingerprint of tensors, as `Seal` has it. tensors: in the file's order."""

    def of_run(alike: tuple[TensorInfo, ...]) -> int:
        return sum(fingerprint_of_run(alike, piece) for _, piece in pieces_of(alike, weights))

    total: int = sum(run(of_run, runs_of(tensors)))
    return total & _MASK
