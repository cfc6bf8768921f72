"""What a batch says while it runs."""

import io

import pytest

from loraplex.launcher.batch.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (61, "1 min 1 s"),
        (3600, "1 h 0 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def halfway(screen: io.StringIO) -> Progress:
    """Of 1,100 lines 100 were answered earlier, 40 of these failed."""
    progress = Progress(screen, 1100, 100, 40)
    progress.begin(50.0)
    for number in range(500):
        progress.count("" if number else "status 404")
    return progress


def test_a_line_now_and_then() -> None:
    screen = io.StringIO()
    progress = halfway(screen)
    progress.note = "waiting: 503 busy"
    progress.show(60.0)
    assert screen.getvalue() == (
        "loraplex: 600 of 1,100 lines, 41 failed, 50 lines a second, 10 s left, waiting: 503 busy\n"
    )


def test_one_line_on_a_terminal() -> None:
    screen = Terminal()
    progress = halfway(screen)
    progress.show(60.0)
    progress.say(progress.summary(60.0))
    assert screen.getvalue() == (
        "\r600 of 1,100 lines, 41 failed, 50 lines a second, 10 s left\x1b[K"
        "\rloraplex: 600 of 1,100 lines have an answer, 41 of them in the error file "
        "(new: 1 status 404); 500 in 10 s, 50 a second\x1b[K\n"
    )


def test_before_the_server_is_ready() -> None:
    progress = Progress(io.StringIO(), 5, 5, 0)
    assert progress.line(9.0) == "5 of 5 lines, 0 failed"
    assert "5 of 5 lines have an answer" in progress.summary(9.0)
