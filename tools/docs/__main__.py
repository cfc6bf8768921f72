"""Writes the pages of docs/ that are made from code or data: `python -m tools.docs`."""

import sys

from tools.docs.pages import PAGES

for path, render in PAGES.items():
    path.write_text(render())
    sys.stdout.write(f"{path}\n")
