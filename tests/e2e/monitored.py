"""A fleet under load and the real Prometheus that scrapes it.

A fleet of router, two workers and Redis has the certifying engine in its workers: everything is
real but the model. `loraplex serve` on one machine has the model, too.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loraplex.launcher.demo import adapter_paths, model_path
from tests.certifying.factory import certify
from tests.e2e.serving import ROOT
from tests.engines import engines_below
from tests.ports import free_port
from tests.tethered import tethered

RULES = ROOT / "deploy/helm/loraplex/rules/loraplex.yaml"
SCRAPE_S = 1
RATE_WINDOW = "15s"
READY_TIMEOUT_S = 240.0
STEP_S = 0.004
# Room for some of the demo's adapters, so that they push each other off.
ADAPTER_MEMORY = "3MiB"
CLIENTS = 6
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


@dataclass
class Fleet:
    """url: the router's. engines: of the workers' processes, by need."""

    url: str
    prometheus: str
    workers: list[subprocess.Popen[bytes]]
    logs: Path
    names: tuple[str, ...]
    began: float = field(default_factory=time.time)

    def query(self, expr: str, step_s: float = 1.0) -> list[dict[str, Any]]:
        """Series of a query over the whole run. Raises for one that Prometheus refuses."""
        answer = httpx.post(
            f"{self.prometheus}/api/v1/query_range",
            data={"query": expr, "start": self.began, "end": time.time(), "step": step_s},
            timeout=240,
        )
        assert answer.status_code == 200, (expr, answer.text)
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def kill_engine(self, worker: int) -> None:
        """As a fault of the device would. `serve` has several engines: one of them is killed."""
        engines_below(self.workers[worker].pid)[0].kill()


@contextmanager
def monitored_fleet() -> Iterator[Fleet]:
    """Ready, and scraped at least once."""
    # The path of a Unix socket may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="monitored-") as name, ExitStack() as stack:
        folder = Path(name)
        redis = _redis(stack, folder)
        ports = [free_port() for _ in range(2)]
        workers = [_worker(stack, folder, i, port) for i, port in enumerate(ports)]
        port = free_port()
        _router(stack, folder, port, ports, redis)
        url = f"http://127.0.0.1:{port}"
        _until(f"{url}/health/ready", folder)
        prometheus = _prometheus(stack, folder, [port, *ports])
        fleet = Fleet(url, prometheus, workers, folder, tuple(adapter_paths()))
        _until_scraped(fleet)
        fleet.began = time.time()
        yield fleet


@contextmanager
def monitored_machine() -> Iterator[Fleet]:
    """One `loraplex serve` with two workers and the demo model, by its own options alone."""
    with tempfile.TemporaryDirectory(prefix="monitored-") as name, ExitStack() as stack:
        folder = Path(name)
        port, watched = free_port(), free_port(3)
        serve = _start(
            *(stack, folder, "serve", sys.executable, "-m", "loraplex", "serve"),
            *("--port", str(port), "--workers", "2", "--metrics-port", str(watched)),
            *("--adapter-memory", ADAPTER_MEMORY),
            *("--cache-dir", str(folder / "cache"), "--drain-timeout-s", "1"),
        )
        url = f"http://127.0.0.1:{port}"
        _until(f"{url}/health/ready", folder)
        prometheus = _prometheus(stack, folder, [watched, watched + 1, watched + 2])
        fleet = Fleet(url, prometheus, [serve], folder, tuple(adapter_paths()))
        _until_scraped(fleet)
        fleet.began = time.time()
        yield fleet


@contextmanager
def load(fleet: Fleet) -> Iterator[None]:
    """Callers of all kinds, for as long as one is inside."""
    over = threading.Event()
    threads = [threading.Thread(target=_call_until, args=(fleet, i, over)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def _call_until(fleet: Fleet, number: int, over: threading.Event) -> None:
    """Adapters by Zipf's law, the base, and what callers do wrong."""
    adapters = [fleet.names[(number + i // 3) % len(fleet.names)] for i in range(12)]
    bodies: list[dict[str, Any]] = [{"model": name} for name in adapters]
    bodies += [{}, {"model": "nobody-has-this"}, {"temperature": -1}, {"guided_regex": "[a-z]{9}"}]
    bodies += [{"guided_choice": ["yes"], "allowed_token_ids": [3]}]  # no token is left
    with httpx.Client(base_url=fleet.url, timeout=240) as http:
        base = http.get("/v1/models").json()["data"][0]["id"]
        for i, body in enumerate(itertools.cycle(bodies)):
            if over.is_set():
                return
            prompt = PROMPT[: 20 + 13 * (i % 9)]
            whole = {"model": base, "prompt": prompt, "max_tokens": 24 if i % 4 else 160, **body}
            with contextlib.suppress(httpx.HTTPError):
                if i % 2:
                    http.post("/v1/completions", json=whole)
                else:
                    _stream(http, whole, leave_early=i % 22 == 0)


def _stream(http: httpx.Client, body: dict[str, Any], leave_early: bool) -> None:
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for _ in answer.iter_lines():
            if leave_early:
                return


# Processes


def _start(
    stack: ExitStack, folder: Path, name: str, *command: str, **environ: str
) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            tethered(*command), cwd=ROOT, stdout=log, stderr=log, env={**_environment(), **environ}
        )
    stack.callback(_stop, process)
    return process


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _redis(stack: ExitStack, folder: Path) -> str:
    socket = folder / "redis.sock"
    options = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder))
    _start(stack, folder, "redis", _program("redis-server"), *options)
    return f"unix://{socket}"


