"""Options of uploaded adapters. Pure."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """Options of `PUT /v1/adapters/{name}`. A tenant of the keys file may have another limit."""

    store: Path | None = field(
        default=None,
        metadata={
            "help": "folder of uploaded adapters; routers share it, and workers that see it are not"
            " sent files (default: uploads in --cache-dir)"
        },
    )
    max_bytes: int = field(default=4 << 30, metadata={"fixed": True})
    disk: int = field(
        default=64 << 30,
        metadata={
            "min": 1,
            "help": "disk for uploads; what is kept stays, the rest goes by age",
            "unit": "bytes",
        },
    )
    tenant_bytes: int = field(default=64 << 30, metadata={"fixed": True})
    wait: int = field(
        default=0,
        metadata={
            "min": 0,
            "help": "workers that must have an upload before its answer (0 = all); the rest gets it"
            " afterwards",
        },
    )
