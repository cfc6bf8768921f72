"""Long tests that need not run again where all that they read is as when they passed."""

import ast
import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".cache" / "unchanged"
COMPILERS = ("triton", "torch")
ORACLES = ("numpy", "peft", "transformers")


def digest_of(folders: Iterable[Path], versions: Iterable[str]) -> str:
    """A hash of names and contents of all files in the folders but tests, and of the versions."""
    read = {
        f"{path.relative_to(folder.parent)}": path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("test_")
    }
    return _digest(read, versions)


def _digest(files: Mapping[str, Path], versions: Iterable[str]) -> str:
    """files: by the names that count."""
    told = hashlib.sha256("\n".join(versions).encode())
    for name, path in files.items():
        told.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return told.hexdigest()


# Names of tests that passed, or were skipped, in this process.
_passed = set[str]()


def note(report: pytest.TestReport) -> None:
    """Notes a test that passed or was skipped."""
    if report.skipped or (report.when == "call" and report.passed):
        _passed.add(report.nodeid)


def unless_file_unchanged(request: pytest.FixtureRequest, conftest: Path) -> Iterator[None]:
    """Skips a file of kernels' tests that passed with all that the file reads.

    What is asked for by name, and what runs on a GPU, always runs.
    """
    options, file = request.config.option, request.path
    whole = not options.keyword and not any(file.name in one for one in request.config.args)
    if not whole or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    read = {conftest, ROOT / "tests" / "conftest.py", *read_by(file, "server/kernels")}
    kept = kept_for(f"{file.stem}-{options.markexpr.replace(' ', '-')}", sorted(read))
    if kept.exists():
        pytest.skip("kernels, Triton and what this file imports are as when its tests passed")
    yield
    if {item.nodeid for item in request.session.items if item.path == file} <= _passed:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()


def _versions(*packages: str) -> list[str]:
    return [f"{package} {version(package)}" for package in (*COMPILERS, *packages)]


@functools.cache
def imports(file: Path) -> frozenset[Path]:
    """Files of the product and of tests that a file imports, in whatever place of it."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = (ROOT / name.removeprefix("loraplex.").replace(".", "/") for name in names)
    found = (path for place in places for path in (place.with_suffix(".py"), place / "__init__.py"))
    return frozenset(path for path in found if path.is_file())


def read_by(file: Path, *folders: str) -> list[Path]:
    """The file, all that it imports, at once or through others, and all files of the folders."""
    found = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    new = {file, *(path for path in found if path.suffix == ".py")}
    while new:
        found |= new
        new = {path for one in new for path in imports(one)} - found
    return sorted(path for path in found if "__pycache__" not in path.parts)


def kept_for(name: str, files: Iterable[Path]) -> Path:
    """Where is noted that the test of this name passed with these files, compilers and oracles."""
    digest = _digest({str(path.relative_to(ROOT)): path for path in files}, _versions(*ORACLES))
    return KEPT / f"{name}-{digest}"


@contextmanager
def unless_unchanged(name: str, *folders: str) -> Iterator[None]:
    """Skips a test that passed with these folders and these versions of the compilers.

    folders: below the root of the repository.
    """
    kept = KEPT / f"{name}-{digest_of([ROOT / folder for folder in folders], _versions())}"
    if kept.exists():
        pytest.skip(f"{', '.join(folders)} and Triton are as when this passed")
    yield
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.touch()
