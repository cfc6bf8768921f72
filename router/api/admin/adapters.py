"""Bodies and answers of the lifecycle routes, rollouts included, in the shapes of loraplex, vLLM,
SGLang and SageMaker. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef, RefSource, format_ref, name_fault, parse_ref, path_ref
from loraplex.router.api.request.body import decode_body, field_fault, require
from loraplex.router.call import RequestError
from loraplex.router.names.registration import Registration, RolloutRequest
from loraplex.router.policy.guards import Measurements, Verdict, quantile
from loraplex.router.policy.rollout import MAX_VERSIONS, Guards, ScorePair, VersionState, Weight
from loraplex.router.tenancy.keys import Word
from loraplex.router.tools.registry import FORMATS
from loraplex.server.protocol import AdapterTiers, TierState


class PartialObject(msgspec.Struct, frozen=True):
    """Modules and layers that have weights, of those that the adapter's config targets.

    layers: how many have some weights. message: the same in words.
    """

    modules: int
    targeted_modules: int
    layers: int
    targeted_layers: int
    message: str


def partial_of(manifest: AdapterManifest) -> PartialObject | None:
    """Counts modules and layers with an adapter's weights; None if nothing is missing."""
    coverage = manifest.partial
    if coverage is None:
        return None
    return PartialObject(
        modules=coverage.modules,
        targeted_modules=coverage.targeted,
        layers=coverage.num_layers,
        targeted_layers=coverage.targeted_layers,
        message=coverage.text,
    )


def partial_object(registration: Registration) -> PartialObject | None:
    """Reports on what a name means; None also while that is not known."""
    content = registration.content
    return None if content is None else partial_of(content.manifest)


def partial_note(registration: Registration) -> str:
    """The end of a load's answer in plain text; "" where nothing is missing."""
    found = partial_object(registration)
    return "" if found is None else f" It is {found.message}."


class EndToken(msgspec.Struct, frozen=True):
    """A token that ends an answer. token: its text."""

    id: int
    token: str


def end_tokens(ids: Iterable[int], text_of: Callable[[int], str]) -> list[EndToken]:
    """Lists tokens at which an answer ends, each with its text. ids: as they are to be listed."""
    return [EndToken(i, text_of(i)) for i in ids]


class VersionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of a name, and its part of the requests."""

    reference: Annotated[str, Meta(min_length=1)]
    weight: Weight


Versions = Annotated[list[VersionBody], Meta(min_length=1, max_length=MAX_VERSIONS + 1)]


class RolloutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request for a rollout. All versions that shall be there. The present one's weight,
    unsaid, is what is left of 100.

    guards: null = no version goes back by itself; unsaid = as they were, or the usual ones.
    """

    versions: Versions
    guards: Guards | None | msgspec.UnsetType = msgspec.UNSET


class DigestBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request that may name one version of an adapter. digest: of the version that is
    meant, or how it begins.
    """

    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,64}\Z")] | None = None


class ChangeObject(msgspec.Struct, frozen=True):
    """A name's meaning from `since` (Unix seconds) on. ref: has its commit. before: a digest."""

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


class ScoresObject(msgspec.Struct, frozen=True):
    """Scores of a version and of the old one beside it, since the version has its share.

    p: the error at which the version's mean is found to be too low; null where guards do not look
    at scores.
    """

    count: int
    mean: float | None
    old_count: int
    old_mean: float | None
    p: float | None


class MeasuredObject(msgspec.Struct, frozen=True):
    """Requests of one version in the guards' window. Seconds; null = too few.

    verdict: of the guards; null of what they do not judge. scores: null, too, where there are none.
    """

    digest: str
    requests: int
    failed: int
    first_token_p95_s: float | None
    token_p95_s: float | None
    verdict: Verdict | None = None
    scores: ScoresObject | None = None


class RolloutObject(msgspec.Struct, frozen=True):
    """A rollout of a name: its versions, its guards, and the measurements. versions: the old one
    first. measured: null where it was not asked for.

    measured_by: all routers, or this one alone while there is no Redis.
    """

    id: str
    versions: list[VersionObject]
    guards: Guards | None
    measured: list[MeasuredObject] | None = None
    measured_by: Literal["all", "this_router"] | None = None


class AdapterHistory(msgspec.Struct, frozen=True):
    """Past meanings of a name, the newest first. tenant: null = the fleet's name."""

    id: str
    tenant: str | None
    data: list[ChangeObject]
    object: Literal["list"] = "list"


