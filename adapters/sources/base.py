"""The protocol of a source of adapters, and the base of sources without commits."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from loraplex.adapters.common.recent import Recent
from loraplex.adapters.errors import AdapterChanged, AdapterError
from loraplex.adapters.ref import AdapterRef, RefSource, pin_of, shown_name
from loraplex.adapters.sources.partial import RemoteBytes, fetch_resumable

MAX_KNOWN = 4096
RETRY_S = 1.0
_MAX_RETRY_S = 300.0
# What enables a source that is not enabled by itself.
ENABLING_OPTIONS: dict[RefSource, str] = {
    "s3": "--s3-bucket",
    "https": "--https-host",
    "modelscope": "--modelscope-owner",
}


class Source(Protocol):
    """Lists and fetches adapters. Blocking: callers run it in threads.

    Every method raises AdapterError, and nothing else, when the source refuses or fails.

    token: the caller's credential, or None; used for this call only.
    """

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        """Pins the reference's revision: proof that this caller may read it now."""
        ...

    def list_files(self, ref: AdapterRef, token: str | None) -> dict[str, int]:
        """Lists the files at the top of a pinned adapter, with their bytes."""
        ...

    def adapters_in(self, ref: AdapterRef, token: str | None) -> Sequence[str]:
        """Names some adapters in a pinned folder that is none itself. Best effort. A name may begin
        with `../`."""
        ...

    def fetch_file(
        self, ref: AdapterRef, token: str | None, name: str, folder: Path
    ) -> list[bytes] | None:
        """Puts one listed file of a pinned adapter into `folder`, whole or not at all.

        Returns the digests of its leaves (`copy_leaves`) where they were made of the bytes that
        were written. After a failure, what had come may lie in `folder` under another name, for
        the next call.
        """
        ...


class LateSource:
    """A source that is opened when it is first asked: its library takes long to load."""

    def __init__(self, opener: Callable[[], Source]) -> None:
        self._source = cache(opener)

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        return self._source().resolve(ref, token)

    def list_files(self, ref: AdapterRef, token: str | None) -> dict[str, int]:
        return self._source().list_files(ref, token)

    def adapters_in(self, ref: AdapterRef, token: str | None) -> Sequence[str]:
        return self._source().adapters_in(ref, token)

    def fetch_file(
        self, ref: AdapterRef, token: str | None, name: str, folder: Path
    ) -> list[bytes] | None:
        return self._source().fetch_file(ref, token, name, folder)


class RemoteFile(NamedTuple):
    """A file at a source, before it is fetched. tag: what the server says changes whenever the
    content does (an ETag).
    """

    tag: str
    size: int


class PinnedSource(ABC):
    """A source without commits. It pins references by a digest over names, tags and sizes.

    Listings are remembered by their digest, so they cannot be stale. Thread-safe. The abstract
    methods raise AdapterError. clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: Recent[AdapterRef, Mapping[str, RemoteFile]] = Recent(MAX_KNOWN)

    @abstractmethod
    def _check(self, ref: AdapterRef) -> object:
        """Refuses references that the operator does not allow."""

    @abstractmethod
    def _list(self, ref: AdapterRef) -> Mapping[str, RemoteFile]:
        """Asks the server for the files of a reference."""

    @abstractmethod
    def _open(
        self, ref: AdapterRef, name: str, file: RemoteFile, offset: int
    ) -> AbstractContextManager[RemoteBytes]:
        """Opens a file that was listed, from `offset` on."""

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        """Asks the server. Raises AdapterChanged when the revision of `ref` is gone."""
        self._check(ref)
        return self._pin(ref)[0]

    def list_files(self, ref: AdapterRef, token: str | None) -> dict[str, int]:
        return {name: file.size for name, file in self._files(ref).items()}

    def adapters_in(self, ref: AdapterRef, token: str | None) -> Sequence[str]:
        return ()

    def fetch_file(self, ref: AdapterRef, token: str | None, name: str, folder: Path) -> None:
        self._fetch(ref, name, self._files(ref)[name], folder / name)

    def _fetch(self, ref: AdapterRef, name: str, file: RemoteFile, target: Path) -> None:
        fetch_resumable(
            target, file.size, lambda offset: self._open(ref, name, file, offset), self._clock
        )

    def _files(self, ref: AdapterRef) -> Mapping[str, RemoteFile]:
        """Lists the files of a pinned reference."""
        self._check(ref)
        known = self._known.get(ref)
        return self._pin(ref)[1] if known is None else known

    def _pin(self, ref: AdapterRef) -> tuple[AdapterRef, Mapping[str, RemoteFile]]:
        files = self._list(ref)
        if not files:
            raise AdapterError("not_found", f"{shown_name(ref)} holds no adapter")
        pin, fingerprint = pin_of(ref), _fingerprint(files)
        pinned = AdapterRef(ref.source, ref.name, pin.of(fingerprint))
        if pin.fingerprint not in (None, fingerprint):
            raise changed(ref)
        self._known.put(pinned, files)
        return pinned, files


def _fingerprint(files: Mapping[str, RemoteFile]) -> str:
    parts = sorted(f"{name}\0{file.tag}\0{file.size}" for name, file in files.items())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


def changed(ref: AdapterRef) -> AdapterChanged:
    name = shown_name(ref)
    return AdapterChanged("unavailable", f"{name} has changed; try again", (), RETRY_S)


def unreachable(ref: AdapterRef) -> AdapterError:
    message = f"{shown_name(ref)} cannot be reached or read now"
    return AdapterError("unavailable", message, (), RETRY_S)


def refused(ref: AdapterRef, status: int, retry_after: str | None) -> AdapterError:
    """Makes an error of a status other than 2xx. 401 means that the operator's access is refused.
    retry_after: the header; only seconds are understood."""
    name = shown_name(ref)
    if status in (401, 403):
        return AdapterError("forbidden", f"{name}: the server's access is refused (HTTP {status})")
    if 300 <= status < 500 and status not in (408, 425, 429):
        return AdapterError("not_found", f"{name} is not to be had (HTTP {status})")
    seconds = retry_after or ""
    delay = float(seconds) if seconds.isascii() and seconds.isdigit() else RETRY_S
    message = f"{name} cannot be served now (HTTP {status})"
    return AdapterError("unavailable", message, (), min(delay, _MAX_RETRY_S))
