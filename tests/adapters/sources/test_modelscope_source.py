"""The ModelScope source against a server of its API on 127.0.0.1, with a storage beside it."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from loraplex.adapters.common.retries import RetryPolicy
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef, RefSource, parse_ref
from loraplex.adapters.sources.base import Source
from loraplex.adapters.sources.modelscope import MAX_ENTRIES, ModelScopeSource
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import ALL_PROJECTIONS, small_base, write_adapter
from tests.adapters.refusals import refusal

BASE = small_base(num_layers=4)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COMMIT = "c" * 40
HASH = "0" * 64


class ModelScope(ThreadingHTTPServer):
    """repositories: (name, revision) -> files. hashes: whether listings have them. What is asked
    for under /storage/ is what the API redirects to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[tuple[str, str], dict[str, bytes]] = {}
        self.asked: Counter[tuple[str, str]] = Counter()
        self.headers: list[dict[str, str]] = []
        self.ranges: list[str] = []
        self.hashes = True
        self.statuses: list[int] = []  # of the next answers, before any real one
        self.cut_after = 0
        self.listing: dict[str, Any] | None = None
        self.redirect = ""
        self.swapped: bytes | None = None  # what the storage sends instead

    def publish(self, name: str, folder: Path, revision: str = "master") -> None:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.repositories[name, revision] = files

    def entries(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        hashed = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        found: list[dict[str, Any]] = [
            {
                "Name": name,
                "Path": name,
                "Type": "blob",
                "Size": len(data),
                "Sha256": hashed[name] if self.hashes else "",
                "Revision": COMMIT,
            }
            for name, data in files.items()
        ]
        return [*found, {"Name": "runs", "Path": "runs", "Type": "tree", "Size": 0}]


class _Handler(BaseHTTPRequestHandler):
    server: ModelScope
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub, url = self.server, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        hub.headers.append(dict(self.headers))
        if hub.statuses:
            self._send(hub.statuses.pop(0), b"{}")
        elif url.path.startswith("/storage/"):
            self._content(json.loads(bytes.fromhex(url.path.removeprefix("/storage/"))))
        else:
            name, _, route = url.path.removeprefix("/api/v1/models/").partition("/repo")
            self._api(name, route, query)

    def _api(self, name: str, route: str, query: dict[str, str]) -> None:
        hub, revision = self.server, query["Revision"]
        known = hub.repositories.get((name, revision))
        hub.asked[route or "content", query.get("FilePath", revision)] += 1
        if known is None and revision == COMMIT:  # a commit of a branch that is there
            known, revision = hub.repositories[name, "master"], "master"
        if known is None:
            self._json({"Code": 10010205001, "Message": "not found", "Data": None}, 404)
        elif route == "/files":
            files = {"Files": hub.entries(known), "LatestCommitter": {"Id": ""}}
            self._json(hub.listing or {"Code": 200, "Success": True, "Data": files})
        else:
            place = json.dumps([name, revision, query["FilePath"]]).encode().hex()
            location = hub.redirect or f"{hub.url}/storage/{place}"
            self._send(302, b"", location=location)

    def _content(self, place: list[str]) -> None:
        hub = self.server
        data = hub.repositories[place[0], place[1]][place[2]]
        data = data if hub.swapped is None else hub.swapped
        given = self.headers.get("range")
        start = int(given.removeprefix("bytes=").removesuffix("-")) if given else 0
        if given:
            hub.ranges.append(given)
        self.send_response(206 if given else 200)
        if given:
            self.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("content-length", str(len(data) - start))
        self.end_headers()
        if hub.cut_after and place[2] == WEIGHTS:
            self.wfile.write(data[start : start + hub.cut_after])
            hub.cut_after = 0
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode())

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ModelScope]:
    with ModelScope() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "published", BASE, rank=32, targets=ALL_PROJECTIONS)


def source_of(hub: ModelScope, *owners: str) -> ModelScopeSource:
    return ModelScopeSource(owners or ["acme"], hub.url, timeout_s=5.0)


