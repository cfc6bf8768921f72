"""Adapters come, change and go on a real server while others generate."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.uploads.archive import adapter_files, archive_pieces
from loraplex.launcher.demo import EXAMPLES, adapter_paths
from tests.e2e.commands import Done, adapter_command
from tests.e2e.serving import Serving, start_serving

PROMPT = EXAMPLES[0]
KEY = "e2e-admin-key"
SLOTS = 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, root: Path, watched: Path
) -> Iterator[Serving]:
    """Room for two adapters on the device; an admin key; a file of adapters; a watched folder."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "key").write_text(KEY)
    (folder / "adapters.yaml").write_text("adapters: []\n")
    server = start_serving(
        *("--cache-dir", str(folder / "cache"), "--adapter-root", str(root)),
        *("--adapter-slots", str(SLOTS), "--admin-key-file", str(folder / "key")),
        *("--adapters-file", str(folder / "adapters.yaml"), "--watch-folder", str(watched)),
        log=folder / "log",
    )
    try:
        yield server
    finally:
        server.process.terminate()
        code = server.process.wait(timeout=240)
    assert code == 0, server.log.read_text()[-4000:]
    assert KEY not in server.log.read_text()


@pytest.fixture
def admin(server: Serving) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=240) as client:
        yield client


def put(folder: Path, demo: str) -> Path:
    """The folder now holds this demo adapter, as one replaces files in place."""
    folder.mkdir(exist_ok=True)
    for file in adapter_paths()[demo].iterdir():
        shutil.copyfile(file, folder / f"{file.name}.new")
        (folder / f"{file.name}.new").rename(folder / file.name)
    return folder


def body(adapter: str, tokens: int) -> dict[str, Any]:
    parameters = {"adapter_id": adapter, "max_new_tokens": tokens, "ignore_eos_token": tokens > 50}
    return {"inputs": PROMPT, "parameters": parameters}


def generate(client: httpx.Client, adapter: str, tokens: int = 40) -> str:
    answer = client.post("/generate", json=body(adapter, tokens))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["generated_text"])


def post(client: httpx.Client, name: str, action: str, status: int = 200) -> Any:
    answer = client.post(f"/v1/adapters/{name}/{action}")
    assert answer.status_code == status, answer.text
    return answer.json()


@contextmanager
def streaming(client: httpx.Client, adapter: str, tokens: int) -> Iterator[Iterator[Any]]:
    with client.stream("POST", "/generate_stream", json=body(adapter, tokens)) as answer:
        assert answer.status_code == 200
        yield (
            json.loads(line.removeprefix("data:"))
            for line in answer.iter_lines()
            if line.startswith("data:")
        )


def test_replaced_under_load_unloaded_and_deleted(admin: httpx.Client, root: Path) -> None:
    folder = put(root / "mine", "sql")
    register = {"name": "mine", "ref": f"local:{folder}"}
    shown = admin.post("/v1/adapters", json=register).json()
    assert shown["state"] == "ready", shown
    assert generate(admin, "mine") == generate(admin, "sql")
    long = generate(admin, "mine", 500)
    pirate = generate(admin, "pirate")
    assert pirate != generate(admin, "mine")
    with streaming(admin, "mine", 500) as events:
        next(events)
        put(folder, "pirate")
        assert generate(admin, "mine") == generate(admin, "sql"), "not before it is refreshed"
        refreshed = post(admin, "mine", "refresh")
        assert refreshed["changed"]
        assert refreshed["adapter"]["running"] >= 1, "the stream was to outlive the refresh"
        assert generate(admin, "mine") == pirate
        last = list(events)[-1]
    assert last["generated_text"] == long
    history = [record["digest"] for record in refreshed["adapter"]["history"]]
    assert history == [refreshed["old_digest"], refreshed["new_digest"]]

    assert post(admin, "mine", "load")["resident_on"]
    # Its content has another name, too, which goes first.
    post(admin, "pirate", "unload")
    unloaded = post(admin, "mine", "unload")
    assert unloaded["state"] == "unloaded"
    (worker,) = unloaded["workers"]
    assert (worker["disk"], worker["host"], worker["device"]) == (True, "absent", "absent")
    assert admin.post("/generate", json=body("mine", 4)).status_code == 409
    post(admin, "pirate", "load")
    assert generate(admin, "pirate") == pirate
    assert admin.delete("/v1/adapters/mine").status_code == 200
    assert admin.post("/generate", json=body("mine", 4)).status_code == 410


def test_a_pinned_adapter_survives_pressure(admin: httpx.Client) -> None:
    pinned = post(admin, "json", "pin")
    assert pinned["pinned"]
    worker = pinned["resident_on"]
    for _ in range(2):
        for name in ("pirate", "polite", "sentiment", "summary"):
            generate(admin, name, 4)
            assert admin.get("/v1/adapters/json").json()["resident_on"] == worker
    post(admin, "sql", "pin")
    full = admin.post("/v1/adapters/polite/pin")
    assert full.status_code == 503
    assert "unpin" in full.json()["error"]["message"]
    refused = admin.post("/generate", json=body("polite", 4))
    assert refused.status_code == 503
    assert generate(admin, "json", 4)
    for name in ("json", "sql"):
        assert not post(admin, name, "unpin")["pinned"]
    assert generate(admin, "polite", 4)


