"""The Grafana dashboards: written here, kept as JSON in the Helm chart; a test holds them equal."""

import json

from launcher.monitoring.adapter_board import ADAPTERS
from launcher.monitoring.fleet_boards import FLEET, TENANTS
from launcher.monitoring.latency_boards import SLO, WORKERS
from launcher.monitoring.panels import Board, to_json

BOARDS: tuple[Board, ...] = (FLEET, SLO, ADAPTERS, TENANTS, WORKERS)


def files() -> dict[str, str]:
    """File name -> content."""
    return {f"{board.uid}.json": json.dumps(to_json(board), indent=1) + "\n" for board in BOARDS}
