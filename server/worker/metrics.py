"""Measurements of a worker, in a registry of its own; the engine's come with its step frames.

Labels are few and closed: no name, digest or id is one.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

from loraplex.adapters.common.meters import COUNT_BUCKETS, LATENCY_BUCKETS_S, STEP_BUCKETS_S, Meters
from loraplex.adapters.errors import AdapterErrorCode
from loraplex.adapters.ref import RefSource
from loraplex.server.engine.executor import PageWay
from loraplex.server.engine.memory.residency import EvictionReason
from loraplex.server.engine.messages import (
    EngineReady,
    EngineStats,
    GrammarFault,
    StepOutput,
    SwapStats,
)
from loraplex.server.protocol import ErrorCode, Finish

# Where a sequence's adapter was when the sequence came.
LookupTier = Literal["device", "loading", "host", "disk"]
# Stages of an adapter's load: from its source, its check, packed bytes into host memory, onto the
# device. The last is also measured without waits for room, other copies and steps.
LoadPhase = Literal["fetch", "check", "stage", "copy", "transfer"]
DeviceUseOf = Literal["adapters", "base", "late", "copies", "pictures"]
ImageOutcome = Literal["decoded", "refused", "failed"]
_COPIED: tuple[PageWay, ...] = ("out", "in", "write", "read")
StepPhase = Literal["plan", "launch", "wait", "commit", "masks"]


class WorkerMetrics:
    """One registry per worker; counters of the engine survive its restarts.

    Families are attributes; `meters` declares more, and gauges that are read at each scrape. What
    each step adds to is summed up here, and noted at a scrape.
    """

    def __init__(self) -> None:
        self.meters = Meters(CollectorRegistry(), "loraplex_worker_")
        self.meters.settle_by(self._settle)
        self._declare_work()
        self._declare_pictures()
        self._declare_steps()
        self._declare_kv()
        self._declare_adapters()
        self._declare_loads()
        self._phases = [self.step_phases.labels(phase) for phase in get_args(StepPhase)]
        self._due = defaultdict[Counter, float](float)  # not noted yet
        self._seen = self._latest = EngineStats()
        self._seen_on_host: dict[EvictionReason, int] = {}

    def _declare_work(self) -> None:
        meters = self.meters
        self.ready = meters.gauge("ready", "1 while the engine takes work")
        self.routers = meters.gauge("routers", "Connected routers")
        self.sequences = meters.gauge("sequences", "Sequences in flight")
        self.orphans = meters.gauge(
            "orphaned_sequences", "Sequences whose router is gone, on their way out"
        )
        self.running = meters.gauge("running_sequences", "Sequences computed now")
        self.waiting = meters.gauge("waiting_sequences", "Sequences accepted, not computed yet")
        self.finished = meters.counter(
            "finished_sequences", "Sequences by how they ended", {"finish": get_args(Finish)}
        )
        self.failed = meters.counter(
            "failed_sequences", "Sequences that ended in an error", {"error": get_args(ErrorCode)}
        )
        self.refused = meters.counter(
            "refused_requests", "Requests not taken", {"error": get_args(ErrorCode)}
        )
        self.devices = meters.gauge("devices", "Devices that share the model")
        self.restarts = meters.counter("engine_restarts", "Times the engine was lost")
        self.loop_lag_s = meters.histogram(
            "event_loop_lag_seconds",
            "How much later than due the worker's event loop runs",
            LATENCY_BUCKETS_S,
        )

    def _declare_pictures(self) -> None:
        meters = self.meters
        self.images = meters.counter(
            "images",
            "Images by what became of them; failed: by no fault of the image",
            {"outcome": get_args(ImageOutcome)},
        )
        self.image_decode_s = meters.histogram(
            "image_decode_seconds",
            "From an image's file to its patches, with the wait for a process",
            LATENCY_BUCKETS_S,
        )

    def _declare_steps(self) -> None:
        meters = self.meters
        self.steps = meters.counter("steps", "Engine steps")
        self.step_tokens = meters.counter("step_tokens", "Tokens computed, prompts included")
        self.adapter_tokens = meters.counter(
            "step_adapter_tokens", "Tokens computed for sequences that have an adapter"
        )
        self.tokens = meters.counter("output_tokens", "Tokens generated")
        self.step_seconds = meters.histogram(
            "step_seconds",
            "Seconds of an engine step, from its launch to its results; steps may overlap",
            STEP_BUCKETS_S,
        )
        self.device_seconds = meters.counter(
            "device_seconds",
            "Seconds of all devices: of steps, by whether an adapter acts on their tokens; late: of"
            " steps whose sequences had all ended; beside steps, of copies of adapters, and of"
            " encoders of pictures",
            {"use": get_args(DeviceUseOf)},
        )
        self.step_phases = meters.counter(
            "step_phase_seconds",
            "Seconds of the engine's thread: planning a step, launching it (on a CPU: computing"
            " it), waiting for the device's results, applying them, waiting for masks of"
            " constrained sequences",
            {"phase": get_args(StepPhase)},
        )
        self.constrained = meters.counter(
            "constrained_tokens", "Tokens drawn under a grammar or another mask"
        )
        self.compile_seconds = meters.histogram(
            "grammar_compile_seconds",
            "Seconds of compiling a grammar that was in no cache",
            LATENCY_BUCKETS_S,
        )
        self.grammar_faults = meters.counter(
            "refused_grammars",
            "Grammars that could not be compiled, by reason; costly: not within their limits;"
            " no_vocabulary: the model's tokens are not known; unavailable: no process could check",
            {"reason": get_args(GrammarFault)},
        )
        self.batch_sequences = meters.histogram(
            "batch_sequences", "Sequences in a step", COUNT_BUCKETS
        )
        self.batch_adapters = meters.histogram(
            "batch_adapters", "Distinct adapters in a step", COUNT_BUCKETS
        )

    def _declare_kv(self) -> None:
        meters = self.meters
        self.free_pages = meters.gauge("free_kv_pages", "KV pages that are free or merely cached")
        self.total_pages = meters.gauge("kv_pages", "KV pages in all")
        self.preemptions = meters.counter("preemptions", "Sequences put aside, to go on later")
        self.draft_tokens = meters.counter("draft_tokens", "Tokens of drafts that steps checked")
        self.accepted_draft_tokens = meters.counter(
            "accepted_draft_tokens",
            "Tokens of drafts that were right, and saved a step each",
        )
        self.prompt_tokens = meters.counter("prompt_tokens", "Prompt tokens accepted")
        self.prefix_hits = meters.counter(
            "prefix_hit_tokens", "Prompt tokens found in the prefix cache"
        )
        self.kept_pages = meters.gauge(
            "kept_kv_pages", "KV pages below the device, by tier", {"tier": ("host", "disk")}
        )
        self.kept_limit = meters.gauge(
            "kept_kv_pages_limit", "KV pages that may be there", {"tier": ("host", "disk")}
        )
        self.page_copies = meters.counter(
            "kv_page_copies",
            "KV pages copied, by way: out of the device into host memory, in again, written to"
            " disk, read from there",
            {"way": _COPIED},
        )
        self.page_faults = meters.counter(
            "kv_page_faults",
            "KV pages that a disk did not take, or did not give back as they were written; these"
            " are computed again",
            {"way": ("write", "read")},
        )
        self.recalled_pages = meters.counter(
            "recalled_kv_pages", "KV pages that sequences waited for instead of computing them"
        )
        self.kept_snapshots = meters.gauge(
            "kept_snapshots",
            "Snapshots of states below the device, by tier",
            {"tier": ("host", "disk")},
        )
        self.snapshot_copies = meters.counter(
            "snapshot_copies",
            "Snapshots of states copied, by way: as of KV pages",
            {"way": _COPIED},
        )

    def _declare_adapters(self) -> None:
        meters = self.meters
        self.adapters = meters.gauge(
            "adapters", "Adapters by tier", {"tier": ("device", "loading", "host")}
        )
        self.adapter_bytes = meters.gauge(
            "adapter_bytes", "Bytes that adapters occupy, by tier", {"tier": ("device", "host")}
        )
        self.adapter_limit = meters.gauge(
            "adapter_bytes_limit", "Bytes that they may occupy", {"tier": ("device", "host")}
        )
        self.lookups = meters.counter(
            "adapter_lookups",
            "Sequences by where their adapter was when they came; all but device are misses",
            {"tier": get_args(LookupTier)},
        )
        self.evictions = meters.counter(
            "adapter_evictions",
            "Adapters that left a tier, by reason",
            {"tier": ("device", "host"), "reason": get_args(EvictionReason)},
        )
        self.reloads = meters.counter(
            "adapter_reloads",
            "Adapters brought to the device again within minutes of being pushed off: thrash",
        )

    def _declare_loads(self) -> None:
        meters = self.meters
        self.fetches = meters.counter(
            "adapter_fetches", "Adapters fetched", {"source": get_args(RefSource)}
        )
        self.loads = meters.counter(
            "adapter_loads",
            "Adapters asked for by name, by result",
            {"result": ("ready", *get_args(AdapterErrorCode))},
        )
        self.load_seconds = meters.histogram(
            "adapter_load_seconds",
            "Seconds of each stage of an adapter's way to the device; transfer: the part of copy"
            " in which its bytes move",
            LATENCY_BUCKETS_S,
            {"stage": get_args(LoadPhase)},
        )
        self.copied_bytes = meters.counter(
            "adapter_copied_bytes", "Bytes of adapters brought to the device"
        )
        self.slabs_saved = meters.counter(
            "slabs_saved",
            "Packed adapters written from host memory to disk, by result; given_up: their room was"
            " needed",
            {"result": ("saved", "given_up", "failed")},
        )
        self.staged = meters.counter(
            "adapters_staged",
            "Adapters brought to host memory, by result; gone: they had given way on disk, and are"
            " fetched again",
            {"result": ("ready", "gone", "failed")},
        )

    def load_took(self, phase: LoadPhase, seconds: float) -> None:
        self.load_seconds.labels(phase).observe(seconds)

    def engine_started(self, ready: EngineReady) -> None:
        """A new engine counts from zero."""
        self._settle()
        self.devices.set(ready.shards)
        self.total_pages.set(ready.total_pages)
        self.adapter_limit.labels("device").set(ready.arena_bytes)
        self.kept_limit.labels("host").set(ready.host_pages)
        self.kept_limit.labels("disk").set(ready.disk_pages)
        self._seen = self._latest = EngineStats()

    def stepped(self, output: StepOutput) -> None:
        due, self._latest = self._due, output.stats
        if output.num_tokens:
            due[self.steps] += 1
            due[self.step_tokens] += output.num_tokens
            self.step_seconds.observe(output.step_s)
        work = output.work
        if work is not None:
            due[self.adapter_tokens] += work.adapter_tokens
            due[self.constrained] += work.constrained
            self.batch_sequences.observe(work.sequences)
            self.batch_adapters.observe(work.adapters)
            for phase, seconds in zip(self._phases, work.phases_s, strict=True):
                due[phase] += seconds
        for compiled in output.compiled:
            self.compile_seconds.observe(compiled.seconds)
            if compiled.fault is not None:
                self.grammar_faults.labels(compiled.fault).inc()
        generated = 0
        for item in output.events:
            event = item.event
            generated += len(event.token_ids)
            if event.finish is not None:
                self.finished.labels(event.finish).inc()
                if event.error is not None:
                    self.failed.labels(event.error).inc()
        due[self.tokens] += generated

    def _settle(self) -> None:
        """Note what came since the last scrape."""
        for counter, grown in self._due.items():
            counter.inc(grown)
        self._due.clear()
        seen, self._seen = self._seen, self._latest
        self._note(seen, self._seen)

    def _note(self, seen: EngineStats, stats: EngineStats) -> None:
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.free_pages.set(stats.free_pages)
        self.adapters.labels("device").set(stats.resident)
        self.adapters.labels("loading").set(len(stats.loading))
        self.adapter_bytes.labels("device").set(stats.adapter_bytes)
        counters: tuple[tuple[Counter, int, int], ...] = (
            (self.preemptions, seen.preemptions, stats.preemptions),
            (self.prefix_hits, seen.prefix_hit_tokens, stats.prefix_hit_tokens),
            (self.prompt_tokens, seen.prompt_tokens, stats.prompt_tokens),
            (self.draft_tokens, seen.draft_tokens, stats.draft_tokens),
            (
                self.accepted_draft_tokens,
                seen.accepted_draft_tokens,
                stats.accepted_draft_tokens,
            ),
        )
        for counter, before, now in counters:
            counter.inc(max(now - before, 0))
        for use in get_args(DeviceUseOf):
            grown = getattr(stats.device_use, use) - getattr(seen.device_use, use)
            self.device_seconds.labels(use).inc(max(grown, 0.0))
        self._note_evictions("device", seen.evictions, stats.evictions)
        self._note_swaps(seen.swaps, stats.swaps)
        self.kept_snapshots.labels("host").set(stats.state_swaps.host)
        self.kept_snapshots.labels("disk").set(stats.state_swaps.disk)
        _add_copied(self.snapshot_copies, seen.state_swaps, stats.state_swaps)

    def _note_swaps(self, seen: SwapStats, now: SwapStats) -> None:
        self.kept_pages.labels("host").set(now.host)
        self.kept_pages.labels("disk").set(now.disk)
        self.recalled_pages.inc(max(now.recalled - seen.recalled, 0))
        _add_copied(self.page_copies, seen, now)
        for way in ("write", "read"):
            failed = now.failed.get(way, 0) - seen.failed.get(way, 0)
            self.page_faults.labels(way).inc(max(failed, 0))

    def note_host_evictions(self, evictions: Mapping[EvictionReason, int]) -> None:
        seen, self._seen_on_host = self._seen_on_host, dict(evictions)
        self._note_evictions("host", seen, evictions)

    def _note_evictions(
        self,
        tier: str,
        seen: Mapping[EvictionReason, int],
        evictions: Mapping[EvictionReason, int],
    ) -> None:
        for reason, count in evictions.items():
            self.evictions.labels(tier, reason).inc(max(count - seen.get(reason, 0), 0))


def _add_copied(counter: Counter, seen: SwapStats, now: SwapStats) -> None:
    for way in _COPIED:
        counter.labels(way).inc(max(now.copied.get(way, 0) - seen.copied.get(way, 0), 0))
