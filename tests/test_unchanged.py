"""Changes that make a long test run again."""

from pathlib import Path

import pytest

from tests import unchanged
from tests.unchanged import digest_of, unless_unchanged


def test_names_contents_and_versions_count_and_tests_do_not(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    (folder / "lora").mkdir(parents=True)
    (folder / "lora" / "expand.py").write_text("a = 1")
    first = digest_of([folder], ["triton 3"])
    (folder / "test_expand.py").write_text("a test")
    assert digest_of([folder], ["triton 3"]) == first
    assert digest_of([folder], ["triton 4"]) != first
    (folder / "lora" / "expand.py").rename(folder / "expand.py")
    moved = digest_of([folder], ["triton 3"])
    (folder / "expand.py").write_text("a = 2")
    assert len({first, moved, digest_of([folder], ["triton 3"])}) == 3


def test_only_what_passed_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()

    def attempt(passes: bool) -> None:
        with unless_unchanged("compile", "kernels"):
            assert passes

    for _ in range(2):
        with pytest.raises(AssertionError):
            attempt(passes=False)
    attempt(passes=True)
    with pytest.raises(pytest.skip.Exception, match="kernels and Triton are as when this passed"):
        attempt(passes=False)
    (tmp_path / "kernels" / "new.py").touch()
    with pytest.raises(AssertionError):
        attempt(passes=False)
