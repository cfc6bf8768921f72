"""Slab files of a store: which one is read, and where each is kept."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.common.disk import mark_used, publish_file
from loraplex.adapters.manifest import LAYOUT_VERSION, SlabDtype, SlabLayout
from loraplex.adapters.slab.file import SlabError, SlabFile, write_slab_file
from loraplex.adapters.store.quota import Quota
from loraplex.adapters.store.unfinished import unfinished_folder


class Slabs:
    """folder: of the files. unfinished: for those that are being written."""

    def __init__(self, folder: Path, unfinished: Path, base: BaseSpec, quota: Quota) -> None:
        self._folder = folder
        self._unfinished = unfinished
        self._base = base
        self._quota = quota

    def open(self, digest: str, dtype: SlabDtype, extent_bytes: int) -> SlabFile | None:
        """The file of this adapter, a finished one if there is one; the caller closes it. Raises
        OSError."""
        for is_finished in (True, False):
            path = self._path(digest, dtype, extent_bytes, is_finished)
            with suppress(FileNotFoundError, SlabError):
                slab = SlabFile(path)
                mark_used(path)
                return slab
        return None

    def keep(
        self,
        layout: SlabLayout,
        arena: memoryview,
        first_extents: Sequence[int],
        stopped: Callable[[], bool],
    ) -> bool:
        """As `AdapterStore.save_slab`. Raises OSError, AdapterError."""
        path = self._path(layout.digest, layout.dtype, layout.extent_bytes, layout.is_finished)
        with suppress(FileNotFoundError, SlabError):
            SlabFile(path).close()
            return True
        self._quota.check(layout.nbytes)
        with self._quota.room(layout.nbytes), unfinished_folder(self._unfinished) as folder:
            written = folder / "slab"
            if not write_slab_file(written, layout, arena, first_extents, stopped):
                return False
            publish_file(written, path)
            return True

    def _path(self, digest: str, dtype: SlabDtype, extent_bytes: int, is_finished: bool) -> Path:
        """What is finished depends on how the base's weights were loaded."""
        parts = [digest, dtype, str(extent_bytes), f"of{self._base.shards}"]
        if is_finished:
            parts.append(f"finished_{self._base.quantize or 'as_stored'}")
        return self._folder / f"{'-'.join(parts)}-v{LAYOUT_VERSION}.slab"
