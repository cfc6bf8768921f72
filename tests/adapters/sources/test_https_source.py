"""The HTTPS source against a TLS server with a self-signed certificate: who may be asked, and how.

The server listens on 127.0.0.1 under the name `adapters.test`, which only the tests' lookup knows.
"""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loraplex.adapters.common.retries import RetryPolicy
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import AdapterRef, parse_ref
from loraplex.adapters.sources.https import HttpsSource
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import ALL_PROJECTIONS, small_base, write_adapter
from tests.adapters.refusals import refusal, violation_codes
from tests.adapters.stub_files import Fault, FileServer, running_files

BASE = small_base(num_layers=8)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CERTIFICATE = Path(__file__).parents[1] / "self_signed.pem"


@pytest.fixture
def web() -> Iterator[FileServer]:
    with running_files(CERTIFICATE) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "published", BASE, rank=32, targets=ALL_PROJECTIONS)


def trusted() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def here(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def source_of(web: FileServer, timeout_s: float = 5.0, **options: Any) -> HttpsSource:
    options = dict[str, Any](certificates=trusted(), lookup=here) | options
    return HttpsSource([f"adapters.test:{web.port}"], timeout_s, **options)


def ref_of(web: FileServer, path: str = "team/a") -> AdapterRef:
    return AdapterRef("https", f"adapters.test:{web.port}/{path}")


def store_of(
    source: HttpsSource, tmp_path: Path, limits: AdapterLimits | None = None
) -> AdapterStore:
    retries = RetryPolicy(sleep=lambda seconds: None)
    return AdapterStore(
        tmp_path / "store", BASE, {"https": source}, limits, clock=lambda: 0.0, retries=retries
    )


def kept(tmp_path: Path) -> list[str]:
    """What is admitted: what is being fetched lies apart."""
    files = (path for path in (tmp_path / "store").rglob("*") if path.is_file())
    return sorted(path.name for path in files if "staging" not in path.parts)


def refused(store: AdapterStore, ref: AdapterRef) -> AdapterError:
    error = refusal(lambda: store.admit(ref, "a-callers-token"))
    assert error is not None
    for word in ("127.0.0.1", "adapters.test", "a-callers-token"):
        assert word not in error.message
    return error


def test_an_adapter_is_pinned_and_only_what_is_needed_is_fetched(
    web: FileServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (folder / "README.md").write_text("x")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    web.publish("team/a", folder)
    source = source_of(web)
    store = store_of(source, tmp_path)
    text = f"https://adapters.test:{web.port}/team/a/"
    manifest = store.admit(parse_ref(text), "a-callers-token")
    assert manifest.chat_template == "{{ messages }}"
    got = {name for method, name in web.asked if method == "GET"}
    assert got == {CONFIG, WEIGHTS, "chat_template.jinja"}
    pinned = source.resolve(ref_of(web), None)
    assert store.admit(pinned, None) == store.admit(ref_of(web), None) == manifest
    assert web.asked["GET", WEIGHTS] == 1
    for headers in web.headers:
        assert headers["host"] == f"adapters.test:{web.port}"
        assert "a-callers-token" not in str(headers)
        assert "authorization" not in {name.lower() for name in headers}


@pytest.mark.parametrize("hosts", [["other.test"], ["adapters.test"], ["adapters.test:1"]])
def test_other_hosts_and_ports_are_refused_before_they_are_looked_up(
    hosts: list[str], web: FileServer, folder: Path, tmp_path: Path
) -> None:
    web.publish("team/a", folder)

    def lookup(host: str, port: int) -> list[str]:
        raise AssertionError

    store = store_of(HttpsSource(hosts, certificates=trusted(), lookup=lookup), tmp_path)
    assert refused(store, ref_of(web)).code == "forbidden"
    assert not web.asked


@pytest.mark.parametrize(
    "addresses",
    [
        *(["127.0.0.1"], ["10.1.2.3"], ["192.168.0.1"], ["172.16.0.1"], ["169.254.169.254"]),
        *(["0.0.0.0"], ["100.64.0.1"], ["224.0.0.1"], ["255.255.255.255"], ["::1"], ["fe80::1%lo"]),
        *(["fd00::1"], ["::ffff:10.0.0.1"], ["64:ff9b::a00:1"], ["2002:a00:1::"], ["::"]),
        # One of several: the name server must not choose.
        ["93.184.215.14", "127.0.0.1"],
    ],
)
def test_private_addresses_are_refused_unless_that_very_port_is_listed(
    addresses: list[str], tmp_path: Path
) -> None:
    source = HttpsSource(["adapters.test"], lookup=lambda host, port: addresses)
    error = refusal(lambda: source.resolve(AdapterRef("https", "adapters.test/a"), None))
    assert error is not None
    assert error.code == "forbidden"
    assert "private address" in error.message
    assert not any(address in error.message for address in addresses)


def test_the_address_that_was_judged_is_the_one_connected_to(
    web: FileServer, folder: Path, tmp_path: Path
) -> None:
    """The name means nothing to this machine: only the looked-up address can have been used."""
    web.publish("team/a", folder)
    assert store_of(source_of(web), tmp_path).admit(ref_of(web), None).ranks == (32,)


def test_an_address_that_nobody_answers_at_is_passed_over(
    web: FileServer, folder: Path, tmp_path: Path
) -> None:
    web.publish("team/a", folder)
    source = source_of(web, lookup=lambda host, port: ["127.0.0.2", "127.0.0.1"])
    assert store_of(source, tmp_path).admit(ref_of(web), None).ranks == (32,)


def test_a_certificate_of_another_host_is_refused(
    web: FileServer, folder: Path, tmp_path: Path
) -> None:
    web.publish("team/a", folder)
    source = HttpsSource([f"evil.test:{web.port}"], certificates=trusted(), lookup=here)
    ref = AdapterRef("https", f"evil.test:{web.port}/team/a")
    assert refused(store_of(source, tmp_path), ref).code == "unavailable"
    strangers = source_of(web, certificates=None)
    assert refused(store_of(strangers, tmp_path), ref_of(web)).code == "unavailable"
    assert not web.asked


def test_a_name_that_means_nothing(web: FileServer, tmp_path: Path) -> None:
    def unknown(host: str, port: int) -> list[str]:
        raise OSError

    def empty(host: str, port: int) -> list[str]:
        return []

    for lookup in (unknown, empty):
        store = store_of(source_of(web, lookup=lookup), tmp_path)
        assert refused(store, ref_of(web)).code == "unavailable"


@pytest.mark.parametrize(
    "text", ["", "https://host", "host/path", "host:", "host:0", "host:70000", "HOST", "a b", "u@h"]
)
def test_bad_hosts(text: str) -> None:
    error = refusal(lambda: HttpsSource([text]))
    assert error is not None
    assert "--https-host" in error.message


class Answer(NamedTuple):
    """What the server answers, and what is made of it."""

    status: int
    code: str
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()


ANSWERS = [
    Answer(204, "unavailable", 1.0),
    Answer(302, "not_found", None, (("Location", "https://adapters.test/x"),)),
    Answer(401, "forbidden"),
    Answer(403, "forbidden"),
    Answer(418, "not_found"),
    Answer(429, "unavailable", 7.0, (("Retry-After", "7"),)),
    Answer(429, "unavailable", 1.0),
    Answer(500, "unavailable", 1.0),
    Answer(503, "unavailable", 300.0, (("Retry-After", "9999999"),)),
]


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_statuses(
    method: str, answer: Answer, web: FileServer, folder: Path, tmp_path: Path
) -> None:
    web.publish("team/a", folder)
    fault = Fault("status", answer.status, "x", answer.headers, method=method)
    web.faults[WEIGHTS] = fault
    error = refused(store_of(source_of(web), tmp_path), ref_of(web))
    assert (error.code, error.retry_after_s) == (answer.code, answer.retry_after_s)
    assert kept(tmp_path) == []


def test_missing(web: FileServer, folder: Path, tmp_path: Path) -> None:
    store = store_of(source_of(web), tmp_path)
    assert refused(store, ref_of(web)).code == "not_found"
    (folder / CONFIG).unlink()
    web.publish("team/b", folder)
    assert violation_codes(lambda: store.admit(ref_of(web, "team/b"), None)) == {"missing_file"}


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("kind", ["cut", "stall"])
def test_a_broken_download_goes_on_where_it_broke(
    kind: str, weak: bool, web: FileServer, folder: Path, tmp_path: Path
) -> None:
    web.weak = weak
    web.publish("team/a", folder)
    size = (folder / WEIGHTS).stat().st_size
    web.faults[WEIGHTS] = Fault(kind, after=70_000, times=2 if kind == "stall" else 4)
    store = store_of(source_of(web, timeout_s=2.0), tmp_path)
    manifest = store.admit(ref_of(web), None)
    content = tmp_path / "store" / BASE.digest[:32] / "content" / manifest.digest / WEIGHTS
    assert content.read_bytes() == (folder / WEIGHTS).read_bytes()
    assert web.body_bytes[WEIGHTS] == size
    name = "if-unmodified-since" if weak else "if-match"
    assert all(name in headers for headers in web.headers if "range" in headers)


def test_content_that_changes_under_the_fetch_is_read_again_and_never_mixed(
    web: FileServer, folder: Path, tmp_path: Path
) -> None:
    web.publish("team/a", folder)
    newer = write_adapter(tmp_path / "newer", BASE, seed=1, rank=4)
    turns = iter([True])

    def replace(name: str) -> None:
        if name == WEIGHTS and next(turns, False):
            web.publish("team/a", newer)

    web.before_get = replace
    assert store_of(source_of(web), tmp_path).admit(ref_of(web), None).ranks == (4,)


def test_a_server_without_anything_to_pin_by_is_refused(
    web: FileServer, folder: Path, tmp_path: Path
) -> None:
    web.publish("team/a", folder)
    web.tells = False
    store = store_of(source_of(web), tmp_path)
    assert violation_codes(lambda: store.admit(ref_of(web), None)) == {"unpinned_file"}


def test_more_bytes_than_announced_are_not_taken(
    web: FileServer, folder: Path, tmp_path: Path
) -> None:
    web.publish("team/a", folder)
    web.faults[WEIGHTS] = Fault("flood")
    error = refused(store_of(source_of(web), tmp_path), ref_of(web))
    assert error.code == "unavailable"
    assert kept(tmp_path) == []


def test_a_server_that_trickles_is_given_up(web: FileServer, folder: Path, tmp_path: Path) -> None:
    """Each look at the clock is a minute later than the last."""
    web.publish("team/a", folder)
    minutes = iter(range(0, 1 << 30, 60))
    store = store_of(source_of(web, clock=lambda: float(next(minutes))), tmp_path)
    error = refused(store, ref_of(web))
    assert error.code == "unavailable"
    assert "a second" in error.message


def test_size_is_judged_before_the_weights(web: FileServer, folder: Path, tmp_path: Path) -> None:
    web.publish("team/a", folder)
    small = store_of(source_of(web), tmp_path, AdapterLimits(max_bytes=1000))
    assert refused(small, ref_of(web)).code == "too_large"
    assert web.asked["GET", WEIGHTS] == 0
