"""Boards of objectives and of workers' insides."""

from deploy.boards.panels import (
    RATE,
    Board,
    Panel,
    Query,
    pick,
    quantiles,
    rate,
    ratio,
    total,
)

_TTFT = "loraplex_time_to_first_token_seconds"


def _share_below(histogram: str, seconds: str) -> str:
    return ratio(rate(f"{histogram}_bucket", f'le="{seconds}"'), rate(f"{histogram}_count"))


def _burn(record: str) -> tuple[Query, ...]:
    return tuple(
        Query(f"loraplex:{record}:burn_rate{window}", f"{{{{service}}}} {window}")
        for window in ("5m", "1h", "6h")
    )


SLO = Board(
    "loraplex-slo",
    "loraplex / Objectives",
    (
        (
            "Error budgets",
            (
                Panel(
                    "Availability, burn rate",
                    "short",
                    _burn("availability"),
                    "How many times faster than allowed the budget is used up; objective: 99.9 % of"
                    " requests without a server error. 14.4 for an hour pages.",
                ),
                Panel(
                    "First token, burn rate",
                    "short",
                    _burn("first_token"),
                    "Objective: 95 % of first tokens within 1 s.",
                ),
                Panel(
                    "First tokens within 1 s",
                    "percentunit",
                    (Query(_share_below(_TTFT, "1.0")),),
                    "Of all requests that had one.",
                    "stat",
                ),
            ),
        ),
        (
            "Latency",
            (
                Panel(
                    "Time to first token",
                    "s",
                    quantiles(_TTFT),
                    "From a request's arrival, cold adapters included.",
                ),
                Panel(
                    "Time to first token, all",
                    "s",
                    (Query(total(f"rate({pick(f'{_TTFT}_bucket')}[{RATE}])", "le"), "{{le}}"),),
                    "Where the mass lies, and whether there are two: warm and cold.",
                    "heatmap",
                ),
                Panel(
                    "Time per output token",
                    "s",
                    quantiles("loraplex_time_per_output_token_seconds"),
                    "Mean of each sequence after its first token.",
                ),
                Panel(
                    "Inter-token latency",
                    "s",
                    quantiles("loraplex_inter_token_latency_seconds"),
                    "Each gap on its own: stalls show here and not in the mean.",
                ),
                Panel(
                    "Whole request",
                    "s",
                    quantiles("loraplex_request_seconds"),
                    "From arrival to the last token.",
                ),
                Panel(
                    "Queue wait",
                    "s",
                    quantiles("loraplex_queue_wait_seconds"),
                    "From readiness to a worker.",
                ),
            ),
        ),
    ),
)

_STEP = "loraplex_worker_step_seconds"

