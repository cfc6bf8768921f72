"""Detects that a file has changed, without reading it."""

from pathlib import Path

# When it was written, its length, and which file of the disk it is.
Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """None where there is no such file. Follows links, as Kubernetes replaces what it mounts."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
