"""A download in pieces: whatever the server does, the file is right or it is not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.common.retries import RetryPolicy
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.sources.partial import (
    RemoteBytes,
    fetch_resumable,
    partial_bytes,
    partial_path,
    range_start,
)
from tests.adapters.refusals import refusal

DATA = bytes(range(256)) * 4


class Server:
    """Each answer: where it begins (at most where it was asked to) and how many bytes come."""

    def __init__(self, answers: list[tuple[int, int]]) -> None:
        self.answers = answers
        self.offsets: list[int] = []

    @contextmanager
    def open_at(self, offset: int) -> Iterator[RemoteBytes]:
        self.offsets.append(offset)
        back, count = self.answers.pop(0) if self.answers else (0, len(DATA))
        start = max(0, offset - back)
        part = DATA[start : start + count]
        yield RemoteBytes(start, [part[at : at + 100] for at in range(0, len(part), 100)])


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000)), max_size=8))
def test_whatever_breaks_the_file_is_whole_or_not_there(answers: list[tuple[int, int]]) -> None:
    server = Server(answers)
    retries = RetryPolicy(attempts=20, sleep=lambda seconds: None)
    with TemporaryDirectory() as name:
        target = Path(name) / "file"

        def fetch() -> None:
            assert not target.exists()
            fetch_resumable(target, len(DATA), server.open_at, lambda: 0.0)

        retries.run(fetch, lambda: partial_bytes(target))
        assert target.read_bytes() == DATA
        assert not partial_path(target).exists()
    assert server.offsets[0] == 0


def test_what_is_there_is_not_asked_for_again(tmp_path: Path) -> None:
    server = Server([(0, 300), (0, 300)])
    for _ in range(2):
        error = refusal(
            lambda: fetch_resumable(tmp_path / "file", len(DATA), server.open_at, lambda: 0.0)
        )
        assert error is not None
        assert error.code == "unavailable"
    fetch_resumable(tmp_path / "file", len(DATA), server.open_at, lambda: 0.0)
    assert server.offsets == [0, 300, 600]


@pytest.mark.parametrize("size", [0, 1, 100, len(DATA) - 1])
def test_more_than_was_announced_is_not_kept(size: int, tmp_path: Path) -> None:
    server = Server([])
    target = tmp_path / "file"
    if size == 0:
        fetch_resumable(target, 0, server.open_at, lambda: 0.0)
        assert target.read_bytes() == b""
        assert server.offsets == []
        return
    with pytest.raises(AdapterError, match="did not come whole"):
        fetch_resumable(target, size, server.open_at, lambda: 0.0)
    assert not target.exists()
    assert partial_bytes(target) == 0


def test_a_skipped_part_is_not_filled_with_anything(tmp_path: Path) -> None:
    @contextmanager
    def skipping(offset: int) -> Iterator[RemoteBytes]:
        yield RemoteBytes(offset + 10, [DATA[offset + 10 :]])

    with pytest.raises(AdapterError, match="skipped"):
        fetch_resumable(tmp_path / "file", len(DATA), skipping, lambda: 0.0)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("status", "told", "start"),
    [
        (206, "bytes 100-199/200", 100),
        (206, None, 0),
        (206, "bytes */200", 0),
        (206, f"bytes {'9' * 5000}-1/2", 0),
        (206, "bytes \u0661-2/3", 0),
        (200, "bytes 100-199/200", 0),
    ],
)
def test_where_an_answer_begins(status: int, told: str | None, start: int) -> None:
    assert range_start(status, told) == start
