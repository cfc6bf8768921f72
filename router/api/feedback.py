"""Body and answer of `/v1/feedback`. Pure."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import decode_plain
from loraplex.router.api.request.known_elsewhere import Body, typed_by_aliases
from loraplex.router.policy.rollout import Counted

_PREFIXES = ("chatcmpl-", "cmpl-")
_WHY_NOT = {
    "again": "the request has this score already",
    "unknown": "no request of a rollout with this id is known: scores count for an hour, for "
    "requests of adapters with a rollout, by keys of the same tenant",
    "over": "the version of this request is not judged any more",
}


class FeedbackBody(Body, frozen=True):
    """Body of a score. request_id: the answer's `x-request-id`, or the `id` of a completion. score:
    0 is worst, 1 best.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=200)]
    score: Annotated[float, Meta(ge=0, le=1)]


class FeedbackObject(msgspec.Struct, frozen=True):
    """Says whether a score counts. version: for which side of a rollout. reason: why it counts for
    none.
    """

    request_id: str
    counted: bool
    version: Literal["old", "new"] | None = None
    reason: str | None = None
    object: Literal["feedback"] = "feedback"


def parse_feedback(body: bytes) -> FeedbackBody:
    """Reads a score. Raises RequestError."""
    said = typed_by_aliases(decode_plain(body), FeedbackBody)
    for prefix in _PREFIXES:
        if said.request_id.startswith(prefix):
            return msgspec.structs.replace(said, request_id=said.request_id[len(prefix) :])
    return said


def feedback_object(request_id: str, counted: Counted) -> FeedbackObject:
    if counted == "old" or counted == "new":
        return FeedbackObject(request_id, True, counted)
    return FeedbackObject(request_id, False, reason=_WHY_NOT[counted])
