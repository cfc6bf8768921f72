"""The counts of `loraplex bench serve`, for servers that report different fields."""

from collections.abc import Iterator

import pytest

from loraplex.launcher.__main__ import main
from tests.launcher.load_server import (
    DONE,
    GOOD,
    REQUESTS,
    Server,
    serve,
    serving,
    texts,
    unbounded,
    usage,
)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def test_without_usage_events_are_counted_and_it_is_said(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = unbounded(texts("", "a", "", "b", "") + DONE)
    summary = serve(server, capfd, stream)
    assert (summary["counted_by_events"], summary["short"]) == (REQUESTS, REQUESTS)
    assert summary["prompt_tokens_per_s"] == pytest.approx(
        2.5 * summary["output_tokens_per_s"], 0.01
    )
    server.say = lambda number, _: stream
    main(["bench", "serve", "--url", server.url, "--requests", "2", "--output", "3"])
    table = capfd.readouterr().out
    assert "answers shorter than asked for: 2" in table
    assert "whose output tokens are events with text: 2" in table


def test_an_answer_that_filled_its_length_is_not_short(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three tokens may come in one event."""
    summary = serve(server, capfd, unbounded(texts("a b c", finish_reason="length") + DONE))
    assert (summary["counted_by_events"], summary["short"]) == (REQUESTS, 0)


def test_answers_shorter_than_asked_are_no_failures(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = texts("a", "b", finish_reason="stop") + usage(5, 2) + DONE
    summary = serve(server, capfd, lambda n, _: unbounded(stream if n < 2 else GOOD))
    assert (summary["completed"], summary["failed"], summary["short"]) == (REQUESTS, 0, 2)


def test_on_servers_that_show_nothing_the_base_neither_hits_nor_misses(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    summary = serve(server, capfd, unbounded(GOOD))
    assert (summary["hit"]["requests"], summary["miss"]["requests"]) == (0, 0)
    assert summary["adapters"] == 0
    summary = serve(server, capfd, unbounded(GOOD), "--adapter", "x")
    assert (summary["hit"]["requests"], summary["miss"]["requests"]) == (REQUESTS - 1, 1)
