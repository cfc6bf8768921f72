"""The worker's Prometheus metrics. Labels are few and closed: no name, digest or id is one."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from server.engine.messages import EngineStats, StepOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STEP_BUCKETS_S = (0.002, 0.004, 0.006, 0.008, 0.012, 0.02, 0.035, 0.06, 0.1, 0.25, 1, 5, 30)
LOAD_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class WorkerMetrics:
    """One registry per worker; counters of the engine survive its restarts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ready = self._gauge("ready", "1 while the engine takes work")
        self.routers = self._gauge("routers", "Connected routers")
        self.sequences = self._gauge("sequences", "Sequences in flight")
        self.running = self._gauge("running_sequences", "Sequences computed now")
        self.waiting = self._gauge("waiting_sequences", "Sequences accepted and not computed yet")
        self.free_pages = self._gauge("free_kv_pages", "KV pages that are free")
        self.total_pages = self._gauge("kv_pages", "KV pages in all")
        self.resident = self._gauge("resident_adapters", "Adapters on the device")
        self.host_bytes = self._gauge("host_adapter_bytes", "Bytes of adapters in host memory")
        self.steps = self._counter("steps", "Engine steps")
        self.step_tokens = self._counter("step_tokens", "Tokens computed, prompts included")
        self.tokens = self._counter("output_tokens", "Tokens generated")
        self.step_seconds = Histogram(
            "loraplex_worker_step_seconds",
            "Seconds of an engine step",
            buckets=STEP_BUCKETS_S,
            registry=self.registry,
        )
        self.preemptions = self._counter("preemptions", "Sequences recomputed later")
        self.prefix_hits = self._counter("prefix_hit_tokens", "Prompt tokens found in the cache")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens accepted")
        self.evictions = self._counter("adapter_evictions", "Adapters pushed off the device")
        self.finished = self._counter("finished_sequences", "Sequences by how they ended", "finish")
        self.refused = self._counter("refused_requests", "Requests not taken", "error")
        self.fetches = self._counter("adapter_fetches", "Adapters fetched", "source")
        self.loads = self._counter("adapter_loads", "Adapter loads by result", "result")
        self.load_seconds = Histogram(
            "loraplex_worker_adapter_load_seconds",
            "Seconds from an adapter's name to packed bytes",
            buckets=LOAD_BUCKETS_S,
            registry=self.registry,
        )
        self.staged = self._counter("slabs_staged", "Adapters brought to host memory", "result")
        self.restarts = self._counter("engine_restarts", "Times the engine was lost")
        self._seen = EngineStats(0, 0, 0, (), (), 0, 0, 0, 0)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"loraplex_worker_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"loraplex_worker_{name}", text, labels, registry=self.registry)

    def engine_started(self, total_pages: int) -> None:
        """A new engine counts from zero."""
        self.total_pages.set(total_pages)
        self._seen = EngineStats(0, 0, 0, (), (), 0, 0, 0, 0)

    def stepped(self, output: StepOutput) -> None:
        if output.num_tokens:
            self.steps.inc()
            self.step_tokens.inc(output.num_tokens)
            self.step_seconds.observe(output.step_s)
        generated = 0
        for item in output.events:
            generated += len(item.event.token_ids)
            if item.event.finish is not None:
                self.finished.labels(item.event.finish).inc()
        self.tokens.inc(generated)
        self._note(output.stats)

    def _note(self, stats: EngineStats) -> None:
        seen, self._seen = self._seen, stats
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.free_pages.set(stats.free_pages)
        self.resident.set(len(stats.resident))
        for counter, before, now in (
            (self.preemptions, seen.preemptions, stats.preemptions),
            (self.prefix_hits, seen.prefix_hit_tokens, stats.prefix_hit_tokens),
            (self.prompt_tokens, seen.prompt_tokens, stats.prompt_tokens),
            (self.evictions, seen.evictions, stats.evictions),
        ):
            counter.inc(max(now - before, 0))

    def render(self) -> bytes:
        return generate_latest(self.registry)
