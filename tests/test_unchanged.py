"""Changes that make a long test run again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import unchanged
from tests.unchanged import (
    digest_of,
    kept_for,
    note,
    read_by,
    unless_file_unchanged,
    unless_unchanged,
)


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


def test_what_is_imported_through_others_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    texts = {
        "tests/test_a.py": "def test() -> None:\n    from loraplex.server import b\n",
        "server/b.py": "import loraplex.server.c\nimport os\n",
        "server/c.py": "",
        "server/other.py": "",
        "kernels/sizes.json": "{}",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    file = tmp_path / "tests/test_a.py"
    read = read_by(file, "kernels")
    assert {str(path.relative_to(tmp_path)) for path in read} == {*texts} - {"server/other.py"}
    kept = kept_for("a", read)
    assert kept_for("a", read) == kept
    (tmp_path / "kernels/sizes.json").write_text("{ }")
    assert kept_for("a", read) != kept


def test_a_file_is_skipped_when_all_its_tests_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    monkeypatch.setattr(unchanged, "_passed", set())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "tests").mkdir()
    file, conftest = (tmp_path / "tests" / name for name in ("test_a.py", "conftest.py"))
    file.touch()
    conftest.touch()
    items = [SimpleNamespace(nodeid=name, path=file) for name in ("one", "two")]
    config = SimpleNamespace(option=SimpleNamespace(keyword="", markexpr=""), args=["tests"])
    request: Any = SimpleNamespace(path=file, config=config, session=SimpleNamespace(items=items))

    def attempt(name: str) -> None:
        for _ in unless_file_unchanged(request, conftest):
            report: Any = SimpleNamespace(nodeid=name, when="call", passed=True, skipped=False)
            note(report)

    attempt("one")
    attempt("two")
    with pytest.raises(pytest.skip.Exception):
        attempt("one")
    config.args = ["tests/test_a.py"]
    attempt("one")
    config.args = ["tests"]
    file.write_text("assert True")
    attempt("one")


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
