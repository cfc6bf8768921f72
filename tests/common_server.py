"""A pytest plugin that gives all files with the common server of e2e tests to one process of xdist.

Else each process would start such a server.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

E2E = "tests/e2e/"
_ROOT = Path(__file__).parents[1]
# A test or a fixture that asks for the server of tests/e2e/conftest.py.
_USER = re.compile(
    r"^(@pytest\.fixture.*\n(async )?def \w+|(async )?def test_\w+)\([^)]*\b(serving|http):",
    re.MULTILINE,
)
_OWN = "\ndef serving("


@cache
def scope_of(file: str) -> str:
    """The scope whose tests are handed out together with those of a file. file: its path from the
    root.
    """
    if not file.startswith(E2E):
        return file
    text = (_ROOT / file).read_text()
    return E2E if _USER.search(text) and _OWN not in text else file


class FilesByServer(LoadFileScheduling):  # type: ignore[misc]
    """Hands out tests by file, but those of the common server together."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesByServer | None:
    """The scheduler of runs by file; None = another kind of run."""
    return FilesByServer(config, log) if config.getvalue("dist") == "loadfile" else None
