"""The violation codes that docs/reference/adapters.md lists."""

import re
from pathlib import Path

_PAGE = Path(__file__).parents[1] / "docs/reference/adapters.md"


def _listed() -> frozenset[str]:
    section = _PAGE.read_text().partition("\n## Violations\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", section, re.M)
    return frozenset(re.findall(r"`([a-z_]+)`", " ".join(cells)))


VIOLATION_CODES = _listed()
