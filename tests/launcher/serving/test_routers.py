"""`loraplex router --router-processes 2` as a user starts it, before a worker without a model."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from loraplex.launcher.__main__ import main
from loraplex.launcher.demo import model_path
from tests.certifying.factory import certify
from tests.e2e.serving import ROOT
from tests.ports import free_port
from tests.router.shared.redis_server import PROGRAM
from tests.tethered import tethered

TIMEOUT_S = 240.0
COUNT = 2
READY = f"{COUNT} router processes listen on"
SECRET = "between router and worker"
# Connections until both have answered; the kernel gives each by a hash of its addresses.
MOST_TRIES = 100
BODY = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}


def until(condition: Callable[[], bool], log: Path) -> None:
    """Polls a condition, bounded in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.02)


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    return False


class Processes:
    """The parent, and what it says."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.metrics_port = free_port(2)
        self.log = folder / "router.log"
        self.process = start(
            self.log,
            *("router", "--port", str(self.port), "--metrics-port", str(self.metrics_port)),
            *("--router-processes", str(COUNT), "--cache-dir", str(folder / "cache"), *options),
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def own_url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.metrics_port + number}"

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def child(self, number: int) -> psutil.Process:
        """By its name, which `ps` shows."""
        (found,) = [
            child
            for child in psutil.Process(self.process.pid).children()
            if f"--started-as=router-{number}" in child.cmdline()
        ]
        return found

    def family(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def is_ready(self) -> bool:
        return all(answers(f"{self.own_url(i)}/health/ready") for i in range(COUNT))

    def generated(self, number: int) -> float:
        """Requests that a process has answered well."""
        text = httpx.get(f"{self.own_url(number)}/metrics", timeout=TIMEOUT_S, trust_env=False).text
        wanted = 'loraplex_requests_total{route="/generate",status="200"} '
        (value,) = [line.split()[-1] for line in text.splitlines() if line.startswith(wanted)]
        return float(value)

    def generate(self) -> None:
        """On a connection of its own."""
        url = f"{self.url}/generate"
        answer = httpx.post(url, json=BODY, timeout=TIMEOUT_S, trust_env=False)
        assert answer.status_code == 200, answer.text

    def generate_until_all_have(self) -> None:
        for _ in range(MOST_TRIES):
            self.generate()
            if all(self.generated(i) for i in range(COUNT)):
                return
        raise AssertionError("a process gets no connection")


def start(log: Path, *arguments: str, program: str = "") -> subprocess.Popen[bytes]:
    command = [program] if program else [sys.executable, "-m", "loraplex"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    with log.open("wb") as out:
        return subprocess.Popen(
            tethered(*command, *arguments),
            cwd=ROOT,
            env={**kept, "LORAPLEX_SECRET": SECRET},
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def options() -> Iterator[list[str]]:
    """Options of a router: a worker and a Redis, both real."""
    # The path of a Unix socket may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="routers-") as name, ExitStack() as stack:
        folder = Path(name)
        assert PROGRAM, "the tests need redis-server on the PATH"
        path = folder / "redis.sock"
        redis = ("--port", "0", "--unixsocket", str(path), "--save", "", "--dir", name)
        stack.callback(end, start(folder / "redis.log", *redis, program=PROGRAM))
        port = free_port()
        log = folder / "worker.log"
        worker = start(
            *(log, "worker", str(model_path()), "--port", str(port), "--kv-memory", "64MiB"),
            *("--executor", certify(step_s=0.01), "--cache-dir", str(folder / "cache")),
        )
        stack.callback(end, worker)
        until(path.exists, folder / "redis.log")
        until(lambda: answers(f"http://127.0.0.1:{port}/health/ready"), log)
        yield ["--redis", f"unix://{path}", "--worker", f"ws://127.0.0.1:{port}"]


@contextmanager
def running(folder: Path, options: list[str]) -> Iterator[Processes]:
    processes = Processes(folder, *options)
    try:
        until(lambda: not processes.is_alive or processes.says(READY), processes.log)
        assert processes.is_alive, processes.log.read_text()
        until(processes.is_ready, processes.log)
        yield processes
    finally:
        end(processes.process)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory, options: list[str]) -> Iterator[Processes]:
    """For tests that leave the processes as they were."""
    with running(tmp_path_factory.mktemp("lasting"), options) as processes:
        yield processes


@pytest.fixture
def processes(tmp_path: Path, options: list[str]) -> Iterator[Processes]:
    with running(tmp_path, options) as processes:
        yield processes


def test_all_serve_and_one_that_is_killed_comes_back(lasting: Processes) -> None:
    lasting.generate_until_all_have()
    killed = lasting.child(0)
    killed.kill()
    psutil.wait_procs([killed], TIMEOUT_S)
    before = lasting.generated(1)
    for _ in range(5):
        lasting.generate()
    assert lasting.generated(1) > before
    until(lambda: lasting.says("router-0 died (killed by SIGKILL)"), lasting.log)
    until(lasting.is_ready, lasting.log)
    assert lasting.child(0).pid != killed.pid
    lasting.generate_until_all_have()
    assert "Traceback" not in lasting.log.read_text()


@pytest.mark.exhaustive
def test_streams_finish_before_all_stop(processes: Processes) -> None:
    body = {"inputs": "x", "parameters": {"max_new_tokens": 100}}
    url = f"{processes.url}/generate_stream"
    family = processes.family()
    with ExitStack() as stack:
        streams = [
            stack.enter_context(
                httpx.stream("POST", url, json=body, timeout=TIMEOUT_S, trust_env=False)
            ).iter_lines()
            for _ in range(4)
        ]
        for lines in streams:
            next(lines)
        processes.process.send_signal(signal.SIGTERM)
        until(lambda: processes.says("stopping"), processes.log)
        for lines in streams:
            last = [line for line in lines if line][-1]
            assert '"index":100' in last, last
    assert processes.process.wait(TIMEOUT_S) == 0
    _, alive = psutil.wait_procs(family, TIMEOUT_S)
    assert not alive


@pytest.mark.exhaustive
def test_a_second_signal_stops_at_once(processes: Processes) -> None:
    body = {"inputs": "x", "parameters": {"max_new_tokens": 900}}
    url = f"{processes.url}/generate_stream"
    family = processes.family()
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        processes.process.send_signal(signal.SIGTERM)
        until(lambda: processes.says("stopping"), processes.log)
        processes.process.send_signal(signal.SIGTERM)
        assert processes.process.wait(TIMEOUT_S) == 130
        with pytest.raises(httpx.TransportError):
            list(lines)
    _, alive = psutil.wait_procs(family, TIMEOUT_S)
    assert not alive


def test_what_is_of_one_process_alone(lasting: Processes) -> None:
    """Metrics are refused on the shared port; the own one has no API."""
    with httpx.Client(base_url=lasting.url, trust_env=False) as http:
        scraped = http.get("/metrics")
        assert scraped.status_code == 409
        assert "--metrics-port" in scraped.text
        assert http.get("/health/ready").status_code == 200
    own = f"{lasting.own_url(1)}/generate"
    assert httpx.post(own, json=BODY, trust_env=False).status_code == 404
    assert lasting.process.poll() is None


SEVERAL = ["router", "--router-processes", "2"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--worker ws://127.0.0.1:1", "--router-processes 2 needs --redis"),
        ("--redis redis://h --port 9000 --metrics-port 8999", "--metrics-port 8999"),
        ("--redis redis://h --port 0 --adapter noequals", "--adapter"),
    ],
)
def test_what_several_cannot_have_is_said_before_anything_starts(
    words: str, why: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
        monkeypatch.delenv(name)
    worker = [] if "--worker" in words else ["--worker", "ws://127.0.0.1:1"]
    with pytest.raises(SystemExit) as left:
        main([*SEVERAL, *worker, *words.split()])
    assert left.value.code == 2
    assert why in capfd.readouterr().err


def test_a_port_in_use_is_said(options: list[str], lasting: Processes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", *SEVERAL, *options, "--port", str(lasting.port)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert "Traceback" not in done.stderr
    assert (done.returncode, f"port {lasting.port}" in done.stderr) == (1, True), done.stderr
