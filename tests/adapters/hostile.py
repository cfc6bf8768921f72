"""Adapter folders that must be refused, each with the codes of all that is wrong with it."""

from collections.abc import Mapping

from loraplex.adapters.base import BaseSpec
from tests.adapters import hostile_config, hostile_files, hostile_tensors
from tests.adapters.spoils import Spoil


def cases(base: BaseSpec) -> Mapping[str, tuple[Spoil, set[str]]]:
    """Name -> how a good folder for `base` is spoiled, and exactly what is found."""
    return hostile_config.cases() | hostile_tensors.cases(base) | hostile_files.cases(base)
