"""`loraplex serve` as a user starts it, on an engine without a model."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from loraplex.launcher.__main__ import main
from loraplex.launcher.demo import adapter_paths, model_path
from tests.certifying.factory import certify
from tests.grids import beyond, sparse
from tests.ports import free_port
from tests.tethered import tethered

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240.0
PEM = Path(__file__).parents[2] / "adapters" / "self_signed.pem"
KEY = "sk-written-for-vllm"
QUICK = ("--executor", certify(step_s=0.002), "--kv-memory", "64MiB")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "loraplex", *arguments]


def environment(**variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    return kept | variables


class Serving:
    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.log = folder / "log"
        arguments = ["serve", "--port", str(self.port), "--cache-dir", str(folder / "cache")]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                tethered(*command(*arguments, *QUICK, *options)),
                cwd=ROOT,
                env=environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        """Polls a condition, bounded in time."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.02)

    def is_ready(self) -> bool:
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/health/ready", trust_env=False)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    def generate(self, max_tokens: int = 5) -> httpx.Response:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": max_tokens}}
        url = f"http://127.0.0.1:{self.port}/generate"
        key = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(url, json=body, headers=key, timeout=TIMEOUT_S, trust_env=False)

    def child(self, command: str) -> psutil.Process:
        (found,) = [
            child
            for child in psutil.Process(self.process.pid).children()
            if command in child.cmdline()
        ]
        return found

    def family(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Serving]:
    serving = Serving(folder, *options)
    try:
        serving.until(lambda: "ready at http" in serving.text)
        yield serving
    finally:
        serving.process.kill()
        serving.process.wait(TIMEOUT_S)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with running(tmp_path) as serving:
        yield serving


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """For tests that leave the server as it was. Its options are vLLM's."""
    (name, folder), *_ = adapter_paths().items()
    model = (f"--model={model_path()}", "--served-model-name=llama", "--enable-lora")
    line = (*model, "--lora-modules", f"{name}={folder}", "--api_key", KEY)
    with running(tmp_path_factory.mktemp("lasting"), *line) as serving:
        yield serving
        assert stop(serving, signal.SIGTERM) == 0
        assert "Traceback" not in serving.text


def stop(serving: Serving, *signals: signal.Signals) -> int:
    """The exit code; no child outlives it."""
    family = serving.family()
    assert len(family) >= 3, "a worker with its engine, a router, and helpers at times"
    for number in signals:
        serving.process.send_signal(number)
    code = serving.process.wait(TIMEOUT_S)
    _, alive = psutil.wait_procs(family, TIMEOUT_S)
    assert not alive
    return code


def test_it_serves(lasting: Serving) -> None:
    assert lasting.generate().status_code == 200
    assert f"curl http://127.0.0.1:{lasting.port}/generate" in lasting.text


def test_a_second_signal_stops_at_once(serving: Serving) -> None:
    """While the router waits for an answer that takes long."""
    url = f"http://127.0.0.1:{serving.port}/generate_stream"
    body = {"inputs": "x", "parameters": {"max_new_tokens": 900}}
    family = serving.family()
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        serving.process.send_signal(signal.SIGINT)
        serving.until(lambda: "stopping" in serving.text)
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(TIMEOUT_S) in (0, 130)
    _, alive = psutil.wait_procs(family, TIMEOUT_S)
    assert not alive


