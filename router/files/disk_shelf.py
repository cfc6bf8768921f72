"""Values of tenants below `--files-dir`: tenants/<tenant>/responses/<name>. Names sort by age."""

import contextlib
import time

from loraplex.router.files.disk import TEMPORARY, names_in, off_loop, read_if_there, write_whole
from loraplex.router.files.store import FileStore
from loraplex.router.policy.batch_limits import ResponsesLimits


class DiskShelf:
    """b"" is no value. least: the first name that may stay. Routers may share the folder. Raises
    RequestError (unavailable) of the disk."""

    def __init__(self, files: FileStore, limits: ResponsesLimits) -> None:
        self._files = files
        self._limits = limits

    async def shelved(self, tenant: str, name: str) -> bytes:
        path = self._files.folder(tenant, "responses") / name
        return await off_loop(read_if_there, path) or b""

    async def shelve(self, tenant: str, name: str, value: bytes, least: str) -> None:
        """The oldest make room for it; it stays in any case."""
        path = self._files.folder(tenant, "responses") / name

        def work() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, value)
            self._trim(tenant, least, name)

        await off_loop(work)

    async def remove(self, tenant: str, name: str) -> None:
        await off_loop((self._files.folder(tenant, "responses") / name).unlink, missing_ok=True)

    def sweep(self, least: str) -> None:
        """Raises OSError."""
        for tenant in self._files.tenants():
            self._trim(tenant, least)

    def _trim(self, tenant: str, least: str, stays: str = "") -> None:
        folder, limits = self._files.folder(tenant, "responses"), self._limits
        count = nbytes = 0
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
