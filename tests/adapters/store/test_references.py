"""What references meant: found again, bounded, and nobody's loss when it is damaged."""

import os
from pathlib import Path

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.store.content import Known, References


def digest(known: References, number: int) -> str | None:
    found = known.find(ref(number))
    return None if found is None else found.digest


def ref(number: int) -> AdapterRef:
    return AdapterRef("hub", "org/a", f"{number:040x}")


def test_found_again_by_any_process(tmp_path: Path) -> None:
    folder, staging = tmp_path / "refs", tmp_path / "staging"
    folder.mkdir()
    staging.mkdir()
    References(folder).remember(Known(ref(1), "d1", 7), staging)
    known = References(folder)
    assert (known.find(ref(1)), known.find(ref(2))) == (Known(ref(1), "d1", 7), None)
    known.remember(Known(ref(1), "d2"), staging)
    assert digest(known, 1) == "d2"
    (path,) = folder.iterdir()
    path.chmod(0o644)
    whole = path.read_bytes()
    not_utf8 = whole.replace(b"d2", b"\xff2")
    assert not_utf8 != whole
    for torn in (b"", b"{", bytes(path.stat().st_size), not_utf8):
        path.write_bytes(torn)
        assert known.find(ref(1)) is None
    assert list(staging.iterdir()) == []


def test_the_oldest_go_and_are_not_looked_for_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, staging = tmp_path / "refs", tmp_path / "staging"
    folder.mkdir()
    staging.mkdir()
    monkeypatch.setattr("loraplex.adapters.store.content.MAX_REFERENCES", 10)
    monkeypatch.setattr("loraplex.adapters.store.content._TRIM_EVERY", 8)
    looked: list[Path] = []
    known = References(folder)
    trim = known._trim

    def watched() -> None:
        looked.append(folder)
        trim()

    monkeypatch.setattr(known, "_trim", watched)
    for number in range(41):
        known.remember(Known(ref(number), f"d{number}"), staging)
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_ctime_ns)
        os.utime(newest, (number, number))
        assert len(list(folder.iterdir())) <= 18
    assert len(looked) == 6
    left = [number for number in range(41) if digest(known, number)]
    assert left == list(range(31, 41))
