"""A model from the Hub: pinned, only the wanted files; one sentence for each thing that fails."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loraplex.server.worker.process.model_source import ModelError, find_model
from tests.server.worker.worker_process import ROOT, write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Hub(ThreadingHTTPServer):
    """The few routes of a Hub that downloading a model uses. Repositories: name -> files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            self._info(path.removeprefix("/api/models/"))
            return
        repo, _, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        content = self.server.repositories.get(repo, {}).get(name)
        if repo in self.server.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif repo not in self.server.repositories:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(200, content, headers, with_body)
            if with_body:
                self.server.fetched.append(name)

    def _info(self, path: str) -> None:
        repo, _, revision = path.partition("/revision/")
        if repo in self.server.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif repo not in self.server.repositories:
            self._send(401, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("", "main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            files = self.server.repositories[repo]
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            info = {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False}
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def model_files(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in write_model(folder).iterdir()}
    return files | {"README.md": b"text", "pytorch_model.bin": b"pickle", "run.py": b"code"}


def find(hub: Hub, home: Path, text: str, revision: str | None = None) -> str:
    """`find_model` in a process of its own, as the Hub library reads its settings when imported."""
    code = (
        "import sys\n"
        "from loraplex.server.worker.process.model_source import ModelError, find_model\n"
        f"try: print(find_model({text!r}, {revision!r}).path)\n"
        "except ModelError as error: sys.exit(str(error))"
    )
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return (done.stdout or done.stderr).strip()


def test_only_safetensors_json_and_tokenizer_files_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/model"] = model_files(tmp_path / "model")
    path = Path(find(hub, tmp_path / "home", "org/model"))
    wanted = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {file.name for file in path.iterdir()} == wanted
    assert set(hub.fetched) == wanted
    assert path.name == COMMIT


def test_shards_are_those_of_the_index(hub: Hub, tmp_path: Path) -> None:
    files = model_files(tmp_path / "model")
    weights = files.pop("model.safetensors")
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    files |= dict.fromkeys((*SHARDS, "consolidated.safetensors"), weights)
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.repositories["org/model"] = files
    path = Path(find(hub, tmp_path / "home", "org/model"))
    assert set(SHARDS) < {file.name for file in path.iterdir()}
    assert "consolidated.safetensors" not in hub.fetched


def test_without_the_hub_an_earlier_download_is_used(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/model"] = model_files(tmp_path / "model")
    first = find(hub, tmp_path / "home", "org/model")
    hub.repositories.clear()
    hub.server_close()
    hub.fetched.clear()
    assert find(hub, tmp_path / "home", "org/model") == first


def test_what_fails_is_said_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    config = model_files(tmp_path / "model")["config.json"]
    hub.repositories["org/pickle"] = {"config.json": config, "pytorch_model.bin": b"x"}
    hub.gated.add("org/gated")
    home = tmp_path / "home"
    hub.repositories["org/data"] = {"data.csv": b"x"}
    index = b'{"weight_map": {"a": "\xff"}}'
    hub.repositories["org/index"] = {"config.json": config, "model.safetensors.index.json": index}
    hub.repositories["org/lora"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}
    hub.repositories["org/gguf"] = {"config.json": config, "q4.gguf": b"", "README.md": b""}
    assert "has only pytorch_model.bin" in find(hub, home, "org/pickle")
    assert "org/lora is a LoRA adapter, not a base model" in find(hub, home, "org/lora")
    assert "org/gguf has its weights in GGUF (q4.gguf)" in find(hub, home, "org/gguf")
    assert "no config.json" in find(hub, home, "org/data")
    assert "index.json cannot be read" in find(hub, home, "org/index")
    assert "no model on the Hub" in find(hub, home, "org/absent")
    assert "is gated" in find(hub, home, "org/gated")
    assert "no revision 'v9'" in find(hub, home, "org/pickle", "v9")


def test_what_is_not_served_is_said_before_weights_come(hub: Hub, tmp_path: Path) -> None:
    other = b'{"model_type": "jamba", "mamba_d_state": 16}'
    hub.repositories["org/jamba"] = {"config.json": other, "model.safetensors": b"x"}
    said = find(hub, tmp_path / "home", "org/jamba")
    needs = "it needs state-space layers (Mamba's)"
    assert said == f"org/jamba: model type 'jamba' is not served: {needs}"
    assert hub.fetched == ["config.json"]


def test_folders(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models--org--name" / "snapshots" / COMMIT)
    assert find_model(str(folder), None).names[0] == "org/name"
    plain = write_model(tmp_path / "llama")
    found = find_model(str(plain), None)
    assert (found.path, found.names[0], found.revision) == (plain, "llama", None)
    link = tmp_path / "llama-3"
    link.symlink_to(plain)
    assert find_model(f"{link}/", None).names == ("llama-3", "llama")
    with pytest.raises(ModelError, match="--revision"):
        find_model(str(plain), "main")
    with pytest.raises(ModelError, match="no folder"):
        find_model(str(tmp_path / "absent"), None)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"model\.gguf is a file; a model is a folder"):
        find_model(str(tmp_path / "model.gguf"), None)
