"""Finds the tensors' names in what a trainer saved, and what a pickle asked for. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

_MAX_DEPTH = 4
_MAX_VISITED = 10_000
_PARALLEL_PREFIX = "module."
_GLOBAL = re.compile(r"(?:GLOBAL|global) ([\w.]{1,200})")


class StateDictError(ValueError):
    """What was saved is no plain set of tensors. str(): why, in words."""


def find_tensors(saved: object, is_tensor: Callable[[object], bool]) -> Mapping[str, Any]:
    """Name -> tensor, out of a state dict or of what holds exactly one with LoRA's tensors.

    `module.`, which torch's parallel wrappers put before all names, is taken off.
    """
    if isinstance(saved, Mapping) and any(map(is_tensor, saved.values())):
        found = saved
    else:
        candidates = [d for d in _mappings(saved, 0, [0]) if _is_lora(d, is_tensor)]
        if not candidates:
            raise StateDictError(f"it holds no state dict of LoRA tensors but {_kind(saved)}")
        if len(candidates) > 1:
            raise StateDictError(f"it holds {len(candidates)} state dicts of LoRA tensors")
        found = candidates[0]
    for name, value in found.items():
        if not isinstance(name, str):
            raise StateDictError(f"a key of the state dict is no text but {_kind(name)}")
        if not is_tensor(value):
            raise StateDictError(f"{name[:200]!a} is no tensor but {_kind(value)}")
    return _without_prefix(found)


def refused_global(message: str) -> str:
    """What the unpickler refused to look up, out of its own words; empty if they do not say."""
    found = _GLOBAL.search(message)
    return found[1].strip(".") if found else ""


def _mappings(value: object, depth: int, visited: list[int]) -> Iterator[Mapping[Any, Any]]:
    visited[0] += 1
    if not isinstance(value, Mapping) or depth > _MAX_DEPTH or visited[0] > _MAX_VISITED:
        return
    yield value
    for child in value.values():
        yield from _mappings(child, depth + 1, visited)


def _is_lora(found: Mapping[Any, Any], is_tensor: Callable[[object], bool]) -> bool:
    return (
        bool(found)
        and any(isinstance(name, str) and "lora_" in name for name in found)
        and any(map(is_tensor, found.values()))
    )


def _without_prefix(found: Mapping[str, Any]) -> Mapping[str, Any]:
    while found and all(name.startswith(_PARALLEL_PREFIX) for name in found):
        found = {name.removeprefix(_PARALLEL_PREFIX): each for name, each in found.items()}
    return found


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        # A key that is no text may take for ever to be spelled.
        keys = [key[:40] for key in islice(value, 8) if isinstance(key, str)]
        return f"a dict with the keys {keys!a}" if keys else "a dict without names"
    return f"a value of type {type(value).__name__}"
