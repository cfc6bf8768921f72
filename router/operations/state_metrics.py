"""Gauges of a router's state, read when somebody scrapes: queue, workers, adapters."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import get_args

from loraplex.adapters.common.meters import Labels, Row
from loraplex.router.batches.desk import BatchDesk
from loraplex.router.generation.dispatcher import Dispatcher
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.catalog import Catalog
from loraplex.router.names.owned_name import OwnedName
from loraplex.router.operations.declarations import Declarations
from loraplex.router.policy.quota import Reason as QuotaReason
from loraplex.router.policy.rollout import VersionState
from loraplex.router.shared.sharing import Sharing
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.telemetry.top_adapters import Count
from loraplex.router.tenancy.admission import MODES
from loraplex.router.tenancy.tenancy import Tenancy
from loraplex.router.workers.base_model import BaseModel
from loraplex.router.workers.bases import Bases
from loraplex.router.workers.roster import Roster
from loraplex.router.workers.session import WorkerSession

# What a worker is to this router.
WORKER_STATES = ("ready", "starting", "draining", "disconnected")


def watch_state(
    metrics: RouterMetrics,
    bases: Bases,
    roster: Roster,
    catalog: Catalog,
    dispatcher: Dispatcher,
) -> None:
    """Registers metrics of requests, queue, workers and adapters, once, at the build."""
    meters = metrics.meters
    text = "Requests being answered"
    if bases.have_names:
        _watch_bases(metrics, bases, "requests_running", text, lambda base: base.running)
    else:
        meters.watch("requests_running", text, lambda: dispatcher.running)
    for name, text, read in (
        ("queue_sequences", "Sequences waiting for a worker", lambda b: len(b.fleet.queue)),
        (
            "queue_bytes",
            "Bytes of the prompts that wait",
            lambda b: b.fleet.queue.capacity.held.nbytes,
        ),
        (
            "queue_limit_sequences",
            "Sequences that may wait",
            lambda b: b.fleet.queue.capacity.limits.count,
        ),
        (
            "waiting_room_requests",
            "Requests waiting for any worker at all",
            lambda b: b.fleet.without_worker.count,
        ),
    ):
        _watch_bases(metrics, bases, name, text, read)
    if bases.have_names:
        text = "Requests of the last minute that found no worker of their base"
        _watch_bases(metrics, bases, "base_wanted", text, _wanted)
    meters.watch(
        "adapters_registered",
        "Names of adapters in service",
        lambda: catalog.rules.aliases.in_service,
    )
    meters.rows(
        "adapter_versions",
        "gauge",
        "Versions of adapters in rollouts, by state",
        {"state": get_args(VersionState)},
        lambda: _versions(catalog.rules.aliases),
    )
    _watch_workers(metrics, bases, roster)
    _watch_adapters(metrics, catalog.rules.aliases)


def _watch_bases(
    metrics: RouterMetrics, bases: Bases, name: str, text: str, read: Callable[[BaseModel], float]
) -> None:
    """Declares a gauge, with a series for each base that has a name."""
    labels: Labels = {"base": ()} if bases.have_names else {}
    metrics.meters.rows(
        name,
        "gauge",
        text,
        labels,
        lambda: [((base.name,) if labels else (), read(base)) for base in bases],
    )


def _wanted(base: BaseModel) -> float:
    return base.fleet.missed.count(asyncio.get_running_loop().time())


def _watch_adapters(metrics: RouterMetrics, aliases: Aliases) -> None:
    """Labels are registered names, as many as `top_adapters` shows; besides `_base`, `_other`."""
    top = metrics.top_adapters

    def is_registered(name: OwnedName) -> bool:
        registration = aliases.get(name)
        return registration is not None and registration.state != "deleted"

    def rows(what: Count) -> Iterable[Row]:
        top.settle(time.monotonic(), is_registered)
        return top.rows(what)

    texts: tuple[tuple[Count, str], ...] = (
        ("requests", "Requests that began"),
        ("errors", "Requests that failed after they began"),
        ("prompt_tokens", "Prompt tokens"),
        ("generated_tokens", "Tokens received from workers"),
        ("device_seconds", "Seconds of devices in steps"),
        ("cost", "Money, in the currency of --prices"),
    )
    for what, text in texts:
        metrics.meters.rows(
            f"adapter_{what}",
            "counter",
            f"{text}, by adapter: `_base`, the registered ones with most tokens, `_other`",
            {"adapter": ()},
            partial(rows, what),
        )
    metrics.meters.rows(
        "adapter_info",
        "gauge",
        "1 for each adapter that has series of its own: what it is",
        {"adapter": (), "state": (), "rank": (), "pinned": ()},
        lambda: _infos(aliases, top.shown),
    )


def watch_declared(metrics: RouterMetrics, aliases: Aliases, declarations: Declarations) -> None:
    """Registers the gauge of declared adapters that cannot be served, once, at the build."""

    def broken() -> Iterator[Row]:
        yield ("option",), len(aliases.marked("broken option"))
        yield ("file",), declarations.broken("file")
        yield ("folder",), declarations.broken("folder")

    metrics.meters.rows(
        "adapters_broken",
        "gauge",
        "Declared adapters that cannot be served as declared: --adapter's, the adapters file's,"
        " watched folders'",
        {"origin": ("option", "file", "folder")},
        broken,
    )


def _versions(aliases: Aliases) -> Iterator[Row]:
    counts = dict.fromkeys(get_args(VersionState), 0)
    for registration in aliases.marked("rollout"):
        if registration.rollout is not None:
            for version in registration.rollout.versions:
                counts[version.state] += 1
    return (((state,), count) for state, count in counts.items())


def _infos(aliases: Aliases, names: Iterable[OwnedName]) -> Iterator[Row]:
    for name in names:
        registration = aliases.get(name)
        if registration is not None:
            content = registration.content
            rank = "" if content is None else str(max(content.manifest.ranks, default=0))
            pinned = str(registration.pinned).lower()
            yield (str(name), registration.shown_state, rank, pinned), 1.0


def watch_sharing(metrics: RouterMetrics, sharing: Sharing, tenancy: Tenancy) -> None:
    """Registers metrics of Redis, sharing routers, refusals and keys, once, at the build."""
    meters, admission = metrics.meters, tenancy.metering.admission
    meters.watch("redis_up", "Whether Redis answers, or none is shared", lambda: sharing.is_up)
    meters.watch("routers", "Live routers that share quotas", lambda: admission.routers)
    meters.rows(
        "quota_refusals",
        "counter",
        "Requests refused for a quota, by what was used up",
        {"reason": get_args(QuotaReason)},
        lambda: (((reason,), count) for reason, count in admission.refusals.items()),
    )
    meters.watch("keys", "Keys that are known", lambda: len(tenancy.keyring.all()))
    meters.rows(
        "quota_mode",
        "gauge",
        "Where quotas are counted now: 1 for the mode in force",
        {"mode": MODES},
        lambda: (((mode,), mode == admission.mode) for mode in MODES),
    )


def watch_batches(metrics: RouterMetrics, desk: BatchDesk | None) -> None:
    """Declares the metrics of batches: all of this router's, but what is stored."""
    meters = metrics.meters

    def read(of: Callable[[BatchDesk], float]) -> Callable[[], float]:
        return lambda: 0.0 if desk is None else of(desk)

    for name, text, value in (
        ("batches_running", "Batches that this router runs", lambda d: d.keeper.running),
        ("batch_rows", "Sequences of batches that it runs", lambda d: d.keeper.rows.running),
        ("batch_rows_limit", "As many as may run now", lambda d: d.keeper.rows.most),
        ("files", "Files in --files-dir", lambda d: d.keeper.stored.files),
        ("files_bytes", "What is in --files-dir, in bytes", lambda d: d.keeper.stored.nbytes),
    ):
        meters.watch(name, text, read(value))


