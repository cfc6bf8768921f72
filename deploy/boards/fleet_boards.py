"""Boards of the fleet and of its tenants."""

from deploy.boards.panels import (
    Board,
    Panel,
    Query,
    pick,
    quantiles,
    rate,
    ratio,
    total,
)
from loraplex.router.telemetry.metrics import GENERATION_PATHS

_NO_FAULT = "no stream was resumed: a quantile of nothing is no number"
_GENERATION = f'route=~"{"|".join(GENERATION_PATHS)}"'

_GENERATED = "loraplex_adapter_generated_tokens_total"
_ERRORS = "loraplex_request_errors_total"
_BUSY = "loraplex_worker_device_seconds_total"

FLEET = Board(
    "loraplex-fleet",
    "loraplex / Fleet",
    (
        (
            "Traffic",
            (
                Panel(
                    "Requests by status",
                    "reqps",
                    (
                        Query(
                            rate("loraplex_requests_total", _GENERATION, by="status"), "{{status}}"
                        ),
                    ),
                    "Generation requests by HTTP status. A stream that broke off counts as 200;"
                    " see the causes of errors.",
                ),
                Panel(
                    "Errors by cause",
                    "reqps",
                    (
                        Query(
                            f"{rate(_ERRORS, by='cause')} > 0"
                            f' or label_replace(0 * {rate(_ERRORS)}, "cause", "none", "", "")',
                            "{{cause}}",
                        ),
                    ),
                    "`unavailable`, `deadline`, `incomplete` and `internal` are the fleet's;"
                    " most others are callers'.",
                ),
                Panel(
                    "Tokens",
                    "short",
                    (
                        Query(rate("loraplex_prompt_tokens_total"), "prompt"),
                        Query(rate("loraplex_cached_prompt_tokens_total"), "prompt, cached"),
                        Query(rate("loraplex_generated_tokens_total"), "generated"),
                    ),
                    "Tokens a second.",
                ),
                Panel(
                    "Vectors and scores",
                    "reqps",
                    (Query(rate("loraplex_vectors_total", by="use"), "{{use}}"),),
                    "Prompts that were read for numbers. `fit`: of a document, for a query.",
                ),
            ),
        ),
        (
            "Queue and workers",
            (
                Panel(
                    "Queue",
                    "short",
                    (
                        Query(total(pick("loraplex_queue_sequences")), "waiting"),
                        Query(total(pick("loraplex_queue_limit_sequences")), "limit"),
                        Query(
                            total(pick("loraplex_waiting_room_requests")), "waiting for any worker"
                        ),
                    ),
                    "Sequences that wait for a worker: true demand, and what to scale by.",
                ),
                Panel(
                    "Saturation",
                    "percentunit",
                    (
                        Query(
                            f"{total(pick('loraplex_link_sequences'), 'worker')} /"
                            f" {total(pick('loraplex_link_credits'), 'worker')}",
                            "{{worker}}",
                        ),
                    ),
                    "Sequences at a worker as a share of what it takes, by worker.",
                ),
                Panel(
                    "Devices busy",
                    "percentunit",
                    (
                        Query(
                            f"{rate(_BUSY, by='use')} / ignoring(use) group_left"
                            f" {total(pick('loraplex_worker_devices'))}",
                            "{{use}}",
                        ),
                    ),
                    "Time of steps as a share of all devices' time, by whether an adapter acts on"
                    " their tokens. `copies` run beside steps; what the others leave is idle.",
                ),
                Panel(
                    "Workers by state",
                    "short",
                    (Query(f"max by (state) ({pick('loraplex_workers')})", "{{state}}"),),
                    "As the router sees them that knows most. `disconnected` should be 0.",
                ),
                Panel(
                    "Ready workers",
                    "short",
                    (Query(f"min({pick('loraplex_workers_ready')})"),),
                    "Of the router that sees fewest. 0 means that requests are refused.",
                    "stat",
                ),
                Panel(
                    "Age of workers' states",
                    "s",
                    (
                        Query(
                            f"max by (worker) ({pick('loraplex_link_status_age_seconds')})",
                            "{{worker}}",
                        ),
                    ),
                    "A worker reports its state twice a second.",
                ),
                Panel(
                    "Requests being answered",
                    "short",
                    (Query(total(pick("loraplex_requests_running"))),),
                    "Streams included.",
                    "stat",
                ),
            ),
        ),
        (
            "Batches",
            (
                Panel(
                    "Lines of batches",
                    "ops",
                    (
                        Query(rate("loraplex_batch_lines_total", by="outcome"), "{{outcome}}"),
                        Query(rate("loraplex_batch_line_retries_total"), "to be asked again"),
                    ),
                    "Answered lines, and those that found all busy.",
                ),
                Panel(
                    "Rows of batches",
                    "short",
                    (
                        Query(total(pick("loraplex_batch_rows")), "sequences"),
                        Query(total(pick("loraplex_batch_rows_limit")), "limit"),
                        Query(total(pick("loraplex_batches_running")), "batches"),
                    ),
                    "The limit falls while live requests run.",
                ),
                Panel(
                    "Batches that ended",
                    "ops",
                    (Query(rate("loraplex_batches_total", by="end"), "{{end}}"),),
                    "`failed`: the input could not be read. A bad line fails alone.",
                ),
                Panel(
                    "Stored files",
                    "bytes",
                    (Query(f"max({pick('loraplex_files_bytes')})"),),
                    "In the folder of files, which routers share.",
                    "stat",
                ),
            ),
        ),
        (
            "Routing",
            (
                Panel(
                    "Placements by reason",
                    "ops",
                    (Query(rate("loraplex_placements_total", by="reason"), "{{reason}}"),),
                    "Why a sequence went to its worker.",
                ),
                Panel(
                    "Further attempts by cause",
                    "ops",
                    (Query(rate("loraplex_resumes_total", by="cause"), "{{cause}}"),),
                    "Sequences that went on at another worker, or tried again. `engine_lost` means"
                    " that a worker or its engine went away; no token is lost by it.",
                ),
                Panel(
                    "Gaps in resumed streams",
                    "s",
                    quantiles("loraplex_resume_gap_seconds"),
                    "What a client sees of a lost worker: between the last token before and the"
                    " first one after.",
                    may_be_empty=_NO_FAULT,
                ),
                Panel(
                    "Silent workers and quarantine",
                    "ops",
                    (
                        Query(rate("loraplex_sequences_handed_over_total"), "left a silent worker"),
                        Query(rate("loraplex_requests_quarantined_total"), "quarantined"),
                    ),
                    "Sequences that left a worker which had fallen silent; requests that killed the"
                    " workers that they ran on and are tried no more.",
                ),
                Panel(
                    "Clients that left",
                    "reqps",
                    (Query(rate("loraplex_generations_given_up_total")),),
                    "Generations whose client went away before the end.",
                ),
                Panel(
                    "Event loop lag of routers",
                    "s",
                    quantiles("loraplex_event_loop_lag_seconds"),
                    "How late a router does what is due. Above 50 ms it needs more replicas.",
                ),
                Panel(
                    "Redis",
                    "short",
                    (Query(f"min({pick('loraplex_redis_up')})"),),
                    "1 while Redis answers, or none is shared.",
                    "stat",
                ),
                Panel(
                    "Router processes",
                    "short",
                    (Query(f"count({pick('loraplex_redis_up')})"),),
                    "Routers that are scraped.",
                    "stat",
                ),
            ),
        ),
    ),
)

