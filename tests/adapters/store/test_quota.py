"""Room on disk: the least recently used give way, and nobody looks at all of them each time."""

import logging
import os
import shutil
from pathlib import Path

import pytest

from loraplex.adapters.common.disk import entry_bytes
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.store.store import Quota


def put(folder: Path, name: str, nbytes: int, used: int = 0) -> None:
    path = folder / name
    path.mkdir()
    (path / "weights").write_bytes(bytes(nbytes - 1))
    (path / "manifest").write_bytes(b"x")
    os.utime(path, (used, used))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    made = tuple(tmp_path / name for name in ("content", "slabs", "staging"))
    for folder in made:
        folder.mkdir()
    return made[0], made[1], made[2]


def test_what_is_stored_is_measured_once(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come: each costs no more than those before it did."""
    measured: list[str] = []

    def counted(entry: "os.DirEntry[str]") -> int:
        measured.append(entry.name)
        return entry_bytes(entry)

    monkeypatch.setattr("loraplex.adapters.store.store.entry_bytes", counted)
    content, slabs, staging = folders
    quota = Quota(1000, (content, slabs), staging)
    for number in range(20):
        with quota.room(10):
            put(content, f"{number}", 10, number)
    assert sorted(measured) == sorted(str(number) for number in range(19))
    assert len(list(content.iterdir())) == 20


def test_the_least_recently_used_go_and_what_left_counts_no_more(
    folders: tuple[Path, Path, Path],
) -> None:
    content, slabs, staging = folders
    quota = Quota(100, (content, slabs), staging)
    for number in range(10):
        with quota.room(10):
            put(content, f"{number}", 10, number)
    os.utime(content / "0", (50, 50))
    with quota.room(20):
        assert sorted(path.name for path in content.iterdir()) == list("03456789")
    shutil.rmtree(content / "3")
    with quota.room(30):
        assert sorted(path.name for path in content.iterdir()) == list("0456789")
    with quota.room(40):
        assert sorted(path.name for path in content.iterdir()) == list("056789")


def test_a_full_disk_is_reported_once(
    folders: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """However many adapters are refused for it."""
    content, slabs, staging = folders
    quota = Quota(1 << 60, (content, slabs), staging)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with pytest.raises(AdapterError, match="no room for this adapter"):
                quota.check(1 << 60)
    [record] = caplog.records
    assert str(content) in record.getMessage()
