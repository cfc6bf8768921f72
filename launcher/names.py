"""Checks that no other installed distribution has a top-level package of loraplex's names."""

from collections.abc import Mapping
from importlib.metadata import packages_distributions

OUR_PACKAGES = ("adapters", "launcher", "router", "server")
OUR_DISTRIBUTION = "loraplex"


def clash(distributions: Mapping[str, list[str]] | None = None) -> str | None:
    """One sentence that says what to uninstall, or None. distributions: package -> who ships it."""
    shipped = packages_distributions() if distributions is None else distributions
    foreign = {
        package: sorted(set(shipped.get(package, ())) - {OUR_DISTRIBUTION})
        for package in OUR_PACKAGES
    }
    clashes = {package: names for package, names in foreign.items() if names}
    if not clashes:
        return None
    others = sorted({name for names in clashes.values() for name in names})
    packages = ", ".join(f"`{package}`" for package in clashes)
    return (
        f"{', '.join(others)} also ships a top-level package {packages}, which loraplex needs for "
        f"itself: run `pip uninstall {' '.join(others)}`, or install loraplex in its own venv"
    )
