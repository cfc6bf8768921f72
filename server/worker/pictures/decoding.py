"""The process that decodes pictures: limits on itself first, then one at a time.

It gives up memory, files, processes and all but a little processor time before it reads a question:
a DecodeJob in msgpack, answered by a DecodeOutcome. It first reads a VisionCard.
"""

import io
from typing import NoReturn

import msgspec
from PIL import (
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from loraplex.adapters.helpers.answering import answer_questions, limit_self, read_frame
from loraplex.server.protocol import MAX_PICTURE_PIXELS, VisionCard
from loraplex.server.worker.pictures.jobs import CPU_SECONDS, MEMORY_BYTES, DecodeJob, DecodeOutcome

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PLUGINS = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, GifImagePlugin)
_MAX_WORDS = 200


class _Fault(Exception):
    """A picture that is not taken; str() says why."""


def main() -> None:
    card = msgspec.json.decode(read_frame() or b"", type=VisionCard)
    _warm_up(card)
    limit_self(MEMORY_BYTES)
    decode = msgspec.msgpack.Decoder(DecodeJob).decode

    def answer(question: bytes) -> bytes:
        return msgspec.msgpack.encode(outcome(decode(question), card))

    answer_questions(answer, CPU_SECONDS)


def outcome(job: DecodeJob, card: VisionCard) -> DecodeOutcome:
    """Decodes a picture and resizes it for the model. Raises MemoryError."""
    try:
        return DecodeOutcome(_pixels(job, card))
    except _Fault as fault:
        return DecodeOutcome(fault=str(fault))
    except MemoryError:
        raise
    except UnidentifiedImageError:  # whose words have an address in memory
        return DecodeOutcome(fault="the picture cannot be decoded: its headers are broken")
    except Exception as error:  # Pillow's plugins raise what they like for broken files
        words = f"the picture cannot be decoded: {error or type(error).__name__}"
        return DecodeOutcome(fault=words[:_MAX_WORDS])


def _pixels(job: DecodeJob, card: VisionCard) -> bytes:
    with Image.open(io.BytesIO(job.data), formats=_FORMATS) as opened:
        if opened.width * opened.height > MAX_PICTURE_PIXELS:
            _differs(opened.size)
        picture = _on_white(ImageOps.exif_transpose(opened))
    width, height = picture.size
    card = card.bounded(job.pixels)
    if max(width, height) < 1 or card.grid(width, height) != job.grid:
        _differs(picture.size)
    tiles, resized = list[bytes](), picture
    for cut in card.cuts(width, height):
        source = resized if cut.goes_on else picture
        resized = source.resize(cut.size, Image.Resampling(card.resample))
        tiles += (resized.crop(box).tobytes() for box in cut.boxes)
    return b"".join(tiles)


def _on_white(picture: Image.Image) -> Image.Image:
    """The picture in red, green and blue; what shines through it is white."""
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")


def _differs(size: tuple[int, int]) -> NoReturn:
    raise _Fault(f"the picture is of {size[0]} x {size[1]} pixels, which its headers do not say")


def _warm_up(card: VisionCard) -> None:
    """Uses each format once. Pillow and the C library load parts when first used; later no file
    can be opened.
    """
    for kind in _FORMATS:
        file = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.new("RGB", (8, 9)).save(file, kind, **({} if kind == "GIF" else {"exif": exif}))
        for data in (file.getvalue(), file.getvalue()[:-9]):
            outcome(DecodeJob(data, card.grid(9, 8)), card)
