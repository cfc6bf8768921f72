"""Writes what a plan says, reads it again, and makes it appear whole or not at all."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from loraplex.adapters.common.disk import sync_files, sync_path
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.validate import WEIGHTS_FILE
from loraplex.adapters.safetensors.file import WeightsFile, open_weights
from loraplex.adapters.safetensors.floats import Raw
from loraplex.adapters.safetensors.header import DTYPE_BYTES
from loraplex.launcher.convert.plan import ConversionPlan, Move


@contextmanager
def workplace(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, which is gone afterwards, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_result(plan: ConversionPlan, weights: WeightsFile, folder: Path) -> None:
    """The config and the weights, compared with the source value by value. Raises AdapterError."""
    (folder / CONFIG_FILE).write_bytes(plan.config)
    target = folder / WEIGHTS_FILE
    with target.open("xb") as out:
        header = _header(plan.moves)
        out.write(len(header).to_bytes(8, "little") + header)
        for move in plan.moves:
            for piece in _pieces(weights, move):
                out.write(piece)
    _compare(plan.moves, weights, target)


def publish(folder: Path, out: Path) -> None:
    """The finished folder becomes `out`, which is not there or empty. Raises OSError."""
    sync_files(folder)
    sync_path(folder)
    folder.rename(out)
    sync_path(out.parent)


def _header(moves: Iterable[Move]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for move in moves:
        end = position + move.source.nbytes
        entries[move.name] = {
            "dtype": move.source.dtype,
            "shape": move.shape,
            "data_offsets": (position, end),
        }
        position = end
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8)


def _pieces(weights: WeightsFile, move: Move) -> Iterator[memoryview]:
    """The bytes of one new tensor."""
    if not move.is_transposed:
        for piece in weights.pieces(move.source.start, move.source.end):
            yield piece.data
        return
    rows, columns = move.source.shape
    values = weights.read(move.source).reshape(rows, columns, -1)
    yield np.ascontiguousarray(values.transpose(1, 0, 2)).data.cast("B")


def _compare(moves: Iterable[Move], weights: WeightsFile, target: Path) -> None:
    """Each value of the file is bit by bit the one that it was made of."""
    with open_weights(target) as written:
        found = {tensor.name: tensor for tensor in written.tensors()}
        for move in moves:
            new, old = found.pop(move.name), move.source
            same = new.shape == move.shape and new.dtype == old.dtype
            if same and move.is_transposed:
                a, b = (
                    _bits(file.read(t), t.dtype) for file, t in ((written, new), (weights, old))
                )
                same = np.array_equal(a.reshape(new.shape).T, b.reshape(old.shape))
            elif same:
                pairs = zip(
                    written.pieces(new.start, new.end),
                    weights.pieces(old.start, old.end),
                    strict=True,
                )
                same = all(np.array_equal(a, b) for a, b in pairs)
            if not same:
                raise AdapterError("unavailable", f"{move.name} was not written as it was read")


def _bits(raw: Raw, dtype: str) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]:
    return raw.view(f"u{DTYPE_BYTES[dtype]}")
