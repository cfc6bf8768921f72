"""Pictures' files that requests under way may need again, and the way to workers that lack them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from loraplex.router.http.worker_files import WorkerFiles
from loraplex.router.pictures.reader import Picture
from loraplex.router.shared_tasks import SharedTasks


class HeldPictures:
    """Keeps the files of pictures as long as a request holds them, each once."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._holders: Counter[str] = Counter()
        self._sending = SharedTasks[tuple[str, str], None]()
        self._workers = WorkerFiles("image")

    def hold(self, pictures: Iterable[Picture]) -> Callable[[], None]:
        """Keeps pictures until what is returned is called."""
        held = {picture.digest: picture.data for picture in pictures}
        self._files |= held
        self._holders.update(held.keys())
        return partial(self._release, tuple(held))

    async def deliver(self, worker: str, secret: str, digests: Sequence[str]) -> None:
        """Sends files that are still held to a worker, http://host:port. Raises AdapterError."""
        for digest in digests:
            data = self._files.get(digest)
            if data is not None:
                url = f"{worker}/pictures/{digest}"
                send = partial(self._workers.put, url, secret, data)
                await self._sending.run((worker, digest), send)

    def _release(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest], self._files[digest]
