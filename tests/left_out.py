"""A pytest plugin that counts the long tests which a run leaves to `make test-all`."""

from collections.abc import Sequence
from typing import Any

import pytest

MARKER = "exhaustive"


class LeftOut:
    """Counts deselected tests with the marker. xdist's workers report to the controller."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._names |= {one.nodeid for one in items if one.get_closest_marker(MARKER)}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if told is not None:
            told[MARKER] = sorted(self._names)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._names.update(getattr(node, "workeroutput", {}).get(MARKER, ()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._names:
            count = len(self._names)
            terminalreporter.write_line(f"{count} long tests are left to `make test-all`")
