"""Chooses among the `checkpoint-…` folders of a training run. Pure."""

import re
from collections.abc import Iterable, Sequence

MAX_NAMED = 4
_STEP = re.compile(r"checkpoint-(?P<step>[0-9]{1,12})")


def is_checkpoint(name: str) -> bool:
    """Whether a trainer names a checkpoint so."""
    return _STEP.fullmatch(name) is not None


def newest_first(names: Iterable[str]) -> list[str]:
    """Checkpoints by falling step, then all others by name."""
    return sorted(names, key=lambda name: (-_step(name), name))


def did_you_mean(place: str, names: Sequence[str]) -> str:
    """What ends a refusal of `place`, whose folders of these names are adapters; "" for none."""
    meant = [_joined(place.rstrip("/"), name) for name in newest_first(names)[:MAX_NAMED]]
    if not meant:
        return ""
    more = len(names) - len(meant)
    rest = f" (and {more} more)" if more else ""
    return f"; did you mean {' or '.join(meant)}{rest}?"


def _joined(place: str, name: str) -> str:
    beside = name.removeprefix("../")
    if beside == name:
        return f"{place}/{name}"
    start = max(place.rfind("/"), place.rfind(":")) + 1
    return f"{place[:start]}{beside}"


def _step(name: str) -> int:
    found = _STEP.fullmatch(name.rpartition("/")[2])
    return int(found["step"]) if found else -1