def store_of(source: ModelScopeSource, tmp_path: Path) -> AdapterStore:
    retries = RetryPolicy(sleep=lambda seconds: None)
    sources: dict[RefSource, Source] = {"modelscope": source}
    return AdapterStore(tmp_path / "store", BASE, sources, clock=lambda: 0.0, retries=retries)


def refused(store: AdapterStore, text: str) -> AdapterError:
    error = refusal(lambda: store.admit(parse_ref(text), "a-callers-token"))
    assert error is not None
    for word in ("127.0.0.1", "a-callers-token"):
        assert word not in error.message
    return error


def test_an_adapter_is_pinned_and_only_what_is_needed_is_fetched(
    hub: ModelScope, folder: Path, tmp_path: Path
) -> None:
    (folder / "README.md").write_text("x")
    hub.publish("acme/sql", folder)
    source = source_of(hub)
    store = store_of(source, tmp_path)
    ref = parse_ref("acme/sql", "modelscope")
    assert ref == AdapterRef("modelscope", "acme/sql")
    manifest = store.admit(ref, "a-callers-token")
    pinned = source.resolve(ref, None)
    assert pinned.revision is not None
    assert pinned.revision.startswith("master~")
    assert store.admit(pinned, None) == store.admit(ref, None) == manifest
    fetched = {name for (route, name), _ in hub.asked.items() if route == "content"}
    assert fetched == {CONFIG, WEIGHTS}
    assert hub.asked["content", WEIGHTS] == 1
    for headers in hub.headers:
        assert "a-callers-token" not in str(headers)
        assert not {"authorization", "cookie"} & {name.lower() for name in headers}


def test_revisions_are_contents_of_their_own(hub: ModelScope, folder: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", BASE, rank=8, seed=3)
    hub.publish("acme/sql", folder)
    hub.publish("acme/sql", other, "v2.0")
    store = store_of(source_of(hub), tmp_path)
    one, two = (store.admit(parse_ref(f"modelscope:acme/sql{r}"), None) for r in ("", "@v2.0"))
    assert one.digest != two.digest
    assert store.admit(parse_ref("modelscope:acme/sql@master"), None) == one
    assert refused(store, "modelscope:acme/sql@v3").code == "not_found"


def test_a_pinned_content_is_served_while_it_lies_there(
    hub: ModelScope, folder: Path, tmp_path: Path
) -> None:
    hub.publish("acme/sql", folder)
    source = source_of(hub)
    pinned = source.resolve(parse_ref("modelscope:acme/sql"), None)
    hub.publish("acme/sql", write_adapter(tmp_path / "other", BASE, rank=8, seed=3))
    error = refusal(lambda: source_of(hub).resolve(pinned, None))
    assert error is not None
    assert (error.code, "has changed" in error.message) == ("unavailable", True)


def test_a_file_that_is_not_what_was_listed_is_not_admitted(
    hub: ModelScope, folder: Path, tmp_path: Path
) -> None:
    """It has the size of another, as if the branch had moved between list and fetch."""
    hub.publish("acme/sql", folder)
    size = len(hub.repositories["acme/sql", "master"][CONFIG])
    source, target = source_of(hub), tmp_path / "fetched"
    target.mkdir()
    pinned = source.resolve(parse_ref("modelscope:acme/sql"), None)
    hub.swapped = b" " * size
    error = refusal(lambda: source.fetch_file(pinned, None, CONFIG, target))
    assert error is not None
    assert error.code == "unavailable"
    assert [*target.iterdir()] == []


def test_files_without_hashes_are_fetched_by_their_commits(
    hub: ModelScope, folder: Path, tmp_path: Path
) -> None:
    hub.publish("acme/sql", folder)
    hub.hashes = False
    assert store_of(source_of(hub), tmp_path).admit(parse_ref("modelscope:acme/sql"), None)


def test_a_broken_download_goes_on(hub: ModelScope, folder: Path, tmp_path: Path) -> None:
    hub.publish("acme/sql", folder)
    hub.cut_after = 4096
    store = store_of(source_of(hub), tmp_path)
    assert store.admit(parse_ref("modelscope:acme/sql"), None)
    assert hub.ranges == ["bytes=4096-"]


def test_a_busy_hub_is_asked_again(hub: ModelScope, folder: Path, tmp_path: Path) -> None:
    hub.publish("acme/sql", folder)
    hub.statuses = [503, 429]
    assert store_of(source_of(hub), tmp_path).admit(parse_ref("modelscope:acme/sql"), None)


def test_callers_at_the_same_time_share_one_fetch(
    hub: ModelScope, folder: Path, tmp_path: Path
) -> None:
    hub.publish("acme/sql", folder)
    store = store_of(source_of(hub), tmp_path)
    with ThreadPoolExecutor(6) as threads:
        ref = parse_ref("modelscope:acme/sql")
        manifests = [*threads.map(lambda _: store.admit(ref, None), range(6))]
    assert len({manifest.digest for manifest in manifests}) == 1
    assert hub.asked["content", WEIGHTS] == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "forbidden"), (403, "forbidden"), (404, "not_found"), (500, "unavailable")],
)
def test_refusals_of_the_hub(
    hub: ModelScope, folder: Path, tmp_path: Path, status: int, code: str
) -> None:
    hub.publish("acme/sql", folder)
    hub.statuses = [status] * 99
    assert refused(store_of(source_of(hub), tmp_path), "modelscope:acme/sql").code == code


