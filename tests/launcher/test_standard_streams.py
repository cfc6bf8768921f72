"""Commands whose stdout is full, closed, left by its reader, or knows few characters."""

import io
import os
import sys
from pathlib import Path

import pytest

from loraplex.launcher.__main__ import main

GENERATE = ["key", "generate", "acme"]


def ended(words: list[str], stdout: io.TextIOBase | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command."""
    monkeypatch.setattr(sys, "stdout", stdout)
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_full_disk_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        assert ended(GENERATE, full, monkeypatch) == 1
    assert capsys.readouterr().err == "loraplex: No space left on device\n"


def test_whoever_reads_no_more_is_told_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken:
        assert ended(GENERATE, broken, monkeypatch) == 141
    assert capsys.readouterr().err == ""


def test_a_closed_stdout_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(GENERATE, None, monkeypatch) == 0
    sys.stdout.close()


def test_characters_that_the_locale_lacks_are_written_by_their_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = io.BytesIO()
    assert ended(["parity", "--help"], io.TextIOWrapper(said, "ascii"), monkeypatch) == 0
    assert b"ADAPTER\\u2026" in said.getvalue()


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, file = tmp_path / "lines.jsonl", tmp_path / "file"
    lines.write_text('{"prompt": "a", "answer": "b"}\n')
    file.write_text("")
    words = ["eval", "a", "--data", str(lines), "--score", "exact", "--out", str(file / "out")]
    assert ended(words, io.StringIO(), monkeypatch) == 1
    assert capsys.readouterr().err == f"loraplex: {file / 'out'}: Not a directory\n"
