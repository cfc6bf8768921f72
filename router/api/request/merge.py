"""`merged_adapters` and `adapter_scale`: what a request asks to be merged, and how. Pure."""

from typing import cast

import msgspec

from loraplex.adapters.merge.recipe import (
    MAX_MEMBERS,
    MAX_WEIGHT,
    SIGN_METHODS,
    STRATEGIES,
    MergeStrategy,
    SignMethod,
)
from loraplex.router.api.request.body import require
from loraplex.router.api.request.fields import choose_adapter
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.call import AdapterChoice, MergedChoice, RequestError

_FIELD = "merged_adapters"
_IDS = f"{_FIELD}.ids"
_WEIGHTS = f"{_FIELD}.weights"


class MergedAdapters(msgspec.Struct, frozen=True):
    """ids, weights: as many of the one as of the other. merge_strategy: linear by default.

    density: needed for `ties` and `dare_*`. majority_sign_method: total by default.
    """

    ids: list[str]
    weights: list[float] = []
    merge_strategy: str | None = None
    density: float | None = None
    majority_sign_method: str | None = None


def choose_merge(
    given: MergedAdapters, source: str | None, token: str | None, limits: ApiLimits
) -> MergedChoice:
    """Raises RequestError."""
    strategy = _one_of("merge_strategy", given.merge_strategy, STRATEGIES)
    sign = _one_of("majority_sign_method", given.majority_sign_method, SIGN_METHODS)
    _check_numbers(given, strategy)
    return MergedChoice(
        members=tuple(
            _member(index, name, source, token, limits) for index, name in enumerate(given.ids)
        ),
        weights=tuple(given.weights),
        strategy=cast(MergeStrategy, strategy),
        density=1.0 if strategy == "linear" else given.density or 0.0,
        majority_sign_method=cast(SignMethod, sign),
    )


def choose_scaled(adapter: AdapterChoice, scale: float) -> AdapterChoice:
    """The adapter with what it adds multiplied. Raises RequestError."""
    require(scale != 0, "0 is the base: leave the adapter out", "adapter_scale")
    require(
        abs(scale) <= MAX_WEIGHT,
        f"expected a scale within +-{MAX_WEIGHT:g}, got {scale:g}",
        "adapter_scale",
    )
    return msgspec.structs.replace(adapter, scale=scale)


def _one_of(name: str, value: str | None, known: tuple[str, ...]) -> str:
    """The first of the known names is the default."""
    chosen = known[0] if value is None else value
    expected = ", ".join(known)
    require(chosen in known, f"expected one of {expected}, got {chosen!r:.40}", f"{_FIELD}.{name}")
    return chosen


def _check_numbers(given: MergedAdapters, strategy: str) -> None:
    count = len(given.ids)
    require(1 <= count <= MAX_MEMBERS, f"expected 1 to {MAX_MEMBERS} adapters, got {count}", _IDS)
    require(
        len(given.weights) == count,
        f"expected a weight for each of {count} ids, got {len(given.weights)}",
        _WEIGHTS,
    )
    for weight in given.weights:
        require(
            abs(weight) <= MAX_WEIGHT,
            f"expected weights within +-{MAX_WEIGHT:g}, got {weight:g}",
            _WEIGHTS,
        )
    require(any(given.weights), "at least one weight must differ from 0", _WEIGHTS)
    density = given.density or 0.0
    require(
        strategy == "linear" or 0 < density <= 1,
        f"expected a density above 0 and at most 1 for {strategy!r}, got {density:g}",
        f"{_FIELD}.density",
    )


def _member(
    index: int, name: str, source: str | None, token: str | None, limits: ApiLimits
) -> AdapterChoice:
    param = f"{_IDS}[{index}]"
    choice = choose_adapter(name, source, token, param, limits)
    if choice is None:
        message = f"`{param}`: expected an adapter, got the base model"
        raise RequestError("invalid", message, param=param)
    return choice