def parse_digest(body: bytes) -> str | None:
    """Reads the digest that a body names; None for none, or no body. Raises RequestError."""
    return decode_body(body, DigestBody)[0].digest if body else None


def change_objects(registration: Registration) -> list[ChangeObject]:
    """Lists the changes of what a name means, the oldest first."""
    return [
        ChangeObject(c.digest, c.since, c.action, c.by, c.ref, c.before, c.note)
        for c in registration.history
    ]


def rollout_object(
    registration: Registration,
    measured: Measurements | None = None,
    resident: Callable[[str], list[str]] = lambda digest: [],
) -> RolloutObject | None:
    """The rollout of a name; None without one. resident: workers with a digest on devices."""
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
    tallies = [_measured(digest, measured, rollout.guards) for digest in measured.versions]
    by: Literal["all", "this_router"] = "all" if measured.of_all else "this_router"
    return RolloutObject(rollout.id, versions, rollout.guards, tallies, by)


def _measured(digest: str, measurements: Measurements, guards: Guards | None) -> MeasuredObject:
    measured, verdict = measurements.versions[digest], measurements.verdicts.get(digest)
    first, token = quantile(measured.first_token), quantile(measured.token)
    pair = measurements.scores.get(digest)
    scores = (
        None if pair is None else _scores(pair, None if guards is None else guards.max_score_drop)
    )
    return MeasuredObject(digest, measured.requests, measured.failed, first, token, verdict, scores)


def _scores(pair: ScorePair, margin: float | None) -> ScoresObject | None:
    old, new = pair.old, pair.new
    if not old.count and not new.count:
        return None
    p = None if margin is None else pair.p_value(margin)
    return ScoresObject(new.count, new.mean, old.count, old.mean, p)


DEFAULT_WAIT_S = 30.0
MAX_WAIT_S = 600.0

Name = Annotated[str, Meta(min_length=1, max_length=96)]
_WORD = "[A-Za-z0-9][A-Za-z0-9._-]*"
NewName = Annotated[Name, Meta(extra_json_schema={"pattern": f"^{_WORD}(/{_WORD})?$"})]


class RegisterBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to register an adapter. `ref`, or `source` with `id` and `revision`, or
    `versions`. token: opens it there.

    pin, token: absent = as they are, of a name that is registered. tenant: whose name it is; absent
    = the fleet's. versions, guards: see RolloutBody; of a name that is new, the first version is
    its own. tool_format: in which it writes calls. auto = by its chat template, or the base's.
    absent = unchanged, for a registered name.
    """

    name: NewName
    ref: str | None = None
    source: Literal["hub", "local", "s3", "https", "modelscope"] | None = None
    id: str | None = None
    revision: str | None = None
    pin: bool | None = None
    token: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    replace: bool = False
    versions: Versions | None = None
    guards: Guards | None | msgspec.UnsetType = msgspec.UNSET
    tenant: Word | None = None
    tool_format: Annotated[
        str | None, Meta(extra_json_schema={"enum": [None, "auto", *FORMATS]})
    ] = None


class UnloadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to unload an adapter. wait_s: how long the answer may wait for running
    requests; they go on in any case.
    """

    wait_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = DEFAULT_WAIT_S


class LoadLoraBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of vLLM's request to load an adapter. lora_path: a folder, or a reference. load_inplace:
    replace what the name means.

    base_model_name, is_3d_lora_weight: change nothing; the adapter's own files say both. tenant: an
    extension; whose name it is.
    """

    lora_name: NewName
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool | None = None
    tenant: Word | None = None


class SglangLoadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of SGLang's request to load an adapter. pinned: it stays on the device. lora_id: changes
    nothing. tenant: as above.
    """

    lora_name: NewName
    lora_path: Annotated[str, Meta(min_length=1)]
    pinned: bool = False
    lora_id: str | None = None
    tenant: Word | None = None


class SagemakerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of SageMaker's request to load an adapter. src: a folder, or a reference. preload: false
    = it is loaded when it is first asked for. pin: it stays on the device. tenant: as above.
    """

    name: NewName
    src: Annotated[str, Meta(min_length=1)]
    preload: bool = True
    pin: bool = False
    tenant: Word | None = None


class SagemakerAdapters(msgspec.Struct, frozen=True):
    """The `name`, `src` and `pin` of each adapter."""

    adapters: list[dict[str, str | bool]]


class UnloadLoraBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of vLLM's and SGLang's request to unload an adapter. lora_int_id, lora_id: change
    nothing. tenant: as above.
    """

    lora_name: Name
    lora_int_id: int | None = None
    lora_id: str | None = None
    tenant: Word | None = None


