"""Documents, docstrings and comments are in plain English: short sentences, and a clear subject."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Written from the code: their words are the code's.
GENERATED = {"configuration.md", "metrics.md"}
PAGES = sorted(
    [
        *(page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
)
MOST_WORDS = 25
BANNED = re.compile(r"\b(told|tells? (of|apart)|of ours|of before|takes? up(?! to))\b", re.I)
# A docstring says what a thing is or does: with these words the thing itself is left out.
BEGINNINGS = re.compile(r"(Of|What|Those|These|Who|Whose)\b")
SOURCES = sorted(
    path
    for folder in ("router", "server", "adapters", "launcher", "loraplex", "tools", "deploy")
    for path in (ROOT / folder).glob("*.py" if folder == "loraplex" else "**/*.py")
)
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]+`")
_CODES = re.compile(r"CODE(,\s+CODE)*\s+and\s+CODE")
# A sentence ends where a capital, a code or a number follows; a colon or semicolon ends one, too.
_END = re.compile(r"(?<=[.!?:;])\s+")


def blocks(text: str) -> Iterator[str]:
    """Paragraphs and list items of a page, without code, tables and headings."""
    lines: list[str] = []
    for line in [*_FENCED.sub("", text).splitlines(), ""]:
        begins = re.match(r"\s*(?:[-*]|[0-9]+\.) ", line) and not line.startswith("    ")
        if begins or not line.strip() or line.startswith(("|", "#", "    ", "<!--")):
            if lines:
                yield " ".join(lines)
            lines = []
        if line.strip() and not line.startswith(("|", "#", "    ", "<!--")):
            lines.append(re.sub(r"^\s*(?:[-*]|[0-9]+\.) ", "", line).strip())


def sentences(text: str) -> Iterator[str]:
    """Link texts stand for links; a piece of code, or a list of them, counts as one word."""
    for block in blocks(text):
        plain = _CODE.sub("CODE", _LINK.sub(r"\1", block)).replace("**", "")
        yield from _END.split(_CODES.sub("CODE", plain))


def length(sentence: str) -> int:
    """Words; figures are none."""
    return sum(re.search("[A-Za-z]", word) is not None for word in sentence.split())


def faults(paths: Iterable[Path], find: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Findings in the text of each file, by file."""
    found = {str(path.relative_to(ROOT)): find(path.read_text()) for path in paths}
    return {path: words for path, words in found.items() if words}


def long_sentences(text: str) -> list[str]:
    return [sentence for sentence in sentences(text) if length(sentence) > MOST_WORDS]


def banned_lines(text: str) -> list[str]:
    return [line for line in _FENCED.sub("", text).splitlines() if BANNED.search(line)]


def test_sentences_are_short() -> None:
    assert faults(PAGES, long_sentences) == {}, f"sentences of more than {MOST_WORDS} words"


def test_no_banned_words() -> None:
    assert faults(PAGES, banned_lines) == {}


def docstrings(text: str) -> list[str]:
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, _DOCUMENTED))
    return [words for node in nodes if (words := ast.get_docstring(node)) is not None]


def comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def unplain(text: str) -> list[str]:
    """Docstrings and comments of a source that begin badly or have a banned word."""
    documented = docstrings(text)
    # Comments take longer to find than all else here.
    said = [*documented, *comments(text)] if BANNED.search(text) else documented
    beginning = [words for words in documented if BEGINNINGS.match(words)]
    return beginning + [words for words in said if BANNED.search(words)]


def test_docstrings_and_comments_are_plain() -> None:
    assert len(SOURCES) > 500
    assert faults(SOURCES, unplain) == {}


def test_docstrings_without_a_subject_are_found() -> None:
    text = 'class A:\n    """Of one process."""\n\n    def f(self): # as told\n        ...\n'
    assert unplain(text) == ["Of one process.", "# as told"]


def test_a_long_sentence_is_found() -> None:
    long = "It goes on " * 9 + "and ends."
    assert long_sentences(f"Short.\n\n- {long}\n") == [long]
    assert banned_lines("It is as told.\n\nIt is said.\n") == ["It is as told."]
