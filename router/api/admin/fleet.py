"""`GET /v1/fleet`: workers, their arenas, adapters, the queue, recent errors. Pure."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.adapters.ref import format_ref
from loraplex.router.api.admin.adapters import (
    PartialObject,
    RolloutObject,
    partial_object,
    rollout_object,
)
from loraplex.router.call import VectorUse
from loraplex.router.names.registration import Registration
from loraplex.server.protocol import (
    AdapterPlace,
    Gift,
    ModelCard,
    TierState,
    WorkerPicture,
    WorkerStatus,
)

MAX_ADAPTERS = 4096

WorkerState = Literal["unreachable", "starting", "ready", "draining"]


class BaseObject(msgspec.Struct, frozen=True):
    """The model that is served. weights: how they are quantised, "" = not. chat: it has a chat
    template that can be used. gives: what may be asked of it. images: it reads them."""

    name: str
    digest: str
    dtype: str
    weights: str
    device: str
    max_context: int
    chat: bool
    gives: tuple[Gift, ...]
    images: bool


class BaseState(msgspec.Struct, frozen=True):
    """One of several bases. model: null = it had no worker yet. queue: sequences that wait for its
    workers. waiting: requests that wait for the first of these."""

    name: str
    model: BaseObject | None
    queue: int
    waiting: int
    workers: int
    workers_ready: int


class RouterObject(msgspec.Struct, frozen=True):
    """This router. queue: sequences that wait for a worker. running: requests being answered."""

    queue: int
    max_queue: int
    queue_bytes: int
    running: int
    max_requests: int


class BatchesObject(msgspec.Struct, frozen=True):
    """Batches that this router runs, and what all have stored. rows: their sequences; rows_limit:
    as many as may run now. files, bytes: in the folder of files."""

    running: int
    rows: int
    rows_limit: int
    files: int
    bytes: int


class WorkObject(msgspec.Struct, frozen=True):
    """Work of this router that is no live answer. vectors: prompts that were read for numbers since
    it started, by use. batches: null = it serves none."""

    vectors: dict[VectorUse, int]
    batches: BatchesObject | None


class PlaceObject(msgspec.Struct, frozen=True):
    """Place of an adapter on a worker: each row in one piece is [first extent, extents].

    name: what it was last named by, where no registration means it. slab_bytes: packed, once known.
    load_s: its last way to the device.
    """

    digest: str
    name: str | None
    device: TierState
    host: TierState
    pinned: bool
    slab_bytes: int | None
    load_s: float | None
    device_spans: tuple[tuple[int, int], ...]
    host_spans: tuple[tuple[int, int], ...]


class WorkerObject(msgspec.Struct, frozen=True):
    """A worker as this router sees it. base: of several, the one that it serves. problem: why it is
    not connected.

    in_flight, credits: sequences of this router there. running, waiting: whoever sent them.
    in_use: digest -> sequences in flight. Counts (tokens, evictions, preemptions) begin with the
    engine; restarts: engines lost since the worker was started.
    shards: devices that share its model, each with as many extents. extents: of `extent_bytes`
    each. memory: [use, bytes] of all that fills a device; [] = not known. kept_pages: of keys and
    values below the device, [where, pages there, pages that can be]. places: null = as in the
    event before.
    """

    url: str
    id: str | None = None
    base: str | UnsetType = UNSET
    state: WorkerState = "unreachable"
    problem: str | None = None
    device: str | None = None
    in_flight: int = 0
    credits: int = 0
    running: int = 0
    waiting: int = 0
    kv_pages: int = 0
    kv_pages_free: int = 0
    page_size: int = 0
    step: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    restarts: int = 0
    extent_bytes: int = 0
    device_extents: int = 0
    host_extents: int = 0
    shards: int = 1
    memory: tuple[tuple[str, int], ...] = ()
    kept_pages: tuple[tuple[Literal["host", "disk"], int, int], ...] = ()
    in_use: dict[str, int] = {}
    places: tuple[PlaceObject, ...] | None = None
    places_left_out: int = 0


class RegisteredObject(msgspec.Struct, frozen=True):
    """A registered adapter; `GET /v1/adapters` shows more of it, `…/rollout` what was measured.

    tenant: null = the fleet's. partial: null = all that its config targets has weights. base: of
    several, its own.
    """

    name: str
    ref: str
    state: str
    pinned: bool
    digest: str | None
    ranks: tuple[int, ...] | None
    nbytes: int | None
    error: str | None
    tenant: str | None = None
    rollout: RolloutObject | None = None
    partial: PartialObject | None = None
    base: str | UnsetType = UNSET


class ErrorObject(msgspec.Struct, frozen=True):
    """An error that callers got. time: Unix seconds, of the last; so is request_id."""

    time: float
    count: int
    path: str
    cause: str
    message: str
    request_id: str


class FleetObject(msgspec.Struct, frozen=True):
    """Picture of the whole fleet at one time, as the operator's page shows it. time: Unix seconds.
    adapters: null = as in the event before. problems: of the adapters file.

    errors: the last that callers got, newest first. base: the first one. bases: all, if the router
    has several.
    """

    time: float
    version: str
    base: BaseObject | None
    router: RouterObject
    work: WorkObject
    workers: tuple[WorkerObject, ...]
    adapters: tuple[RegisteredObject, ...] | None
    adapters_left_out: int
    problems: list[str]
    errors: list[ErrorObject]
    bases: tuple[BaseState, ...] | UnsetType = UNSET
    object: Literal["fleet"] = "fleet"


def base_object(card: ModelCard, chat: bool) -> BaseObject:
    return BaseObject(
        name=card.names[0],
        digest=card.base_digest,
        dtype=card.dtype,
        weights=card.weights,
        device=card.device,
        max_context=card.max_context,
        chat=chat,
        gives=card.gives,
        images=card.vision is not None,
    )


def registered_objects(registrations: Sequence[Registration]) -> tuple[RegisteredObject, ...]:
    return tuple(_registered(registration) for registration in registrations[:MAX_ADAPTERS])


def _registered(registration: Registration) -> RegisteredObject:
    manifest = None if registration.content is None else registration.content.manifest
    return RegisteredObject(
        name=registration.name,
        ref=format_ref(registration.ref),
        state=registration.shown_state,
        pinned=registration.pinned,
        digest=registration.digest,
        ranks=None if manifest is None else tuple(manifest.ranks),
        nbytes=None if manifest is None else manifest.nbytes,
        error=registration.error,
        tenant=registration.tenant or None,
        rollout=rollout_object(registration),
        partial=partial_object(registration),
        base=registration.base or UNSET,
    )


def place_objects(
    places: Sequence[AdapterPlace], names: Mapping[str, str]
) -> tuple[PlaceObject, ...]:
    """Describes where the adapters of a worker lie. names: by digest."""
    return tuple(
        PlaceObject(
            digest=place.digest,
            name=names.get(place.digest),
            device=place.device,
            host=place.host,
            pinned=place.pinned,
            slab_bytes=place.slab_bytes or None,
            load_s=place.load_s,
            device_spans=place.device_spans,
            host_spans=place.host_spans,
        )
        for place in places
    )


def worker_object(
    worker: WorkerObject,
    status: WorkerStatus | None,
    picture: WorkerPicture | None,
    places: tuple[PlaceObject, ...],
) -> WorkerObject:
    """Adds to a worker what its own reports say. worker: what is known without its own reports."""
    known: dict[str, object] = {}
    if status is not None:
        known |= {
            "state": _state(status),
            "running": status.running,
            "waiting": status.waiting,
            "kv_pages": status.total_pages,
            "kv_pages_free": status.free_pages,
            "step": status.step,
        }
    if picture is not None:
        known |= {
            name: getattr(picture, name) for name in _SHARED if name not in ("in_use", "places")
        }
        known |= {"in_use": dict(picture.in_use), "places": places}
    return msgspec.structs.replace(worker, **known)


_SHARED = sorted(set(WorkerObject.__struct_fields__) & set(WorkerPicture.__struct_fields__))


def _state(status: WorkerStatus) -> WorkerState:
    if status.draining:
        return "draining"
    return "ready" if status.ready else "starting"
