"""Brings rivals' published tests, and what those import, into `.cache/suites`, once."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CACHE = Path(__file__).parents[2] / ".cache" / "suites"
_PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
_SITE = (
    "anthropic==2.14.0",
    "docstring-parser==0.18.0",
    "pybase64==1.5.1",
    "tblib==3.2.2",
    "wget==3.2",
)


class Package(NamedTuple):
    """within: the folder that holds the tests, below the package's root. at: where it is put."""

    requirement: str
    within: str
    at: str
    is_wheel: bool = False


PACKAGES = {
    "vllm": Package("vllm==0.33.0", "tests", "tests"),
    "llama": Package("llama-cpp-python==0.3.36", "vendor/llama.cpp/tools/server/tests", "."),
    "sglang": Package("sglang==0.5.23", "sglang/test", "sglang/test", is_wheel=True),
}


def suite_of(name: str) -> Path:
    """The folder of a package's tests, brought if it is missing."""
    package, folder = PACKAGES[name], CACHE / name
    _once(folder, lambda to: _copy(package, to))
    return folder


def site() -> Path:
    """Packages that the tests import, and the project does not."""
    folder = CACHE / "site"
    _once(folder, lambda to: _pip("install", "--no-deps", "--target", str(to), *_SITE))
    return folder


def _once(folder: Path, make: Callable[[Path], object]) -> None:
    if folder.exists():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        make(Path(scratch) / "made")
        (Path(scratch) / "made").rename(folder)


def _copy(package: Package, to: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        bring = _unpacked_wheel if package.is_wheel else _unpacked_sources
        source = bring(package.requirement, Path(scratch)) / package.within
        shutil.copytree(source, to / package.at)


def _unpacked_wheel(requirement: str, scratch: Path) -> Path:
    _pip("download", "--no-deps", "--dest", str(scratch), requirement)
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch / "wheel")
    return scratch / "wheel"


def _unpacked_sources(requirement: str, scratch: Path) -> Path:
    """pip unpacks sources, then asks their build for metadata; that fails, and the sources stay."""
    keep = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-clean"]
    command = [*_PIP, "download", *keep, "--dest", str(scratch / "made"), requirement]
    subprocess.run(command, env={"TMPDIR": str(scratch), **_environ()}, capture_output=True)
    found = sorted(scratch.glob("pip-download-*/*_*"))
    if not found:
        raise FileNotFoundError(f"pip did not unpack the sources of {requirement}")
    return found[0]


def _pip(*arguments: str) -> None:
    subprocess.run([*_PIP, *arguments], check=True)


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TMPDIR"}
