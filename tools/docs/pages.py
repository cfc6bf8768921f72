"""The pages of docs/ that are made from code or data."""

from collections.abc import Callable
from pathlib import Path

from tools.docs import benchmarks, configuration, families, metrics

DOCS = Path(__file__).parents[2] / "docs"
# Each page and what makes its text.
PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "benchmarks.md": benchmarks.render,
    DOCS / "reference/configuration.md": configuration.render,
    DOCS / "reference/families.md": families.render,
    DOCS / "reference/metrics.md": metrics.render,
}