LISTINGS: list[tuple[Any, str]] = [
    ({"Code": 10010205001, "Message": "no", "Data": None}, "not_found"),
    ({"Code": 200, "Data": None}, "not_found"),
    ({"Code": 200, "Data": {"Files": [{"Path": WEIGHTS, "Size": 5}]}}, "invalid"),
    (
        {"Code": 200, "Data": {"Files": [{"Path": WEIGHTS, "Size": -5, "Sha256": HASH}]}},
        "invalid",
    ),
    ({"Code": 200, "Data": {"Files": [{"Path": f"{i}"} for i in range(MAX_ENTRIES)]}}, "invalid"),
    ({"Files": []}, "unavailable"),
    ({"Code": 200, "Data": {"Files": [{"Path": 5}]}}, "unavailable"),
    ({"Code": 200, "Data": "x" * (9 << 20)}, "unavailable"),
]


@pytest.mark.parametrize(("listing", "code"), LISTINGS, ids=[str(i) for i in range(len(LISTINGS))])
def test_listings_that_cannot_be_used(
    hub: ModelScope, folder: Path, tmp_path: Path, listing: Any, code: str
) -> None:
    hub.publish("acme/sql", folder)
    hub.listing = listing
    error = refused(store_of(source_of(hub), tmp_path), "modelscope:acme/sql")
    assert error.code == code
    if code == "invalid":
        (violation,) = error.violations
        assert violation.code in ("unpinned_file", "too_many_files")


@pytest.mark.parametrize("location", ["http://127.0.0.1:9/x", "ftp://127.0.0.1/x", "//[/x", ""])
def test_redirects_that_lead_nowhere(
    hub: ModelScope, folder: Path, tmp_path: Path, location: str
) -> None:
    hub.publish("acme/sql", folder)
    hub.redirect = location or f"{hub.url}/api/v1/models/acme/sql/repo?Revision=master&FilePath=x"
    error = refused(store_of(source_of(hub), tmp_path), "modelscope:acme/sql")
    assert error.code == "unavailable"


def test_other_owners_are_refused_before_anybody_is_asked(
    hub: ModelScope, folder: Path, tmp_path: Path
) -> None:
    hub.publish("acme/sql", folder)
    store = store_of(source_of(hub, "umbrella"), tmp_path)
    error = refused(store, "modelscope:acme/sql")
    assert (error.code, "--modelscope-owner" in error.message) == ("forbidden", True)
    assert not hub.headers
    assert store_of(source_of(hub, "*"), tmp_path / "any").admit(
        parse_ref("modelscope:acme/sql"), None
    )
