"""A process killed in the middle of a download: the next one goes on where it stopped."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from loraplex.adapters.base import BaseSpec
from loraplex.launcher.demo import BASE_NAME, model_path
from loraplex.server.model.card import read_base_spec
from tests.adapter_folders import ALL_PROJECTIONS, write_adapter
from tests.adapters.stub_files import Fault, running_files
from tests.adapters.stub_hub import running_hub
from tests.e2e.serving import ROOT
from tests.grids import beyond
from tests.tethered import tethered

WEIGHTS = "adapter_model.safetensors"
CERTIFICATE = ROOT / "tests/adapters/self_signed.pem"
BASE: BaseSpec = read_base_spec(model_path(), (BASE_NAME,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("published")
    return write_adapter(made / "a", BASE, rank=64, targets=ALL_PROJECTIONS)


@dataclass(frozen=True)
class Server:
    """It sends half of the weights once and then stalls; ranges: what was asked for after that.

    body_bytes: by file name, of all answers together.
    """

    ref: str
    environ: dict[str, str]
    ranges: list[str]
    body_bytes: Counter[str]


@contextmanager
def hub(folder: Path) -> Iterator[Server]:
    with running_hub() as stub:
        stub.publish("org/a", folder)
        stub.repos["org/a"].truncate = WEIGHTS
        stub.repos["org/a"].truncations = 1
        stub.stall = threading.Event()
        try:
            yield Server("hub:org/a", {"HF_ENDPOINT": stub.endpoint}, stub.ranges, stub.body_bytes)
        finally:
            stub.stall.set()


@contextmanager
def files(folder: Path, certificate: Path | None) -> Iterator[Server]:
    with running_files(certificate) as stub:
        stub.publish("team/a", folder)
        half = (folder / WEIGHTS).stat().st_size // 2
        stub.faults[WEIGHTS] = Fault("stall", after=half, times=1)
        if certificate is None:
            environ = {"AWS_ENDPOINT_URL_S3": stub.endpoint, "AWS_ACCESS_KEY_ID": "id"}
            environ |= {"AWS_SECRET_ACCESS_KEY": "secret", "AWS_CONFIG_FILE": "/nowhere"}
            yield Server("s3:team/a", environ, stub.ranges, stub.body_bytes)
        else:
            environ = {"SSL_CERT_FILE": str(certificate)}
            ref = f"https://localhost:{stub.port}/team/a/"
            yield Server(ref, environ, stub.ranges, stub.body_bytes)


SERVERS: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {
    "hub": hub,
    "s3": lambda folder: files(folder, None),
    "https": lambda folder: files(folder, CERTIFICATE),
}


def pull(server: Server, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loraplex", "adapter", "pull", server.ref, "--base", "demo"]
    return subprocess.Popen(
        tethered(*command),
        cwd=ROOT,
        env=os.environ | server.environ | {"LORAPLEX_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls a condition, bounded by the deadline


def partial_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*.partial"))


@pytest.mark.parametrize("kind", beyond(1, [*SERVERS]))
def test_killed_in_the_middle(kind: str, folder: Path, tmp_path: Path) -> None:
    size = (folder / WEIGHTS).stat().st_size
    with SERVERS[kind](folder) as server:
        first = pull(server, tmp_path)
        try:
            wait_until(lambda: partial_bytes(tmp_path) > size * 0.4)
        finally:
            first.kill()
            first.communicate()
        assert list(tmp_path.glob("*/content/*")) == []
        assert list(tmp_path.glob("*/refs/*")) == []
        second = pull(server, tmp_path)
        output, _ = second.communicate(timeout=120)
        assert second.returncode == 0, output
        ranges, sent = list(server.ranges), server.body_bytes[WEIGHTS]
    assert len(ranges) == 1
    assert int(ranges[0].removeprefix("bytes=").removesuffix("-")) > size * 0.4
    assert sent < size * 1.2
    (content,) = tmp_path.glob("*/content/*")
    assert (content / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert list(tmp_path.glob("*/staging/*")) == []
