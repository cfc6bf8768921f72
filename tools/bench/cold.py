"""Way of a cold adapter in the worker process: from its folder to the host arena and the slab file,
in milliseconds of a core, or of the clock where threads share the work. Nothing else runs."""

import argparse
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.content_check import Run
from loraplex.adapters.manifest import AdapterManifest, SlabDtype
from loraplex.adapters.peft.validate import WEIGHTS_FILE, AdapterLimits, SlabRoom
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.slab.memory import one_after_another
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.store.store import AdapterStore, FetchPhase
from loraplex.launcher.bench.commands import DTYPES, add_config, add_folders, names_in, print_points
from loraplex.launcher.bench.engine.offline import EXTENT_BYTES, model_folder
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import whole
from loraplex.server.engine.shared_memory import HostMemory
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.spec.base_spec import base_spec

_ROOM = 1 << 40
_PIECE = 256 << 10


@dataclass(frozen=True, slots=True)
class ColdTimes:
    """Times of an adapter with `mb` megabytes of weights, in milliseconds of a core. Each is the
    best of the adapters and rounds, since other load on the cores also shows in the times.

    fetch: its folder copied into the store. judge: read, hashed, checked and kept. pack: from there
    into the arena. first_use: all of these. save: the slab file, written and synced behind that.
    load: the slab file into the arena. sha256: one pass of the digest's hash over as many bytes
    that a core has at hand.
    """

    mb: float
    fetch_ms: float
    judge_ms: float
    pack_ms: float
    first_use_ms: float
    save_ms: float
    load_ms: float
    sha256_ms: float


class _Pools(NamedTuple):
    """Threads of a store, and the clock that suits them."""

    syncing: Executor
    run: Run
    clock: Callable[[], float]


class _Path:
    """One adapter after the other, through a store of its own each round."""

    def __init__(
        self, root: Path, adapters_in: Path, base: BaseSpec, dtype: SlabDtype, pools: _Pools
    ) -> None:
        limits = AdapterLimits(room=SlabRoom(dtype, EXTENT_BYTES, _ROOM, _ROOM))
        syncing, run, self._clock = pools
        source = LocalSource([adapters_in], run)
        self._store = AdapterStore(root, base, {"local": source}, limits, syncing=syncing, run=run)
        self._dtype = dtype
        self._memory: HostMemory | None = None

    def measure(self, name: str, weights: Path) -> ColdTimes:
        marks: dict[FetchPhase, float] = {}

        def progress(stage: FetchPhase) -> None:
            marks[stage] = self._clock()

        manifest = self._store.admit(AdapterRef("local", name), None, None, progress)
        judged = self._clock()
        pack = self._bring(manifest)
        save = self._save(manifest)
        load = self._bring(manifest)
        fetch, judge = marks["checking"] - marks["fetching"], judged - marks["checking"]
        return ColdTimes(
            mb=weights.stat().st_size / 1e6,
            fetch_ms=1e3 * fetch,
            judge_ms=1e3 * judge,
            pack_ms=1e3 * pack,
            first_use_ms=1e3 * (fetch + judge + pack),
            save_ms=1e3 * save,
            load_ms=1e3 * load,
            sha256_ms=1e3 * _sha256_s(weights.stat().st_size),
        )

    def _bring(self, manifest: AdapterManifest) -> float:
        """Seconds; the arena has been written to before, as a GPU's worker pins it at its start."""
        with closing(self._store.open_slab(manifest.digest, self._dtype, EXTENT_BYTES)) as slab:
            if self._memory is None or len(self._memory.view) < slab.layout.nbytes:
                self._memory = HostMemory(slab.layout.nbytes)
                self._memory.view[:] = bytes(slab.layout.nbytes)
        started = self._clock()
        with closing(self._store.open_slab(manifest.digest, self._dtype, EXTENT_BYTES)) as slab:
            slab.copy_runs(self._memory.view, one_after_another(slab.layout))
            return self._clock() - started

    def _save(self, manifest: AdapterManifest) -> float:
        assert self._memory is not None
        with closing(self._store.open_slab(manifest.digest, self._dtype, EXTENT_BYTES)) as slab:
            layout = slab.layout
        started = self._clock()
        self._store.save_slab(layout, self._memory.view, one_after_another(layout))
        return self._clock() - started


def measure(
    config: Path,
    adapters_in: Path,
    names: Sequence[str],
    dtype: SlabDtype,
    rounds: int,
    threads: int = 0,
) -> ColdTimes:
    """config: of the base model. names: of folders in `adapters_in`. dtype: of the slabs. threads:
    share the work; 0 = none do. The store's disk is that of temporary files. Raises AdapterError,
    OSError."""
    base = base_spec(read_config(config), "0" * 64, ("base",))
    found: list[ColdTimes] = []
    for _ in range(rounds):
        with (
            TemporaryDirectory(prefix="loraplex-cold-") as folder,
            ThreadPoolExecutor(1, "store-sync") as syncing,
            ThreadPoolExecutor(max(1, threads), "adapter-work") as work,
        ):
            how = (work.map, time.perf_counter) if threads else (map, time.thread_time)
            path = _Path(Path(folder), adapters_in, base, dtype, _Pools(syncing, *how))
            found += [path.measure(name, adapters_in / name / WEIGHTS_FILE) for name in names]
    return ColdTimes(
        *(min(getattr(one, field.name) for one in found) for field in fields(ColdTimes))
    )


def _sha256_s(nbytes: int) -> float:
    piece = bytes(_PIECE)
    digest = hashlib.sha256()
    started = time.thread_time()
    for _ in range(nbytes // _PIECE):
        digest.update(piece)
    return time.thread_time() - started


def add_arguments(parser: Parser) -> None:
    """Adds the model, the adapters and the number of rounds."""
    add_config(parser)
    add_folders(parser, required=True, count=4)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the slabs")
    parser.add_argument("--rounds", type=whole(1), default=5, help="the best counts")
    parser.add_argument("--threads", type=whole(0), default=0, help="share the work (0 = none do)")


def run(arguments: argparse.Namespace) -> None:
    """Raises AdapterError, BenchError, CheckpointError, OSError."""
    folder, names = model_folder(arguments.config), names_in(arguments)
    how = (arguments.dtype, arguments.rounds, arguments.threads)
    times = measure(folder, arguments.adapters_in, names, *how)
    print_points([times], arguments.json)
