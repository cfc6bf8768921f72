"""The Grafana dashboards: written here, kept as JSON in the Helm chart; a test holds them equal."""

import json

from loraplex.launcher.monitoring.adapter_board import ADAPTERS
from loraplex.launcher.monitoring.fleet_boards import FLEET, TENANTS
from loraplex.launcher.monitoring.latency_boards import SLO, WORKERS
from loraplex.launcher.monitoring.panels import Board, to_json

BOARDS: tuple[Board, ...] = (FLEET, SLO, ADAPTERS, TENANTS, WORKERS)


def files() -> dict[str, str]:
    """File name -> content."""
    return {f"{board.uid}.json": json.dumps(to_json(board), indent=1) + "\n" for board in BOARDS}
