"""The store of admitted adapters on disk: fetched once, judged once, packed on demand.

Everything is keyed by content digest; what a reference meant is remembered beside it. Several
processes may share a root. Blocking and thread-safe; who may use which adapter is not decided here.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.common.disk import (
    disk_errors,
    entry_bytes,
    free_bytes,
    mark_used,
    publish_file,
    release,
    stored_bytes,
    tell_of_disk,
)
from loraplex.adapters.common.recent import Recent
from loraplex.adapters.common.retries import RetryPolicy
from loraplex.adapters.common.single_flight import SingleFlight
from loraplex.adapters.common.unfinished import remove_stale, resumable_folder, unfinished_folder
from loraplex.adapters.content_check import Run, Seal
from loraplex.adapters.coverage import Coverage
from loraplex.adapters.errors import AdapterChanged, AdapterError, Findings, invalid
from loraplex.adapters.judge import (
    Judged,
    KnownShapes,
    check_small,
    judge_folder,
    rejudge,
    seal_stored,
)
from loraplex.adapters.manifest import LAYOUT_VERSION, AdapterManifest, SlabDtype, SlabLayout
from loraplex.adapters.merge.job import MergeJob, write_ends, write_job
from loraplex.adapters.merge.plan import merged_coverage, plan_merge
from loraplex.adapters.merge.recipe import MergeRecipe
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.files import fetched_bytes, read_index, small_files, weight_files
from loraplex.adapters.peft.lora_tensors import LoraTensors
from loraplex.adapters.peft.validate import WEIGHTS_FILE, AdapterLimits
from loraplex.adapters.ref import (
    AdapterRef,
    RefSource,
    format_ref,
    is_pinned,
    shown_name,
    shown_place,
)
from loraplex.adapters.safetensors.file import WeightsFile, join_files, open_weights
from loraplex.adapters.slab.file import SlabError, SlabFile, SlabSource, write_slab_file
from loraplex.adapters.slab.layout import make_layout
from loraplex.adapters.slab.pack import DamagedError, SlabPlan, Unpacked, plan_moves
from loraplex.adapters.sources.base import ENABLING_OPTIONS, Source
from loraplex.adapters.sources.partial import partial_bytes
from loraplex.adapters.store.content import Contents, Known, References, merged_member, present

# Content leaves this much of the disk to others.
HEADROOM_BYTES = 64 << 20
MAX_SIZES = 1 << 17
_RETRY_S = 30.0
log = logging.getLogger(__name__)

FetchPhase = Literal["fetching", "checking"]
Progress = Callable[[FetchPhase], None]

_FAILURE_TTL_S = 5.0
_MERGE_FAILURE_TTL_S = 600.0
# Some 300 KB each: what comes is used soon.
_MAX_JUDGED = 128
_MAX_ALLOWED = 65_536
# Of a fine-tune that is trained again and again, or of many that were trained alike.
_MAX_SHAPES = 64
# The rest waits: each is ready sooner than if all were begun.
_JUDGED_AT_ONCE = 4


class AdapterStore:
    """Fetches, judges and keeps adapters. Adapters for one base model under `root`.

    sources: those that references may name; others are refused. clock: monotonic seconds. syncing:
    a thread that waits for the disk, so that nobody who wants an adapter does; None = it is waited
    for before `admit` returns. run: `map`, or that of threads, which then share the work.
    Every method raises AdapterError when the adapter cannot be had.
    """

    def __init__(
        self,
        root: Path,
        base: BaseSpec,
        sources: Mapping[RefSource, Source],
        limits: AdapterLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        retries: RetryPolicy | None = None,
        syncing: Executor | None = None,
        run: Run = map,
    ) -> None:
        self._base = base
        self._run = run
        self._retries = retries or RetryPolicy()
        self._sources = dict(sources)
        self._limits = limits or AdapterLimits()
        self._home = home = root.expanduser() / (base.digest[:32] or "base")
        content, refs = home / "content", home / "refs"
        slabs = home / "slabs"
        self._unfinished = home / "staging"
        self._folders = content, refs, slabs, self._unfinished
        self._contents = Contents(content, syncing)
        self._references = References(refs)
        self._quota = Quota(self._limits.max_store_bytes, (content, slabs), self._unfinished)
        self._slabs = Slabs(slabs, self._unfinished, base, self._quota)
        self._admissions: SingleFlight[AdapterRef, AdapterManifest]
        self._admissions = SingleFlight(clock, _FAILURE_TTL_S)
        self._judged: Recent[str, Judged] = Recent(_MAX_JUDGED)
        self._shapes: KnownShapes = Recent(_MAX_SHAPES)
        self._plans: Recent[tuple[bytes, SlabDtype, int], SlabPlan] = Recent(_MAX_SHAPES)
        self._configs: Recent[bytes, bool] = Recent(_MAX_SHAPES)
        self._allowed: Recent[str, Coverage] = Recent(_MAX_ALLOWED)
        self._judging = threading.BoundedSemaphore(_JUDGED_AT_ONCE)
        self._merges: SingleFlight[str, AdapterManifest]
        self._merges = SingleFlight(clock, _MERGE_FAILURE_TTL_S)
        try:
            self._make_folders()
            remove_stale(self._unfinished)
            self._contents.sync_all()
        except OSError as error:
            reason = error.strerror or error
            message = f"the cache folder {root} cannot be used: {reason}; --cache-dir names another"
            raise AdapterError("unavailable", message) from error

    def admit(
        self,
        ref: AdapterRef,
        token: str | None,
        expected_digest: str | None = None,
        progress: Callable[[FetchPhase], None] | None = None,
    ) -> AdapterManifest:
        """The manifest of the adapter that `ref` names, fetched and judged if it is not yet here.

        A commit of the Hub that is known costs no network: its caller has been authorised already.
        Others are resolved here, and once more if they change under the fetch. token: of this
        caller, for this call. progress: called at each phase of a fetch.
        """
        source = self._sources.get(ref.source)
        if source is None:
            option = ENABLING_OPTIONS.get(ref.source)
            allowed = "" if option is None else f": no {option} allows them"
            message = f"adapters from {ref.source!r} are not enabled here{allowed}"
            raise AdapterError("forbidden", message)
        report = progress or (lambda phase: None)
        try:
            manifest = self._admit_current(source, ref, token, report)
        except AdapterChanged:
            manifest = self._admit_current(source, ref, token, report)
        if expected_digest is not None and manifest.digest != expected_digest:
            message = f"expected content {expected_digest}, found {manifest.digest}"
            raise invalid("digest_mismatch", shown_name(ref), message)
        return manifest

    def recall(self, ref: AdapterRef) -> AdapterManifest | None:
        """Returns what `admit` would, if all of it is here: quick, without any network."""
        source = self._sources.get(ref.source)
        if source is None or not (_is_known_by_name(ref) or ref.source == "local"):
            return None
        pinned = ref if _is_known_by_name(ref) else source.resolve(ref, None)
        with disk_errors(self._home):
            manifest = self._recall(pinned)
        return manifest if manifest and manifest.knows_ends else None

    def merge(self, recipe: MergeRecipe, run: Callable[[Path], None]) -> AdapterManifest:
        """The adapter that the recipe makes of admitted ones; its digest is the recipe's.

        run: does the job (`loraplex.adapters.merge.job`) of the folder that it is given.
        """
        return self._merges.run(recipe.digest, "", lambda: self._merge(recipe, run))

    def manifest(self, digest: str) -> AdapterManifest:
        """Reads the manifest of an admitted adapter."""
        with disk_errors(self._home), self._contents.held(digest) as manifest:
            return present(manifest, digest)

    def has(self, digest: str) -> bool:
        """Whether it is here. It does not count as a use."""
        return self._contents.has(digest)

    def open_slab(self, digest: str, dtype: SlabDtype, extent_bytes: int) -> SlabSource:
        """An admitted adapter's slab, from its file or else to be packed as it is read; the caller
        closes it. One that is finished is preferred."""
        with disk_errors(self._home), ExitStack() as held:
            known = held.enter_context(self._contents.held(digest))
            manifest = present(known, digest)
            slab = self._slabs.open(digest, dtype, extent_bytes)
            if slab is not None:
                return slab
            weights = held.enter_context(open_weights(self._contents.path(digest) / WEIGHTS_FILE))
            adapter, seal = self._checked(manifest, weights)
            plan = self._plan(adapter, digest, dtype, extent_bytes)
            damaged = partial(self._damaged, digest)
            kept = held.pop_all()
            return Unpacked(weights, adapter, self._base, plan, seal, damaged, kept, self._run)

    def save_slab(
        self,
        layout: SlabLayout,
        arena: memoryview,
        first_extents: Sequence[int],
        stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Keeps on disk what `SlabSource.copy_runs` brought to the arena, or what a device made of
        it there: a copy is quicker. False: `stopped` became true, and nothing is kept."""
        with disk_errors(self._home):
            self._make_folders()
            return self._slabs.keep(layout, arena, first_extents, stopped)

    def _plan(
        self, adapter: LoraTensors, digest: str, dtype: SlabDtype, extent_bytes: int
    ) -> SlabPlan:
        """The plan of an adapter's slab; those of one shape differ in their digest alone."""
        judged = self._judged.get(digest)
        if judged is None or judged.tensors is not adapter or not judged.shape:
            return SlabPlan(make_layout(adapter, self._base, digest, dtype, extent_bytes))
        key = judged.shape, dtype, extent_bytes
        known = self._plans.get(key)
        if known is None:
            layout = make_layout(adapter, self._base, digest, dtype, extent_bytes)
            known = SlabPlan(layout, plan_moves(adapter, self._base, layout))
            self._plans.put(key, known)
        return known._replace(layout=msgspec.structs.replace(known.layout, digest=digest))

    def _admit_current(
        self, source: Source, ref: AdapterRef, token: str | None, progress: Progress
    ) -> AdapterManifest:
        pinned = ref
        if not _is_known_by_name(ref):
            pinned = self._retries.run(lambda: source.resolve(ref, token))
        credential = hashlib.sha256((token or "").encode()).hexdigest()
        return self._admissions.run(
            pinned, credential, lambda: self._admit(source, pinned, token, progress)
        )

    def _admit(
        self, source: Source, ref: AdapterRef, token: str | None, progress: Progress
    ) -> AdapterManifest:
        with disk_errors(self._home):
            known = self._recall(ref)
            if known is not None and known.knows_ends:
                return known
            try:
                return self._bring(source, ref, token, progress)
            except AdapterError as error:
                if known is None or error.violations or isinstance(error, AdapterChanged):
                    raise
                return known

    def _bring(
        self, source: Source, ref: AdapterRef, token: str | None, progress: Progress
    ) -> AdapterManifest:
        self._make_folders()
        with self._folder_for(ref) as folder:
            progress("fetching")
            nbytes, hashed = self._fetch(source, ref, token, folder)
            progress("checking")
            with self._judging:
                judged = judge_folder(
                    folder, self._base, self._limits, self._run, self._shapes, hashed
                )
            self._keep(folder, judged)
            self._references.remember(Known(ref, judged.manifest.digest, nbytes), folder)
        return judged.manifest

    def _merge(self, recipe: MergeRecipe, run: Callable[[Path], None]) -> AdapterManifest:
        with disk_errors(self._home), ExitStack() as held:
            known = self._known(recipe.digest)
            if known is not None:
                return known
            members = [
                merged_member(held.enter_context(self._contents.held(member.digest)), member.digest)
                for member in recipe.members
            ]
            return self._make(recipe, members, run)

    def _make(
        self,
        recipe: MergeRecipe,
        members: Sequence[AdapterManifest],
        run: Callable[[Path], None],
    ) -> AdapterManifest:
        tensors = [self._intact(member) for member in members]
        nbytes = plan_merge(recipe, tensors, self._base, self._limits).nbytes
        self._make_folders()
        self._quota.check(nbytes)
        with self._quota.room(nbytes), unfinished_folder(self._unfinished) as folder:
            job = MergeJob(recipe, self._base, self._limits)
            write_job(folder, job, [self._contents.path(member.digest) for member in members])
            run(folder)
            write_ends(folder, members)
            judged = judge_folder(folder, self._base, self._limits)
            manifest = judged.manifest.of_merge(recipe.digest, merged_coverage(tensors))
            self._keep(folder, judged._replace(manifest=manifest))
        return manifest

    def _fetch(
        self, source: Source, ref: AdapterRef, token: str | None, folder: Path
    ) -> tuple[int, list[bytes] | None]:
        """Fetches an adapter's files. Small files come first: most of what cannot be served is
        known before the weights come.

        Returns the bytes of all files, and the digests of the weights' leaves if the source knows
        them.
        """
        listing = self._retries.run(lambda: source.list_files(ref, token))
        findings = Findings()
        nearby = partial(source.adapters_in, ref, token)
        small = small_files(listing, self._limits, findings, shown_place(ref), nearby)
        total = fetched_bytes(listing)
        if total > self._quota.max_bytes:
            message = f"the adapter has {total} bytes, more than the adapter store may hold"
            raise AdapterError("too_large", message)
        self._quota.check(total)

        def fetch(name: str) -> list[bytes] | None:
            target = folder / name
            if partial_bytes(target) == listing[name] and target.exists():
                return None
            hashed = self._retries.run(
                lambda: source.fetch_file(ref, token, name, folder), lambda: partial_bytes(target)
            )
            fetched = target.stat().st_size
            if fetched != listing[name]:
                target.unlink()
                message = f"{name} came with {fetched} bytes, {listing[name]} were announced"
                raise AdapterError("unavailable", message, (), 1.0)
            return hashed

        for name in small:
            fetch(name)
        contents = {name: (folder / name).read_bytes() for name in small}
        config = hashlib.sha256(contents.get(CONFIG_FILE, b"")).digest()
        is_known = self._configs.get(config) is not None
        check_small(contents, self._base, self._limits, findings, is_known=is_known)
        index = read_index(contents, listing, findings)
        findings.raise_if_any()
        self._configs.put(config, True)
        # Several files and the one that is made of them lie side by side for a while.
        with self._quota.room(total if index is None else 2 * total):
            hashed = [fetch(name) for name in weight_files(listing)]
            if index is None:
                return total, hashed[0]
            join_files(folder, index, WEIGHTS_FILE)
        return total, None

    def _make_folders(self) -> None:
        """Makes folders before each write: somebody may have deleted them. Raises OSError."""
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)

    def _folder_for(self, ref: AdapterRef) -> AbstractContextManager[Path]:
        """The folder to fetch to: fresh for folders; downloads go on where they broke off."""
        if ref.source in ("local", "upload"):
            return unfinished_folder(self._unfinished)
        return resumable_folder(self._unfinished, format_ref(ref))

    def _keep(self, folder: Path, judged: Judged) -> None:
        self._contents.keep(folder, judged.manifest)
        self._judged.put(judged.manifest.digest, judged)
        self._allowed.put(judged.manifest.digest, judged.tensors.coverage)

    def _recall(self, ref: AdapterRef) -> AdapterManifest | None:
        """Finds a pinned reference's manifest, if its files keep to the limits of today."""
        known = self._references.find(ref)
        if known is None or known.nbytes > self._limits.max_bytes:
            return None
        return self._known(known.digest)

    def _known(self, digest: str) -> AdapterManifest | None:
        """Reads a stored manifest, once its content keeps to the limits of today.

        Refused content is given up, and the published files are fetched and judged again: the
        disk may have changed the stored ones.
        """
        with self._contents.held(digest) as manifest:
            if manifest is None:
                return None
            coverage = self._allowed.get(digest)
            if coverage is None:
                try:
                    folder = self._contents.path(digest)
                    coverage = rejudge(folder, self._base, self._limits).coverage
                except AdapterError as error:
                    log.warning("stored adapter %.12s is given up: %s", digest, error)
                    self._contents.give_up(digest)
                    return None
                self._allowed.put(digest, coverage)
            return manifest.with_coverage(coverage)

    def _intact(self, manifest: AdapterManifest) -> LoraTensors:
        """The tensors of stored content, which is given up if the disk has changed it."""
        folder = self._contents.path(manifest.digest)
        adapter = rejudge(folder, self._base, self._limits)
        with open_weights(folder / WEIGHTS_FILE) as weights:
            if seal_stored(weights, adapter, manifest, self._run) is None:
                raise self._damaged(manifest.digest)
        return adapter

    def _checked(
        self, manifest: AdapterManifest, weights: WeightsFile
    ) -> tuple[LoraTensors, Callable[[], Seal]]:
        """The tensors of stored content, and what shows that they are read as they were judged.

        Content that this process judged itself, and whose file is still the same, need not be
        hashed again.
        """
        judged = self._judged.get(manifest.digest)
        if judged is not None and judged.seal.identity == weights.identity():
            return judged.tensors, lambda: judged.seal
        adapter = rejudge(self._contents.path(manifest.digest), self._base, self._limits)
        return adapter, partial(self._sealed_anew, manifest, adapter, weights)

    def _sealed_anew(
        self, manifest: AdapterManifest, adapter: LoraTensors, weights: WeightsFile
    ) -> Seal:
        """The seal of stored content. Raises DamagedError where it is not what was judged."""
        seal = seal_stored(weights, adapter, manifest, self._run)
        if seal is None:
            raise DamagedError
        return seal

    def _damaged(self, digest: str) -> AdapterError:
        """Gives up stored content that the disk has changed."""
        self._contents.give_up(digest)
        message = "the stored adapter was damaged and has been removed; try again"
        return AdapterError("unavailable", message, (), 1.0)


