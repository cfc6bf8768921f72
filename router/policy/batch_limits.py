"""Options of files, batches and stored answers. Pure."""

from dataclasses import dataclass, field

LEAST_EXPIRY_S = 3600
MOST_EXPIRY_S = 30 * 86400


@dataclass(frozen=True, slots=True)
class FilesLimits:
    """Limits of `--files-dir`. A tenant of the keys file may have others."""

    max_file_bytes: int = field(default=200 << 20, metadata={"fixed": True})
    tenant_bytes: int = field(default=10 << 30, metadata={"fixed": True})
    tenant_count: int = field(default=1000, metadata={"fixed": True})
    expire_s: int = field(default=MOST_EXPIRY_S, metadata={"fixed": True})


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of batches that the router runs."""

    max_lines: int = field(default=50_000, metadata={"fixed": True})
    rows: int = field(
        default=64,
        metadata={"min": 1, "help": "sequences of batches that run at once, of all together"},
    )
    live_rows: int = field(
        default=4,
        metadata={"help": "the same while other requests run (0 = batches wait for their end)"},
    )


@dataclass(frozen=True, slots=True)
class ResponsesLimits:
    """Limits of answers that `/v1/responses` stores."""

    keep_s: int = field(
        default=0,
        metadata={
            "max": MOST_EXPIRY_S,
            "help": "seconds for which answers of /v1/responses are stored: in --redis, else in"
            " --files-dir (0 = they are not)",
        },
    )
    tenant_bytes: int = field(default=256 << 20, metadata={"fixed": True})
    tenant_count: int = field(default=1000, metadata={"fixed": True})
