"""Ranges that several APIs share, as types; and which adapter a caller names. Pure."""

from collections.abc import Collection, Sequence
from typing import Annotated, cast, get_args

from msgspec import Meta

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import RefSource, parse_ref
from loraplex.router.api.request.body import require
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.call import AdapterChoice, RequestError, Secret
from loraplex.router.text.stop_patterns import compiled

MAX_INT32 = 2**31 - 1
# Characters of a pattern.
MAX_PATTERN = 256
# The engine divides logits by the temperature: what lies below this is greedy.
LEAST_TEMPERATURE = 1e-5

NonNegative = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT32)]
# 0 and -1 are off.
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
# -1 = any number.
ThinkingTokens = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-3, le=1e3)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1)]
LogitBias = dict[NonNegative, Annotated[float, Meta(ge=-100, le=100)]]
# Steps behind the caller's own: nobody raises what the key was given.
Priority = Annotated[int, Meta(ge=0, le=100)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
# The caller's own, in place of the request's.
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]

SOURCES = ("hub", "local", "s3", "https", "modelscope")
_HUB_TOKEN_PREFIX = "hf_"


def temperature_of(value: float) -> float:
    return 0.0 if value < LEAST_TEMPERATURE else value


def check_stops(stops: list[str], limits: ApiLimits, param: str = "stop") -> tuple[str, ...]:
    most = limits.max_stop_sequences
    require(len(stops) <= most, f"expected at most {most} stop strings, got {len(stops)}", param)
    for stop in stops:
        require(
            0 < len(stop) <= limits.max_stop_chars,
            f"expected stop strings of 1 to {limits.max_stop_chars} characters, got {len(stop)}",
            param,
        )
    return tuple(stops)


def check_patterns(given: str | Sequence[str], limits: ApiLimits) -> tuple[str, ...]:
    """Check the patterns of `stop_regex`. Raises RequestError."""
    patterns = (given,) if isinstance(given, str) else tuple(given)
    most, param = limits.max_stop_sequences, "stop_regex"
    require(len(patterns) <= most, f"expected at most {most} patterns, got {len(patterns)}", param)
    for pattern in patterns:
        size = f"expected patterns of 1 to {MAX_PATTERN} characters, got {len(pattern)}"
        require(0 < len(pattern) <= MAX_PATTERN, size, param)
        try:
            compiled(pattern)
        except ValueError as error:
            raise RequestError("invalid", f"`{param}`: {error}", param=param) from error
    return patterns


def within_base(model: str, base_names: Collection[str]) -> str:
    """The adapter of SGLang's `base:adapter`, "" of `base:`; any other name as it is.

    A base that is called as a source of adapters is (`hub`) hides no reference.
    """
    if model in base_names:
        return model
    for base in sorted(base_names, key=len, reverse=True):
        if base not in get_args(RefSource) and model.startswith(f"{base}:"):
            return model[len(base) + 1 :]
    return model


def choose_adapter(
    name: str | None,
    source: str | None,
    token: str | None,
    param: str,
    limits: ApiLimits,
) -> AdapterChoice | None:
    """The adapter that the caller names, None for the base. Raises RequestError."""
    if not name or (name in limits.base_names and not source):
        return None
    if source == "pbase":
        message = "`adapter_source`: adapters from Predibase are not supported yet"
        raise RequestError("unsupported", message, param="adapter_source")
    require(
        not source or source in SOURCES,
        f"expected one of {', '.join(SOURCES)}; got {source!r:.40}",
        "adapter_source",
    )
    try:
        ref = parse_ref(name, cast(RefSource, source or limits.default_source))
    except AdapterError as error:
        raise RequestError("invalid", f"`{param}`: {error.message}", param=param) from None
    require(
        not source or ref.source in (source, "alias"),
        f"{source!r} contradicts the adapter's own source {ref.source!r}",
        "adapter_source",
    )
    return AdapterChoice(name, ref, Secret(token) if token else None)


def credential(api_token: str | None, bearer: str | None) -> str | None:
    """The caller's credential for the adapter's source: the one named so, or a Hub token as bearer.

    Other bearers are keys for this service, or the placeholder that some SDKs insist on sending;
    they are nobody else's business.
    """
    if api_token:
        return api_token
    return bearer if bearer and bearer.startswith(_HUB_TOKEN_PREFIX) else None
