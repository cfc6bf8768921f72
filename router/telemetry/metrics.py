"""Measurements of a router, in a registry of its own.

Labels come from fixed, short lists; `top_adapters` bounds the only names among them.
"""

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from loraplex.adapters.common.meters import (
    LATENCY_BUCKETS_S,
    STEP_BUCKETS_S,
    TOKEN_BUCKETS,
    Labels,
    Meters,
)
from loraplex.router.call import Cause, VectorUse
from loraplex.router.names.judged_requests import JudgedRequests
from loraplex.router.names.rollout_tally import Outcomes
from loraplex.router.policy.front_door import Cut
from loraplex.router.policy.placement.placement import Reason
from loraplex.router.policy.rollout import Counted, RolledBackBy
from loraplex.router.telemetry.top_adapters import TopAdapters
from loraplex.server.protocol import ErrorCode

# What these are posted, tokens answer.
GENERATION_PATHS = (
    *("/", "/generate", "/generate_stream", "/invocations"),
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/chat/completions/batch", "/inference/v1/generate"),
    *("/v1/embeddings", "/embed", "/classify", "/classify_batch"),
    *("/pooling", "/v2/embed", "/v2/chat", "/cohere/v2/chat"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)

# How a sequence began: without an adapter; with one; with one that it had to wait for.
Start = Literal["base", "warm", "cold"]
M = TypeVar("M", Counter, Histogram)


class RouterMetrics:
    """Families are attributes; `meters` declares more, and gauges that are read at each scrape.

    max_adapters: those that have series of their own. bases: names of the router's bases; where
    these have names, families about answers have the label `base`.
    """

    def __init__(
        self, registry: CollectorRegistry, max_adapters: int, bases: Sequence[str] = ("",)
    ) -> None:
        self._base: Labels = {"base": bases} if any(bases) else {}
        self.meters = Meters(registry, "loraplex_")
        self.top_adapters = TopAdapters(max_adapters)
        self.outcomes = Outcomes()
        self.judged_requests = JudgedRequests()
        self._declare_requests()
        self._declare_tokens()
        self._declare_answers()
        self._declare_placement()
        self._declare_adapters()
        self._declare_batches()
        self._answers = {base: AnswerMetrics(self, base) for base in bases}

    def of(self, base: str) -> "AnswerMetrics":
        """The measurements of one base's answers."""
        return self._answers[base]

    def _declare_requests(self) -> None:
        meters = self.meters
        self.requests = meters.counter(
            "requests", "Requests by route and HTTP status", {"route": (), "status": ()}
        )
        self.request_errors = meters.counter(
            "request_errors",
            "Requests that ended in an error, by cause; also those that broke off in a stream. "
            "kind: whether they asked for tokens",
            {"cause": get_args(Cause), "kind": ("generation", "other")},
        )
        self.request_s = meters.histogram(
            "request_seconds",
            "From a generation request's arrival to its last token",
            LATENCY_BUCKETS_S,
            self._base,
        )
        self.connections = meters.counter("connections", "Connections that clients opened")
        self.connections_refused = meters.counter(
            "connections_refused", "Connections beyond the cap"
        )
        self.connections_cut = meters.counter(
            "connections_cut",
            "Connections that the router ended: their clients were too slow, or spoke no HTTP",
            {"why": get_args(Cut)},
        )
        self.given_up = meters.counter(
            "generations_given_up", "Generations whose client left before the answer was whole"
        )
        self.helper_broken = meters.gauge(
            "helper_broken",
            "1 = the router could not start such a helper process when it started itself",
            {"helper": ("grammar_checker", "template_renderer")},
        )
        self.refused = meters.counter(
            "generations_refused",
            "Generation requests that ended before they were queued. after: work on their adapter, "
            "template, text or grammar; or nothing",
            {"after": ("nothing", "work")},
        )
        self.loop_lag_s = meters.histogram(
            "event_loop_lag_seconds",
            "How much later than due the router's event loop runs",
            LATENCY_BUCKETS_S,
        )

    def _declare_tokens(self) -> None:
        meters, base = self.meters, self._base
        self.prompt_tokens = meters.counter(
            "prompt_tokens", "Prompt tokens of started sequences", base
        )
        self.cached_tokens = meters.counter(
            "cached_prompt_tokens", "Prompt tokens that a worker found in its prefix cache", base
        )
        self.vectors = meters.counter(
            "vectors",
            "Prompts that were read for numbers: a vector, classes, or the fit of a document",
            {"use": get_args(VectorUse), **base},
        )
        self.generated_tokens = meters.counter(
            "generated_tokens", "Tokens received from workers", base
        )
        self.first_token_s = meters.histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token; cold = it waited for its adapter",
            LATENCY_BUCKETS_S,
            {"start": get_args(Start), **base},
        )
        self.token_gap_s = meters.histogram(
            "inter_token_latency_seconds",
            "Between two arrivals of tokens of one sequence",
            STEP_BUCKETS_S,
            base,
        )
        self.output_token_s = meters.histogram(
            "time_per_output_token_seconds",
            "Of a whole sequence: from its first token to its last, over those after the first",
            STEP_BUCKETS_S,
            base,
        )

    def _declare_answers(self) -> None:
        meters = self.meters
        self.prefill_s, self.decode_s, self.inference_s = (
            meters.histogram(f"{name}_seconds", text, LATENCY_BUCKETS_S, self._base)
            for name, text in (
                ("prefill", "From a sequence's way to its worker to its first token"),
                ("decode", "From a sequence's first token to its last"),
                ("inference", "From a sequence's way to its worker to its last token"),
            )
        )
        # In the order of `RequestObserver.finished`.
        self.sizes = {
            name: meters.histogram(
                f"request_{name}", f"Of a whole answer: {text}", TOKEN_BUCKETS, self._base
            )
            for name, text in (
                ("prompt_tokens", "tokens of its prompts"),
                ("generated_tokens", "tokens of all its choices"),
                ("longest_choice_tokens", "tokens of the longest of them"),
                ("choices", "choices that were generated"),
                ("max_tokens", "`max_tokens`, where the request says it"),
            )
        }
        self.choices_ended = meters.counter(
            "choices_ended",
            "Choices that ended; abort, error: requests that broke off",
            {"finish": ("stop", "length", "abort", "error"), **self._base},
        )

    def _declare_placement(self) -> None:
        meters, base = self.meters, self._base
        self.queue_wait_s = meters.histogram(
            "queue_wait_seconds",
            "From a sequence's readiness to its placement on a worker",
            LATENCY_BUCKETS_S,
            base,
        )
        self.placements = meters.counter(
            "placements", "Sequences placed, by reason", {"reason": get_args(Reason), **base}
        )
        self.resumes = meters.counter(
            "resumes", "Attempts after the first, by cause", {"cause": get_args(ErrorCode), **base}
        )

        self.resume_gap_s = meters.histogram(
            "resume_gap_seconds",
            "What a client sees of a lost worker: between the last token of one attempt and the"
            " first of the next",
            LATENCY_BUCKETS_S,
            base,
        )
        self.quarantined = meters.counter(
            "requests_quarantined", "Sequences that killed the workers that they ran on"
        )
        self.handed_over = meters.counter(
            "sequences_handed_over", "Sequences that left a worker which had fallen silent"
        )

    def _declare_adapters(self) -> None:
        meters = self.meters
        self.adapter_load_s = meters.histogram(
            "adapter_load_seconds",
            "From naming an adapter to its digest, kept answers included, by outcome",
            LATENCY_BUCKETS_S,
            {"outcome": ("ready", "failed")},
        )
        self.rollbacks = meters.counter(
            "adapter_rollbacks",
            "Versions of adapters that were taken back; guard_alone: by one router, without Redis",
            {"by": get_args(RolledBackBy)},
        )
        self.feedback = meters.counter(
            "feedback",
            "Scores of answers that callers gave, by the version of a rollout for which they "
            "count; again: given twice; unknown: of no request that is remembered; over: of a "
            "version that is not judged any more",
            {"counted": get_args(Counted)},
        )
        self.feedback_score = meters.histogram(
            "feedback_score",
            "Scores that count, by the version of a rollout",
            [tenth / 10 for tenth in range(11)],
            {"version": ("old", "new")},
        )
        meters.rows(
            "feedback_forgotten",
            "counter",
            "Requests of rollouts that were not remembered for scores: too many",
            {},
            lambda: (((), self.judged_requests.forgotten),),
        )

    def _declare_batches(self) -> None:
        meters = self.meters
        self.batches = meters.counter(
            "batches",
            "Batches that ended, by how",
            {"end": ("completed", "failed", "expired", "cancelled")},
        )
        self.batch_lines = meters.counter(
            "batch_lines",
            "Lines of batches that were answered: in the output file, or in the error file",
            {"outcome": ("completed", "failed")},
        )
        self.batch_retries = meters.counter(
            "batch_line_retries", "Lines of batches that were to be asked again: all was busy"
        )

    def request(self, route: str, status: int) -> None:
        self.requests.labels(route, str(status)).inc()


