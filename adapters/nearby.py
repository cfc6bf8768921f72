"""Finds adapters near a folder that is none: the checkpoints of a run, inside or next to it."""

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.files import is_checkpoint, weight_files

MAX_ENTRIES = 10_000


def adapters_near(folder: Path, *, may_look_beside: bool = True) -> list[str]:
    """Names adapters in a folder, else checkpoints next to it as `../checkpoint-…`. Links are not
    followed. Folders that cannot be read hold none."""
    found = _adapters_in(folder, lambda name: True)
    if found or not may_look_beside:
        return found
    return [f"../{name}" for name in _adapters_in(folder.parent, is_checkpoint)]


def _adapters_in(folder: Path, counts: Callable[[str], bool]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            folders = [
                entry.name
                for entry in islice(entries, MAX_ENTRIES)
                if counts(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
    return [name for name in folders if _is_adapter(folder / name)]


def _is_adapter(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            files = {entry.name for entry in islice(entries, MAX_ENTRIES) if entry.is_file()}
    except OSError:
        return False
    return CONFIG_FILE in files and bool(weight_files(files))
