"""Environments that have no more than an extra brings, made of links to what is installed here."""

import re
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def linked(folder: Path, extras: tuple[str, ...] = ()) -> Path:
    """The new environment's Python. Raises PackageNotFoundError where this one lacks a package."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "loraplex").symlink_to(ROOT / "loraplex")
    for found in _closure(extras):
        for place in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            source = Path(str(found.locate_file(place)))
            if not (site / place).exists() and source.suffix != ".pth":
                (site / place).symlink_to(source)
    return folder / "bin/python"


def _closure(extras: tuple[str, ...]) -> Iterator[Distribution]:
    wanted = [("loraplex", extra) for extra in ("", *extras)]
    seen = set[tuple[str, str]]()
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found = distribution(name)
        if not extra:
            yield found
        for needed in map(Requirement, found.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                spelled = re.sub(r"[-_.]+", "-", needed.name).lower()
                wanted += [(spelled, inner) for inner in ("", *needed.extras)]
