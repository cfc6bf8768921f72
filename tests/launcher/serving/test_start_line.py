"""The line of a terminal while `loraplex serve` loads."""

import os
import sys

import pytest

from loraplex.launcher.serving.processes import _Screen
from loraplex.launcher.serving.serve import start_line
from loraplex.server.engine.messages import StartProgress

HALF = StartProgress("reading weights", 7.5, 15, "GiB")


def test_the_slowest_worker_is_shown() -> None:
    line = start_line([HALF], 1, 12.3)
    assert line == "reading weights: 7.5 of 15 GiB [##########----------], 12 s"
    late = StartProgress("loading libraries")
    assert start_line([HALF, late], 3, 5.0) == "loading libraries, 5 s, 1 of 3 workers ready"
    assert start_line([], 3, 20.0) == "starting the router, 20 s"
    full = StartProgress("reading weights", 16, 15, "GiB")
    assert "[####################]" in start_line([full], 1, 1)


def test_lines_pass_above_the_bar_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w", closefd=True) as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        screen = _Screen()
        screen.show("first")
        screen.show_bar("half")
        screen.show("second")
        screen.show_bar("")
        screen.show("third")
        erase = "\r\x1b[K"
        wanted = f"first\r\n{erase}half{erase}second\r\nhalf{erase}third\r\n".encode()
        shown = b""
        while len(shown) < len(wanted):  # a terminal hands on what has come so far
            shown += os.read(ours, 1 << 16)
    os.close(ours)
    assert shown == wanted


def test_a_log_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    with open(theirs, "w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        screen = _Screen()
        screen.show_bar("half")
        screen.show("line")
        assert os.read(ours, 1 << 16) == b"line\n"
    os.close(ours)