def _worker(stack: ExitStack, folder: Path, number: int, port: int) -> subprocess.Popen[bytes]:
    roots = [
        option for path in adapter_paths().values() for option in ("--adapter-root", str(path))
    ]
    return _start(
        *(stack, folder, f"worker-{number}", sys.executable, "-m", "loraplex", "worker"),
        *(str(model_path()), "--port", str(port), "--worker-id", f"worker-{number}"),
        *("--executor", certify(step_s=STEP_S), *roots),
        *("--cache-dir", str(folder / f"cache-{number}"), "--adapter-memory", ADAPTER_MEMORY),
        *("--drain-timeout-s", "1"),
    )


def _router(stack: ExitStack, folder: Path, port: int, workers: Sequence[int], redis: str) -> None:
    named = [
        option
        for name, path in adapter_paths().items()
        for option in ("--adapter", f"{name}=local:{path}")
    ]
    links = [option for at in workers for option in ("--worker", f"ws://127.0.0.1:{at}")]
    _start(
        *(stack, folder, "router", sys.executable, "-m", "loraplex", "router"),
        *("--port", str(port), "--redis", redis, *links, *named),
        *("--cache-dir", str(folder / "cache"), "--drain-timeout-s", "1", "--metrics-compat"),
    )


def _prometheus(stack: ExitStack, folder: Path, targets: Sequence[int]) -> str:
    port = free_port()
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "loraplex",
                "static_configs": [{"targets": [f"127.0.0.1:{target}" for target in targets]}],
            }
        ],
    }
    path = folder / "prometheus.yaml"
    path.write_text(json.dumps(config))  # YAML has JSON in it
    _start(
        *(stack, folder, "prometheus", _program("prometheus"), f"--config.file={path}"),
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    url = f"http://127.0.0.1:{port}"
    _until(f"{url}/-/ready", folder)
    return url


def _program(name: str) -> str:
    path = shutil.which(name)
    assert path, f"the tests need {name} on the PATH"
    return path


def _until(url: str, folder: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            raise AssertionError(f"not ready: {url}\n{logs}")
        time.sleep(0.1)  # polls a condition, bounded by the deadline


def _until_scraped(fleet: Fleet) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while len(fleet.query("up == 1")) < 3:
        assert time.monotonic() < deadline, "Prometheus cannot scrape"
        time.sleep(0.1)  # polls a condition, bounded by the deadline
