"""Panels and boards as values, and as the JSON that Grafana imports; PromQL in short."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["timeseries", "stat", "heatmap"]

RATE = "$__rate_interval"
# Every selector has it, so that one Prometheus can hold several fleets.
WHERE = 'namespace=~"$namespace"'
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _A_ROW = 8, 8, 3
_SCHEMA = 39


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and its legend in Grafana's spelling, `{{label}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture of some queries.

    unit: Grafana's name of the unit. text: what a person sees, and when to worry. may_be_empty: the
    reason why a fleet without faults has no data for it.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str
    kind: Kind = "timeseries"
    may_be_empty: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. rows: title and panels of each row, from above."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for _, panels in self.rows for panel in panels)


# PromQL


def pick(name: str, *where: str) -> str:
    """Selector of a metric in the chosen namespaces. where: more conditions on labels."""
    return f"{name}{{{','.join((*where, WHERE))}}}"


def rate(name: str, *where: str, by: str = "") -> str:
    """Sum of a counter's growth each second. by: labels to keep."""
    return total(f"rate({pick(name, *where)}[{RATE}])", by)


def total(expr: str, by: str = "") -> str:
    return f"sum by ({by}) ({expr})" if by else f"sum({expr})"


def quantile(q: float, histogram: str, *where: str, by: str = "") -> str:
    group = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', *where, by=group)})"


def quantiles(histogram: str, *where: str) -> tuple[Query, ...]:
    return tuple(
        Query(quantile(q, histogram, *where), f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99)
    )


def ratio(part: str, whole: str) -> str:
    """Quotient of two expressions; 0 where the whole is 0."""
    return f"{part} / ({whole} > 0) or 0 * {whole}"


# JSON


def to_json(board: Board) -> dict[str, Any]:
    """A dashboard as Grafana imports and provisions it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in board.rows:
        panels.append(_row(len(panels) + 1, title, y))
        y += 1
        for place, panel in enumerate(row):
            at = {
                "x": place % _A_ROW * _WIDTH,
                "y": y + place // _A_ROW * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            }
            panels.append(_panel(len(panels) + 1, panel, at))
        y += -(-len(row) // _A_ROW) * _HEIGHT
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["loraplex"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": _A_ROW * _WIDTH, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "gridPos": place,
        "collapsed": False,
        "panels": [],
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    is_heatmap = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + i),
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "format": "heatmap" if is_heatmap else "time_series",
            "datasource": _DATASOURCE,
        }
        for i, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": _options(panel),
        "targets": targets,
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "legend": {"show": True}}
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _variables() -> Sequence[dict[str, Any]]:
    query = "label_values(loraplex_requests_running, namespace)"
    return (
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "namespace",
            "label": "Namespace",
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": "namespaces"},
            "definition": query,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            # Also for what has no such label.
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    )
