"""The board of adapters: use, cold loads, tiers."""

from deploy.boards.panels import (
    RATE,
    Board,
    Panel,
    Query,
    pick,
    quantile,
    quantiles,
    rate,
    ratio,
    total,
)

_BYTES = "loraplex_worker_adapter_bytes"
_TOP = 10


def _top(name: str, *where: str) -> Query:
    return Query(f"topk({_TOP}, {rate(name, *where, by='adapter')})", "{{adapter}}")


ADAPTERS = Board(
    "loraplex-adapters",
    "loraplex / Adapters and residency",
    (
        (
            "Use",
            (
                Panel(
                    "Requests, busiest adapters",
                    "reqps",
                    (_top("loraplex_adapter_requests_total"),),
                    "`_base` is the base model, `_other` all adapters without series of their own.",
                ),
                Panel(
                    "Generated tokens, busiest adapters",
                    "short",
                    (_top("loraplex_adapter_generated_tokens_total"),),
                    "Tokens a second.",
                ),
                Panel(
                    "Failed requests by adapter",
                    "reqps",
                    (_top("loraplex_adapter_errors_total"),),
                    "Requests that failed after they began.",
                ),
                Panel(
                    "Cost by adapter",
                    "short",
                    (_top("loraplex_adapter_cost_total"),),
                    "Money a second, in the currency of `--prices`, as answers end.",
                ),
                Panel(
                    "Devices by adapter",
                    "short",
                    (_top("loraplex_adapter_device_seconds_total"),),
                    "Devices that each keeps busy: seconds of devices a second, as answers end.",
                ),
                Panel(
                    "Share of `_other`",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                rate("loraplex_adapter_requests_total", 'adapter="_other"'),
                                rate("loraplex_adapter_requests_total"),
                            )
                        ),
                    ),
                    "Requests for adapters that have no series of their own; raise"
                    " `--metrics-adapters` to see more of them.",
                    "stat",
                ),
                Panel(
                    "Registered adapters",
                    "short",
                    (Query(f"max({pick('loraplex_adapters_registered')})"),),
                    "Names in service.",
                    "stat",
                ),
                Panel(
                    "Adapters with series of their own",
                    "short",
                    (Query(f"count({pick('loraplex_adapter_info')}) or vector(0)"),),
                    "At most `--metrics-adapters` a router.",
                    "stat",
                ),
            ),
        ),
        (
            "Rollouts",
            (
                Panel(
                    "Versions in rollouts",
                    "short",
                    (
                        Query(
                            f"max by (state) ({pick('loraplex_adapter_versions')})",
                            "{{state}}",
                        ),
                    ),
                    "Versions beside the old ones. `warming` for long: workers have no room for"
                    " them; the adapter's `error` says why.",
                ),
                Panel(
                    "Mean score of answers",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                rate("loraplex_feedback_score_sum", by="version"),
                                rate("loraplex_feedback_score_count", by="version"),
                            ),
                            "{{version}}",
                        ),
                    ),
                    "Scores that callers gave to answers of old and new versions, of all rollouts.",
                ),
                Panel(
                    "Versions taken back",
                    "short",
                    (
                        Query(
                            "sum by (by) (increase("
                            f"{pick('loraplex_adapter_rollbacks_total')}[{RATE}]))",
                            "{{by}}",
                        ),
                    ),
                    "By a guard: the new version did worse than the old one. `loraplex adapter"
                    " history NAME` says how.",
                ),
            ),
        ),
        (
            "Cold and warm",
            (
                Panel(
                    "Cold starts",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                rate("loraplex_time_to_first_token_seconds_count", 'start="cold"'),
                                rate(
                                    "loraplex_time_to_first_token_seconds_count",
                                    'start=~"cold|warm"',
                                ),
                            )
                        ),
                    ),
                    "First tokens of sequences that waited for their adapter, as a share of all"
                    " that have one.",
                ),
                Panel(
                    "Time to first token, cold, warm and base",
                    "s",
                    (
                        Query(
                            quantile(0.9, "loraplex_time_to_first_token_seconds", by="start"),
                            "p90 {{start}}",
                        ),
                    ),
                    "What a cold adapter costs its caller.",
                ),
                Panel(
                    "Where sequences found their adapter",
                    "ops",
                    (Query(rate("loraplex_worker_adapter_lookups_total", by="tier"), "{{tier}}"),),
                    "`device` is a hit; the others are misses, ever dearer.",
                ),
                Panel(
                    "Load time by stage",
                    "s",
                    (
                        Query(
                            quantile(0.9, "loraplex_worker_adapter_load_seconds", by="stage"),
                            "p90 {{stage}}",
                        ),
                    ),
                    "From its source, its check, into host memory, onto the device.",
                ),
                Panel(
                    "Time from name to digest",
                    "s",
                    quantiles("loraplex_adapter_load_seconds", 'outcome="ready"'),
                    "What resolving an adapter costs a request, kept answers included.",
                ),
                Panel(
                    "Loads that failed",
                    "ops",
                    (
                        Query(
                            rate(
                                "loraplex_worker_adapter_loads_total",
                                'result!="ready"',
                                by="result",
                            ),
                            "{{result}}",
                        ),
                        Query(
                            rate("loraplex_worker_adapters_staged_total", 'result="failed"'),
                            "not staged",
                        ),
                    ),
                    "By result; `unavailable` is the source's or the disk's.",
                ),
            ),
        ),
        (
            "Residency",
            (
                Panel(
                    "Adapters by tier",
                    "short",
                    (
                        Query(
                            total(pick("loraplex_worker_adapters"), "instance, tier"),
                            "{{instance}} {{tier}}",
                        ),
                    ),
                    "On the device, on their way, in host memory.",
                ),
                Panel(
                    "Adapter memory in use",
                    "percentunit",
                    (
                        Query(
                            f"{total(pick(_BYTES), 'instance, tier')} /"
                            f" {total(pick(f'{_BYTES}_limit'), 'instance, tier')}",
                            "{{instance}} {{tier}}",
                        ),
                    ),
                    "Full is normal; full with many reloads is not.",
                ),
                Panel(
                    "Bytes brought to devices",
                    "Bps",
                    (Query(rate("loraplex_worker_adapter_copied_bytes_total", by="instance")),),
                    "A second.",
                ),
                Panel(
                    "Evictions by tier and reason",
                    "ops",
                    (
                        Query(
                            rate("loraplex_worker_adapter_evictions_total", by="tier, reason"),
                            "{{tier}} {{reason}}",
                        ),
                    ),
                    "Adapters that left a tier.",
                ),
                Panel(
                    "Reloads (thrash)",
                    "ops",
                    (Query(rate("loraplex_worker_adapter_reloads_total", by="instance")),),
                    "Adapters that came back to a device within five minutes of leaving it.",
                ),
                Panel(
                    "Fetches by source",
                    "ops",
                    (
                        Query(
                            rate("loraplex_worker_adapter_fetches_total", by="source"), "{{source}}"
                        ),
                    ),
                    "Adapters brought from outside.",
                ),
            ),
        ),
    ),
)
