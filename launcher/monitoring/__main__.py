"""Writes the Grafana dashboards into a folder: `python -m launcher.monitoring FOLDER`."""

import sys
from pathlib import Path

from launcher.monitoring import dashboards

for name, text in dashboards.files().items():
    (Path(sys.argv[1]) / name).write_text(text)
