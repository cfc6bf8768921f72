"""Grafana dashboards. The Helm chart keeps them as JSON; a test holds both equal."""

import json

from deploy.boards.adapter_board import ADAPTERS
from deploy.boards.fleet_boards import FLEET, TENANTS
from deploy.boards.latency_boards import SLO, WORKERS
from deploy.boards.panels import Board, to_json

BOARDS: tuple[Board, ...] = (FLEET, SLO, ADAPTERS, TENANTS, WORKERS)


def files() -> dict[str, str]:
    """Text of each dashboard's file, by file name."""
    return {f"{board.uid}.json": json.dumps(to_json(board), indent=1) + "\n" for board in BOARDS}