@pytest.mark.exhaustive
def test_it_serves_and_stops_when_nobody_reads_its_lines(tmp_path: Path) -> None:
    arguments = ["serve", "--port", "0", "--cache-dir", str(tmp_path), *QUICK]
    process = subprocess.Popen(
        tethered(*command(*arguments)), cwd=ROOT, env=environment(), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url = next(line.split()[3] for line in process.stdout if b"ready at http" in line)
        process.stdout.close()
        family = psutil.Process(process.pid).children(recursive=True)
        assert httpx.get(url.rstrip(b",").decode() + "/health", trust_env=False).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        _, alive = psutil.wait_procs(family, TIMEOUT_S)
        assert not alive
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def secret_of(process: psutil.Process) -> str:
    """The secret in the document on a child's stdin."""
    config: dict[str, str] = json.loads(Path(f"/proc/{process.pid}/fd/0").read_bytes())
    return config["secret"]


def test_no_secret_is_on_a_command_line(lasting: Serving) -> None:
    secret = secret_of(lasting.child("router"))
    assert len(secret) > 30
    assert secret_of(lasting.child("worker")) == secret
    for process in lasting.family():
        assert secret not in str((process.cmdline(), process.environ()))
    assert secret not in lasting.text


@pytest.mark.parametrize("name", ["worker", "router"])
def test_a_killed_child_is_replaced_and_said_so(lasting: Serving, name: str) -> None:
    lasting.child(name).kill()
    lasting.until(lambda: f"loraplex: {name} died" in lasting.text)
    lasting.until(lasting.is_ready)
    assert lasting.generate().status_code == 200


@pytest.mark.exhaustive
def test_a_killed_launcher_leaves_nothing_behind(serving: Serving) -> None:
    family = serving.family()
    serving.process.kill()
    _, alive = psutil.wait_procs(family, TIMEOUT_S)
    assert not alive


def test_a_container_written_for_vllm_serves(lasting: Serving) -> None:
    """The key is on its own command line, and nowhere else."""
    url = f"http://127.0.0.1:{lasting.port}/v1/"
    (adapter, *_) = adapter_paths()
    with httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_S) as client:
        asked = [{"model": m, "prompt": "x", "max_tokens": 2} for m in ("llama", adapter)]
        assert client.post("completions", json=asked[0]).status_code == 401
        client.headers["Authorization"] = f"Bearer {KEY}"
        codes = [client.post("completions", json=body).status_code for body in asked]
        listed = {entry["id"] for entry in client.get("models").json()["data"]}
    assert codes == [200, 200]
    assert {"llama", adapter} <= listed
    for process in lasting.family():
        with suppress(psutil.NoSuchProcess):  # one that has just ended has no words left
            assert KEY not in str((process.cmdline(), process.environ()))
    assert KEY not in lasting.text
    for said in (
        "--enable-lora has no effect here: ",
        "an API key opens all adapters; --keys-file",
        "only this machine reaches 127.0.0.1",
    ):
        assert f"loraplex: {said}" in lasting.text


def failure(*arguments: str, **variables: str) -> str:
    """The one sentence on stderr of a command that fails, perhaps after it started children."""
    done = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("loraplex: ")]
    return sentence


class Refusals:
    """Runs commands that start nothing within this process."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = patch, capture

    def __call__(self, *arguments: str, code: int = 2, **variables: str) -> str:
        """Gives the one sentence on stderr. Nothing is on stdout, where children's lines go."""
        with self._patch.context() as patch:
            for name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as left:
                main(arguments)
        said = self._capture.readouterr()
        assert (left.value.code, said.out) == (code, "")
        (sentence,) = [line for line in said.err.splitlines() if line.startswith("loraplex: ")]
        return sentence


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refusals:
    return Refusals(monkeypatch, capfd)


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        sentence = failure("serve", "--port", port, "--cache-dir", str(tmp_path), *QUICK)
    assert port in sentence
    assert "--port" in sentence


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/no/such/folder", "no folder"),
        ("./no-such-folder", "no folder"),
        ("a b", "neither a folder nor a Hub id"),
        ("x" * 300, "too long"),
    ],
)
def test_a_model_that_is_not_there_is_said(
    tmp_path: Path, model: str, says: str, refusal: Refusals
) -> None:
    options = ["--port", "0", "--cache-dir", str(tmp_path), *QUICK]
    assert says in refusal("serve", model, *options, code=1)


def test_a_model_that_was_never_downloaded_is_said_offline(tmp_path: Path) -> None:
    sentence = failure(
        "worker", "org/model", "--port", "0", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)
    )
    assert "cannot be reached" in sentence


def test_a_folder_without_a_model_is_said(tmp_path: Path) -> None:
    assert "config.json" in failure("worker", str(tmp_path), "--port", "0", *QUICK)


@pytest.mark.exhaustive
def test_an_engine_that_cannot_start_is_said(tmp_path: Path) -> None:
    options = ["--port", "0", "--cache-dir", str(tmp_path), "--executor", "nonsense"]
    assert "the engine cannot start" in failure("serve", *options)


@pytest.mark.exhaustive
def test_what_the_model_cannot_have_is_said_by_the_options_name(tmp_path: Path) -> None:
    options = ["--port", "0", "--cache-dir", str(tmp_path), "--max-context", "999999"]
    assert "--max-context is 999999" in failure("serve", *options)


def test_a_cache_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    said = failure("serve", "--port", "0", "--cache-dir", str(folder), *QUICK)
    assert f"the cache folder {folder} cannot be used: Not a directory" in said


