"""Values of tenants below `--files-dir`, in tenants/<tenant>/responses/<name>.

Routers may share the folder: whoever replaces a value holds tenants/<tenant>/responses.lock.
"""

import contextlib
import fcntl
import time

from loraplex.router.files.disk import TEMPORARY, names_in, off_loop, read_if_there, write_whole
from loraplex.router.files.store import FileStore
from loraplex.router.policy.batch_limits import ResponsesLimits


class DiskShelf:
    """A Shelf on disk. Raises RequestError (unavailable) of the disk."""

    def __init__(self, files: FileStore) -> None:
        self._files = files

    async def shelved(self, tenant: str, name: str) -> bytes:
        path = self._files.folder(tenant, "responses") / name
        return await off_loop(read_if_there, path) or b""

    async def shelve(
        self, tenant: str, name: str, old: bytes, new: bytes, limits: ResponsesLimits, least: str
    ) -> bool:
        path = self._files.folder(tenant, "responses") / name

        def replace() -> bool:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.parent.with_suffix(".lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if (read_if_there(path) or b"") != old:
                    return False
                if new:
                    write_whole(path, new)
                else:
                    path.unlink(missing_ok=True)
            self._trim(tenant, limits, least, name)
            return True

        return await off_loop(replace)

    def sweep(self, limits: ResponsesLimits, least: str) -> None:
        for tenant in self._files.tenants():
            self._trim(tenant, limits, least)

    def _trim(self, tenant: str, limits: ResponsesLimits, least: str, stays: str = "") -> None:
        folder, count, nbytes = self._files.folder(tenant, "responses"), 0, 0
        for name in sorted(names_in(folder), reverse=True):
            path = folder / name
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                if name.endswith(TEMPORARY):  # it is being written, or its router died
                    goes = about.st_mtime < time.time() - limits.keep_s
                else:
                    count, nbytes = count + 1, nbytes + about.st_size
                    fits = count <= limits.tenant_count and nbytes <= limits.tenant_bytes
                    goes = name != stays and not (fits and name >= least)
                if goes:
                    path.unlink()
