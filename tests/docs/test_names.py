"""Files, folders, classes and methods that documents name are there."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("adapters", "server", "router", "launcher")
PAGES = (*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
# `folder/file.py`, `folder/`, or a file's bare name.
_FILE = re.compile(
    r"`([\w./-]+\.py|(?:tests|tools|deploy|docs|server|router|adapters|launcher)/[\w./-]+)`"
)
_METHOD = re.compile(r"`([A-Z]+[a-z]\w*)\.(\w+)`")
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)
# A name of the code: with a capital or an underscore inside.
_NAME = re.compile(r"`(_?[A-Za-z]+(?:_\w+|[a-z][A-Z]\w*))`")
_WORD = re.compile(r"\w+")
_DOTTED = re.compile(r"`(_?[A-Za-z]+[\w.]*)`")
# In diagrams names are not marked as code: words with a capital inside.
_IN_DIAGRAM = re.compile(r"\b[A-Z][a-z]+(?:[A-Z]\w*)+\b")
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```", re.M | re.S)


@cache
def words(*folders: str) -> frozenset[str]:
    """Every identifier and word of the Python files below."""
    texts = (path.read_text() for name in folders for path in (ROOT / name).rglob("*.py"))
    return frozenset(word for text in texts for word in _WORD.findall(text))


@cache
def file_names() -> frozenset[str]:
    folders = (*PACKAGES, "tests", "deploy", "tools")
    return frozenset(path.name for name in folders for path in (ROOT / name).rglob("*.py"))


def is_there(name: str) -> bool:
    return name in file_names() if "/" not in name else (ROOT / name).exists()


@cache
def words_beside() -> dict[str, set[str]]:
    """Find for each class the words of the files that define it."""
    found: dict[str, set[str]] = {}
    for text in (path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for owner in re.findall(r"^class (\w+)", text, re.M):
            found.setdefault(owner, set()).update(_WORD.findall(text))
    return found


def has_method(owner: str, name: str) -> bool:
    """In the file that defines the class."""
    return name in words_beside().get(owner, set())


def test_files_are_there() -> None:
    named = [(page.name, name) for page in PAGES for name in _FILE.findall(page.read_text())]
    assert len(named) > 100
    assert [(page, name) for page, name in named if not is_there(name)] == []


def test_methods_are_of_their_classes() -> None:
    texts = {page.name: _FENCED.sub("", page.read_text()) for page in PAGES}
    named = [(page, *found) for page, text in texts.items() for found in _METHOD.findall(text)]
    assert len(named) > 10
    assert [(page, *found) for page, *found in named if not has_method(*found)] == []


def test_what_diagrams_name_is_in_the_code() -> None:
    diagrams = _DIAGRAM.findall((DOCS / "architecture.md").read_text())
    assert len(diagrams) == 3
    names = {name for diagram in diagrams for name in _IN_DIAGRAM.findall(diagram)}
    assert len(names) > 20
    assert sorted(names - words(*PACKAGES)) == []


def test_what_the_architecture_names_is_in_the_code() -> None:
    """Each `name` and each part of a `Class.name`, above the table of rooms."""
    text = _FENCED.sub("", (DOCS / "architecture.md").read_text()).partition("\n## Rooms")[0]
    names = {part for dotted in _DOTTED.findall(text) for part in dotted.split(".")}
    assert len(names) > 100
    assert sorted(names - words(*PACKAGES, "deploy")) == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("guides/add-*.md")), ids=lambda page: page.stem)
def test_guides_for_the_code_name_what_is_there(page: Path) -> None:
    names = set(_NAME.findall(_FENCED.sub("", page.read_text())))
    assert len(names) >= 3
    assert sorted(names - words(*PACKAGES, "tests")) == []
