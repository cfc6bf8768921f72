"""Finds the extra of loraplex that brings a missing package."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

_DISTRIBUTION = "loraplex"
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,.\s-]+)\])?")
_MARKER = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")


def sentence(error: ModuleNotFoundError, wanted: str = "") -> str | None:
    """Tell what to install; None for a fault of loraplex itself. wanted: the command's extra."""
    module = (error.name or "").partition(".")[0]
    if not module or module in (_DISTRIBUTION, *sys.stdlib_module_names):
        return None
    return f"{module} is not installed: run `{remedy(module, wanted)}`"


def remedy(module: str, wanted: str = "") -> str:
    """The command that installs a module. wanted: an extra that is named if it brings the module,
    or if none does; else the smallest that does is named."""
    brought = brought_by_extras()
    held = [name for name, found in brought.items() if any(_is_of(module, d) for d in found)]
    if wanted not in held and held:
        wanted = min(held, key=lambda name: len(brought[name]))
    return f"pip install '{_DISTRIBUTION}[{wanted}]'" if wanted else f"pip install {_DISTRIBUTION}"


def require(module: str) -> None:
    """Raises ModuleNotFoundError as an import of an absent module would, in less time."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def installed(distribution: str) -> str | None:
    """The version of a distribution; None = it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def brought_by_extras() -> dict[str, set[str]]:
    """Distributions by extra, as the installed metadata lists them; none in a mere checkout."""
    try:
        lines = requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    listed: dict[str, list[str]] = {}
    for line in lines:
        for extra in _MARKER.findall(line):
            listed.setdefault(extra, []).append(line)
    return {extra: set(_distributions(extra, listed)) for extra in listed}


def _distributions(extra: str, listed: dict[str, list[str]]) -> Iterator[str]:
    for line in listed.get(extra, []):
        match = _REQUIREMENT.match(line)
        if match is None:
            continue
        if match[1] != _DISTRIBUTION:
            yield match[1]
        for inner in (match[2] or "").split(",") if match[1] == _DISTRIBUTION else ():
            yield from _distributions(inner.strip(), listed)


def _is_of(module: str, distribution: str) -> bool:
    """Whether a distribution has its module's name, or that with `py` before or a word behind."""
    name = re.sub(r"[-_.]+", "_", distribution).lower()
    return name in (module, f"py{module}") or name.startswith(f"{module}_")
