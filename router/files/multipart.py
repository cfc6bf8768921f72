"""Multipart forms (RFC 7578), taken apart as they come: no part is kept whole here. Pure."""

from collections.abc import Iterator
from email.message import Message
from typing import Literal

import msgspec

_MAX_HEAD_BYTES = 8 << 10
_MAX_PARTS = 16
_MAX_BOUNDARY = 70
_LINE_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"


class FormError(Exception):
    """str() says what is wrong with the form."""


class PartBegins(msgspec.Struct, frozen=True):
    """filename: None = a plain field."""

    name: str
    filename: str | None


class PartContent(msgspec.Struct, frozen=True):
    """A piece of the part that began last."""

    content: bytes


class PartEnds(msgspec.Struct, frozen=True):
    """The part that began last is whole."""


FormEvent = PartBegins | PartContent | PartEnds


def boundary_of(content_type: str) -> bytes:
    """Raises FormError for what is no form."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or boundary is None:
        raise FormError("expected content-type multipart/form-data with a boundary")
    encoded = boundary.encode("utf-8", "surrogateescape")
    if not 0 < len(encoded) <= _MAX_BOUNDARY:
        raise FormError(f"the boundary may have 1 to {_MAX_BOUNDARY} bytes")
    return encoded


class FormReader:
    """`feed` returns what the next bytes of a body hold. is_whole: the form has ended."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # As if a line had ended before the first boundary.
        self._rest = bytearray(_LINE_END)
        self._state: Literal["content", "delimiter", "head", "end"] = "content"
        self._parts = 0

    @property
    def is_whole(self) -> bool:
        return self._state == "end"

    def feed(self, piece: bytes) -> list[FormEvent]:
        """Raises FormError."""
        if self._state == "end":
            return []
        self._rest += piece
        return list(self._events())

    def _events(self) -> Iterator[FormEvent]:
        steps = {"content": self._content, "delimiter": self._after_delimiter, "head": self._head}
        while self._state != "end":
            before = self._state, len(self._rest)
            yield from steps[self._state]()
            if (self._state, len(self._rest)) == before:
                return

    def _content(self) -> Iterator[FormEvent]:
        at = self._rest.find(self._delimiter)
        # The last bytes may be the beginning of a delimiter.
        sure = at if at >= 0 else max(0, len(self._rest) - len(self._delimiter) + 1)
        if sure and self._parts:
            yield PartContent(bytes(self._rest[:sure]))
        del self._rest[:sure]
        if at >= 0:
            del self._rest[: len(self._delimiter)]
            if self._parts:
                yield PartEnds()
            self._state = "delimiter"

    def _after_delimiter(self) -> Iterator[FormEvent]:
        if self._rest.startswith(b"--"):
            self._rest.clear()
            self._state = "end"
            return
        end = self._rest.find(_LINE_END)
        if end >= 0 and not self._rest[:end].strip(b" \t"):
            del self._rest[:end]  # the line's end stays: a part may have no head
            self._state = "head"
        elif end >= 0 or len(self._rest) > _MAX_HEAD_BYTES:
            raise FormError("something follows a boundary in its line")
        yield from ()

    def _head(self) -> Iterator[FormEvent]:
        end = self._rest.find(_HEAD_END)
        if end > _MAX_HEAD_BYTES or (end < 0 and len(self._rest) > _MAX_HEAD_BYTES):
            raise FormError(f"the head of a part has more than {_MAX_HEAD_BYTES} bytes")
        if end < 0:
            return
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise FormError(f"the form has more than {_MAX_PARTS} parts")
        head = bytes(self._rest[:end])
        del self._rest[: end + len(_HEAD_END)]
        self._state = "content"
        yield _part_of(head)


def _part_of(head: bytes) -> PartBegins:
    """Raises FormError."""
    for line in head.split(_LINE_END):
        field, _, value = line.partition(b":")
        if field.strip().lower() == b"content-disposition":
            message = Message()
            message["content-disposition"] = _one_line(value)
            name = message.get_param("name", header="content-disposition")
            if isinstance(name, str):
                return PartBegins(name, message.get_filename())
    raise FormError("a part has no name in its Content-Disposition")


def _one_line(value: bytes) -> str:
    return " ".join(value.decode("utf-8", "replace").split())