class WorkerAdapter(msgspec.Struct, frozen=True):
    """An adapter's tiers on one worker. slab_bytes: packed, once known.

    load_s: its last way to the device. idle_s: since a sequence last named it there.
    """

    worker: str
    disk: bool
    host: TierState
    device: TierState
    pinned: bool
    slab_bytes: int | None
    load_s: float | None
    idle_s: float | None


class KeptVersion(msgspec.Struct, frozen=True):
    """An uploaded version that requests may name, as `name@version`."""

    version: int
    digest: str


class AdapterObject(msgspec.Struct, frozen=True):
    """A registered adapter. digest, ranks, targets, nbytes: once it was resolved.

    tenant: whose name it is; null = the fleet's. tool_format: what its registration says of it.
    partial: null = every module that its config targets has weights.
    ends: tokens that end its answers, in addition to the base's; null = not looked for yet.
    resident_on, loading_on: ids of workers. running: requests of this router. last_used: Unix
    seconds. history: oldest first. kept: uploaded versions, the newest last. base: of several, its
    own.
    """

    id: str
    source: str
    ref: str
    digest: str | None
    resident_on: list[str]
    loading_on: list[str]
    state: str = "registered"
    origin: str = "option"
    pinned: bool = False
    error: str | None = None
    ranks: list[int] | None = None
    targets: list[str] | None = None
    nbytes: int | None = None
    partial: PartialObject | None = None
    ends: list[EndToken] | None = None
    running: int = 0
    last_used: float | None = None
    history: list[ChangeObject] = []
    workers: list[WorkerAdapter] = []
    rollout: RolloutObject | None = None
    tenant: str | None = None
    tool_format: str | None = None
    kept: list[KeptVersion] = []
    base: str | UnsetType = UNSET
    object: Literal["adapter"] = "adapter"


class AdapterList(msgspec.Struct, frozen=True):
    """Answer that lists the registered adapters. file_errors: problems of the adapters file and of
    watched folders. next: `after` of the next page; absent on the last.
    """

    data: list[AdapterObject]
    file_errors: list[str] = []
    next: str | UnsetType = UNSET
    object: Literal["list"] = "list"


class Refreshed(msgspec.Struct, frozen=True):
    """Answer to a refresh: the content that a name had, and the one that it has now. changed: the
    reference means another content than before.
    """

    old_digest: str | None
    new_digest: str | None
    changed: bool
    adapter: AdapterObject


class Deleted(msgspec.Struct, frozen=True):
    id: str
    tenant: str | None
    deleted: bool = True
    object: Literal["adapter"] = "adapter"


def parse_register(body: bytes, default_source: str) -> tuple[RegisterBody, AdapterRef]:
    """Reads a body that registers an adapter, and its reference. Raises RequestError."""
    request, _ = decode_body(body, RegisterBody)
    check_name(request.name, "name")
    format_named(request.tool_format)
    ref = _target(request, default_source)
    message = (
        f"only adapters of the Hub are opened with one; it would not be used for {ref.source}:"
    )
    require(request.token is None or ref.source == "hub", message, "token")
    return request, ref


def _target(request: RegisterBody, default_source: str) -> AdapterRef:
    """Finds the reference that a registration names. Raises RequestError."""
    parts = (request.source, request.id, request.revision)
    if request.versions is not None:
        is_alone = (request.ref, *parts) == (None,) * 4
        require(is_alone, "give it, or ref, or source, id and revision", "versions")
        return parse_target(request.versions[0].reference, "versions", default_source)
    require(request.guards is msgspec.UNSET, "they need `versions` beside them", "guards")
    if request.ref is not None:
        require(parts == (None,) * 3, "give it, or source, id and revision", "ref")
        return parse_target(request.ref, "ref", default_source)
    require(request.id is not None, "give ref, or source and id", "ref")
    revision = f"@{request.revision}" if request.revision is not None else ""
    text = f"{request.source or default_source}:{request.id}{revision}"
    return parse_target(text, "id", default_source)


def check_versions_alone(request: RegisterBody) -> None:
    """Checks a registered name's body for what only new names take. Raises RequestError."""
    others = {
        "pin": request.pin,
        "token": request.token is not None,
        "replace": request.replace,
        "tool_format": request.tool_format is not None,
    }
    for param, given in others.items():
        message = "the name is registered: with `versions` this is for new ones alone"
        require(not given, message, param)


