"""Small files that appear whole, and calls that may wait for a disk."""

import asyncio
import errno
import functools
import logging
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from loraplex.adapters.common.disk import sync_path
from loraplex.router.call import RequestError

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_RETRY_S = 30.0
# Of their own: a slow disk must not keep threads from those who need none of it.
_THREADS = ThreadPoolExecutor(8, "files")

P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` in a thread: a disk may be slow. Raises RequestError (unavailable) for one that
    is full or broken, and what `work` raises."""
    try:
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(_THREADS, call)
    except OSError as error:
        logger.error("--files-dir cannot be used: %s", error)
        why = "is full" if error.errno in _FULL else "cannot be used"
        message = f"the disk of --files-dir {why}; try again later"
        raise RequestError("unavailable", message, retry_after_s=_RETRY_S) from error


def write_whole(path: Path, content: bytes, durable: bool = True) -> None:
    """Replaces a file's content in one step. durable: a crash undoes nothing. Raises OSError."""
    written = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        written.write_bytes(content)
        if durable:
            sync_path(written)
        written.rename(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
    if durable:
        sync_path(path.parent)


def read_if_there(path: Path) -> bytes | None:
    """Reads a file; None where there is none. Raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def names_in(folder: Path) -> list[str]:
    """The names in a folder; empty when the folder is not there. Raises OSError."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
