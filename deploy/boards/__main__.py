"""Writes the Grafana dashboards into the Helm chart: `python -m deploy.boards`."""

import sys
from pathlib import Path

from deploy.boards import dashboards

folder = Path(__file__).parents[1] / "helm/loraplex/dashboards"
for name, text in dashboards.files().items():
    (folder / name).write_text(text)
    sys.stdout.write(f"{folder / name}\n")
