"""A pytest plugin that runs the files first which took longest in earlier runs.

Else a long file may come last, and all processes but one have nothing to do.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

SECONDS = Path(__file__).parents[1] / ".cache" / "seconds.json"
TOLD = "seconds"
NOTED_S = 1.0  # of shorter files the order is no matter


def file_of(name: str) -> str:
    """The file of a test's node id."""
    return name.partition("::")[0]


def longest_first(names: Sequence[str], seconds: Mapping[str, float]) -> list[int]:
    """Places of the names: those of long files first, others in order. A file stays together."""
    return sorted(range(len(names)), key=lambda place: -seconds.get(file_of(names[place]), 0.0))


class LongestFirst:
    """Notes what files take, for later runs. xdist's controller tells its workers what is known, so
    that all of them have one order."""

    def __init__(self, config: pytest.Config) -> None:
        told: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._is_worker = told is not None
        self._known: dict[str, float] = {}
        if told is not None:
            self._known = told[TOLD]
        elif SECONDS.exists():
            self._known = json.loads(SECONDS.read_text())
        self._taken: dict[str, float] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[TOLD] = self._known

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = longest_first([item.nodeid for item in items], self._known)
        items[:] = [items[place] for place in order]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self._taken[file] = self._taken.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        noted = {file: round(s, 1) for file, s in self._taken.items() if s > NOTED_S}
        if noted and not self._is_worker:
            SECONDS.parent.mkdir(exist_ok=True)
            written = SECONDS.with_suffix(".new")
            written.write_text(json.dumps(self._known | noted, indent=0, sort_keys=True))
            written.replace(SECONDS)  # another run may read it meanwhile
