"""Measures one request from its start to its end: latencies, tokens, its adapter's share."""

from collections.abc import Callable
from typing import Literal

from router.names.served import ServedAdapter
from router.policy.guards import GuardSample
from router.telemetry.metrics import RouterMetrics, Start
from router.telemetry.request import in_hand
from router.telemetry.top_adapters import BASE, COUNTS, OTHER
from server.protocol import TokenEvent

_REQUESTS, _ERRORS, _PROMPT_TOKENS, _GENERATED_TOKENS = range(len(COUNTS))


class ChoiceTimes:
    """One sequence's. first_at, last_at: when tokens came, on the meter's clock.

    attempt: whose token came last.
    """

    __slots__ = ("attempt", "first_at", "last_at", "num_tokens")

    def __init__(self) -> None:
        self.first_at = self.last_at = 0.0
        self.num_tokens = self.attempt = 0


class RequestMeter:
    """started: when the request came, on `clock`. start: known with the first token."""

    def __init__(
        self,
        metrics: RouterMetrics,
        adapter: ServedAdapter | None,
        started: float,
        clock: Callable[[], float],
    ) -> None:
        self.started = started
        self.first_token_s: float | None = None
        self.start: Start | None = None
        self._metrics = metrics
        self._clock = clock
        self._top = metrics.top_adapters
        # What nobody registered has no name here: callers choose it.
        self._name = BASE if adapter is None else adapter.alias or OTHER
        self._request = in_hand()
        self._num_generated = 0
        self._adapter = adapter
        self._outcome: Literal["ok", "failed", "excused"] = "ok"
        self._decode_s = 0.0
        self._num_decoded = 0
        if adapter is not None:
            self._request.notes["loraplex.adapter.digest"] = adapter.digest

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self.started

    def begins(self, num_prompt_tokens: int) -> None:
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._top.count(self._name, _REQUESTS)
        self._top.count(self._name, _PROMPT_TOKENS, num_prompt_tokens)
        self._request.notes["gen_ai.usage.input_tokens"] = num_prompt_tokens

    def tokens(self, times: ChoiceTimes, event: TokenEvent) -> None:
        """Generated ones of a choice came."""
        count = len(event.token_ids)
        now = self._clock()
        metrics = self._metrics
        metrics.generated_tokens.inc(count)
        self._top.count(self._name, _GENERATED_TOKENS, count)
        if times.num_tokens:
            metrics.token_gap_s.observe(now - times.last_at)
            if event.attempt != times.attempt:
                metrics.resume_gap_s.observe(now - times.last_at)
        else:
            times.first_at = now
            if self.first_token_s is None:
                self.first_token_s = now - self.started
                start = self.start = self._start(event)
                first_token_s = metrics.first_token_s.labels(start)
                first_token_s.observe(self.first_token_s, self._request.exemplar)
                self._request.notes["loraplex.start"] = start
                self._request.notes["loraplex.time_to_first_token_s"] = self.first_token_s
        times.num_tokens += count
        times.last_at = now
        times.attempt = event.attempt
        self._num_generated += count

    def _start(self, first: TokenEvent) -> Start:
        if self._name == BASE:
            return "base"
        return "cold" if first.load_s else "warm"

    def choice_ends(self, times: ChoiceTimes) -> None:
        if times.num_tokens > 1:
            decode_s = times.last_at - times.first_at
            self._metrics.output_token_s.observe(decode_s / (times.num_tokens - 1))
            self._decode_s += decode_s
            self._num_decoded += times.num_tokens - 1

    def ends(self) -> None:
        """The answer is whole."""
        self._metrics.request_s.observe(self.elapsed_s, self._request.exemplar)

    def fails(self, *, excused: bool) -> None:
        """excused: whatever adapter it had would have failed."""
        self._top.count(self._name, _ERRORS)
        self._outcome = "excused" if excused else "failed"

    def is_given_up(self) -> None:
        self._metrics.given_up.inc()
        self._request.error = "client_gone"

    def _told(self) -> GuardSample:
        """Who left before the first token has waited for so long at least.

        A cold start says nothing of a version: one with a small share has more of them.
        """
        if self._outcome == "failed":
            return GuardSample(True)
        token_s = self._decode_s / self._num_decoded if self._num_decoded else None
        first_token_s = self.elapsed_s if self.first_token_s is None else self.first_token_s
        return GuardSample(False, None if self.start == "cold" else first_token_s, token_s)

    def closes(self) -> None:
        """However it ended."""
        adapter = self._adapter
        if adapter is not None and adapter.rollout and self._outcome != "excused":
            self._metrics.outcomes.add(adapter.rollout, adapter.digest, self._told())
        self._request.notes["gen_ai.usage.output_tokens"] = self._num_generated