class _OfBase(Generic[M]):
    """Series of one base in a family with more labels. base: "" = the family is of one base."""

    def __init__(self, family: M, base: str) -> None:
        self._family: M = family
        self._base = (base,) if base else ()

    def labels(self, value: str) -> M:
        series: M = self._family.labels(value, *self._base)
        return series


class AnswerMetrics:
    """Measurements of one base's answers: series of `RouterMetrics`' families, so named."""

    def __init__(self, metrics: RouterMetrics, base: str) -> None:
        def alone(family: M) -> M:
            return family.labels(base) if base else family

        self.request_s = alone(metrics.request_s)
        self.prompt_tokens = alone(metrics.prompt_tokens)
        self.cached_tokens = alone(metrics.cached_tokens)
        self.vectors = _OfBase(metrics.vectors, base)
        self.generated_tokens = alone(metrics.generated_tokens)
        self.first_token_s = _OfBase(metrics.first_token_s, base)
        self.token_gap_s = alone(metrics.token_gap_s)
        self.output_token_s = alone(metrics.output_token_s)
        self.prefill_s = alone(metrics.prefill_s)
        self.decode_s = alone(metrics.decode_s)
        self.inference_s = alone(metrics.inference_s)
        self.sizes = {name: alone(family) for name, family in metrics.sizes.items()}
        self.choices_ended = _OfBase(metrics.choices_ended, base)
        self.resume_gap_s = alone(metrics.resume_gap_s)
        self._queue_wait_s = alone(metrics.queue_wait_s)
        self._placements = _OfBase(metrics.placements, base)
        self._resumes = _OfBase(metrics.resumes, base)

    def placed(self, reason: Reason, waited_s: float) -> None:
        self._placements.labels(reason).inc()
        self._queue_wait_s.observe(waited_s)

    def resumed(self, cause: ErrorCode) -> None:
        self._resumes.labels(cause).inc()
