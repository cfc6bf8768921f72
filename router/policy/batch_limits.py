"""Options of files, batches and stored answers. Pure."""

from dataclasses import dataclass

from loraplex.adapters.common.option import fixed, option

LEAST_EXPIRY_S = 3600
MOST_EXPIRY_S = 30 * 86400


@dataclass(frozen=True, slots=True)
class FilesLimits:
    """Limits of `--files-dir`. A tenant of the keys file may have others."""

    max_file_bytes: int = fixed(200 << 20)
    tenant_bytes: int = fixed(10 << 30)
    tenant_count: int = fixed(1000)
    expire_s: int = fixed(MOST_EXPIRY_S)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of batches that the router runs."""

    max_lines: int = fixed(50_000)
    rows: int = option(64, "sequences of batches that run at once, of all together", min=1)
    live_rows: int = option(4, "the same while other requests run (0 = batches wait for their end)")


@dataclass(frozen=True, slots=True)
class ResponsesLimits:
    """Limits of answers that `/v1/responses` stores."""

    keep_s: int = option(
        0,
        "seconds for which answers of /v1/responses are stored: in --redis, else in"
        " --files-dir (0 = they are not)",
        max=MOST_EXPIRY_S,
    )
    tenant_bytes: int = fixed(256 << 20)
    tenant_count: int = fixed(1000)
