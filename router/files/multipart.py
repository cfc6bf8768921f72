"""Multipart forms, taken apart as they come: no part is kept whole here. Pure.

`python-multipart` reads them, as in starlette; here are bounds, and what a part is called.
"""

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

_MAX_HEAD_BYTES = 8 << 10
_MAX_HEADS = 16
_MAX_PARTS = 16
_MAX_BOUNDARY = 70


class FormError(Exception):
    """str() says what is wrong with the form."""


class PartBegins(msgspec.Struct, frozen=True):
    """The head of a form's field. filename: None = a plain field."""

    name: str
    filename: str | None


class PartContent(msgspec.Struct, frozen=True):
    """A piece of the part that began last."""

    content: bytes


class PartEnds(msgspec.Struct, frozen=True):
    """The part that began last is whole."""


FormEvent = PartBegins | PartContent | PartEnds


def boundary_of(content_type: str) -> bytes:
    """Reads the boundary of a form from its content type. Raises FormError for what is no form."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or boundary is None:
        raise FormError("expected content-type multipart/form-data with a boundary")
    if not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise FormError(f"the boundary may have 1 to {_MAX_BOUNDARY} bytes")
    return boundary


class FormReader:
    """Reads a form in pieces: `feed` returns what the next bytes of a body hold.

    is_whole: the form has ended.
    """

    def __init__(self, boundary: bytes) -> None:
        self.is_whole = False
        self._found: list[FormEvent] = []
        self._parts = 0
        self._field, self._value, self._disposition = b"", b"", b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._whole,
            },
            max_header_count=_MAX_HEADS,
            max_header_size=_MAX_HEAD_BYTES,
        )

    def feed(self, piece: bytes) -> list[FormEvent]:
        """Reads the next bytes of the form. Raises FormError."""
        if self.is_whole:
            return []
        self._found = []
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise FormError(str(error)) from None
        return self._found

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise FormError(f"the form has more than {_MAX_PARTS} parts")
        self._field, self._value, self._disposition = b"", b"", b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._field.strip().lower() == b"content-disposition":
            self._disposition = self._value
        self._field, self._value = b"", b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise FormError("a part has no name in its Content-Disposition")
        filename = options.get(b"filename")
        name = None if filename is None else _text(filename)
        self._found.append(PartBegins(_text(options[b"name"]), name))

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._found.append(PartContent(data[start:end]))

    def _end(self) -> None:
        self._found.append(PartEnds())

    def _whole(self) -> None:
        self.is_whole = True


def _text(raw: bytes) -> str:
    """Reads a name as HTML writes names in forms: these three characters alone are escaped."""
    text = raw.decode("utf-8", "replace")
    return text.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
