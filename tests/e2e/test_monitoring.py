"""Every panel and every alert has data, from a real fleet under load and a real Prometheus.

No Grafana server is needed: what a panel shows is what Prometheus answers to its expressions.
"""

import math
import re
import time
from typing import Any

import pytest
import yaml

from launcher.monitoring.dashboards import BOARDS
from tests.e2e.monitored import RATE_WINDOW, RULES, Fleet, load, monitored_fleet

LOAD_S = 15.0
# Alerts about what is missing: with a fleet there must be nothing.
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


def without_data(fleet: Fleet, with_faults: bool) -> list[str]:
    """Panels and rules whose expressions gave nothing in the whole run.

    with_faults: then also those that a fleet without faults may leave empty must have data.
    """
    rules = [r for group in yaml.safe_load(RULES.read_text())["groups"] for r in group["rules"]]
    asked = {
        f"{board.title} / {panel.title} / {query.legend}": as_grafana_asks(query.expr)
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
    }
    asked |= {rule.get("alert") or rule["record"]: as_truth(rule["expr"]) for rule in rules}
    may_be_empty = {
        f"{board.title} / {panel.title} / {query.legend}"
        for board in BOARDS
        for panel in board.panels
        if panel.may_be_empty and not with_faults
        for query in panel.queries
    }
    empty = {name for name, expr in asked.items() if not has_data(fleet.query(expr))}
    empty -= may_be_empty
    assert empty >= MUST_BE_EMPTY.keys()
    return sorted(empty - MUST_BE_EMPTY.keys())


@pytest.mark.timeout(120)
def test_every_panel_and_alert_has_data() -> None:
    with monitored_fleet() as fleet:
        with load(fleet):
            deadline = time.monotonic() + LOAD_S
            while (missing := without_data(fleet, False)) and time.monotonic() < deadline:
                time.sleep(1.0)  # polls a condition, bounded by the deadline
        assert missing == []


def test_alerts_become_truths() -> None:
    assert as_truth('sum(a{b!="c"}) > 1 and (x / (y > 0)) == 0') == (
        'sum(a{b!="c"}) > bool 1 and (x / (y > 0)) == bool 0'
    )
