"""A real `serve` takes adapters from an S3 and an HTTPS server, and from no other place there."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from loraplex.launcher.demo import adapter_paths
from loraplex.server.worker.setup import LOAD_THREADS
from tests.adapters.stub_files import FileServer, running_files
from tests.e2e.serving import ROOT, Serving, start_serving

CERTIFICATE = ROOT / "tests/adapters/self_signed.pem"
CALLERS = LOAD_THREADS + 8
KEY_ID, SECRET = "AKIATHISISTHEID", "thisIsTheSecretKey"


@pytest.fixture(scope="module")
def s3() -> Iterator[FileServer]:
    with running_files() as server:
        server.publish("models/team/sql", adapter_paths()["sql"])
        server.publish("private/sql", adapter_paths()["sql"])
        yield server


@pytest.fixture(scope="module")
def web() -> Iterator[FileServer]:
    with running_files(CERTIFICATE) as server:
        server.publish("team/sql", adapter_paths()["sql"])
        yield server


@pytest.fixture(scope="module")
def environ(s3: FileServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    nowhere = str(tmp_path_factory.mktemp("aws") / "none")
    return os.environ | {
        "AWS_ENDPOINT_URL_S3": s3.endpoint,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_CONFIG_FILE": nowhere,
        "AWS_SHARED_CREDENTIALS_FILE": nowhere,
        "SSL_CERT_FILE": str(CERTIFICATE),
    }


@pytest.fixture(scope="module")
def remote(
    web: FileServer, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    server = start_serving(
        *("--cache-dir", str(tmp_path_factory.mktemp("cache"))),
        *("--s3-bucket", "models", "--https-host", f"localhost:{web.port}"),
        *("--adapter", "named=s3:models/team/sql"),
        log=tmp_path_factory.mktemp("serve") / "log",
        environ=environ,
    )
    try:
        yield server
    finally:
        server.process.terminate()
        assert server.process.wait(timeout=240) == 0, server.log.read_text()[-4000:]


def generate(serving: Serving, **parameters: str) -> httpx.Response:
    body = {"inputs": "SELECT", "parameters": {"max_new_tokens": 8, **parameters}}
    return httpx.post(f"{serving.url}/generate", json=body, timeout=240)


def test_the_same_adapter_from_everywhere(remote: Serving, s3: FileServer, web: FileServer) -> None:
    expected = generate(remote, adapter_id="sql")
    assert expected.status_code == 200, expected.text
    digest = expected.headers["x-loraplex-adapter-digest"]
    for parameters in (
        {"adapter_id": "s3://models/team/sql/"},
        {"adapter_id": "models/team/sql", "adapter_source": "s3"},
        {"adapter_id": "named"},
        {"adapter_id": f"https://localhost:{web.port}/team/sql/"},
    ):
        answer = generate(remote, **parameters)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-loraplex-adapter-digest"] == digest
        assert answer.json() == expected.json()
    assert s3.asked["GET", "adapter_model.safetensors"] == 1
    assert web.asked["GET", "adapter_model.safetensors"] == 1


def test_other_places_are_refused(remote: Serving, s3: FileServer, web: FileServer) -> None:
    before = sum(s3.asked.values()) + sum(web.asked.values())
    for name in (
        "s3:private/sql",
        f"https://localhost/{web.port}/team/sql",
        f"https://127.0.0.1:{web.port}/team/sql",
        "https://169.254.169.254/latest/meta-data",
    ):
        answer = generate(remote, adapter_id=name)
        assert (answer.status_code, answer.json()["error_type"]) == (403, "forbidden"), name
    assert sum(s3.asked.values()) + sum(web.asked.values()) == before
    missing = generate(remote, adapter_id="s3:models/nothing")
    assert missing.status_code == 404
    assert SECRET not in remote.log.read_text()


def test_a_source_that_stalls_holds_up_no_other(remote: Serving, s3: FileServer) -> None:
    arrived, gate = threading.Semaphore(0), threading.Event()

    def stall(name: str) -> None:
        arrived.release()
        gate.wait(60)

    s3.before_get = stall
    with ThreadPoolExecutor(CALLERS) as pool:
        try:
            names = [f"s3:models/team/none-{number}" for number in range(CALLERS)]
            asking = [pool.submit(generate, remote, adapter_id=name) for name in names]
            for _ in range(LOAD_THREADS):
                assert arrived.acquire(timeout=240)
            assert generate(remote, adapter_id="pirate").status_code == 200
            assert not any(ask.done() for ask in asking)
        finally:
            gate.set()
            s3.before_get = lambda name: None
        assert {ask.result().status_code for ask in asking} <= {404, 503}


def test_the_commands_take_references(
    environ: dict[str, str], web: FileServer, tmp_path: Path
) -> None:
    for name in ("s3:private/sql", f"https://localhost:{web.port}/team/sql"):
        for action in ("check", "pull"):
            done = subprocess.run(
                [sys.executable, "-m", "loraplex", "adapter", action, name, "--base", "demo"],
                cwd=ROOT,
                env=environ | {"LORAPLEX_CACHE_DIR": str(tmp_path)},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert "can be served" in done.stdout
