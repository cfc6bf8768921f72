"""Detects that a file has changed, without reading it."""

from pathlib import Path

# When it was written, its length, and which file of the disk it is.
Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """A file's stamp, another one once the file has changed. None where there is no such file.
    Links are followed, as Kubernetes replaces what it mounts."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
