"""Hellos, status and pictures of routers and workers. Pure."""

import msgspec

from loraplex.server.protocol.adapters import TierState

PROTOCOL_VERSION = 7


class RouterHello(msgspec.Struct, frozen=True, array_like=True, tag="rh"):
    """The router's first frame."""

    router_id: str
    version: int = PROTOCOL_VERSION


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag="wh"):
    """The worker's first frame. credits: sequences this router may have in flight here."""

    worker_id: str
    epoch: int
    card_digest: str
    credits: int
    version: int = PROTOCOL_VERSION


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="in"):
    """Asks what lies where, for people who look. Answered by one WorkerPicture.

    known: the version of `places` that the router has already (0 = none).
    """

    order_id: str
    known: int = 0


class WorkerStatus(msgspec.Struct, frozen=True, array_like=True, tag="ws"):
    """Hints, twice a second. ready: the engine takes work. resident, loading: adapter digests.

    adapter_slots: adapters that may be on the device at once.
    silent: the engine gives no sign of life, or its step no end; its sequences are not lost, but
    had better go on elsewhere.
    credits: sequences this router may have in flight here from now on (0 = as before).
    rows: how many of them can be computed at once (0 = not known).
    load_bytes_s: how fast adapters came to the device lately (0 = not known).
    preemptions, step_tokens: since the engine was started, as `step`. page_size: in tokens.
    """

    worker_id: str
    epoch: int
    base_digest: str
    ready: bool
    draining: bool
    free_pages: int
    total_pages: int
    running: int
    waiting: int
    resident: tuple[str, ...]
    loading: tuple[str, ...]
    step: int
    adapter_slots: int = 0
    silent: bool = False
    credits: int = 0
    load_bytes_s: float = 0.0
    rows: int = 0
    preemptions: int = 0
    step_tokens: int = 0
    page_size: int = 0


class AdapterPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where an adapter lies: (first extent, extents) of each unbroken row, in either arena.

    slab_bytes: packed, 0 if not known. load_s: its last way to the device.
    """

    digest: str
    device: TierState
    host: TierState
    pinned: bool
    slab_bytes: int
    load_s: float | None
    device_spans: tuple[tuple[int, int], ...]
    host_spans: tuple[tuple[int, int], ...]


class WorkerPicture(msgspec.Struct, frozen=True, array_like=True, tag="wp"):
    """Answers an Inspect: both arenas, and counts since the engine was started.

    in_use: adapters with sequences in flight here, and how many, whoever sent them.
    version: of `places`; None = as the router has them. places_left_out: above the bound.
    restarts: engines lost since the worker was started. shards: devices that share its model.
    draft_tokens: that steps checked; accepted_draft_tokens: those that were right.
    """

    order_id: str
    device: str
    page_size: int
    extent_bytes: int
    device_extents: int
    host_extents: int
    prompt_tokens: int
    output_tokens: int
    evictions: int
    preemptions: int
    restarts: int
    in_use: tuple[tuple[str, int], ...]
    version: int
    places: tuple[AdapterPlace, ...] | None
    places_left_out: int = 0
    shards: int = 1
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
