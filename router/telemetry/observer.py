"""Counts, traces, logs and charges one generation request, event by event.

The request's way names what happens. What follows from an event is decided here alone.
"""

import time
from collections.abc import Callable
from typing import Literal

from loraplex.router.call import FinishReason, GenerationCall, RequestError, VectorUse
from loraplex.router.names.served import ServedAdapter
from loraplex.router.policy.guards import GuardSample
from loraplex.router.policy.placement.placement import Reason
from loraplex.router.telemetry.metrics import AnswerMetrics, RouterMetrics, Start
from loraplex.router.telemetry.request import Notes, RequestInHand
from loraplex.router.telemetry.request_log import note_call
from loraplex.router.telemetry.top_adapters import BASE, COUNTS, OTHER
from loraplex.router.tenancy.metering import Charge
from loraplex.server.protocol import DeviceCost, ErrorCode, TokenEvent

_REQUESTS, _ERRORS, _PROMPT_TOKENS, _GENERATED_TOKENS, _DEVICE_SECONDS, _COST = range(len(COUNTS))


class RequestObserver:
    """Hears of one request's events in this order: asked, resolved or unresolved, queued; those of
    its sequences; finished, or failed, or neither; stopped if it was not finished; closed. A
    request that is refused is only closed.

    request: for its log line and trace. charge: for its usage. report: makes an error known to
    operators. clock: the event loop's. start, first_token_s: known with the first token;
    start with the first vector, too.
    """

    _call: GenerationCall  # once it is asked
    _own: AnswerMetrics

    def __init__(
        self,
        request: RequestInHand,
        metrics: RouterMetrics,
        charge: Charge,
        report: Callable[[RequestError], None],
        clock: Callable[[], float],
    ) -> None:
        self.start: Start | None = None
        self.first_token_s: float | None = None
        self._request = request
        self._metrics = metrics
        self._charge = charge
        self._report = report
        self.clock = clock
        self._top = metrics.top_adapters
        self._name = BASE
        self._began = 0.0
        self._adapter: ServedAdapter | None = None
        self._is_queued = False
        self._outcome: Literal["ok", "failed", "excused"] = "ok"
        self._num_generated = 0
        self._decode_s = 0.0
        self._num_decoded = 0
        self._use: VectorUse = "vector"
        self._num_prompt = self._longest = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request was asked."""
        return self.clock() - self._began

    # The way in

    def asked(self, call: GenerationCall, tenant: str, base_name: str, base: str) -> None:
        """Notes that a caller may have an answer, and there are workers. base: as of `of_base`."""
        self._began, self._call = self.clock(), call
        self.of_base(base)
        if call.vector is not None:
            self._use = call.vector.use
        note_call(self._request, call, tenant, base_name)

    def of_base(self, base: str) -> None:
        """Notes for which base the request is. base: its name, as the operator declares it."""
        self._own = self._metrics.of(base)
        self._charge.base = base

    def resolved(self, began: float) -> None:
        """Notes that the adapter's name is resolved. began: when that began."""
        self._looked_up("ready", began)

    def unresolved(self, began: float) -> None:
        self._looked_up("failed", began)

    def _looked_up(self, outcome: str, began: float) -> None:
        ended = self.clock()
        self._metrics.adapter_load_s.labels(outcome).observe(ended - began)
        self._request.trace.stage("resolve", began, ended, {"loraplex.outcome": outcome})

    def template_failed(self, adapter: ServedAdapter) -> None:
        """Notes that the adapter's own template cannot render the messages."""
        if adapter.rollout:
            self._metrics.outcomes.add(adapter.rollout, adapter.digest, GuardSample(True))

    def queued(self, adapter: ServedAdapter | None, num_prompt_tokens: int) -> None:
        """Notes that a request was admitted, and that its sequences wait for workers."""
        self._is_queued, self._num_prompt = True, num_prompt_tokens
        self._adapter = adapter
        if adapter is not None:
            # What nobody registered has no name here: callers choose it.
            self._name = adapter.alias or OTHER
            self._request.notes["loraplex.adapter.digest"] = adapter.digest
            charge = self._charge
            self._metrics.judged_requests.note(
                charge.tenant, charge.request_id, adapter, time.time()
            )
        self._own.prompt_tokens.inc(num_prompt_tokens)
        self._top.count(self._name, _REQUESTS)
        self._top.count(self._name, _PROMPT_TOKENS, num_prompt_tokens)
        self._request.notes["gen_ai.usage.input_tokens"] = num_prompt_tokens

    def sequence(self, digest: str | None) -> "SequenceObserver":
        """The observer of one of the request's sequences, with the adapter of this digest."""
        return SequenceObserver(self, self._request, self._metrics, self._own, digest)

    # The way back

    def prompt_read(self, num_cached: int) -> None:
        """Notes that a worker has read a prompt. num_cached: tokens that were there already."""
        self._charge.cached_tokens += num_cached
        self._own.cached_tokens.inc(num_cached)

    def generated(self, count: int) -> None:
        """Counts generated tokens of any sequence."""
        self._own.generated_tokens.inc(count)
        self._top.count(self._name, _GENERATED_TOKENS, count)
        self._num_generated += count
        self._charge.generated_tokens += count

    def spent(self, cost: DeviceCost) -> None:
        """Notes what a sequence cost, perhaps after the request's end."""
        self._top.count(self._name, _DEVICE_SECONDS, cost.device_s)
        self._top.count(self._name, _COST, self._charge.spent(cost))

    def first_token(self, event: TokenEvent, now: float) -> None:
        """Notes the first token of one of the sequences; the first of all of them counts."""
        if self.first_token_s is not None:
            return
        self.first_token_s = now - self._began
        self.start = self._start(event)
        first_token_s = self._own.first_token_s.labels(self.start)
        first_token_s.observe(self.first_token_s, self._request.exemplar)
        self._request.notes["loraplex.start"] = self.start
        self._request.notes["loraplex.time_to_first_token_s"] = self.first_token_s

    def _start(self, first: TokenEvent) -> Start:
        if self._name == BASE:
            return "base"
        return "cold" if first.load_s else "warm"

    def vector(self, event: TokenEvent) -> None:
        """Notes that one prompt was read for numbers."""
        self._own.vectors.labels(self._use).inc()
        if self.start is None:
            self.start = self._request.notes["loraplex.start"] = self._start(event)

    def choice_ended(self, finish: FinishReason, count: int) -> None:
        """Notes that a sequence has ended, with `count` tokens."""
        self._own.choices_ended.labels("stop" if finish == "eos" else finish).inc()
        self._longest = max(self._longest, count)

    def decoded(self, decode_s: float, count: int) -> None:
        """Notes that a sequence has ended, with `count` tokens after its first."""
        self._own.output_token_s.observe(decode_s / count)
        self._decode_s += decode_s
        self._num_decoded += count

    def finished(self) -> None:
        """Notes that the answer is whole."""
        self._charge.outcome = "ok"
        self._own.request_s.observe(self.elapsed_s, self._request.exemplar)
        call, generated = self._call, (self._num_generated, self._longest)
        if call.vector is None:
            sizes = (self._num_prompt, *generated, call.best_of, call.max_tokens)
            for histogram, size in zip(self._own.sizes.values(), sizes, strict=True):
                if size is not None:
                    histogram.observe(size)

    def failed(self, *, excused: bool) -> None:
        """Notes that it ended in an error. excused: with any adapter it would have failed."""
        self._top.count(self._name, _ERRORS)
        self._outcome = "excused" if excused else "failed"

    def broke_off(self, error: RequestError) -> None:
        """Notes that a stream ended in an error after its first byte."""
        self._report(error)

    def stopped(self, *, by_failure: bool) -> None:
        """Notes an end before the answer was whole: a failure, or its client left."""
        self._charge.outcome = "failed" if by_failure else "cancelled"
        self._own.choices_ended.labels("error" if by_failure else "abort").inc()
        if not by_failure:
            self._metrics.given_up.inc()
            self._request.error = "client_gone"

    def closed(self) -> None:
        """Notes the end of a request, however it ended, also before it was queued."""
        if self._is_queued:
            adapter = self._adapter
            if adapter is not None and adapter.rollout and self._outcome != "excused":
                self._metrics.outcomes.add(adapter.rollout, adapter.digest, self._sample())
            self._request.notes["gen_ai.usage.output_tokens"] = self._num_generated
        else:
            self._metrics.refused.labels("work" if self._charge.has_entered else "nothing").inc()
        self._top.count(self._name, _COST, self._charge.close())

    def _sample(self) -> GuardSample:
        """The measurements for the guards. A client that left early has waited so long at least.

        A cold start says nothing of a version: a version with a small share has more of them.
        """
        if self._outcome == "failed":
            return GuardSample(True)
        token_s = self._decode_s / self._num_decoded if self._num_decoded else None
        first_token_s = self.elapsed_s if self.first_token_s is None else self.first_token_s
        return GuardSample(False, None if self.start == "cold" else first_token_s, token_s)


