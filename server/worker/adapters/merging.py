"""Merges adapters in short-lived processes beside the worker, which only waits for them."""

import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.merge.recipe import MergeRecipe
from loraplex.adapters.store.store import AdapterStore
from loraplex.server.protocol import AdapterMerge, LoadStage, MemberSource
from loraplex.server.worker import tether

log = logging.getLogger(__name__)

MERGE_MODULE = "loraplex.adapters.merge.process"
# Linear merges take seconds and do not wait behind the others, which may take minutes.
LINEAR_THREADS = 2
DENSE_THREADS = 1
_MAX_WORDS = 4000
_RETRY_S = 10.0


class Merger:
    """Merge adapters in processes of their own. timeout_s: of one merge."""

    def __init__(self, store: AdapterStore, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._linear = ThreadPoolExecutor(LINEAR_THREADS, "adapter-merge")
        self._dense = ThreadPoolExecutor(DENSE_THREADS, "adapter-merge-dense")
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def threads(self, recipe: MergeRecipe) -> Executor:
        """Threads in which `merge` may block."""
        return self._linear if recipe.strategy == "linear" else self._dense

    def known(self, recipe: MergeRecipe) -> AdapterManifest | None:
        """The merged adapter, if it is here. Reads the disk."""
        try:
            return self._store.manifest(recipe.digest)
        except AdapterError:
            return None

    def merge(self, frame: AdapterMerge, progress: Callable[[LoadStage], None]) -> AdapterManifest:
        """The merged adapter, made if it is not there yet. Raises AdapterError."""
        for member, source in zip(frame.recipe.members, frame.sources, strict=True):
            self._bring(member.digest, source)
        progress("checking")
        return self._store.merge(frame.recipe, self.run)

    def run(self, folder: Path) -> None:
        """Does the job of `folder` in a process, see `loraplex.adapters.merge.job`.

        Raises AdapterError.
        """
        with tempfile.TemporaryFile() as output:
            process = self._start(folder, output.fileno())
            try:
                code = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                message = f"the merge takes longer than {self._timeout_s:g} s, which is the limit"
                raise AdapterError("too_large", message) from None
            finally:
                self._end(process)
            if code != 0:
                raise self._failure(code, output)

    def close(self) -> None:
        """Ends what runs; nothing new is started."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()

    def _bring(self, digest: str, source: MemberSource) -> None:
        try:
            self._store.manifest(digest)
        except AdapterError:
            self._store.admit(source.ref, source.token, digest)

    def _start(self, folder: Path, output: int) -> subprocess.Popen[bytes]:
        """The kernel ties the process to this thread, which lives as long as the worker."""
        with self._lock:
            if self._closed:
                raise AdapterError("unavailable", "the worker is being stopped", (), _RETRY_S)
            process = tether.spawn(MERGE_MODULE, [str(folder)], output=output)
            self._running.add(process)
            return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        with self._lock:
            self._running.discard(process)

    def _failure(self, code: int, output: IO[bytes]) -> AdapterError:
        if not self._closed:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _MAX_WORDS))
            words = output.read().decode(errors="replace")
            log.error("a merge of adapters left with code %d:\n%s", code, words)
        return AdapterError("unavailable", "the merge failed; try again", (), _RETRY_S)