def _watch_workers(metrics: RouterMetrics, bases: Bases, roster: Roster) -> None:
    """Labels are the ids of connected workers: as many as there are."""
    meters = metrics.meters

    def each(read: Callable[[WorkerSession], float]) -> Callable[[], Iterable[Row]]:
        return lambda: {(s.worker_id,): read(s) for s in roster.sessions}.items()

    def able(base: BaseModel) -> float:
        return sum(view.able for view in base.fleet.views)

    _watch_bases(metrics, bases, "workers_ready", "Workers that take work", able)
    meters.rows(
        "workers",
        "gauge",
        "Workers that this router knows, by state",
        {"state": WORKER_STATES},
        lambda: _states(roster),
    )
    for name, text, read in (
        ("sequences", "Sequences that this router has there", lambda s: s.view.in_flight),
        ("credits", "Sequences that it may have there", lambda s: s.view.credits),
        ("status_age_seconds", "Since a worker reported its state", lambda s: s.silent_s),
    ):
        meters.rows(f"link_{name}", "gauge", text, {"worker": ()}, each(read))


def _states(roster: Roster) -> Iterator[Row]:
    counts = dict.fromkeys(WORKER_STATES, 0)
    for view in roster.views:
        state = "draining" if view.draining else "ready" if view.ready else "starting"
        counts[state] += 1
    counts["disconnected"] = len(roster.clients) - len(roster.views)
    return (((state,), count) for state, count in counts.items())
