"""Rules of the house that no linter holds."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapters", "router", "server", "launcher")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", list(sources()), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_version_is_in_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}$", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_server_package_is_empty() -> None:
    """A router imports server.protocol, and must get nothing else with it."""
    assert (ROOT / "server/__init__.py").read_text() == ""


TORCH_FREE = """
import sys
for name in ("torch", "triton", "transformers", "peft", "flashinfer"):
    sys.modules[name] = None
import {module}
"""


@pytest.mark.parametrize("module", ["server.protocol", "router.app", "adapters.store"])
def test_imports_without_torch(module: str) -> None:
    code = TORCH_FREE.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
