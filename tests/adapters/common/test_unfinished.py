"""Staging folders: private, removed when left; downloads that broke off lie for the next."""

import os
import time
from pathlib import Path

import pytest

from loraplex.adapters.common.unfinished import (
    KEPT_S,
    MAX_KEPT,
    remove_stale,
    resumable_folder,
    unfinished_folder,
)
from loraplex.adapters.errors import AdapterChanged, AdapterError


def break_off(parent: Path, key: str, error: Exception) -> Path:
    """Leaves a folder with one file by way of `error`; where it was."""
    left: list[Path] = []

    def download() -> None:
        with resumable_folder(parent, key) as folder:
            left.append(folder)
            (folder / "file.partial").write_bytes(b"half")
            raise error

    with pytest.raises(type(error)):
        download()
    return left[0]


def passing() -> AdapterError:
    return AdapterError("unavailable", "broke off")


def test_what_broke_off_is_found_again_by_its_key_alone(tmp_path: Path) -> None:
    break_off(tmp_path, "a", passing())
    with resumable_folder(tmp_path, "b") as other:
        assert list(other.iterdir()) == []
    with resumable_folder(tmp_path, "a") as folder:
        assert (folder / "file.partial").read_bytes() == b"half"
    assert list(tmp_path.iterdir()) == [], "removed when all went well"


@pytest.mark.parametrize(
    "error",
    [
        AdapterError("invalid", "refused"),
        AdapterChanged("unavailable", "changed"),
        OSError("the disk"),
        RuntimeError("a fault"),
    ],
)
def test_what_cannot_go_on_is_removed(error: Exception, tmp_path: Path) -> None:
    assert not break_off(tmp_path, "a", error).exists()


def test_one_at_a_time(tmp_path: Path) -> None:
    with resumable_folder(tmp_path, "a") as first:
        with resumable_folder(tmp_path, "a") as second:
            assert first != second
            remove_stale(tmp_path)
            assert first.exists()
            assert second.exists()
        assert not second.exists()


def test_another_boot_does_not_trust_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_off(tmp_path, "a", passing())
    boot = tmp_path / "boot-id"
    boot.write_text("another")
    monkeypatch.setattr("loraplex.adapters.common.disk._BOOT_ID", boot)
    with resumable_folder(tmp_path, "a") as folder:
        assert list(folder.iterdir()) == []


def test_few_are_kept_and_not_for_long(tmp_path: Path) -> None:
    now = time.time()
    old = break_off(tmp_path, "old", passing())
    os.utime(old, (now - KEPT_S - 1, now - KEPT_S - 1))
    folders = []
    for number in range(MAX_KEPT + 3):
        folders.append(break_off(tmp_path, str(number), passing()))
        os.utime(folders[-1], (now - 100 + number, now - 100 + number))
    remove_stale(tmp_path)
    assert not old.exists()
    assert [folder.exists() for folder in folders] == [False] * 3 + [True] * MAX_KEPT


def test_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.adapters.common.unfinished.MAX_KEPT_BYTES", 6)
    first = break_off(tmp_path, "a", passing())
    os.utime(first, (time.time() - 9, time.time() - 9))
    second = break_off(tmp_path, "b", passing())
    assert not first.exists()
    assert second.exists()


def test_a_fresh_folder_is_gone_however_it_ends(tmp_path: Path) -> None:
    with pytest.raises(AdapterError), unfinished_folder(tmp_path) as folder:
        raise passing()
    assert not folder.exists()