def test_bad_options_stop_the_start(refusal: Refusals) -> None:
    assert "--kv-memory" in refusal("serve", "--kv-memory", "lots")
    assert "LORAPLEX_KV_MEMORY" in refusal("serve", LORAPLEX_KV_MEMORY="lots")
    assert "did you mean" in refusal("router", LORAPLEX_WORKRE="ws://x")
    assert "--worker" in refusal("router")
    assert "--adapter" in refusal("serve", "--adapter", "nonsense")
    assert "--workers must be at least 1" in refusal("serve", "--workers", "0")


@pytest.mark.parametrize(
    ("option", "alone"),
    sparse(
        ["--adapters-file", "--keys-file", "--admin-key-file"],
        [(), ("--worker", "ws://127.0.0.1:1")],
    ),
)
def test_a_file_that_is_not_there_is_said_before_anything_starts(
    tmp_path: Path, option: str, alone: tuple[str, ...], refusal: Refusals
) -> None:
    command = ("router", *alone) if alone else ("serve",)
    said = refusal(*command, option, str(tmp_path / "absent"))
    assert said.startswith(f"loraplex: {option} ")
    assert "No such file" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("serve", "~nobody-of-this-name/x"), "MODEL: there is no user of that name"),
        (("serve", "--adapter-root", "/no/such"), "--adapter-root /no/such: there is no such"),
        (("worker", "org/model", "--adapter-root", "/no/such"), "--adapter-root /no/such"),
        (("worker", "org/model", "--redis", "redis://h/name"), "--redis: expected redis://"),
        (("worker", "org/model", "--redis", "redis://:secret@h"), "LORAPLEX_REDIS_PASSWORD"),
    ],
)
def test_what_could_never_work_is_said_before_a_model_is_looked_for(
    words: tuple[str, ...], why: str, refusal: Refusals
) -> None:
    assert why in refusal(*words)


def test_a_certificate_without_its_key_is_said_before_anything_starts(refusal: Refusals) -> None:
    other = str(PEM.parents[1] / "router" / "pem" / "another_ec_key.pem")
    said = refusal("serve", "--tls-cert", str(PEM), "--tls-key", other)
    assert said.startswith(f"loraplex: --tls-key {other}: it is not the key of")


@pytest.mark.exhaustive
def test_it_says_when_it_is_ready_over_tls(tmp_path: Path) -> None:
    with running(tmp_path, "--tls-cert", str(PEM), "--tls-key", str(PEM)) as serving:
        assert f"ready at https://127.0.0.1:{serving.port}" in serving.text
        assert stop(serving, signal.SIGTERM) == 0


def test_an_exposed_worker_needs_a_secret(refusal: Refusals) -> None:
    options = ("--host", "0.0.0.0", "--port", "0")
    assert "secret" in refusal("worker", "org/model", *options, code=1)


def test_every_line_of_a_run_is_json(tmp_path: Path) -> None:
    """Lines of the launcher, the router with its operators' actions, the worker and its engine."""
    key = tmp_path / "key"
    key.write_text("admin")
    options = ("--log-format", "json", "--log-requests", "prompts", "--admin-key-file", str(key))
    with running(tmp_path, *options) as serving:
        assert serving.generate().status_code == 200
        url = f"http://127.0.0.1:{serving.port}/v1/adapters/none/pin"
        headers = {"Authorization": "Bearer admin"}
        assert httpx.post(url, headers=headers, trust_env=False).status_code == 404
        assert stop(serving, signal.SIGINT) == 0
        lines = [json.loads(line) for line in serving.text.splitlines()]
    assert {line["process"] for line in lines} == {"loraplex", "router", "worker"}
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert any(line["message"].startswith("router: listening on http") for line in lines)
    (audited,) = (line for line in lines if line["message"] == "audit")
    assert audited["audit"]["action"] == "POST /v1/adapters/none/pin"
    assert any("loraplex.prompt" in line for line in lines if line["message"] == "request")


@pytest.mark.parametrize("command", beyond(1, ["router", "worker"]))
def test_a_failed_start_is_json_too(tmp_path: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = ("--port", str(taken.getsockname()[1]), "--log-format", "json")
        what = ["--worker", "ws://127.0.0.1:9"] if command == "router" else ["demo", *QUICK]
        done = subprocess.run(
            [sys.executable, "-m", "loraplex", command, *what, *place],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 1
    (line,) = map(json.loads, (done.stdout + done.stderr).splitlines())
    assert line["level"] == "critical"
    assert line["message"].startswith("loraplex: ")
    assert "ddress already in use" in line["message"]
