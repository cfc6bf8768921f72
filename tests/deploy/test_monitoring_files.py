"""Dashboards, rules and runbooks as files: fresh, valid, about metrics that the code declares."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.boards import dashboards
from deploy.boards.dashboards import BOARDS
from deploy.boards.panels import Board, Panel
from tests.deploy.chart import case, merged, objects_of, of_kind, render
from tools.docs.metrics import router_meters, worker_meters

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/loraplex"
RULES = CHART / "rules/loraplex.yaml"
RUNBOOKS = ROOT / "docs/operations/runbooks"
# Of a histogram.
SUFFIXES = ("_bucket", "_sum", "_count")


@cache
def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def expressions() -> list[tuple[str, str]]:
    found = [
        (f"{board.uid}: {panel.title}", query.expr)
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
    ]
    return [*found, *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())]


@cache
def declared() -> dict[str, dict[str, tuple[str, ...]]]:
    """Series names -> label -> its values, or none when they come as they go."""
    families = {}
    for family in (*router_meters().declared, *worker_meters().declared):
        labels = {name: tuple(values) for name, values in family.labels.items()}
        names = [family.name]
        if family.kind == "histogram":
            names = [f"{family.name}{suffix}" for suffix in SUFFIXES]
            labels["le"] = ()
        families.update(dict.fromkeys(names, labels))
    families.update({rule["record"]: {} for rule in rules() if "record" in rule})
    return families


def test_dashboards_are_fresh() -> None:
    kept = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert kept == dashboards.files(), "run: .venv/bin/python -m deploy.boards"


@pytest.mark.parametrize(("place", "expr"), expressions(), ids=lambda value: value[:60])
def test_expressions_are_of_declared_families(place: str, expr: str) -> None:
    families = declared()
    selectors = re.findall(r"\b(loraplex[\w:]+)(?:\{([^}]*)\})?", expr)
    assert selectors
    for name, matchers in selectors:
        assert name in families, f"{name} is declared nowhere"
        for label, values in re.findall(r'(\w+)(?:=~|!=|=)"([^"]*)"', matchers):
            if label == "namespace":
                continue
            known = families[name][label]
            assert not known or set(values.split("|")) <= set(known), (name, label, values)
    for counter in re.findall(r"(?:rate|increase)\((loraplex\w+)", expr):
        assert counter.endswith(("_total", *SUFFIXES)), f"{counter} is no counter"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_boards_have_what_grafana_needs(board: Board) -> None:
    made = json.loads(dashboards.files()[f"{board.uid}.json"])
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places)
    for panel in panels:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]
    names = [variable["name"] for variable in made["templating"]["list"]]
    assert names == ["datasource", "namespace"]


@pytest.mark.parametrize(
    "panel", [p for board in BOARDS for p in board.panels], ids=lambda panel: panel.title
)
def test_rates_follow_the_scrape_interval(panel: Panel) -> None:
    for query in panel.queries:
        for window in re.findall(r"\brate\([^\[]*\[([^\]]*)\]", query.expr):
            assert window == "$__rate_interval"


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    named: dict[str, set[str]] = {}
    for alert in alerts():
        assert alert["labels"]["severity"] in ("critical", "warning")
        named.setdefault(alert["annotations"]["runbook_url"], set()).add(alert["alert"])
    assert set(named) == {f"docs/operations/runbooks/{path.name}" for path in RUNBOOKS.glob("*.md")}
    for page, names in named.items():
        text = (ROOT / page).read_text()
        assert set(re.findall(r"`(Loraplex\w+)`", text)) == names, page


def test_runbooks_name_panels_that_are_there() -> None:
    titles = {panel.title for board in BOARDS for panel in board.panels}
    for path in RUNBOOKS.glob("*.md"):
        text = path.read_text().replace("\n  ", " ")
        for title in re.findall(r"\*([^*]+)\*", text):
            assert title in titles, (path.name, title)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_releases_in_a_namespace_do_not_hide_each_other(rule: dict[str, Any]) -> None:
    for labels in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
        assert {"service", "instance", "worker"} & set(labels.split(", ")), labels


def promtool(*arguments: str, text: bytes = b"") -> None:
    done = subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_rules_are_valid() -> None:
    promtool("check", "rules", str(RULES))


def test_every_alert_fires_on_what_it_is_for() -> None:
    tests = Path(__file__).with_name("rules_test.yaml")
    promtool("test", "rules", str(tests))
    tested = set(re.findall(r"alertname: (\w+)", tests.read_text()))
    assert tested == {alert["alert"] for alert in alerts()}


NONE_READY, DISCONNECTED = "LoraplexNoReadyWorker", "LoraplexWorkerDisconnected"
# (case, its routers' Service, workers not connected, workers ready, what fires)
MISSING: list[tuple[str, str, int, int, set[str]]] = [
    ("small", "demo-loraplex-router", 0, 1, set()),
    ("small", "demo-loraplex-router", 1, 0, {NONE_READY, DISCONNECTED}),
    ("small", "", 1, 0, {NONE_READY, DISCONNECTED}),  # scraped by other means
    ("fleet", "demo-loraplex-router", 12, 6, set()),
    ("fleet", "demo-loraplex-router", 13, 5, {DISCONNECTED}),
    ("hpa", "lora-router", 8, 2, set()),
    ("hpa", "lora-router", 9, 1, {DISCONNECTED}),
    ("hpa", "lora-router", 10, 0, {NONE_READY, DISCONNECTED}),
    ("scale-to-zero", "demo-loraplex-router", 6, 0, set()),
    ("hpa", "other", 10, 0, set()),
]


@cache
def rendered_rules(name: str) -> str:
    values = merged(case(name), {"monitoring": {"prometheusRule": {"enabled": True}}})
    (rule,) = of_kind(objects_of(render(values)), "PrometheusRule")
    text: str = yaml.safe_dump(rule["spec"])
    return text


@pytest.mark.parametrize(("name", "service", "gone", "ready", "firing"), MISSING)
def test_room_to_grow_is_no_loss(
    name: str, service: str, gone: int, ready: int, firing: set[str], tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(rendered_rules(name))
    labels = f'namespace="serving",service="{service}"'
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f'loraplex_workers{{{labels},state="disconnected"}}', "values": f"{gone}x9"},
            {"series": f"loraplex_workers_ready{{{labels}}}", "values": f"{ready}x9"},
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertname!~".*Absent",alertstate="firing"})',
                "eval_time": "9m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(firing)
                ],
            }
        ],
    }
    run = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(run))
    promtool("test", "rules", str(tmp_path / "test.yaml"))


@pytest.mark.parametrize("meters", [router_meters, worker_meters])
def test_expositions_are_as_prometheus_wants_them(meters: Any) -> None:
    promtool("check", "metrics", text=meters().render("")[0])
