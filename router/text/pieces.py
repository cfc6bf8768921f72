"""JSON in pieces. While one is encoded no other thread runs, so none is large. Pure."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

PIECE_BYTES = 64 << 10
# Items of a longer list are taken for small ones: several are encoded at once.
_FEW = 256

_encode = msgspec.json.Encoder().encode


def in_pieces(answer: Any) -> Iterator[bytes]:
    """As `msgspec.json.encode` writes it. Bytes are JSON already; an iterator becomes a list."""
    parts: list[bytes] = []
    size = 0
    for part in _cut(answer) if isinstance(answer, bytes) else _parts(answer):
        parts.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, msgspec.Struct) and _is_plain(value):
        yield from _object(value)
    elif isinstance(value, list | tuple) and len(value) <= _FEW:
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _parts(item)
        yield b"]" if value else b"[]"
    elif isinstance(value, list | tuple | Iterator):
        yield from _list(iter(value))
    elif isinstance(value, str) and len(value) > PIECE_BYTES:
        yield b'"'
        for start in range(0, len(value), PIECE_BYTES):
            yield _encode(value[start : start + PIECE_BYTES])[1:-1]
        yield b'"'
    else:
        yield _encode(value)


def _is_plain(value: msgspec.Struct) -> bool:
    config = value.__struct_config__
    return config.tag is None and not config.array_like and not config.omit_defaults


def _object(value: msgspec.Struct) -> Iterator[bytes]:
    mark = b"{"
    names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
    for name, written in names:
        held = getattr(value, name)
        if held is not msgspec.UNSET:
            yield mark + _encode(written) + b":"
            yield from _parts(held)
            mark = b","
    yield b"}" if mark == b"," else b"{}"


def _list(items: Iterator[Any]) -> Iterator[bytes]:
    """So many at once as make about a piece."""
    count, mark = 1, b"["
    while some := list(islice(items, count)):
        data = _encode(some)
        yield mark + data[1:-1]
        mark = b","
        count = count * 2 if len(data) < PIECE_BYTES // 2 else max(1, count // 2)
    yield b"]" if mark == b"," else b"[]"