def command(server: Serving, *arguments: str, key: str = KEY) -> Done:
    return adapter_command(server, *arguments, key=key)


def test_the_same_from_a_shell(server: Serving, admin: httpx.Client, root: Path) -> None:
    folder = put(root / "shell", "summary")
    done = command(server, "register", "shell", f"local:{folder}")
    assert done.returncode == 0, done.stderr
    head, row = done.stdout.splitlines()
    assert head.split()[:4] == ["NAME", "TENANT", "STATE", "PINNED"]
    assert row.split()[:4] == ["shell", "-", "ready", "no"]
    assert generate(admin, "shell") == generate(admin, "summary")
    listed = json.loads(command(server, "list", "shell", "--json").stdout)
    assert (listed["id"], listed["ref"]) == ("shell", f"local:{folder}")
    assert "unchanged" in command(server, "refresh", "shell").stdout
    both = command(server, "load", "no-such", "shell")
    assert both.returncode == 1
    assert "no adapter is registered as 'no-such'" in both.stderr
    assert "shell" in both.stdout
    assert command(server, "delete", "shell").stdout == "shell deleted\n"
    wrong = command(server, "list", key="wrong")
    assert (wrong.returncode, "admin key" in wrong.stderr) == (1, True)


def upload(client: httpx.Client, name: str, demo: str, **query: Any) -> Any:
    pieces = b"".join(archive_pieces(adapter_files(adapter_paths()[demo])))
    answer = client.put(f"/v1/adapters/{name}", content=pieces, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_uploads_change_a_name_under_a_stream(server: Serving, admin: httpx.Client) -> None:
    first = upload(admin, "policy", "sql", keep=2)
    assert (first["version"], first["missing"]) == (1, {})
    long = generate(admin, "policy", 500)
    with streaming(admin, "policy", 500) as events:
        next(events)
        second = upload(admin, "policy", "pirate")
        assert generate(admin, "policy") == generate(admin, "pirate")
        assert generate(admin, "policy@1") == generate(admin, "sql")
        assert list(events)[-1]["generated_text"] == long
    assert [kept["version"] for kept in second["adapter"]["kept"]] == [1, 2]
    pushed = command(server, "push", "policy", str(adapter_paths()["summary"]))
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.startswith("policy@3 ")
    assert generate(admin, "policy") == generate(admin, "summary")
    assert admin.post("/generate", json=body("policy@1", 4)).status_code == 410
    assert admin.delete("/v1/adapters/policy").status_code == 200


def until_listed(admin: httpx.Client, condition: Any) -> dict[str, Any]:
    for _ in range(1200):
        listed: dict[str, Any] = admin.get("/v1/adapters").json()
        by_name = {adapter["id"]: adapter for adapter in listed["data"]}
        if condition(by_name, listed["file_errors"]):
            return by_name
        time.sleep(0.2)  # polls a condition, bounded
    raise AssertionError(listed)


def test_a_folder_is_watched(admin: httpx.Client, watched: Path) -> None:
    put(watched / "run-1", "sentiment")
    until_listed(admin, lambda names, _: "run-1" in names)
    assert generate(admin, "run-1") == generate(admin, "sentiment")
    put(watched / "run-1", "summary")
    until_listed(admin, lambda names, _: len(names["run-1"]["history"]) == 2)
    assert generate(admin, "run-1") == generate(admin, "summary")
    weights = watched / "run-1" / "adapter_model.safetensors"
    shutil.copytree(watched / "run-1", watched / "run-2")
    (watched / "run-2" / weights.name).write_bytes(weights.read_bytes()[:-100])
    names = until_listed(admin, lambda names, errors: errors)
    assert names["run-2"]["state"] == "broken"
    assert weights.name in names["run-2"]["error"]
    shutil.copyfile(weights, watched / "run-2" / weights.name)
    until_listed(admin, lambda names, errors: not errors)
    assert generate(admin, "run-2") == generate(admin, "summary")
    for name in ("run-1", "run-2"):
        shutil.rmtree(watched / name)
    until_listed(admin, lambda names, _: not names.keys() & {"run-1", "run-2"})
    assert admin.post("/generate", json=body("run-1", 4)).status_code == 410


def test_the_file_is_followed(server: Serving, admin: httpx.Client, root: Path) -> None:
    file = server.log.parent / "adapters.yaml"

    def until(condition: Any) -> dict[str, Any]:
        return until_listed(admin, condition)

    put(root / "declared", "sentiment")
    entry = {"name": "declared", "ref": f"local:{root / 'declared'}", "pin": True}
    wrong = {"name": "wrong", "ref": f"local:{root / 'not-there'}"}
    file.write_text(json.dumps({"adapters": [entry, wrong]}))
    shown = until(lambda names, errors: "declared" in names and errors)
    assert (shown["declared"]["origin"], shown["declared"]["pinned"]) == ("file", True)
    assert shown["wrong"]["state"] == "broken"
    assert generate(admin, "declared") == generate(admin, "sentiment")
    file.write_text("adapters: [")
    until(lambda names, errors: "adapters.yaml" in "".join(errors))
    assert generate(admin, "declared") == generate(admin, "sentiment")
    file.write_text("adapters: []")
    until(lambda names, errors: "declared" not in names and not errors)
    assert admin.post("/generate", json=body("declared", 4)).status_code == 410
