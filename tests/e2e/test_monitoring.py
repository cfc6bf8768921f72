"""Every panel and every alert has data, from a real fleet under load and a real Prometheus.

No Grafana server is needed: what a panel shows is what Prometheus answers to its expressions.
"""

import math
import re
import time
from typing import Any

import pytest
import yaml

from deploy.boards.dashboards import BOARDS
from tests.e2e.monitored import RATE_WINDOW, RULES, Fleet, load, monitored_fleet, monitored_machine

LOAD_S = 60.0
# What vLLM's own dashboards, and autoscalers, ask for; each with these labels.
VLLM_LABELS = "model_name, engine"
VLLM_GAUGES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("gpu_cache_usage_perc", "cache_config_info"),
)
VLLM_COUNTERS = (
    *("prompt_tokens", "generation_tokens", "prompt_tokens_cached", "num_preemptions"),
    *("prefix_cache_queries", "prefix_cache_hits", "request_success"),
)
VLLM_HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
)
# Not asked: alerts about what is missing have nothing to say while a fleet is scraped.
MUST_BE_EMPTY = {"LoraplexMetricsAbsent": "a router is scraped"}


def as_grafana_asks(expr: str) -> str:
    """With Grafana's variables filled in."""
    return expr.replace("$__rate_interval", RATE_WINDOW).replace("$namespace", ".*")


def as_truth(expr: str) -> str:
    """An alert's expression with 0 and 1 in place of what it leaves out: data if its inputs have.

    Comparisons inside of parentheses only guard against a division by nothing.
    """
    depth, made, rest = 0, "", expr
    while rest:
        match = re.match(r'"[^"]*"|[<>]=?|[=!]=|.', rest, re.S)
        assert match
        token = match[0]
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(token, 0)
        made += f"{token} bool" if depth == 0 and token[0] in "<>=!" else token
        rest = rest[len(token) :]
    return made


def has_data(found: list[dict[str, Any]]) -> bool:
    return any(math.isfinite(float(value)) for series in found for _, value in series["values"])


def expressions(with_faults: bool) -> dict[str, str]:
    """Of every panel and rule, by name, as Prometheus is to be asked.

    with_faults: then also what a fleet without faults may leave empty must have data.
    """
    rules = [r for group in yaml.safe_load(RULES.read_text())["groups"] for r in group["rules"]]
    asked = {
        f"{board.title} / {panel.title} / {query.legend}": as_grafana_asks(query.expr)
        for board in BOARDS
        for panel in board.panels
        if with_faults or not panel.may_be_empty
        for query in panel.queries
    }
    asked |= {rule.get("alert") or rule["record"]: as_truth(rule["expr"]) for rule in rules}
    return {name: expr for name, expr in asked.items() if name not in MUST_BE_EMPTY}


def asked_of_vllm() -> dict[str, str]:
    """As Grafana's panels for vLLM ask: rates, quantiles and means of one model."""
    of_model = '{model_name=~".+", engine="0"}'
    asked = {name: f"sum by ({VLLM_LABELS}) (vllm:{name}{of_model})" for name in VLLM_GAUGES}
    for name in VLLM_COUNTERS:
        by = VLLM_LABELS + ", finished_reason" * (name == "request_success")
        asked[name] = f"sum by ({by}) (rate(vllm:{name}_total{of_model}[{RATE_WINDOW}]))"
    for name in (*VLLM_HISTOGRAMS, "iteration_tokens_total"):
        rates = [f"rate(vllm:{name}_{end}{of_model}[{RATE_WINDOW}])" for end in ("sum", "count")]
        asked[f"{name}, mean"] = " / ".join(rates)
    for name in VLLM_HISTOGRAMS:
        buckets = f"rate(vllm:{name}_bucket{of_model}[{RATE_WINDOW}])"
        asked[f"{name}, p90"] = f"histogram_quantile(0.9, sum by (le, model_name) ({buckets}))"
    stopped = f'finished_reason="stop", {of_model[1:]}'
    return asked | {"stopped": f"vllm:request_success_total{{{stopped}"}


def without_data(fleet: Fleet, asked: dict[str, str]) -> dict[str, str]:
    """Those that gave nothing in the whole run so far."""
    return {name: expr for name, expr in asked.items() if not has_data(fleet.query(expr))}


def until_data(fleet: Fleet, asked: dict[str, str]) -> dict[str, str]:
    """What is still without data after `LOAD_S` under load."""
    deadline = time.monotonic() + LOAD_S
    while (asked := without_data(fleet, asked)) and time.monotonic() < deadline:
        time.sleep(1.0)  # polls a condition, bounded by the deadline
    return asked


@pytest.mark.exhaustive
def test_every_panel_and_alert_has_data() -> None:
    with monitored_fleet() as fleet:
        with load(fleet):
            missing = until_data(fleet, expressions(with_faults=False) | asked_of_vllm())
        assert missing == {}


@pytest.mark.exhaustive
def test_every_panel_has_data_on_one_machine() -> None:
    """Also those about a lost worker, once one is lost."""
    everything = expressions(with_faults=True)
    panels = {name: everything[name] for name in everything if " / " in name}
    assert len(panels) >= 123
    with monitored_machine() as fleet:
        with load(fleet):
            faultless = expressions(with_faults=False).keys() & panels.keys()
            assert until_data(fleet, {name: panels[name] for name in faultless}) == {}
            fleet.kill_engine(0)
            missing = until_data(fleet, panels)
        assert missing == {}


def test_alerts_become_truths() -> None:
    assert as_truth('sum(a{b!="c"}) > 1 and (x / (y > 0)) == 0') == (
        'sum(a{b!="c"}) > bool 1 and (x / (y > 0)) == bool 0'
    )
