"""Options of uploaded adapters. Pure."""

from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.common.option import fixed, option


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """Options of `PUT /v1/adapters/{name}`. A tenant of the keys file may have another limit."""

    store: Path | None = option(
        None,
        "folder of uploaded adapters; routers share it, and workers that see it are not"
        " sent files (default: uploads in --cache-dir)",
    )
    max_bytes: int = fixed(4 << 30)
    disk: int = option(
        64 << 30, "disk for uploads; what is kept stays, the rest goes by age", min=1, unit="bytes"
    )
    tenant_bytes: int = fixed(64 << 30)
