"""Adapters: loaded, merged, pinned, moved between tiers. Pure."""

from typing import Literal

import msgspec

from loraplex.adapters.errors import AdapterErrorCode, Violation
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.merge.recipe import MergeRecipe
from loraplex.adapters.ref import AdapterRef


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True, tag="al"):
    """Turn a pinned reference into a digest: fetch, check, pack. Answered by AdapterState.

    ref: `hub` refs carry a commit as revision. token: the caller's credential for the source; never
    logged or stored. expected_digest: when given, other content is a violation.
    """

    load_id: str
    ref: AdapterRef
    token: str | None = None
    expected_digest: str | None = None


class MemberSource(msgspec.Struct, frozen=True, array_like=True):
    """The source of a merge's member, if the worker lacks it. Fields as in AdapterLoad."""

    ref: AdapterRef
    token: str | None = None


class AdapterMerge(msgspec.Struct, frozen=True, array_like=True, tag="am"):
    """Make an adapter of others, by digest. Answered by AdapterState, as AdapterLoad is.

    sources: parallel to recipe.members. The caller may use every one of them.
    """

    load_id: str
    recipe: MergeRecipe
    sources: tuple[MemberSource, ...]


class AdapterPins(msgspec.Struct, frozen=True, array_like=True, tag="ap"):
    """The adapters that this router wants to stay on the device, until its next list or its end.

    Absent ones are loaded. The worker must have admitted them (AdapterLoad).
    """

    digests: tuple[str, ...]


class AdapterPrefetch(msgspec.Struct, frozen=True, array_like=True, tag="af"):
    """A hint that sequences of these will come soon, soonest first: bring them to host memory when
    nothing more urgent is to be done.

    Not answered; may be repeated, ignored, and name what the worker has not admitted.
    """

    digests: tuple[str, ...]


OrderAction = Literal[
    "load",  # to the device
    "evict",  # from device and host memory, once no sequence needs it
    "status",  # only report
    "withdraw",  # nobody waits any more for the order of the same id: not answered, nor is that
]


class AdapterOrder(msgspec.Struct, frozen=True, array_like=True, tag="ao"):
    """Move admitted adapters between tiers. Answered by one AdapterReport, when it is done."""

    order_id: str
    action: OrderAction
    digests: tuple[str, ...]


LoadStage = Literal["fetching", "checking", "ready", "failed"]


class AdapterState(msgspec.Struct, frozen=True, array_like=True, tag="as"):
    """Progress of an AdapterLoad or AdapterMerge.

    Final: `ready` (manifest set), `failed` (error, message set). trained_for: see AdapterError.
    """

    load_id: str
    stage: LoadStage
    manifest: AdapterManifest | None = None
    error: AdapterErrorCode | None = None
    message: str | None = None
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None
    trained_for: str = ""


TierState = Literal["absent", "loading", "ready"]


class AdapterTiers(msgspec.Struct, frozen=True, array_like=True):
    """The places where a worker has an adapter. slab_bytes: packed, 0 if not known.

    load_s: its last way to the device. idle_s: since a sequence last named it.
    """

    digest: str
    disk: bool
    host: TierState
    device: TierState
    pinned: bool
    slab_bytes: int = 0
    load_s: float | None = None
    idle_s: float | None = None


class AdapterReport(msgspec.Struct, frozen=True, array_like=True, tag="ar"):
    """Answers an AdapterOrder. error: why it was not carried out. tiers: as they are now."""

    order_id: str
    tiers: tuple[AdapterTiers, ...]
    error: str | None = None
