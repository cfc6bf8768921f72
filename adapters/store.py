"""The store of admitted adapters on disk: fetched once, judged once, packed on demand.

Everything is keyed by content digest; what a reference meant is remembered beside it. Several
processes may share a root. Blocking and thread-safe; who may use which adapter is not decided here.
"""

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from adapters.adapter_files import fetched_bytes, small_files
from adapters.base import BaseSpec
from adapters.disk import (
    disk_errors,
    hold,
    mark_used,
    publish_file,
    publish_folder,
)
from adapters.errors import AdapterChanged, AdapterError
from adapters.judge import check_small, is_intact, judge_folder, rejudge
from adapters.layout import make_layout
from adapters.manifest import LAYOUT_VERSION, AdapterManifest, SlabDtype
from adapters.merge_job import MergeJob, write_job
from adapters.merge_plan import plan_merge
from adapters.merge_recipe import MergeRecipe
from adapters.pack import SlabError, SlabFile, write_slab
from adapters.peft_format import CONFIG_FILE
from adapters.quota import Quota
from adapters.ref import AdapterRef, RefSource, format_ref, is_pinned, told_name
from adapters.retries import Retries
from adapters.single_flight import SingleFlight
from adapters.sources.base import Source
from adapters.sources.partial import partial_bytes
from adapters.staging import remove_stale, resumable_folder, staging_folder
from adapters.validate import WEIGHTS_FILE, AdapterLimits, LoraTensors
from adapters.violations import Findings, invalid

Stage = Literal["fetching", "checking"]
Progress = Callable[[Stage], None]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MANIFEST_FILE = "manifest.json"
_FAILURE_TTL_S = 5.0
_MERGE_FAILURE_TTL_S = 600.0
_MAX_REFS = 65_536


class _Remembered(msgspec.Struct, frozen=True):
    """What a pinned reference turned out to be."""

    ref: AdapterRef
    digest: str