TENANTS = Board(
    "loraplex-tenants",
    "loraplex / Tenants",
    (
        (
            "Limits",
            (
                Panel(
                    "Requests refused for their number",
                    "reqps",
                    (
                        Query(
                            rate(
                                _ERRORS,
                                'cause=~"rate_limited|overloaded"',
                                by="cause",
                            ),
                            "{{cause}}",
                        ),
                    ),
                    "`rate_limited`: a key's quota; `overloaded`: the fleet's queue.",
                ),
                Panel(
                    "Quotas used up",
                    "reqps",
                    (Query(rate("loraplex_quota_refusals_total", by="reason"), "{{reason}}"),),
                    "Requests refused, by the limit that kept them out. Whose it was is in the"
                    " usage API: keys are no labels.",
                ),
                Panel(
                    "Where quotas are counted",
                    "short",
                    (Query(f"sum by (mode) ({pick('loraplex_quota_mode')})", "{{mode}}"),),
                    "Routers by mode: `shared` is in Redis (or there is one router); the others are"
                    " what was chosen for the time without it.",
                ),
                Panel(
                    "Keys",
                    "short",
                    (Query(f"max({pick('loraplex_keys')})"),),
                    "That are known.",
                    "stat",
                ),
                Panel(
                    "Requests refused for their key",
                    "reqps",
                    (
                        Query(
                            rate(
                                _ERRORS,
                                'cause=~"unauthorized|forbidden"',
                                by="cause",
                            ),
                            "{{cause}}",
                        ),
                    ),
                    "No key or a wrong one; a key that may not do this.",
                ),
                Panel(
                    "Callers' errors",
                    "reqps",
                    (
                        Query(
                            rate(
                                _ERRORS,
                                'cause=~"invalid|unsupported|unknown_parameter|context_length'
                                '|template_error|adapter_not_found|adapter_invalid|too_large|gone|not_served"',
                                by="cause",
                            ),
                            "{{cause}}",
                        ),
                    ),
                    "What callers asked for and could not be done.",
                ),
            ),
        ),
        (
            "Fairness",
            (
                Panel(
                    "Share of the busiest adapter",
                    "percentunit",
                    (Query(ratio(f"max({rate(_GENERATED, by='adapter')})", rate(_GENERATED))),),
                    "Of all generated tokens. Exact figures by key are in the usage API.",
                ),
                Panel(
                    "Queue wait",
                    "s",
                    quantiles("loraplex_queue_wait_seconds"),
                    "From readiness to a worker: what a flood costs others.",
                ),
                Panel(
                    "Queue in bytes",
                    "bytes",
                    (Query(total(pick("loraplex_queue_bytes"))),),
                    "Prompts that wait.",
                ),
            ),
        ),
    ),
)
