"""Draws the dashboards' panels from a real run: `python -m tests.e2e.draw_dashboards FOLDER`.

A fleet under load, with one engine killed half-way; each panel's own queries, answered by the
Prometheus that scraped it. Needs the extra `plots`.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import Image

from deploy.boards.dashboards import BOARDS
from deploy.boards.panels import Board, Panel
from tests.e2e.monitored import Fleet, load, monitored_fleet
from tests.e2e.test_monitoring import as_grafana_asks, expressions, without_data

mpl.use("agg")
from matplotlib import pyplot

COLUMNS = 3
COLORS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--seconds", type=float, default=90.0, help="of load")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with monitored_fleet() as fleet:
        with load(fleet):
            time.sleep(options.seconds / 2)
            fleet.kill_engine(0)
            time.sleep(options.seconds / 2)
        print("without data:", sorted(without_data(fleet, expressions(with_faults=True))))
        for board in BOARDS:
            draw(fleet, board, options.folder / f"{board.uid}.png", options.seconds)


def draw(fleet: Fleet, board: Board, path: Path, seconds: float) -> None:
    """All panels of a board in one picture."""
    panels = [panel for panel in board.panels if panel.kind != "heatmap"]
    rows = -(-len(panels) // COLUMNS)
    figure, axes = pyplot.subplots(
        rows, COLUMNS, figsize=(13, 2.3 * rows), squeeze=False, layout="constrained"
    )
    figure.suptitle(f"{board.title}: the panels' own queries, from a run of {seconds:g} s")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _plot(fleet, panel, axis)
    figure.savefig(path, dpi=66)
    pyplot.close(figure)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLORS)
    small.save(path, optimize=True)


def _plot(fleet: Fleet, panel: Panel, axis: Any) -> None:
    axis.set_title(f"{panel.title} ({panel.unit})", fontsize=8)
    axis.tick_params(labelsize=7)
    for query in panel.queries:
        for series in fleet.query(as_grafana_asks(query.expr)):
            at = [float(t) - fleet.began for t, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            label = _legend(query.legend, series["metric"])
            axis.plot(at, values, linewidth=1, label=label)
    axis.set_ylim(bottom=0)
    # What was 0 all the time is drawn, and not named.
    named = [(line, line.get_label()) for line in axis.lines if any(line.get_ydata())]
    if len(named) > 1:
        handles, labels = zip(*named, strict=True)
        axis.legend(handles, labels, fontsize=6, loc="upper left", framealpha=0.5)


def _legend(template: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    # A name that begins with `_` would be left out of the legend.
    return template.replace("_", "\N{NO-BREAK SPACE}_", 1) if template[:1] == "_" else template


if __name__ == "__main__":
    main()
