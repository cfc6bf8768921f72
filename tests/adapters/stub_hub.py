"""A Hub of a few endpoints on 127.0.0.1: what huggingface_hub asks for to resolve and fetch."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """commits: sha -> files. branches: name -> sha. token: None = public. faults: other answers.

    gated: all may look, but only `granted` tokens open the files.
    """

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    token: str | None = None
    gated: bool = False
    granted: frozenset[str] = frozenset()
    faults: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    truncate: str | None = None
    truncations: int = 1 << 30


class StubHub:
    """repos: by `owner/name`. requests: how often each method and path was asked for."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.repos: dict[str, Repo] = {}
        self.requests: Counter[tuple[str, str]] = Counter()
        self.tokens: set[str] = set()
        self.ranges: list[str] = []
        self.body_bytes: Counter[str] = Counter()
        # Set, a truncated body's connection stays open until it is released.
        self.stall: threading.Event | None = None
        self.gate = threading.Event()
        self.gate.set()

    def publish(self, name: str, folder: Path, branch: str = "main", **options: Any) -> str:
        """Adds a commit with the folder's files and moves the branch to it; returns its sha."""
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        parts = b"".join(n.encode() + data for n, data in sorted(files.items()))
        sha = hashlib.sha1(parts, usedforsecurity=False).hexdigest()
        repo = self.repos.setdefault(name, Repo({}, {}, **options))
        repo.commits[sha] = files
        repo.branches[branch] = sha
        return sha

    def downloads(self, file: str) -> int:
        return sum(
            count
            for (method, path), count in self.requests.items()
            if method == "GET" and path.endswith(f"/{file}")
        )


class _Handler(BaseHTTPRequestHandler):
    hub: StubHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests[self.command, path] += 1
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        assert self.hub.gate.wait(60)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
            repo = self._repo(name, "api")
            if repo is not None:
                self._model(name, repo, rest[1] if rest[:1] == ["revision"] else "main")
            return
        name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        repo = self._repo(name, file)
        if repo is not None:
            self._file(repo, revision, file)

    def _repo(self, name: str, what: str) -> Repo | None:
        """The repository, if this caller may read it and it has no fault here; else it answers."""
        repo = self.hub.repos.get(name)
        authorization = self.headers.get("Authorization", "")
        if repo is None or (repo.token and authorization != f"Bearer {repo.token}"):
            given = "Bearer invalid" in authorization
            code = {} if given else {"X-Error-Code": "RepoNotFound"}
            text = "Invalid credentials" if given else "Repository not found"
            self._send(401, text.encode(), code | {"X-Error-Message": text})
            return None
        fault = repo.faults.get(what)
        if fault is not None:
            self._send(fault[0], b"{}", fault[1])
            return None
        granted = authorization.removeprefix("Bearer ") in repo.granted
        if repo.gated and what != "api" and not granted:
            self._send(403, b"gated", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
            return None
        return repo

    def _model(self, name: str, repo: Repo, revision: str) -> None:
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [
            {"rfilename": file, "size": len(data), "blobId": hashlib.sha256(data).hexdigest()}
            for file, data in repo.commits[sha].items()
        ]
        gated = "manual" if repo.gated else False
        body = {"id": name, "sha": sha, "siblings": siblings, "tags": [], "gated": gated}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: Repo, revision: str, file: str) -> None:
        sha = repo.branches.get(revision, revision)
        data = repo.commits.get(sha, {}).get(file)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        etag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": sha}
        wanted = self.headers.get("Range")
        if wanted and self.command == "GET":
            self.hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            etag["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            broken = self._is_broken(repo, file)
            self._send(206, b"" if broken else data[start:], etag, len(data) - start)
            return
        broken = self._is_broken(repo, file)
        self._send(200, data[: len(data) // 2] if broken else data, etag, len(data))

    def _is_broken(self, repo: Repo, file: str) -> bool:
        """Whether only a part of this body is to be sent, or none of a rest."""
        if repo.truncate != file or repo.truncations <= 0 or self.command != "GET":
            return False
        repo.truncations -= 1
        self.close_connection = True
        return True

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], announced: int | None = None
    ) -> None:
        self.send_response(status)
        length = len(body) if announced is None else announced
        for name, value in ({"Content-Length": str(length)} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.hub.body_bytes[urlsplit(self.path).path.rpartition("/")[2]] += len(body)
            self.wfile.flush()
            if length > len(body) and self.hub.stall is not None:
                self.hub.stall.wait(60)


@contextmanager
def running_hub() -> Iterator[StubHub]:
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.hub = StubHub(server.server_port)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield handler.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)
