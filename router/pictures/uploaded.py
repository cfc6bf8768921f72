"""Pictures that requests name by the ids of uploaded files, of the same tenant alone."""

from loraplex.router.call import RequestError
from loraplex.router.files.store import FileStore, off_loop, read_if_there
from loraplex.server.protocol import MAX_PICTURE_BYTES

_PURPOSES = ("vision", "user_data")


class UploadedPictures:
    """Uploaded pictures of a request. store: None = no files. most_bytes: of all together."""

    def __init__(self, store: FileStore | None, most_bytes: int, tenant: str = "") -> None:
        self._store = store
        self._most_bytes = most_bytes
        self._tenant = tenant
        self._left = most_bytes

    def of(self, tenant: str) -> "UploadedPictures":
        """Returns the uploaded pictures of a new request of the tenant's."""
        return UploadedPictures(self._store, self._most_bytes, tenant)

    async def data(self, file_id: str, where: str) -> bytes:
        """Reads the bytes of a file. where: its place in the body. Raises RequestError
        (file_not_found, invalid_image, unsupported, unavailable).
        """
        if self._store is None:
            message = f"`{where}`: there are no files: the router has no --files-dir"
            raise RequestError("unsupported", message, param=where)
        return await off_loop(self._read, self._store, file_id, where)

    def _read(self, store: FileStore, file_id: str, where: str) -> bytes:
        stored = store.get(self._tenant, file_id, where)
        if stored.purpose not in _PURPOSES:
            uses = " or ".join(_PURPOSES)
            raise _unfit(where, f"the file's purpose is {stored.purpose!r}, expected {uses}")
        if stored.bytes > MAX_PICTURE_BYTES:
            raise _unfit(where, f"the file has more than {MAX_PICTURE_BYTES} bytes")
        self._left -= stored.bytes
        if self._left < 0:
            most = self._most_bytes
            raise _unfit(where, f"the request's files have more than {most} bytes together")
        data = read_if_there(store.content(self._tenant, file_id))
        if data is None:
            raise RequestError("file_not_found", f"no file {file_id!r}", param=where)
        return data


def _unfit(where: str, problem: str) -> RequestError:
    return RequestError("invalid_image", f"`{where}`: {problem}", param=where)
