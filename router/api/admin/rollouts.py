"""Bodies and answers of rollouts and of names' history. Pure."""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loraplex.adapters.ref import format_ref
from loraplex.router.api.request.body import decode_body
from loraplex.router.names.registration import Registration
from loraplex.router.policy.guards import Measurements, Verdict, quantile
from loraplex.router.policy.rollout import MAX_VERSIONS, Guards, VersionState, Weight


class VersionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of a name, and its part of the requests."""

    reference: Annotated[str, Meta(min_length=1)]
    weight: Weight


Versions = Annotated[list[VersionBody], Meta(min_length=1, max_length=MAX_VERSIONS + 1)]


class RolloutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All versions that shall be there. The present one's weight, unsaid, is what is left of 100.

    guards: null = no version goes back by itself; unsaid = as they were, or the usual ones.
    """

    versions: Versions
    guards: Guards | None | msgspec.UnsetType = msgspec.UNSET


class DigestBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """digest: of the version that is meant, or how it begins."""

    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,64}\Z")] | None = None


class ChangeObject(msgspec.Struct, frozen=True):
    """What a name meant from `since` (Unix seconds) on. ref: with its commit. before: a digest."""

    digest: str
    since: int
    action: str
    by: str
    ref: str
    before: str | None
    note: str


class VersionObject(msgspec.Struct, frozen=True):
    """One version in a rollout. weight: wanted, live_weight: in force. why: why it went back.

    resident_on: ids of workers.
    """

    reference: str
    digest: str
    weight: int
    live_weight: int
    state: str
    why: str | None
    resident_on: list[str]


class MeasuredObject(msgspec.Struct, frozen=True):
    """Requests of one version in the guards' window. Seconds; null = too few.

    verdict: of the guards; null of what they do not judge.
    """

    digest: str
    requests: int
    failed: int
    first_token_p95_s: float | None
    token_p95_s: float | None
    verdict: Verdict | None = None


class RolloutObject(msgspec.Struct, frozen=True):
    """versions: the old one first. measured: null where it was not asked for.

    measured_by: all routers, or this one alone while there is no Redis.
    """

    id: str
    versions: list[VersionObject]
    guards: Guards | None
    measured: list[MeasuredObject] | None = None
    measured_by: Literal["all", "this_router"] | None = None


class AdapterHistory(msgspec.Struct, frozen=True):
    """Newest first. tenant: null = the fleet's name."""

    id: str
    tenant: str | None
    data: list[ChangeObject]
    object: Literal["list"] = "list"


def parse_digest(body: bytes) -> str | None:
    """Raises RequestError."""
    return decode_body(body, DigestBody)[0].digest if body else None


def change_objects(registration: Registration) -> list[ChangeObject]:
    """Oldest first."""
    return [
        ChangeObject(c.digest, c.since, c.action, c.by, c.ref, c.before, c.note)
        for c in registration.history
    ]


def rollout_object(
    registration: Registration,
    measured: Measurements | None = None,
    resident: Callable[[str], list[str]] = lambda digest: [],
) -> RolloutObject | None:
    """resident: the workers that have a digest on their devices."""
    rollout, content = registration.rollout, registration.content
    if rollout is None or content is None:
        return None
    state: VersionState = "serving" if rollout.live else "idle"
    old = (registration.ref, content.digest, rollout.weight, rollout.live, state, None)
    rows = [(v.ref, v.digest, v.weight, v.live, v.state, v.why) for v in rollout.versions]
    versions = [
        VersionObject(format_ref(ref), digest, weight, live, state, why, resident(digest))
        for ref, digest, weight, live, state, why in (old, *rows)
    ]
    if measured is None:
        return RolloutObject(rollout.id, versions, rollout.guards)
    tallies = [_measured(digest, measured) for digest in measured.versions]
    by: Literal["all", "this_router"] = "all" if measured.of_all else "this_router"
    return RolloutObject(rollout.id, versions, rollout.guards, tallies, by)


def _measured(digest: str, measurements: Measurements) -> MeasuredObject:
    measured, verdict = measurements.versions[digest], measurements.verdicts.get(digest)
    first, token = quantile(measured.first_token), quantile(measured.token)
    return MeasuredObject(digest, measured.requests, measured.failed, first, token, verdict)
