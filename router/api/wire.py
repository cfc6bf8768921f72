"""Shared by the answers of every API: ranking, counting, events, finite numbers. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from loraplex.router.api.errors import Dialect, error_object
from loraplex.router.call import ChoiceResult, FinishReason, RequestError

encode = msgspec.json.Encoder().encode

# OpenAI's stand-in for "very unlikely": JSON has no infinity.
LEAST_LOGPROB = -9999.0
# Line ends of Unicode: legal in JSON, and no line ends of SSE or JSON Lines. Several clients split
# at them.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def sse(payload: Any) -> bytes:
    """Writes one server-sent event with a JSON payload."""
    return b"data: " + in_one_line(encode(payload)) + b"\n\n"


def in_one_line(data: bytes) -> bytes:
    """Escapes what some clients take for the end of a line. data: JSON."""
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


def named_sse(name: str, payload: Any) -> bytes:
    """Writes one server-sent event, with its name and a JSON payload."""
    return b"event: " + name.encode() + b"\n" + sse(payload)


def sse_error(error: RequestError, dialect: Dialect) -> bytes:
    return sse(error_object(error, dialect))


def finite(logprob: float | None) -> float:
    """Returns a log-probability as JSON can carry it."""
    if logprob is None or not math.isfinite(logprob):
        return LEAST_LOGPROB
    return logprob


def best_first(results: Sequence[ChoiceResult]) -> list[ChoiceResult]:
    """Sorts answers by a token's mean log-probability, the best first; equals stay in order."""
    return sorted(results, key=_badness)


def completed(finish: FinishReason) -> FinishReason:
    """The reason of an answer's end. Raises RequestError (incomplete) for one broken off."""
    if finish == "abort":  # by the caller, whose client must not ask again by itself
        headers = {"x-should-retry": "false"}
        raise RequestError("incomplete", "the answer was aborted", headers=headers)
    if finish == "error":
        raise RequestError("incomplete", "the answer broke off before its end")
    return finish


def _badness(result: ChoiceResult) -> float:
    if result.sum_logprob is None or not result.generated_tokens:
        return 0.0
    return -finite(result.sum_logprob) / result.generated_tokens
