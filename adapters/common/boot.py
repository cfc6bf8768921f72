"""An id of the machine's current boot."""

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """What a machine wrote in another run may never have reached its disk. "" where the system does
    not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
