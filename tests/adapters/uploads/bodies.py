"""Files and archives of uploads, right and wrong."""

import io
import json
import tarfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from loraplex.adapters.uploads.archive import unpack_archive
from loraplex.adapters.uploads.sink import FileSink

CONFIG = json.dumps(
    {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
    }
).encode()
WEIGHTS = save({"a.lora_A.weight": np.ones((2, 300), np.float32)})
FILES = {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}
LIMIT = 1 << 20


def entry(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, size: int | None = None
) -> bytes:
    """One entry of a tar. size: that it claims; None = its own."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content) if size is None else size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def archive(files: Iterable[tuple[str, bytes]] = tuple(FILES.items()), end: bool = True) -> bytes:
    return b"".join(entry(*file) for file in files) + bytes(1024 * end)


def unpacked(body: bytes, folder: Path, limit: int = LIMIT) -> str:
    """The digest of the files in a tar, which lie in `folder` then."""
    with closing(FileSink(folder, limit)) as sink:
        unpack_archive(io.BytesIO(body), sink)
        return sink.finish()
