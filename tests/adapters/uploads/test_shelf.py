"""Uploads on disk: found by digest, bounded, and nothing left of what was broken off."""

import os
from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.uploads.shelf import UploadShelf

NBYTES = 1000


def put(shelf: UploadShelf, digest: str, used: float, stay: tuple[str, ...] = ()) -> None:
    with shelf.staging() as folder:
        (folder / "adapter_config.json").write_bytes(b"x" * NBYTES)
        shelf.keep(folder, digest, stay)
    os.utime(shelf.root / digest, (used, used))


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {"staging"}


def test_what_is_kept_stays_and_the_rest_goes_by_age(tmp_path: Path) -> None:
    now = 4e9  # nothing here is old
    shelf = UploadShelf(tmp_path, 3 * NBYTES)
    for number, digest in enumerate("abc"):
        put(shelf, digest, now + number)
    put(shelf, "d", now + 3, stay=("a",))
    assert names(tmp_path) == {"a", "c", "d"}
    with pytest.raises(AdapterError) as refused:
        put(shelf, "e", now, stay=("a", "c", "d"))
    assert refused.value.code == "unavailable"
    assert names(tmp_path) == {"a", "c", "d"}
    assert list((tmp_path / "staging").iterdir()) == []


def test_what_nobody_has_used_for_long_goes(tmp_path: Path) -> None:
    shelf = UploadShelf(tmp_path, 100 * NBYTES)
    put(shelf, "a", 1.0)
    put(shelf, "b", 1.0)
    put(shelf, "c", 4e9, stay=("b",))
    assert names(tmp_path) == {"b", "c"}
    assert shelf.find("a") is None
    assert shelf.find("b") == tmp_path / "b"
