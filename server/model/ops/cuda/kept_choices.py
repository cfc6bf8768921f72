"""Ways of products that earlier starts on such a device chose, beside Triton's compiled kernels.

A start measures only what is not kept, and chooses as the start before did. It compiles nothing
together where an earlier one did, of the same model and sizes.
"""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from triton.runtime.cache import CacheManager, get_cache_manager

from loraplex.server.kernels.launch.sources import sources_digest

_FILE = "ways_of_products"  # without an ending: no kernel's
_ALL_KERNELS = (0, ("all kernels",))


class KeptChoices:
    """Names of ways by number of rows and kind of matrix. What cannot be read counts as none."""

    def __init__(self, cache: Callable[[], CacheManager]) -> None:
        """cache: makes its folder, and raises OSError where that cannot be."""
        self._cache = cache
        self._found = self._read()
        self._new: dict[str, list[str]] = {}

    @classmethod
    def of(cls, device: torch.device, *others: object) -> "KeptChoices":
        """Find what GPUs of this name chose, with the same kernels and libraries. others: facts on
        which it depends, too, as `repr` says them."""
        facts = (
            torch.cuda.get_device_name(device),
            torch.__version__,
            torch.version.cuda,
            triton.__version__,
            sources_digest(),
            *others,
        )
        key = hashlib.sha256(repr(facts).encode()).hexdigest()
        return cls(partial(get_cache_manager, key))

    def find(self, rows: int, kind: tuple[object, ...]) -> list[str]:
        """The names that were kept; none where there is nothing."""
        return self._found.get(_key(rows, kind), [])

    def keep(self, rows: int, kind: tuple[object, ...], names: list[str]) -> None:
        self._new[_key(rows, kind)] = names

    def keep_compiled(self) -> None:
        """Keep that all kernels are compiled, and save that. Raises OSError."""
        self.keep(*_ALL_KERNELS, ["compiled"])
        self.save()

    @property
    def are_compiled(self) -> bool:
        """Whether an earlier start has compiled all kernels. Those that are gone since are compiled
        as they are launched."""
        return bool(self.find(*_ALL_KERNELS))

    def save(self) -> None:
        """Write what is new, beside what others have written since. Raises OSError."""
        if self._new:
            self._found = {**self._read(), **self._new}
            self._cache().put(json.dumps(self._found), _FILE, binary=False)
            self._new = {}

    def _read(self) -> dict[str, list[str]]:
        try:
            path = self._cache().get_file(_FILE)
            found = {} if path is None else json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _key(rows: int, kind: tuple[object, ...]) -> str:
    return f"{rows} {tuple(kind)!r}"
