"""Adapters in folders of this machine, under the roots that the operator configured.

Paths are resolved first and must lie under a root. They are then opened step by step without
following any link, so what was judged is what is read.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loraplex.adapters.common.disk import share_bytes
from loraplex.adapters.content_check import Run, copy_leaves
from loraplex.adapters.errors import AdapterChanged, AdapterError, Findings, invalid, shown
from loraplex.adapters.judge import adapters_near
from loraplex.adapters.peft.files import is_relevant, is_unsafe
from loraplex.adapters.ref import AdapterRef, path_of_local, shown_name

MAX_ENTRIES = 10_000
_CHANGED_RETRY_S = 1.0
# A loop of links, a file among the parents, a socket.
_OF_KIND = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
# Errors of the disk that is written to, which the caller knows how to name.
_OF_TARGET = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


class LocalSource:
    """Serves adapters from folders of this machine. roots: adapter folders, or folders under which
    adapters lie; none = no local adapters. run: `map`, or that of threads, which then copy.
    """

    def __init__(self, roots: Sequence[Path], run: Run = map) -> None:
        self._run = run
        self._roots = tuple(Path(os.path.realpath(Path(root).expanduser())) for root in roots)

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        """Pins by the folder's fingerprint: names, identities, sizes and times of files."""
        folder = self._folder(ref)
        fingerprint = _fingerprint(self._stat_files(folder, ref))
        if ref.revision is not None and ref.revision != fingerprint:
            raise _changed(ref)
        return AdapterRef("local", ref.name, fingerprint)

    def list_files(self, ref: AdapterRef, token: str | None) -> dict[str, int]:
        files = self._stat_files(self._folder(ref), ref)
        if ref.revision is not None and ref.revision != _fingerprint(files):
            raise _changed(ref)
        return {name: found.st_size for name, found in files.items()}

    def adapters_in(self, ref: AdapterRef, token: str | None) -> Sequence[str]:
        folder = self._folder(ref)
        return adapters_near(folder, may_look_beside=folder not in self._roots)

    def fetch_file(
        self, ref: AdapterRef, token: str | None, name: str, folder: Path
    ) -> list[bytes] | None:
        source = self._folder(ref) / name
        target, digests = folder / name, None
        try:
            with self._open(source, ref) as fd:
                before = os.fstat(fd)
                with target.open("xb", buffering=0) as file:
                    if share_bytes(fd, file.fileno()):
                        copied = os.fstat(file.fileno()).st_size
                    else:
                        into = file.fileno()
                        copied, digests = copy_leaves(fd, into, before.st_size, self._run)
                after = os.fstat(fd)
            if copied != before.st_size or identity(before) != identity(after):
                raise _changed(ref)
            self.list_files(ref, token)  # the files before this one are of the same revision, too
        except (AdapterError, OSError):
            target.unlink(missing_ok=True)
            raise
        return digests

    def _folder(self, ref: AdapterRef) -> Path:
        """The real folder that the reference means, under a root."""
        if not self._roots:
            raise AdapterError("forbidden", "local adapters are not enabled: no root is configured")
        name = shown(shown_name(ref))
        beneath = leads_away = False
        for root in self._roots:
            path = root / path_of_local(ref.name)
            found = Path(os.path.realpath(path))
            if not found.is_relative_to(root):
                leads_away |= os.path.lexists(path)
                continue
            beneath = True
            with _source_errors(ref):
                if found.is_dir():
                    return found
        if beneath and not leads_away:
            raise AdapterError("not_found", f"no adapter folder {name} under the roots")
        raise AdapterError("forbidden", f"{name} does not lie under an allowed root")

    def _stat_files(self, folder: Path, ref: AdapterRef) -> dict[str, os.stat_result]:
        files: dict[str, os.stat_result] = {}
        findings = Findings()
        with _source_errors(ref), os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_ENTRIES:
                    message = f"the folder has more than {MAX_ENTRIES} entries"
                    raise invalid("too_many_files", shown_name(ref), message)
                if is_unsafe(entry.name):  # never opened, whatever it is
                    files[entry.name] = entry.stat(follow_symlinks=False)
                elif is_relevant(entry.name):
                    with findings.gathered(), self._open(folder / entry.name, ref) as fd:
                        files[entry.name] = os.fstat(fd)
        findings.raise_if_any()
        return files

    @contextmanager
    def _open(self, path: Path, ref: AdapterRef) -> Iterator[int]:
        """Opens a regular file and gives its descriptor."""
        with _source_errors(ref):
            real = Path(os.path.realpath(path))
            root = next((root for root in self._roots if real.is_relative_to(root)), None)
            if root is None:
                message = f"{path.name} is a link to a place outside the allowed roots"
                raise invalid("escaping_link", path.name, message)
            fd = _open_beneath(root, real.relative_to(root))
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    message = f"{path.name} is not a regular file"
                    raise invalid("not_a_file", path.name, message)
                yield fd
            finally:
                os.close(fd)


def _open_beneath(root: Path, relative: Path) -> int:
    """Opens for reading without following a link in any part, nor waiting for a FIFO's writer."""
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in relative.parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            child = os.open(part, flags, dir_fd=directory)
            os.close(directory)
            directory = child
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(relative.name, flags, dir_fd=directory)
    finally:
        os.close(directory)


@contextmanager
def _source_errors(ref: AdapterRef) -> Iterator[None]:
    name = shown(shown_name(ref))
    try:
        yield
    except FileNotFoundError:
        raise AdapterError("not_found", f"local adapter {name} is not complete") from None
    except PermissionError:
        raise AdapterError("forbidden", f"local adapter {name} may not be read") from None
    except OSError as error:
        if error.errno in _OF_TARGET:
            raise
        if error.errno in _OF_KIND:
            raise invalid(
                "not_a_file", shown_name(ref), f"{name} has a file of a wrong kind"
            ) from None
        why = os.strerror(error.errno) if error.errno else type(error).__name__
        message = f"local adapter {name} cannot be read now: {why}"
        raise AdapterError("unavailable", message, (), _CHANGED_RETRY_S) from error


def _fingerprint(files: dict[str, os.stat_result]) -> str:
    parts = [f"{name}\0{identity(found)}" for name, found in files.items()]
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:40]


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Facts that identify a file's content. Tools that copy a folder set the modification time
    back; nobody can set the change time.
    """
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _changed(ref: AdapterRef) -> AdapterChanged:
    message = f"local adapter {shown(shown_name(ref))} changed while it was read; try again"
    return AdapterChanged("unavailable", message, (), _CHANGED_RETRY_S)
