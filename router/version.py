"""The release's version."""

from importlib.metadata import PackageNotFoundError, version


def _version() -> str:
    try:
        return version("loraplex")
    except PackageNotFoundError:
        return "0 (from a checkout)"


VERSION = _version()