class SequenceObserver:
    """Hears of one sequence's events: placed, submitted, received; resumed before each further
    attempt; token and ended when its answer's reader has them.

    Keeps times only: a span (queue, placement, load, prefill, decode; of each attempt) is made when
    a part is over. digest: of its adapter.
    """

    __slots__ = (
        *("_adapter", "_attempt", "_first_at", "_last_at", "_metrics", "_notes", "_num_tokens"),
        *("_own", "_placed_at", "_prefill_s", "_received_at", "_request", "_request_notes"),
        *("_submitted_at", "_trace"),
    )

    def __init__(
        self,
        request: RequestObserver,
        in_hand: RequestInHand,
        metrics: RouterMetrics,
        own: AnswerMetrics,
        digest: str | None,
    ) -> None:
        self._request = request
        self._request_notes = in_hand.notes
        self._trace = in_hand.trace
        self._metrics = metrics
        self._own = own
        self._adapter: Notes = {} if digest is None else {"loraplex.adapter.digest": digest}
        self._notes: Notes = {}
        self._placed_at = self._submitted_at = self._received_at = 0.0
        self._first_at = self._last_at = self._prefill_s = 0.0
        self._num_tokens = self._attempt = 0

    def placed(self, began: float, worker_id: str, reason: Reason, tier: str, attempt: int) -> None:
        """Notes that a sequence left the queue, which it entered at `began`, for a worker."""
        self._own.placed(reason, self._request.clock() - began)
        self._request_notes["loraplex.placement.reason"] = reason
        self._notes = {
            **self._adapter,
            "loraplex.worker.id": worker_id,
            "loraplex.placement.reason": reason,
            "loraplex.adapter.tier": tier,
            "loraplex.attempt": attempt,
        }
        self._placed_at = time.monotonic()
        self._trace.stage("queue", began, self._placed_at, self._notes)

    def submitted(self) -> None:
        """Notes that the worker has, or has been sent, all that it needs."""
        self._submitted_at, self._received_at = time.monotonic(), 0.0
        self._trace.stage("placement", self._placed_at, self._submitted_at, self._notes)

    def received(self, event: TokenEvent) -> float:
        """Notes an event of the worker; returns when it came, in seconds of `time.monotonic`."""
        now = time.monotonic()
        if not self._received_at and (event.token_ids or event.vector is not None):
            self._received_at, self._prefill_s = now, now - self._submitted_at
            self._own.prefill_s.observe(self._prefill_s)
            loaded = min(self._submitted_at + (event.load_s or 0.0), now)
            if event.load_s:
                self._trace.stage("load", self._submitted_at, loaded, self._notes)
            self._trace.stage("prefill", loaded, now, self._notes)
        if event.finish is not None and self._received_at and event.vector is None:
            self._trace.stage("decode", self._received_at, now, self._notes)
        return now

    def spent(self, cost: DeviceCost) -> None:
        """Notes what an attempt cost; it may come after the request's end."""
        self._request.spent(cost)

    def resumed(self, cause: ErrorCode) -> None:
        """Notes that another attempt begins."""
        self._own.resumed(cause)

    def quarantined(self) -> None:
        """Notes that a sequence killed the workers that it ran on."""
        self._metrics.quarantined.inc()

    def token(self, event: TokenEvent, at: float) -> None:
        """Notes that generated tokens are with the answer's reader. at: when they came."""
        request, metrics, count = self._request, self._own, len(event.token_ids)
        request.generated(count)
        if self._num_tokens:
            metrics.token_gap_s.observe(at - self._last_at)
            if event.attempt != self._attempt:
                metrics.resume_gap_s.observe(at - self._last_at)
        else:
            self._first_at = at
            request.first_token(event, at)
        self._num_tokens += count
        self._last_at = at
        self._attempt = event.attempt

    def vector(self, event: TokenEvent) -> None:
        """Notes that the prompt's vector is with the answer's reader."""
        self._request.vector(event)

    def ended(self, finish: FinishReason) -> None:
        """Notes that the answer's reader has the whole choice."""
        decode_s = self._last_at - self._first_at
        self._request.choice_ended(finish, self._num_tokens)
        self._own.decode_s.observe(decode_s)
        self._own.inference_s.observe(self._prefill_s + decode_s)
        if self._num_tokens > 1:
            self._request.decoded(decode_s, self._num_tokens - 1)
