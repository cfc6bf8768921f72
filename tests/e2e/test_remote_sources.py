"""A real `serve` takes adapters from folders, a Hub, an S3 and an HTTPS server, in the forms that
people have, and from no other place. What is wrong with one is said before anybody asks."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from loraplex.adapters.judge import judge_folder
from loraplex.launcher.demo import adapter_paths
from loraplex.server.worker.setup import LOAD_THREADS
from tests.adapters.sharded import cut
from tests.adapters.stub_files import FileServer, running_files
from tests.adapters.stub_hub import StubHub, running_hub
from tests.e2e.serving import ROOT, Serving, start_serving
from tests.grids import sparse

CERTIFICATE = ROOT / "tests/adapters/self_signed.pem"
CALLERS = LOAD_THREADS + 8
WEIGHTS = "adapter_model.safetensors"
FORMS = ("checkpoint-500", "several files", "inner model", "runs/compiled/final")
PATIENCE_S = 240
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
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One adapter in several forms, a folder each."""
    top = tmp_path_factory.mktemp("run")
    for form in FORMS:
        folder = top / form.replace(" ", "-")
        shutil.copytree(adapter_paths()["sql"], folder)
        tensors = load_file(folder / WEIGHTS)
        if form == "inner model":
            tensors = {
                n.replace("model.model.model.", "model.model."): t for n, t in tensors.items()
            }
        elif form == "runs/compiled/final":
            tensors = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    cut(top / "several-files", 3)
    return top


@pytest.fixture(scope="module")
def hub(forms: Path) -> Iterator[StubHub]:
    with running_hub() as stub:
        stub.publish("org/sql", forms)
        yield stub


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of adapters: `cut` lacks layers, `bad` has what nobody serves."""
    folder = tmp_path_factory.mktemp("wrong")
    for name in ("cut", "bad"):
        shutil.copytree(adapter_paths()["summary"], folder / name)
    weights = folder / "cut" / WEIGHTS
    kept = {name: t for name, t in load_file(weights).items() if ".layers.0." in name}
    save_file(kept, weights, {"format": "pt"})
    config = folder / "bad" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_qalora": True}))
    return folder


@pytest.fixture(scope="module")
def environ(
    s3: FileServer, hub: StubHub, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    nowhere = str(tmp_path_factory.mktemp("aws") / "none")
    return os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": "",
        "AWS_ENDPOINT_URL_S3": s3.endpoint,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_CONFIG_FILE": nowhere,
        "AWS_SHARED_CREDENTIALS_FILE": nowhere,
        "SSL_CERT_FILE": str(CERTIFICATE),
    }


@pytest.fixture(scope="module")
def remote(
    web: FileServer,
    forms: Path,
    wrong: Path,
    environ: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    server = start_serving(
        *("--cache-dir", str(tmp_path_factory.mktemp("cache"))),
        *("--s3-bucket", "models", "--https-host", f"localhost:{web.port}"),
        *("--adapter", "named=s3:models/team/sql", "--adapter", f"here={forms / FORMS[0]}"),
        *("--adapter", f"cut={wrong / 'cut'}", "--adapter", f"bad={wrong / 'bad'}"),
        *("--adapter", "gone=hub:acme/never-there"),
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
    weights = ("GET", "adapter_model.safetensors")
    before = s3.asked[weights], web.asked[weights]
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
    assert s3.asked[weights] - before[0] <= 1
    assert web.asked[weights] - before[1] <= 1


def test_other_places_are_refused(remote: Serving, s3: FileServer, web: FileServer) -> None:
    generate(remote, adapter_id="named")  # else the start may still look for what is registered
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


@pytest.mark.parametrize(("source", "action"), sparse(["s3", "https"], ["check", "pull"]))
def test_the_commands_take_references(
    environ: dict[str, str], web: FileServer, tmp_path: Path, source: str, action: str
) -> None:
    name = "s3:private/sql" if source == "s3" else f"https://localhost:{web.port}/team/sql"
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", "adapter", action, name, "--base", "demo"],
        cwd=ROOT,
        env=environ | {"LORAPLEX_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "can be served" in done.stdout


@pytest.mark.parametrize("form", FORMS)
def test_every_form_answers_as_the_plain_one(form: str, forms: Path, remote: Serving) -> None:
    folder = form.replace(" ", "-")
    reference = f"hub:org/sql/{folder}@main"
    answer = generate(remote, adapter_id=reference)
    assert answer.status_code == 200, answer.text
    digest = answer.headers["x-loraplex-adapter-digest"]
    assert digest == judge_folder(forms / folder).manifest.digest
    assert answer.text == generate(remote, adapter_id="here").text
    body = {"model": reference, "prompt": "SELECT", "max_tokens": 4}
    by_model = httpx.post(f"{remote.url}/v1/completions", json=body, timeout=240)
    assert by_model.status_code == 200, by_model.text
    assert by_model.headers["x-loraplex-adapter-digest"] == digest


def test_what_is_wrong_is_said_before_anybody_asks(remote: Serving) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        listed = httpx.get(f"{remote.url}/v1/adapters", timeout=240).json()["data"]
        told = {one["id"]: one for one in listed if one["id"] in ("gone", "bad", "cut")}
        if all(one["digest"] or one["error"] for one in told.values()):
            break
        assert time.monotonic() < deadline, told
        time.sleep(0.05)  # polls a condition, bounded by the deadline
    assert "acme/never-there" in told["gone"]["error"]
    assert "use_qalora" in told["bad"]["error"]
    assert (told["cut"]["error"], told["cut"]["partial"]["layers"]) == (None, 1)
    assert all(not one["resident_on"] for one in told.values())
    log = remote.log.read_text()
    for name in ("gone", "bad"):
        assert log.count(f"adapter {name} cannot be loaded: {told[name]['error']}") == 1
    assert log.count(f"(cut) is {told['cut']['partial']['message']}") == 1