def parse_rollout(body: bytes, default_source: str, by: str) -> RolloutRequest:
    """Reads a body that begins or changes a rollout. Raises RequestError."""
    request, _ = decode_body(body, RolloutBody)
    return rollout_request(request.versions, request.guards, default_source, by)


def rollout_request(
    versions: list[VersionBody],
    guards: Guards | None | msgspec.UnsetType,
    default_source: str,
    by: str,
) -> RolloutRequest:
    """Makes a rollout's request, whose references are still texts. Raises RequestError."""
    refs = [
        parse_target(version.reference, f"versions[{number}].reference", default_source)
        for number, version in enumerate(versions)
    ]
    weights = [version.weight for version in versions]
    return RolloutRequest(tuple(zip(refs, weights, strict=True)), guards, by)


def check_name(name: str, param: str) -> None:
    """Checks that a text can be the name of an adapter. Raises RequestError."""
    fault = name_fault(name)
    require(fault is None, fault or "", param)


def format_named(name: str | None) -> str | None:
    """Checks the name of a format of calls; returns None where none is named, and "" where the
    template decides. Raises RequestError for names of none.
    """
    known = ", ".join(("auto", *FORMATS))
    require(name in (None, "auto", *FORMATS), f"expected one of {known}", "tool_format")
    return "" if name == "auto" else name


def parse_tenant(query: Mapping[str, str]) -> str | None:
    """Reads the tenant from the query; None = none is said. Raises RequestError."""
    tenant = query.get("tenant")
    if tenant:
        try:
            msgspec.convert(tenant, Word)
        except msgspec.ValidationError as error:
            message = f"`tenant`: {field_fault(error, Word)}"
            raise RequestError("invalid", message, param="tenant") from None
    return tenant


def parse_target(text: str, param: str, default_source: str) -> AdapterRef:
    """Parses the reference that a name shall mean; a path is a folder. Raises RequestError."""
    if text.startswith("/"):
        text = path_ref(text)
    message = (
        "a path of the server's begins with '/'; `loraplex adapter push` sends a folder of yours"
    )
    require(not f"{text}/".startswith(("./", "../")), f"got {text[:80]!r}: {message}", param)
    try:
        ref = parse_ref(text, cast(RefSource, default_source))
    except AdapterError as error:
        raise RequestError("invalid", f"`{param}`: {error.message}", param=param) from None
    message = "names no source; write hub:, local:, s3:, https:// or modelscope:"
    require(ref.source != "alias", message, param)
    return ref


def parse_unload(body: bytes) -> float:
    """Seconds to wait. Raises RequestError."""
    return decode_body(body, UnloadBody)[0].wait_s if body else DEFAULT_WAIT_S


def adapter_object(
    registration: Registration,
    workers: dict[str, AdapterTiers],
    running: int = 0,
    last_used: float | None = None,
    resident: Callable[[str], list[str]] = lambda digest: [],
    ends: list[EndToken] | None = None,
) -> AdapterObject:
    """Describes a registered adapter, as the operator's routes show it. workers: by id, those that
    reported it. resident: see `rollout_object`.
    """
    manifest = None if registration.content is None else registration.content.manifest
    return AdapterObject(
        id=registration.name,
        source=registration.ref.source,
        ref=format_ref(registration.ref),
        digest=registration.digest,
        resident_on=sorted(w for w, tiers in workers.items() if tiers.device == "ready"),
        loading_on=sorted(w for w, tiers in workers.items() if tiers.device == "loading"),
        state=registration.shown_state,
        origin=registration.origin,
        pinned=registration.pinned,
        error=registration.error,
        ranks=None if manifest is None else list(manifest.ranks),
        targets=None if manifest is None else list(manifest.targets),
        nbytes=None if manifest is None else manifest.nbytes,
        partial=partial_object(registration),
        ends=ends,
        running=running,
        last_used=last_used,
        history=change_objects(registration),
        workers=[_worker(worker, workers[worker]) for worker in sorted(workers)],
        rollout=rollout_object(registration, None, resident),
        tenant=registration.tenant or None,
        tool_format=registration.tool_format or None,
        kept=[KeptVersion(v.number, v.content.digest) for v in registration.kept],
        base=registration.base or UNSET,
    )


def _worker(worker: str, tiers: AdapterTiers) -> WorkerAdapter:
    return WorkerAdapter(
        worker=worker,
        disk=tiers.disk,
        host=tiers.host,
        device=tiers.device,
        pinned=tiers.pinned,
        slab_bytes=tiers.slab_bytes or None,
        load_s=tiers.load_s,
        idle_s=tiers.idle_s,
    )
