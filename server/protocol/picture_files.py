"""Headers of picture files: format, and width and height as a viewer shows the picture. Pure.

A picture is not decoded here. What its bytes hold beyond their headers, a worker finds out.
"""

import re
import struct
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

PictureFormat = Literal["PNG", "JPEG", "WEBP", "GIF"]
MAX_PICTURE_BYTES = 20 << 20
MAX_PICTURE_PIXELS = 64 << 20
# A file has more parts only to cost time.
_MAX_PARTS = 1 << 14
_ORIENTATION = 0x0112
_NUMBERS = {1: "B", 3: "H", 4: "I"}  # of TIFF's types, those of one whole number
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_PNG = b"\x89PNG\r\n\x1a\n"
_XMP_IN_JPEG = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_IN_PNG = b"XML:com.adobe.xmp\0"
_EXIF = b"Exif\0\0"
# Markers of a JPEG's frame, which has its size, and of what has no length behind it.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE = frozenset((0x00, 0x01, *range(0xD0, 0xD9)))
# A marker may begin with any number of 0xff. A search for all of them would begin again at each.
_MARKER = re.compile(rb"\xff([^\xff])")
_SCAN = 0xDA


class PictureFault(ValueError):
    """A file is no picture that is read; str() says why."""


class PictureHead(msgspec.Struct, frozen=True):
    """Facts of a picture's headers. width, height: in pixels, turned as its EXIF data say."""

    format: PictureFormat
    width: int
    height: int


class _Found:
    """Facts that the parts of a file have said so far."""

    def __init__(self) -> None:
        self.size: tuple[int, int] | None = None
        self.exif = b""
        self.xmp = b""

    @property
    def is_turned(self) -> bool:
        """Whether width and height change places."""
        turned = _exif_orientation(self.exif.removeprefix(_EXIF).removeprefix(_EXIF))
        if turned is None and (match := _XMP_ORIENTATION.search(self.xmp)):
            turned = int(match[1])
        return turned in (5, 6, 7, 8)


def read_picture_head(data: bytes) -> PictureHead:
    """Reads the headers of a picture's file. Raises PictureFault."""
    if len(data) > MAX_PICTURE_BYTES:
        raise PictureFault(f"the file has {len(data)} bytes; at most {MAX_PICTURE_BYTES} are read")
    kind, read = _reader(data)
    found = _Found()
    try:
        read(data, found)
    except (IndexError, struct.error):
        raise PictureFault(f"the {kind} file breaks off in its headers") from None
    if found.size is None or not all(found.size):
        raise PictureFault(f"the {kind} file does not say its size")
    width, height = found.size
    if width * height > MAX_PICTURE_PIXELS:
        raise PictureFault(
            f"the picture has {width} x {height} pixels; at most {MAX_PICTURE_PIXELS} are read"
        )
    return PictureHead(kind, *((height, width) if found.is_turned else (width, height)))


def _reader(data: bytes) -> tuple[PictureFormat, Callable[[bytes, _Found], None]]:
    if data.startswith(_PNG):
        return "PNG", _read_png
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG", _read_jpeg
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP", _read_webp
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF", _read_gif
    raise PictureFault("the file is no PNG, JPEG, WebP or GIF")


def _parts() -> Iterator[None]:
    """Counts the parts of a file. Raises PictureFault when there are too many."""
    for _ in range(_MAX_PARTS):
        yield
    raise PictureFault(f"the file has more than {_MAX_PARTS} parts")


def _read_png(data: bytes, found: _Found) -> None:
    at = len(_PNG)
    for _ in _parts():
        if at + 8 > len(data):
            return  # a file may end early: whether its pixels are there, the worker sees
        size, kind = struct.unpack_from(">I4s", data, at)
        body = at + 8
        if kind == b"IHDR" and found.size is None:
            found.size = struct.unpack_from(">II", data, body)
        elif kind == b"eXIf":
            found.exif = data[body : body + size]
        elif kind == b"iTXt" and data.startswith(_XMP_IN_PNG, body):
            found.xmp = data[body : body + size]
        elif kind == b"IEND":
            return
        at = body + size + 4


def _read_jpeg(data: bytes, found: _Found) -> None:
    at, exif = 2, bytearray()
    for _ in _parts():
        match = _MARKER.search(data, at)
        if match is None:
            raise IndexError
        marker, at = match[1][0], match.end()
        if marker in _BARE:
            continue
        if marker == _SCAN:
            found.exif = bytes(exif)
            return
        (size,) = struct.unpack_from(">H", data, at)
        body = data[at + 2 : at + size]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", body, 1)
            found.size = width, height
        elif marker == 0xE1 and body.startswith(_EXIF):
            exif += body.removeprefix(_EXIF)
        elif marker == 0xE1 and body.startswith(_XMP_IN_JPEG):
            found.xmp = body
        at += size


def _read_webp(data: bytes, found: _Found) -> None:
    at = 12
    for _ in _parts():
        if at + 8 > len(data):
            return
        kind, size = struct.unpack_from("<4sI", data, at)
        body = at + 8
        if kind == b"VP8X":
            canvas = data[body + 4 : body + 10]
            found.size = _three_bytes(canvas) + 1, _three_bytes(canvas[3:]) + 1
        elif kind == b"VP8 " and found.size is None:
            wide, high = struct.unpack_from("<HH", data, body + 6)
            found.size = wide & 0x3FFF, high & 0x3FFF
        elif kind == b"VP8L" and found.size is None:
            (bits,) = struct.unpack_from("<I", data, body + 1)
            found.size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        elif kind == b"EXIF":
            found.exif = data[body : body + size]
        elif kind == b"XMP ":
            found.xmp = data[body : body + size]
        at = body + size + (size & 1)


def _read_gif(data: bytes, found: _Found) -> None:
    """The canvas grows with a first frame that goes beyond its edges."""
    wide, high, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    parts = _parts()
    for _ in parts:
        if data[at] == 0x2C:
            left, top, width, height = struct.unpack_from("<HHHH", data, at + 1)
            found.size = max(wide, left + width), max(high, top + height)
            return
        if data[at] != 0x21:
            at += 1
            continue
        at += 2
        while data[at]:
            next(parts)
            at += data[at] + 1
        at += 1


def _three_bytes(data: bytes) -> int:
    if len(data) < 3:
        raise IndexError
    return int.from_bytes(data[:3], "little")


def _exif_orientation(exif: bytes) -> int | None:
    """Reads how a picture is turned, from 1 to 8; None = EXIF data do not say it."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return None
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, number = struct.unpack_from(f"{order}HHI", exif, entry)
            if tag == _ORIENTATION and number == 1 and kind in _NUMBERS:
                return int(struct.unpack_from(order + _NUMBERS[kind], exif, entry + 8)[0])
    except struct.error:
        pass
    return None