WORKERS = Board(
    "loraplex-workers",
    "loraplex / Workers",
    (
        (
            "Batches",
            (
                Panel(
                    "Sequences",
                    "short",
                    (
                        Query(
                            total(pick("loraplex_worker_running_sequences"), "instance"),
                            "{{instance}} running",
                        ),
                        Query(
                            total(pick("loraplex_worker_waiting_sequences"), "instance"),
                            "{{instance}} waiting",
                        ),
                    ),
                    "Computed now, and accepted but not yet begun.",
                ),
                Panel(
                    "Sequences in a step",
                    "short",
                    quantiles("loraplex_worker_batch_sequences"),
                    "Batch size.",
                ),
                Panel(
                    "Distinct adapters in a step",
                    "short",
                    quantiles("loraplex_worker_batch_adapters"),
                    "Each one's weights are read once a step.",
                ),
            ),
        ),
        (
            "Steps",
            (
                Panel(
                    "Step time",
                    "s",
                    quantiles(_STEP),
                    "From launch to results; steps overlap on a GPU.",
                ),
                Panel(
                    "Where the engine's thread spends its time",
                    "percentunit",
                    (
                        Query(
                            rate("loraplex_worker_step_phase_seconds_total", by="phase"),
                            "{{phase}}",
                        ),
                    ),
                    "Seconds a second, all workers. A GPU that is busy shows as `wait`; on a CPU"
                    " the computing itself is `launch`.",
                ),
                Panel(
                    "Tokens computed",
                    "short",
                    (
                        Query(rate("loraplex_worker_step_tokens_total"), "all"),
                        Query(rate("loraplex_worker_step_adapter_tokens_total"), "with an adapter"),
                        Query(rate("loraplex_worker_output_tokens_total"), "generated"),
                    ),
                    "A second, prompts included.",
                ),
                Panel(
                    "Share of tokens with an adapter",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                rate("loraplex_worker_step_adapter_tokens_total"),
                                rate("loraplex_worker_step_tokens_total"),
                            )
                        ),
                    ),
                    "LoRA's share of a step in tokens; its share in time is not measured.",
                ),
                Panel(
                    "Steps",
                    "ops",
                    (Query(rate("loraplex_worker_steps_total", by="instance"), "{{instance}}"),),
                    "A second.",
                ),
                Panel(
                    "Event loop lag of workers",
                    "s",
                    quantiles("loraplex_worker_event_loop_lag_seconds"),
                    "No step waits for the worker; tokens on their way to routers do.",
                ),
            ),
        ),
        (
            "Grammars",
            (
                Panel(
                    "Tokens under a mask",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                rate("loraplex_worker_constrained_tokens_total"),
                                rate("loraplex_worker_output_tokens_total"),
                            )
                        ),
                    ),
                    "Of sequences with a grammar, allowed tokens or bad words. Waiting for masks is"
                    " the phase `masks` of the engine's thread.",
                ),
                Panel(
                    "Compiling a grammar",
                    "s",
                    quantiles("loraplex_worker_grammar_compile_seconds"),
                    "Of those that were in no cache; their sequences wait, no step does.",
                ),
                Panel(
                    "Grammars refused",
                    "ops",
                    (
                        Query(
                            rate("loraplex_worker_refused_grammars_total", by="reason"),
                            "{{reason}}",
                        ),
                    ),
                    "`costly` is above a worker's `--grammar-…` options.",
                ),
            ),
        ),
        (
            "KV cache",
            (
                Panel(
                    "KV pages in use",
                    "percentunit",
                    (
                        Query(
                            f"1 - {total(pick('loraplex_worker_free_kv_pages'), 'instance')} /"
                            f" {total(pick('loraplex_worker_kv_pages'), 'instance')}",
                            "{{instance}}",
                        ),
                    ),
                    "Pages that are merely cached count as free.",
                ),
                Panel(
                    "Preemptions",
                    "ops",
                    (
                        Query(
                            rate("loraplex_worker_preemptions_total", by="instance"), "{{instance}}"
                        ),
                    ),
                    "Sequences that gave up their pages and are computed again.",
                ),
                Panel(
                    "Prompt tokens found in the prefix cache",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                rate("loraplex_worker_prefix_hit_tokens_total"),
                                rate("loraplex_worker_prompt_tokens_total"),
                            )
                        ),
                    ),
                    "Prefixes are shared within an adapter and a tenant.",
                ),
            ),
        ),
        (
            "Ends",
            (
                Panel(
                    "Sequences by how they ended",
                    "ops",
                    (
                        Query(
                            rate("loraplex_worker_finished_sequences_total", by="finish"),
                            "{{finish}}",
                        ),
                    ),
                    "`stop` and `length` are answers.",
                ),
                Panel(
                    "Sequences that failed or were refused",
                    "ops",
                    (
                        Query(
                            rate("loraplex_worker_failed_sequences_total", by="error"),
                            "failed {{error}}",
                        ),
                        Query(
                            rate("loraplex_worker_refused_requests_total", by="error"),
                            "refused {{error}}",
                        ),
                    ),
                    "`overloaded` and `draining` are placed again elsewhere.",
                ),
                Panel(
                    "Engine restarts",
                    "short",
                    (
                        Query(
                            total(
                                f"increase({pick('loraplex_worker_engine_restarts_total')}[1h])",
                                "instance",
                            ),
                            "{{instance}}",
                        ),
                    ),
                    "In an hour.",
                ),
            ),
        ),
    ),
)
