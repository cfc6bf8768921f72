"""Picture files of all formats and modes for tests, made by Pillow."""

import io
import random
from typing import Any

from PIL import Image

# Modes that a format can hold.
MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P", "RGB", "RGBA"),
}
ORIENTATION = 0x0112


def noise(mode: str, width: int, height: int, seed: int) -> Image.Image:
    """A picture of random colours, in larger and smaller patches."""
    generator = random.Random(seed)
    small = (max(1, width // 7), max(1, height // 5))
    if mode == "I;16":
        depth = generator.randbytes(2 * width * height)
        return Image.frombytes("I;16", (width, height), depth)
    bands = Image.frombytes("RGBA", small, generator.randbytes(4 * small[0] * small[1]))
    large = bands.resize((width, height), Image.Resampling.NEAREST)
    return large if mode == "RGBA" else large.convert(mode)


def written(
    format: str, mode: str, width: int, height: int, seed: int = 0, orientation: int = 1
) -> bytes:
    """A file. orientation: of its EXIF data, from 1 to 8; 1 = it has none."""
    file, options = io.BytesIO(), dict[str, Any]()
    if orientation != 1:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    if format == "WEBP":
        options["lossless"] = bool(seed % 2)
    noise(mode, width, height, seed).save(file, format, **options)
    return file.getvalue()
