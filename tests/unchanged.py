"""Long tests that need not run again where all that they read is as when they passed."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".cache" / "unchanged"
COMPILERS = ("triton", "torch")


def digest_of(folders: Iterable[Path], versions: Iterable[str]) -> str:
    """A hash of names and contents of all files in the folders but tests, and of the versions."""
    told = hashlib.sha256("\n".join(versions).encode())
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            is_read = path.is_file() and "__pycache__" not in path.parts
            if is_read and not path.name.startswith("test_"):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                told.update(f"{path.relative_to(folder.parent)} {content}\n".encode())
    return told.hexdigest()


@contextmanager
def unless_unchanged(name: str, *folders: str) -> Iterator[None]:
    """Skips a test that passed with these folders and these versions of the compilers.

    folders: below the root of the repository.
    """
    versions = [f"{package} {version(package)}" for package in COMPILERS]
    kept = KEPT / f"{name}-{digest_of([ROOT / folder for folder in folders], versions)}"
    if kept.exists():
        pytest.skip(f"{', '.join(folders)} and Triton are as when this passed")
    yield
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.touch()
