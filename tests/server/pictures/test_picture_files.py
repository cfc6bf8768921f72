"""Headers of picture files against Pillow, and of files that are none."""

import io
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from loraplex.server.protocol import MAX_PICTURE_BYTES, PictureFault, read_picture_head
from tests.server.pictures.files import MODES, written


def seen_size(data: bytes) -> tuple[int, int]:
    width, height = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size
    return width, height


@pytest.mark.parametrize(
    ("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes]
)
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_sizes_are_those_that_are_seen(kind: str, mode: str, orientation: int) -> None:
    for seed, (width, height) in enumerate(((1, 1), (37, 20), (5, 83))):
        data = written(kind, mode, width, height, seed, 1 if kind == "GIF" else orientation)
        head = read_picture_head(data)
        assert (head.width, head.height) == seen_size(data)
        assert head.format == kind


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_xmp_turns_what_exif_does_not() -> None:
    xmp = b"XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation='1' tiff:Orientation=\"6\"/>"
    plain = written("PNG", "RGB", 30, 20)
    data = plain[:33] + png_chunk(b"iTXt", xmp) + plain[33:]
    head = read_picture_head(data)
    assert (head.width, head.height) == (20, 30) == seen_size(data)
    file = io.BytesIO()
    Image.new("RGB", (30, 20)).save(file, "JPEG", xmp=b'<x tiff:Orientation="8"/>')
    head = read_picture_head(file.getvalue())
    assert (head.width, head.height) == (20, 30) == seen_size(file.getvalue())


def test_a_first_frame_beyond_the_canvas_counts() -> None:
    data = bytearray(written("GIF", "P", 12, 9))
    data[6:10] = struct.pack("<HH", 4, 4)
    head = read_picture_head(bytes(data))
    assert (head.width, head.height) == (12, 9) == Image.open(io.BytesIO(data)).size


def test_animations_have_the_size_of_their_first_frame() -> None:
    frames = [Image.new("RGB", (24, 16), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        head = read_picture_head(file.getvalue())
        assert (head.width, head.height) == (24, 16)


BIG = struct.pack(">IIBBBBB", 1 << 16, 1 << 16, 8, 2, 0, 0, 0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no PNG, JPEG, WebP or GIF"),
        (b"BM" + bytes(60), "no PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no PNG, JPEG, WebP or GIF"),
        (b"\x89PNG\r\n\x1a\n", "does not say its size"),
        (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", bytes(13)), "does not say its size"),
        (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", BIG), "65536 x 65536 pixels"),
        (b"\x89PNG\r\n\x1a\n" + png_chunk(b"xxxx", b"") * (1 << 15), "parts"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "breaks off"),
        (b"\xff\xd8" + b"\xff" * 60, "breaks off"),
        (b"\xff\xd8" + b"\xff" * (1 << 22), "breaks off"),  # hours, if time grows by the square
        (b"\xff\xd8" + b"\xff\xd0" * (1 << 15), "parts"),
        (b"RIFF\0\0\0\0WEBP", "does not say its size"),
        (b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0", "breaks off"),
        (b"GIF89a\1\0\1\0", "breaks off"),
        (b"GIF89a\1\0\1\0\0\0\0" + bytes(1 << 15), "parts"),
        (b"GIF89a\1\0\1\0\0\0\0!\xfe" + b"\1x" * (1 << 15), "parts"),
        (bytes(MAX_PICTURE_BYTES + 1), "at most"),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(PictureFault, match=words):
        read_picture_head(data)


@given(st.sampled_from(sorted(MODES)), st.data())
def test_broken_headers_are_read_or_refused(kind: str, data: st.DataObject) -> None:
    file = bytearray(written(kind, "RGB", 13, 11))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, min(len(file), 80) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(file[: data.draw(st.integers(0, len(file)))])
    try:
        head = read_picture_head(cut)
    except PictureFault:
        return
    assert head.width > 0
    assert head.height > 0
