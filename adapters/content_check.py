"""Checks of weights as they are read: their digest, and a fingerprint to recognise them by.

Both are made of parts that threads compute apart. Leaves are planned once for all adapters of one
shape: the less Python a leaf needs, the more threads share the work.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from loraplex.adapters.common.disk import read_at, write_at
from loraplex.adapters.manifest import DIGEST_FORM, AdapterText, SlabDtype
from loraplex.adapters.peft.config import PeftConfig
from loraplex.adapters.safetensors.file import Weights
from loraplex.adapters.safetensors.floats import Raw
from loraplex.adapters.safetensors.header import TensorInfo

# Work of one thread at a time: enough that handing it over does not count.
LEAF_BYTES = 4 << 20
# Larger writes want larger pages, which a machine may have to look for.
_WRITE_BYTES = 256 << 10
_WORD = 8
_MIX = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


class Run(Protocol):
    """`map`, or that of an executor's threads."""

    def __call__(self, work: Callable[[Any], Any], parts: Iterable[Any], /) -> Iterator[Any]: ...


def content_digest(
    config: PeftConfig, text: AdapterText, nbytes: int, leaves: Iterable[bytes]
) -> str:
    """sha256 hex over an adapter's config, its texts and the leaves of its weights file.

    The texts are the default chat template, special tokens, ends of an answer, other templates,
    classes and added tokens. Each part comes with its length. A leaf is the sha256 of `LEAF_BYTES`
    of the file, which has `nbytes`.
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
    digest.update(nbytes.to_bytes(8, "little"))
    for leaf in leaves:
        digest.update(leaf)
    return digest.hexdigest()


_own = threading.local()


def buffer(nbytes: int) -> Raw:
    """Memory of this thread, until the thread asks again."""
    if len(getattr(_own, "buffer", ())) < nbytes:
        _own.buffer = np.empty(max(nbytes, LEAF_BYTES + _WORD), np.uint8)
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
    """The part of a piece in the fingerprint of tensors. Such parts are added up in any order. The
    piece begins at a multiple of 8 bytes from the tensor's start."""
    return _weight(tensor) * (_sum(piece) + len(piece)) & _MASK


def _weight(tensor: TensorInfo) -> int:
    return (tensor.start + 1) * _MIX & _MASK | 1


def _sum(piece: Raw) -> int:
    words = len(piece) // _WORD
    total = int(np.add.reduce(piece[: _WORD * words].view("<u8")))
    return total + int.from_bytes(piece[_WORD * words :].tobytes(), "little")


