"""Fields of config dataclasses, which users may set as options. Pure."""

from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: T, words: str, **metadata: Any) -> T:
    """Makes a field that is an option. words: its help. metadata: see `launcher/options.py`."""
    return field(default=default, metadata={"help": words, **metadata})


def fixed(default: T) -> T:
    """Makes a field that is no option: one value suits all, and tests set others."""
    return field(default=default, metadata={"fixed": True})
