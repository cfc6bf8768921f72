"""Starts the product as a user does, and waits until it is ready."""

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.tethered import tethered

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = END_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Serving:
    url: str
    process: subprocess.Popen[bytes]
    log: Path


def start_serving(*options: str, log: Path, environ: Mapping[str, str] | None = None) -> Serving:
    """A request that comes while a killed worker starts again waits as long as this does."""
    port, patience = free_port(), ("--worker-wait-s", str(READY_TIMEOUT_S))
    with log.open("wb") as out:
        process = subprocess.Popen(
            tethered(
                sys.executable, "-m", "loraplex", "serve", "--port", str(port), *patience, *options
            ),
            cwd=ROOT,
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not is_ready(url):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"not ready:\n{log.read_text()[-4000:]}")
        time.sleep(0.1)  # polls a condition, bounded by the deadline
    return Serving(url, process, log)


@contextmanager
def running_folder(folder: Path, adapters: Iterable[str], *options: str) -> Iterator[Serving]:
    """Serves the model `base` of a folder in float32 on the CPU, with adapters of the same folder.
    The server must end well when it is asked to.
    """
    serving = start_serving(
        *(str(folder / "base"), "--device", "cpu", "--dtype", "float32"),
        *("--adapter-root", str(folder), "--cache-dir", str(folder / "cache")),
        *(part for name in adapters for part in ("--adapter", f"{name}=local:{folder / name}")),
        *options,
        log=folder / "log",
    )
    try:
        yield serving
    finally:
        serving.process.terminate()
        code = serving.process.wait(timeout=END_TIMEOUT_S)
    assert code == 0


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
