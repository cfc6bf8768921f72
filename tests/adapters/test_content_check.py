"""One pass over a weights file, leaf by leaf, against what each tensor says alone."""

import hashlib
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.content_check import (
    Kind,
    LeafPart,
    copy_leaves,
    fingerprint_of,
    leaves_of,
    read_leaves,
)
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.floats import Raw
from loraplex.adapters.safetensors.header import TensorInfo

_KINDS = (Kind("BF16", "bfloat16", True), Kind("F32", "float32", True), Kind("I8", None, False))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_pass_by_leaves_is_one_over_each_tensor(data: Any, tmp_path_factory: Any) -> None:
    """Read tensors of odd sizes, at odd places, with others between that are not read."""
    leaf = data.draw(st.integers(8, 100), "bytes of a leaf")
    header = data.draw(st.integers(8, 40), "bytes of the header")
    sizes = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=12), "numbers")
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    widths = [(2, 4, 1, 1)[kind] for kind in kinds]
    nbytes = [size * width for size, width in zip(sizes, widths, strict=True)]
    ends = list(accumulate(nbytes, initial=header))
    tensors = [
        (TensorInfo(f"t{i}", "", (size,), ends[i], ends[i + 1]), _KINDS[kind])
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
        if kind < 3
    ]
    content = np.random.default_rng(ends[-1]).integers(0, 256, ends[-1], np.uint8)
    path: Path = tmp_path_factory.mktemp("leaves") / "w"
    path.write_bytes(content.tobytes())
    seen: dict[str, list[bytes]] = {tensor.name: [] for tensor, _ in tensors}

    def check(part: LeafPart, position: int, piece: Raw) -> list[tuple[str, bool]]:
        assert piece.tobytes() == content[position : position + len(piece)].tobytes()
        for tensor in part.tensors:
            own = piece[max(0, tensor.start - position) : tensor.end - position]
            assert len(own) % (8 if position + len(piece) < tensor.end else 1) == 0
            seen[tensor.name].append(own.tobytes())
        return [(part.kind.dtype, True)]

    with patch("loraplex.adapters.content_check.LEAF_BYTES", leaf), open_weights(path) as weights:
        leaves = leaves_of(weights.nbytes, tensors)
        found = read_leaves(weights, leaves, map, check, with_digests=True)
        with (path.parent / "copy").open("w+b") as target, path.open("rb") as source:
            copied = copy_leaves(source.fileno(), target.fileno(), weights.nbytes)
    digests = [
        hashlib.sha256(content[at : at + leaf].tobytes()).digest()
        for at in range(0, len(content), leaf)
    ]
    assert [each.digest for each in found] == digests
    assert copied == (len(content), digests)
    assert (path.parent / "copy").read_bytes() == content.tobytes()
    expected = sum(
        fingerprint_of(tensor, content[tensor.start : tensor.end])
        for tensor, kind in tensors
        if kind.is_sealed
    )
    assert (sum(each.fingerprint for each in found) - expected) % (1 << 64) == 0
    for tensor, _ in tensors:
        assert b"".join(seen[tensor.name]) == content[tensor.start : tensor.end].tobytes()
