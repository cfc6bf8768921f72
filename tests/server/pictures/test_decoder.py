"""The decoding process: real files become patches, hostile ones words."""

import asyncio
import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from loraplex.server.engine.shared_memory import HostMemory
from loraplex.server.protocol import PictureFault, read_picture_head
from loraplex.server.worker.pictures import decoder as decoder_module
from loraplex.server.worker.pictures.decoder import NoPatches, PictureDecoder
from loraplex.server.worker.pictures.jobs import DecodeJob
from loraplex.server.worker.pictures.segments import PatchMemory, memory_bytes
from tests.lost_helpers import helpers, kill_helpers
from tests.server.pictures.cards import QWEN
from tests.server.pictures.files import MODES, written
from tests.server.pictures.test_patches import expected
from tests.server.pictures.test_picture_files import png_chunk

PNG = b"\x89PNG\r\n\x1a\n"


def ihdr(width: int, height: int, depth: int = 8, colour: int = 2, interlaced: int = 0) -> bytes:
    return png_chunk(
        b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    )


def bomb(width: int, height: int) -> bytes:
    """A PNG whose few bytes are a great many pixels."""
    squeezed = zlib.compressobj(9)
    line = bytes(1 + 3 * width)
    body = b"".join(squeezed.compress(line) for _ in range(height)) + squeezed.flush()
    return PNG + ihdr(width, height) + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


def broken() -> Iterator[tuple[str, bytes]]:
    """Kinds of files that are no picture, though they begin like one."""
    for kind, modes in MODES.items():
        for mode in modes:
            data = written(kind, mode, 60, 50, 3)
            for part in (1, 2, 3):
                yield f"{kind} {mode} cut at {part}/4", data[: len(data) * part // 4]
        other = bytearray(written(kind, "RGB", 60, 50, 3))
        for at in range(60, len(other), max(1, len(other) // 40)):
            other[at] ^= 0xFF
        yield f"{kind} with other bytes", bytes(other)
        yield f"{kind} twice as high", _taller(kind, written(kind, "RGB", 60, 50, 3))
    yield "PNG without pixels", PNG + ihdr(60, 50) + png_chunk(b"IEND", b"")
    yield "PNG of text", PNG + ihdr(60, 50) + png_chunk(b"IDAT", b"text") + png_chunk(b"IEND", b"")
    yield (
        "PNG of an odd depth",
        PNG + ihdr(60, 50, depth=7) + png_chunk(b"IDAT", zlib.compress(b"")),
    )
    yield "PNG of an odd colour", PNG + ihdr(60, 50, colour=5) + png_chunk(b"IDAT", b"")
    yield "PNG, interlaced and short", PNG + ihdr(60, 50, interlaced=1) + png_chunk(b"IDAT", b"")
    text = png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(70 << 20), 1))
    yield "PNG with a bomb of text", PNG + ihdr(60, 50) + text + png_chunk(b"IDAT", b"")
    profile = png_chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(70 << 20), 1))
    yield "PNG with a bomb of a profile", PNG + ihdr(60, 50) + profile + png_chunk(b"IEND", b"")


def _taller(kind: str, data: bytes) -> bytes:
    """The file with a header that promises more lines than there are."""
    other = bytearray(data)
    at = {"PNG": 20, "JPEG": 0, "WEBP": 0, "GIF": 8}[kind]
    if kind == "PNG":
        other[16:29] = struct.pack(">IIBBBBB", 60, 100, 8, 2, 0, 0, 0)
        other[29:33] = struct.pack(">I", zlib.crc32(other[12:29]))
    elif kind == "JPEG":
        at = data.index(b"\xff\xc0") + 5
        other[at : at + 2] = struct.pack(">H", 900)
    elif kind == "GIF":
        other[at : at + 2] = struct.pack("<H", 900)
        frame = data.index(b"\x2c", 13)
        other[frame + 7 : frame + 9] = struct.pack("<H", 900)
    else:
        return data[:30] + bytes(len(data) - 30)
    return bytes(other)


_TAKEN = ("with other bytes", "twice as high")


def make_decoder() -> PictureDecoder:
    memory = HostMemory(memory_bytes(0, QWEN))
    return PictureDecoder(QWEN, PatchMemory(memory, 0, QWEN))


async def end(decoder: PictureDecoder, data: bytes) -> str:
    """What becomes of a file, be its headers wrong or its pixels; "" = patches."""
    try:
        head = read_picture_head(data)
        grid = QWEN.grid(head.width, head.height)
    except (PictureFault, ValueError) as error:
        return str(error)
    try:
        pixels = await decoder.pixels(DecodeJob(data, grid))
        (await decoder.patches(pixels, grid)).remove()
    except NoPatches as error:
        return error.message if error.code == "invalid_image" else error.code
    return ""


def test_files_become_patches_in_host_memory() -> None:
    async def main() -> None:
        memory = HostMemory(memory_bytes(0, QWEN))
        decoder = PictureDecoder(QWEN, PatchMemory(memory, 0, QWEN))
        for kind in MODES:
            data = written(kind, "RGB", 90, 61, 1, 1 if kind == "GIF" else 6)
            head = read_picture_head(data)
            grid = QWEN.grid(head.width, head.height)
            segment = await decoder.patches(await decoder.pixels(DecodeJob(data, grid)), grid)
            wanted, _ = expected(data, QWEN)
            held = np.frombuffer(memory.view, np.float32, wanted.size, segment.begin)
            np.testing.assert_array_equal(held.reshape(segment.rows, segment.columns), wanted)
            segment.remove()
            kill_helpers(decoder_module._MODULE)  # the next question finds another process
        with pytest.raises(NoPatches, match="headers do not say"):
            await decoder.pixels(DecodeJob(written("PNG", "RGB", 90, 61), (1, 2, 2)))
        await decoder.close()

    asyncio.run(main())


def test_hostile_files_end_in_words() -> None:
    async def main() -> None:
        decoder = make_decoder()
        files = list(broken())
        assert len(files) >= 60
        assert await end(decoder, written("JPEG", "RGB", 60, 50)) == ""
        before = {process.pid for process in helpers(decoder_module._MODULE)}
        ends = {name: await end(decoder, data) for name, data in files}
        assert before == {process.pid for process in helpers(decoder_module._MODULE)}
        # Decoders make something of bytes that they never check, as they do for transformers.
        taken = {name for name, words in ends.items() if not words}
        assert all(name.endswith(_TAKEN) or "GIF" in name for name in taken), taken
        await decoder.close()

    asyncio.run(main())


def test_bombs_are_bounded() -> None:
    async def main() -> None:
        decoder = make_decoder()
        assert "at most" in await end(decoder, PNG + ihdr(20000, 20000) + bytes(5000))
        assert await end(decoder, bomb(3000, 3000)) == ""
        file = io.BytesIO()
        frames = [Image.new("P", (300, 300), i) for i in range(40)]
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
        assert await end(decoder, file.getvalue()) == ""
        await decoder.close()

    asyncio.run(main())