class AdapterStore:
    """Adapters for one base model under `root`.

    sources: those that references may name; others are refused. clock: monotonic seconds.
    Every method raises AdapterError when the adapter cannot be had.
    """

    def __init__(
        self,
        root: Path,
        base: BaseSpec,
        sources: Mapping[RefSource, Source],
        limits: AdapterLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        retries: Retries | None = None,
    ) -> None:
        self._base = base
        self._retries = retries or Retries()
        self._sources = dict(sources)
        self._limits = limits or AdapterLimits()
        home = root.expanduser() / (base.digest[:32] or "base")
        self._content = home / "content"
        self._refs = home / "refs"
        self._slabs = home / "slabs"
        self._staging = home / "staging"
        self._quota = Quota(
            self._limits.max_store_bytes, (self._content, self._slabs), self._staging
        )
        self._admissions: SingleFlight[AdapterRef, AdapterManifest]
        self._admissions = SingleFlight(clock, _FAILURE_TTL_S)
        self._packings: SingleFlight[Path, Path] = SingleFlight(clock, _FAILURE_TTL_S)
        self._merges: SingleFlight[str, AdapterManifest]
        self._merges = SingleFlight(clock, _MERGE_FAILURE_TTL_S)
        with disk_errors():
            for folder in (self._content, self._refs, self._slabs, self._staging):
                folder.mkdir(parents=True, exist_ok=True)
            remove_stale(self._staging)

    def admit(
        self,
        ref: AdapterRef,
        token: str | None,
        expected_digest: str | None = None,
        progress: Callable[[Stage], None] | None = None,
    ) -> AdapterManifest:
        """The manifest of the adapter that `ref` names, fetched and judged if it is not yet here.

        A commit of the Hub that is known costs no network: its caller has been authorised already.
        Others are resolved here, and once more if they change under the fetch.
        token: of this caller, for this call. progress: told of each stage of a fetch.
        """
        source = self._sources.get(ref.source)
        if source is None:
            message = f"adapters from {ref.source!r} are not enabled here"
            raise AdapterError("forbidden", message)
        report = progress or (lambda stage: None)
        try:
            manifest = self._admit_current(source, ref, token, report)
        except AdapterChanged:
            manifest = self._admit_current(source, ref, token, report)
        if expected_digest is not None and manifest.digest != expected_digest:
            message = f"expected content {expected_digest}, found {manifest.digest}"
            raise invalid("digest_mismatch", told_name(ref), message)
        return manifest

    def recall(self, ref: AdapterRef) -> AdapterManifest | None:
        """What `admit` would say, if the adapter is here: quick, without any network."""
        source = self._sources.get(ref.source)
        if source is None or not (_is_commit(ref) or ref.source == "local"):
            return None
        pinned = ref if _is_commit(ref) else source.resolve(ref, None)
        with disk_errors():
            return self._recall(pinned)

    def merge(self, recipe: MergeRecipe, run: Callable[[Path], None]) -> AdapterManifest:
        """The adapter that the recipe makes of admitted ones; its digest is the recipe's.

        run: does the job (`adapters.merge_job`) of the folder that it is given.
        """
        return self._merges.run(recipe.digest, "", lambda: self._merge(recipe, run))

    def manifest(self, digest: str) -> AdapterManifest:
        """Of an admitted adapter."""
        with disk_errors(), self._held(digest) as manifest:
            return _present(manifest, digest)

    def has(self, digest: str) -> bool:
        """Whether it is here. It does not count as a use."""
        return (
            bool(_DIGEST.fullmatch(digest)) and (self._content / digest / _MANIFEST_FILE).is_file()
        )

    def slab(
        self, digest: str, dtype: SlabDtype, extent_bytes: int, tp_rank: int = 0, tp_size: int = 1
    ) -> SlabFile:
        """An admitted adapter's slab, packed now if need be; the caller closes it."""
        if (tp_rank, tp_size) != (0, 1):
            raise ValueError("slabs are not sharded: tp_size must be 1")
        key = f"{digest}-{dtype}-{extent_bytes}-{tp_rank}of{tp_size}-v{LAYOUT_VERSION}.slab"
        target = self._slabs / key
        mine: list[SlabFile] = []

        def pack() -> Path:
            mine.append(self._pack(manifest, dtype, extent_bytes, target))
            return target

        with disk_errors(), self._held(digest) as known:
            manifest = _present(known, digest)
            while True:
                self._packings.run(target, "", pack)
                if mine:
                    return mine[0]
                # Another packed it; it may be gone before it is opened here: then once more.
                with suppress(FileNotFoundError, SlabError):
                    return SlabFile(target)

    def _admit_current(
        self, source: Source, ref: AdapterRef, token: str | None, progress: Progress
    ) -> AdapterManifest:
        pinned = ref
        if not _is_commit(ref):
            pinned = self._retries.run(lambda: source.resolve(ref, token))
        credential = hashlib.sha256((token or "").encode()).hexdigest()
        return self._admissions.run(
            pinned, credential, lambda: self._admit(source, pinned, token, progress)
        )

    def _admit(
        self, source: Source, ref: AdapterRef, token: str | None, progress: Progress
    ) -> AdapterManifest:
        with disk_errors():
            known = self._recall(ref)
            if known is not None:
                return known
            with self._staging_folder(ref) as folder:
                progress("fetching")
                self._fetch(source, ref, token, folder)
                progress("checking")
                manifest = judge_folder(folder, self._base, self._limits).manifest
                self._keep(folder, manifest)
                self._remember(ref, manifest.digest, folder)
            return manifest

    def _merge(self, recipe: MergeRecipe, run: Callable[[Path], None]) -> AdapterManifest:
        with disk_errors(), ExitStack() as held:
            known = self._known(recipe.digest)
            if known is not None:
                return known
            members = [
                _member(held.enter_context(self._held(member.digest)), member.digest)
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
        self._quota.check(nbytes)
        with self._quota.room(nbytes), staging_folder(self._staging) as folder:
            job = MergeJob(recipe, self._base, self._limits)
            write_job(folder, job, [self._content / member.digest for member in members])
            run(folder)
            made = judge_folder(folder, self._base, self._limits).manifest
            manifest = msgspec.structs.replace(
                made, digest=recipe.digest, content_digest=made.digest
            )
            self._keep(folder, manifest)
        return manifest

    def _fetch(self, source: Source, ref: AdapterRef, token: str | None, folder: Path) -> None:
        """Small files first: most of what cannot be served is known before the weights come."""
        listing = self._retries.run(lambda: source.list_files(ref, token))
        findings = Findings()
        small = small_files(listing, self._limits, findings)
        total = fetched_bytes(listing)
        if total > self._quota.max_bytes:
            message = f"the adapter has {total} bytes, more than the adapter store may hold"
            raise AdapterError("too_large", message)
        self._quota.check(total)

        def fetch(name: str) -> None:
            target = folder / name
            if partial_bytes(target) == listing[name] and target.exists():
                return
            self._retries.run(
                lambda: source.fetch_file(ref, token, name, folder), lambda: partial_bytes(target)
            )
            fetched = target.stat().st_size
            if fetched != listing[name]:
                target.unlink()
                message = f"{name} came with {fetched} bytes, {listing[name]} were announced"
                raise AdapterError("unavailable", message, (), 1.0)

        for name in small:
            fetch(name)
        contents = {name: (folder / name).read_bytes() for name in small}
        check_small(contents, self._base, self._limits, findings)
        findings.raise_if_any()
        with self._quota.room(total):
            fetch(WEIGHTS_FILE)

    def _staging_folder(self, ref: AdapterRef) -> AbstractContextManager[Path]:
        """Folders are copied; what comes over a network goes on where it broke off."""
        if ref.source == "local":
            return staging_folder(self._staging)
        return resumable_folder(self._staging, format_ref(ref))

    def _keep(self, folder: Path, manifest: AdapterManifest) -> None:
        """Moves judged content to its place, the manifest and what packing needs."""
        target = self._content / manifest.digest
        staged = folder / manifest.digest
        staged.mkdir(exist_ok=True)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            (folder / name).rename(staged / name)
        (staged / _MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
        with self._held(manifest.digest) as known:
            if known is None and target.exists():
                shutil.rmtree(target)
        publish_folder(staged, target)

    @contextmanager
    def _held(self, digest: str) -> Iterator[AdapterManifest | None]:
        """Stored content, safe from eviction meanwhile. None: it is not here, or was damaged."""
        found = bool(_DIGEST.fullmatch(digest))
        with ExitStack() as held:
            if found:
                try:
                    held.enter_context(closing(hold(self._content / digest)))
                except FileNotFoundError:
                    found = False
            yield self._read_manifest(digest) if found else None

    def _read_manifest(self, digest: str) -> AdapterManifest | None:
        folder = self._content / digest
        try:
            manifest = msgspec.json.decode(
                (folder / _MANIFEST_FILE).read_bytes(), type=AdapterManifest
            )
            weights = (folder / WEIGHTS_FILE).stat().st_size
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None
        if manifest.digest != digest or weights < manifest.nbytes:
            return None
        mark_used(folder)
        return manifest

    def _recall(self, ref: AdapterRef) -> AdapterManifest | None:
        """What is known of a pinned reference."""
        try:
            known = msgspec.json.decode(self._ref_file(ref).read_bytes(), type=_Remembered)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return self._known(known.digest) if known.ref == ref else None

    def _known(self, digest: str) -> AdapterManifest | None:
        """Of stored content, judged again under the limits of today."""
        with self._held(digest) as manifest:
            if manifest is not None:
                rejudge(self._content / digest, self._base, self._limits)
            return manifest

    def _remember(self, ref: AdapterRef, digest: str, folder: Path) -> None:
        staged = folder / "ref.json"
        staged.write_bytes(msgspec.json.encode(_Remembered(ref, digest)))
        publish_file(staged, self._ref_file(ref))
        files = sorted(self._refs.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in files[: max(0, len(files) - _MAX_REFS)]:
            old.unlink(missing_ok=True)

    def _ref_file(self, ref: AdapterRef) -> Path:
        name = hashlib.sha256(format_ref(ref).encode()).hexdigest()
        return self._refs / f"{name}.json"

    def _intact(self, manifest: AdapterManifest) -> LoraTensors:
        """The tensors of stored content, which is given up if the disk has changed it."""
        folder = self._content / manifest.digest
        adapter = rejudge(folder, self._base, self._limits)
        if not is_intact(folder, adapter, manifest):
            shutil.rmtree(folder)
            message = "the stored adapter was damaged and has been removed; try again"
            raise AdapterError("unavailable", message, (), 1.0)
        return adapter

    def _pack(
        self, manifest: AdapterManifest, dtype: SlabDtype, extent_bytes: int, target: Path
    ) -> SlabFile:
        """manifest: of content that is held."""
        with disk_errors():
            with suppress(FileNotFoundError, SlabError):
                slab = SlabFile(target)
                mark_used(target)
                return slab
            adapter = self._intact(manifest)
            layout = make_layout(adapter, self._base, manifest.digest, dtype, extent_bytes)
            self._quota.check(layout.nbytes)
            with self._quota.room(layout.nbytes), staging_folder(self._staging) as folder:
                weights = self._content / manifest.digest / WEIGHTS_FILE
                write_slab(weights, adapter, self._base, layout, folder / "slab")
                slab = SlabFile(folder / "slab")
                slab.publish(target)
                return slab


def _present(manifest: AdapterManifest | None, digest: str) -> AdapterManifest:
    if manifest is None:
        raise AdapterError("not_found", f"adapter {digest[:12]} is not in the store")
    return manifest


def _member(manifest: AdapterManifest | None, digest: str) -> AdapterManifest:
    """Of a merge: what is not here any more can be fetched again."""
    if manifest is None:
        message = f"adapter {digest[:12]} is not in the store any more; try again"
        raise AdapterError("unavailable", message, (), 1.0)
    return manifest


def _is_commit(ref: AdapterRef) -> bool:
    """Of the Hub, where whoever pins has been authorised. Other sources allow at each resolve."""
    return ref.source == "hub" and is_pinned(ref)