class Sums(NamedTuple):
    """Sums up pieces of tensors that lie in one piece, each times its weight.

    offsets: where each begins, `[pieces]` in words. weights: `[pieces]`, uint64; 0 = what lies
    there does not count. addend: for the sizes of the pieces.
    """

    offsets: npt.NDArray[np.intp]
    weights: npt.NDArray[np.uint64]
    addend: int

    @classmethod
    def of(cls, pieces: Iterable[tuple[TensorInfo | None, int, int]]) -> "Sums":
        """pieces: of each the tensor, where it begins, a multiple of 8, and its bytes."""
        placed = [(t and _weight(t) or 0, begin // _WORD, nbytes) for t, begin, nbytes in pieces]
        weights = np.array([weight for weight, _, _ in placed], np.uint64)
        addend = sum(weight * nbytes for weight, _, nbytes in placed)
        return cls(np.array([begin for _, begin, _ in placed], np.intp), weights, addend)

    def fingerprint(self, piece: Raw) -> int:
        """The sum of `fingerprint_of` over the pieces of tensors."""
        if len(piece) % _WORD:
            piece = np.pad(piece, (0, -len(piece) % _WORD))
        sums = np.add.reduceat(piece.view("<u8"), self.offsets)
        return int(np.add.reduce(sums * self.weights)) + self.addend


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


class Kind(NamedTuple):
    """The use that tensors are read for. slab: the dtype that has to hold their values; None = any.
    is_sealed: whether the fingerprint covers them.
    """

    dtype: str
    slab: SlabDtype | None
    is_sealed: bool


class LeafPart(NamedTuple):
    """Tensors of one kind that lie side by side in a leaf, whole or cut. begin, end: in the leaf;
    the last may end a few bytes behind it, so that no number is cut.
    """

    kind: Kind
    begin: int
    end: int
    tensors: tuple[TensorInfo, ...]
    sums: Sums


class Leaf(NamedTuple):
    """`nbytes` bytes of a weights file from `start` on, and the tensors in them."""

    start: int
    nbytes: int
    parts: tuple[LeafPart, ...]

    @property
    def read_bytes(self) -> int:
        return max((self.nbytes, *(part.end for part in self.parts)))


class LeafFound(NamedTuple):
    """Finds of one pass over a leaf. digest: sha256; b"" = it was not wanted. bad: see `Check`."""

    digest: bytes
    fingerprint: int
    bad: Sequence[tuple[str, bool]]


# Gives tensors whose values are not right, and whether those are finite.
Check = Callable[[LeafPart, int, Raw], Iterable[tuple[str, bool]]]


def leaves_of(nbytes: int, tensors: Iterable[tuple[TensorInfo, Kind]]) -> tuple[Leaf, ...]:
    """Plans how to read a file of `nbytes`. tensors: in the file's order."""
    parts: list[list[LeafPart]] = [[] for _ in range(0, nbytes, LEAF_BYTES)]
    some: list[TensorInfo] = []
    leaf = 0
    kind: Kind | None = None

    def close() -> None:
        if some and kind is not None:
            start = leaf * LEAF_BYTES
            cuts = [(t, *_cut(t, start)) for t in some]
            begin, end = cuts[0][1], cuts[-1][2]
            sums = Sums.of((t, from_ - begin, to - from_) for t, from_, to in cuts)
            parts[leaf].append(LeafPart(kind, begin - start, end - start, tuple(some), sums))
            some.clear()

    for tensor, own in tensors:
        for number in range(tensor.start // LEAF_BYTES, -(-tensor.end // LEAF_BYTES)):
            begin, end = _cut(tensor, number * LEAF_BYTES)
            if begin == end:
                continue
            # Sums are of whole words from each tensor's start on.
            follows = some and some[-1].end == begin and not some[-1].nbytes % _WORD
            if not follows or leaf != number or kind != own:
                close()
            leaf, kind = number, own
            some.append(tensor)
    close()
    return tuple(
        Leaf(start, min(LEAF_BYTES, nbytes - start), tuple(found))
        for start, found in zip(range(0, nbytes, LEAF_BYTES), parts, strict=True)
    )


def _cut(tensor: TensorInfo, start: int) -> tuple[int, int]:
    """The part of a tensor in the leaf from `start` on, in the file's bytes, cut at words."""

    def at(position: int) -> int:
        within = max(0, position - tensor.start)
        return min(tensor.end, tensor.start + -(-within // _WORD) * _WORD)

    return at(start), at(start + LEAF_BYTES)


def read_leaves(
    weights: Weights, leaves: Iterable[Leaf], run: Run, check: Check, *, with_digests: bool
) -> list[LeafFound]:
    """Reads each leaf once. check: what is wrong with a part, which lies in the file from there on.
    run: `map`, or that of an executor, whose threads then share the work.
    """
    return list(run(partial(_read_leaf, weights, check, with_digests), leaves))


def _read_leaf(weights: Weights, check: Check, with_digests: bool, leaf: Leaf) -> LeafFound:
    piece = buffer(leaf.read_bytes)
    weights.read_into(leaf.start, piece)
    digest = hashlib.sha256(piece[: leaf.nbytes].data).digest() if with_digests else b""
    fingerprint = 0
    bad: list[tuple[str, bool]] = []
    for part in leaf.parts:
        own = piece[part.begin : part.end]
        if part.kind.is_sealed:
            fingerprint += part.sums.fingerprint(own)
        bad += check(part, leaf.start + part.begin, own)
    return LeafFound(digest, fingerprint, bad)


def seal_of(
    weights: Weights, tensors: Iterable[TensorInfo], run: Run = map
) -> tuple[int, list[bytes]]:
    """The fingerprint of tensors, as `Seal` has it, and the digests of the leaves, in one pass.
    tensors: in the file's order.
    """
    kinds = ((tensor, Kind(tensor.dtype, None, True)) for tensor in tensors)
    leaves = leaves_of(weights.nbytes, kinds)
    found = read_leaves(weights, leaves, run, lambda *part: (), with_digests=True)
    return fingerprint_in(found), [leaf.digest for leaf in found]


def fingerprint_in(leaves: Iterable[LeafFound]) -> int:
    """The fingerprint of the tensors of all leaves."""
    return sum(leaf.fingerprint for leaf in leaves) & _MASK


def copy_leaves(source: int, target: int, nbytes: int, run: Run = map) -> tuple[int, list[bytes]]:
    """Copies the first `nbytes` of an open file to another. How many there were, and the digests
    of the leaves as they were written. Raises OSError.
    """
    found = list(run(partial(_copy_leaf, source, target, nbytes), range(0, nbytes, LEAF_BYTES)))
    return sum(count for count, _ in found), [digest for _, digest in found]


def _copy_leaf(source: int, target: int, nbytes: int, start: int) -> tuple[int, bytes]:
    piece = buffer(min(LEAF_BYTES, nbytes - start)).data
    count = read_at(source, piece, start)
    for begin in range(0, count, _WRITE_BYTES):
        write_at(target, piece[begin : min(begin + _WRITE_BYTES, count)], start + begin)
    return count, hashlib.sha256(piece[:count]).digest()