def _is_known_by_name(ref: AdapterRef) -> bool:
    """Whether this is a commit of the Hub or an upload: a router has authorised its callers."""
    return ref.source in ("hub", "upload") and is_pinned(ref)


class Quota:
    """Keeps the store's folders within a size.

    The size is at most `max_bytes` for what lies in `folders`, and never more than the disk has.
    Thread-safe.

    What another holds (`loraplex.adapters.common.disk.hold`) stays, even if the quota is exceeded
    for a while. spare: what lies there is not counted, and goes first when the disk has no room.
    """

    def __init__(self, max_bytes: int, folders: Sequence[Path], spare: Path) -> None:
        self.max_bytes = max_bytes
        self._folders = tuple(folders)
        self._spare = (spare,)
        self._lock = threading.Lock()
        self._expected = 0
        self._sizes: dict[tuple[str, int], int] = {}

    def check(self, nbytes: int) -> None:
        """Raises AdapterError when the disk has no room for `nbytes`, whatever were removed."""
        shortage = self._shortage(nbytes)
        if shortage > 0 and shortage > stored_bytes(self._folders + self._spare):
            tell_of_disk(self._folders[0], f"{shortage} bytes more would have to be free", "full")
            message = "the disk of the adapter store has no room for this adapter"
            raise AdapterError("unavailable", message, (), _RETRY_S)

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Makes room for what is written while inside; concurrent writers count together."""
        # One at a time: two who saw the same content would both remove what one of them needs.
        with self._lock:
            release(self._shortage(nbytes), self._spare)
            excess = (
                stored_bytes(self._folders, self._size) + self._expected + nbytes - self.max_bytes
            )
            release(max(excess, self._shortage(nbytes)), self._folders, self._size)
            self._expected += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._expected -= nbytes

    def _size(self, entry: os.DirEntry[str]) -> int:
        """Measures an entry once: there may be thousands, and stored content never changes."""
        key = entry.path, entry.inode()
        size = self._sizes.get(key)
        if size is None:
            if len(self._sizes) >= MAX_SIZES:
                self._sizes.clear()
            size = self._sizes[key] = entry_bytes(entry)
        return size

    def _shortage(self, nbytes: int) -> int:
        return nbytes + HEADROOM_BYTES - free_bytes(self._folders[0])


class Slabs:
    """Files of slabs in a folder. unfinished: for those that are being written."""

    def __init__(self, folder: Path, unfinished: Path, base: BaseSpec, quota: Quota) -> None:
        self._folder = folder
        self._unfinished = unfinished
        self._base = base
        self._quota = quota

    def open(self, digest: str, dtype: SlabDtype, extent_bytes: int) -> SlabFile | None:
        """A finished file of this adapter, if any; the caller closes it. Raises OSError."""
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
        """Writes a slab file, as `AdapterStore.save_slab`. Raises OSError, AdapterError."""
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
        """Names a slab file. One holds what changes an encoder of pictures where the base has that.
        A finished one depends on how the base's weights were loaded."""
        parts = [digest, dtype, str(extent_bytes), f"of{self._base.shards}"]
        if self._base.tower_layer >= 0:
            parts.append("images")
        if is_finished:
            parts.append(f"finished_{self._base.quantize or 'as_stored'}")
        return self._folder / f"{'-'.join(parts)}-v{LAYOUT_VERSION}.slab"
