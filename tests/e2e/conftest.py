"""One real `loraplex serve` (router, worker, engine) on the demo model for all e2e tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Serving, start_serving


@pytest.fixture(scope="session")
def adapter_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder under which tests may put local adapters."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory, adapter_root: Path) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("serve") / "log"
    server = start_serving(
        "--cache-dir",
        str(tmp_path_factory.mktemp("cache")),
        "--adapter-root",
        str(adapter_root),
        "--files-dir",
        str(tmp_path_factory.mktemp("files")),
        "--responses-keep-s",
        "3600",
        log=log,
    )
    try:
        yield server
    finally:
        server.process.terminate()
        try:
            code = server.process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise
    assert code == 0, log.read_text()[-4000:]


@pytest.fixture
def http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=240) as client:
        yield client
