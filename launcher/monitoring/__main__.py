"""Writes the Grafana dashboards into a folder: `python -m loraplex.launcher.monitoring FOLDER`."""

import sys
from pathlib import Path

from loraplex.launcher.monitoring import dashboards

if len(sys.argv) != 2:
    sys.exit(__doc__)
folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, text in dashboards.files().items():
    (folder / name).write_text(text)
