"""A killed batch goes on: its files are read again, and each line is answered once."""

import codecs
import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.line_files import BatchInput, Journal
from loraplex.router.lines.lines import BadLine
from loraplex.router.lines.order import send_order
from loraplex.router.lines.records import BatchFault, Outcome, record_id, record_of, response_of
from tests.launcher.batch.batch_files import chat, line, numbers, records, write

LINES = [
    chat("a"),
    b"",
    chat("b", "json"),
    b"nonsense",
    chat("a", "json"),
    line(None, "/generate", {}),
    chat("c", "base"),
    b"nonsense",
    line("d", "/nowhere", {}),
    chat("d"),
    line("e", "/generate", {"inputs": "x"}),
]
CODES = {
    4: "invalid_json",
    5: "duplicate_custom_id",
    6: "missing_custom_id",
    8: "invalid_json",
    9: "invalid_url",
    10: "duplicate_custom_id",
}
NUMBERS = [number for number, text in enumerate(LINES, 1) if text]


class Files:
    def __init__(self, folder: Path, lines: list[bytes]) -> None:
        self.input = write(folder / "in.jsonl", lines)
        self.out, self.errors = folder / "out.jsonl", folder / "err.jsonl"

    def answer(self, limit: int = 10**9, restart: bool = False) -> int:
        """A run that is killed after so many lines. Lines that were skipped."""
        source = BatchInput(self.input)
        with contextlib.closing(source):
            journal = Journal(self.out, self.errors, source, restart)
            with contextlib.closing(journal):
                skipped = journal.skipped
                for place in send_order(source.groups, journal.answered).tolist()[:limit]:
                    said = source.read(place)
                    outcome: Outcome = response_of(200, "r", b"{}")
                    if isinstance(said, BadLine):
                        outcome = BatchFault(said.code, said.message)
                    name = record_id(place + 1, source.mark(place))
                    journal.append(place, record_of(name, said.custom_id, outcome))
        return skipped


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, LINES)


def test_every_line_has_its_answer(files: Files) -> None:
    assert files.answer() == 0
    assert numbers(files.out, files.errors) == NUMBERS
    assert {
        int(one["id"].split("_")[2]): one["error"]["code"] for one in records(files.errors)
    } == CODES
    assert {one["custom_id"] for one in records(files.out)} == {"a", "b", "c", "e"}


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300), st.booleans()), max_size=5),
    st.permutations(LINES),
)
def test_killed_and_started_again(kills: list[tuple[int, int, bool]], lines: list[bytes]) -> None:
    """Each kill comes after some lines, and tears off some bytes of one file's last line."""
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), lines)
        for limit, torn, is_out in kills:
            files.answer(limit)
            path = files.out if is_out else files.errors
            *whole, last = path.read_bytes().splitlines(keepends=True) or [b""]
            path.write_bytes(b"".join(whole) + last[: max(0, len(last) - torn)])
        files.answer()
        there = [number for number, text in enumerate(lines, 1) if text]
        assert numbers(files.out, files.errors) == there
        assert files.answer() == len(there)


def test_a_byte_order_mark_is_no_part_of_the_first_line(files: Files) -> None:
    files.input.write_bytes(codecs.BOM_UTF8 + files.input.read_bytes())
    assert files.answer(limit=3) == 0
    assert files.answer() == 3
    assert records(files.out)[0]["custom_id"] == "a"
    assert numbers(files.out, files.errors) == NUMBERS


def test_lines_may_be_added(files: Files) -> None:
    files.answer()
    write(files.input, [*LINES, chat("new")])
    assert files.answer() == len(NUMBERS)
    assert numbers(files.out, files.errors) == [*NUMBERS, len(LINES) + 1]


@pytest.mark.parametrize("foreign", [b"my notes\n", b"my notes", b'{"id": 7}\n', b"\n"])
def test_what_is_no_output_is_left_alone(files: Files, foreign: bytes) -> None:
    for path in (files.out, files.errors):
        path.write_bytes(foreign)
        with pytest.raises(BatchError, match="is not of this input: its line 1 answers none"):
            files.answer()
        assert path.read_bytes() == foreign
        path.unlink()


def test_the_output_of_another_input_is_left_alone(files: Files) -> None:
    files.answer()
    before = files.out.read_bytes()
    write(files.input, [chat("a", "another"), *LINES[1:]])
    with pytest.raises(BatchError, match=r"out\.jsonl is not of this input.*--restart"):
        files.answer()
    assert files.out.read_bytes() == before
    assert files.answer(restart=True) == 0
    assert numbers(files.out, files.errors) == NUMBERS


def test_one_batch_at_a_time(files: Files) -> None:
    source = BatchInput(files.input)
    with (
        contextlib.closing(source),
        contextlib.closing(Journal(files.out, files.errors, source, False)),
        pytest.raises(BatchError, match=r"another `loraplex batch` writes to .*out\.jsonl"),
    ):
        files.answer()


def test_an_input_that_changes_meanwhile(files: Files) -> None:
    source = BatchInput(files.input)
    with contextlib.closing(source):
        write(files.input, [chat("z"), *LINES[1:]])
        with pytest.raises(BatchError, match="has changed in line 1"):
            source.read(0)


@pytest.mark.parametrize("name", ["nowhere.jsonl", ""])
def test_no_input(tmp_path: Path, name: str) -> None:
    with pytest.raises(BatchError, match="cannot be read|must be a file"):
        BatchInput(tmp_path / name)
