"""The S3 source, with the real boto3 against a stub S3: pinned, resumed, refused, never said."""

import functools
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import botocore.session
import pytest

from loraplex.adapters.common.retries import RetryPolicy
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import AdapterRef, parse_ref
from loraplex.adapters.sources.s3 import S3Source
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import ALL_PROJECTIONS, small_base, write_adapter
from tests.adapters.refusals import refusal, violation_codes
from tests.adapters.stub_files import Fault, FileServer, running_files

BASE = small_base(num_layers=8)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REF = AdapterRef("s3", "models/team/a")
KEY_ID, SECRET, SESSION = "AKIATHISISTHEID", "thisIsTheSecretKey", "thisIsTheSessionToken"
SECRETS = (KEY_ID, SECRET, SESSION)


@pytest.fixture(scope="module", autouse=True)
def descriptions() -> Iterator[None]:
    """Botocore reads its megabytes of descriptions once, and not for each client."""
    with pytest.MonkeyPatch.context() as patch:
        loaders = functools.cache(botocore.session.create_loader)
        patch.setattr(botocore.session, "create_loader", loaders)
        yield


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SESSION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture
def s3() -> Iterator[FileServer]:
    with running_files() as server:
        yield server


@pytest.fixture
def source(s3: FileServer) -> S3Source:
    return S3Source(["models"], s3.endpoint, timeout_s=5.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "published", BASE, rank=32, targets=ALL_PROJECTIONS)


def store_of(source: S3Source, tmp_path: Path, limits: AdapterLimits | None = None) -> AdapterStore:
    retries = RetryPolicy(sleep=lambda seconds: None)
    return AdapterStore(
        tmp_path / "store", BASE, {"s3": source}, limits, clock=lambda: 0.0, retries=retries
    )


def kept(tmp_path: Path) -> list[str]:
    """What is admitted: what is being fetched lies apart."""
    files = (path for path in (tmp_path / "store").rglob("*") if path.is_file())
    return sorted(path.name for path in files if "staging" not in path.parts)


def refused(store: AdapterStore, ref: AdapterRef = REF) -> AdapterError:
    error = refusal(lambda: store.admit(ref, "a-callers-token"))
    assert error is not None
    for word in (*SECRETS, "127.0.0.1", "http:", "models", "a-callers-token"):
        assert word not in error.message
    return error


def test_an_adapter_is_pinned_and_only_what_is_needed_is_fetched(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    (folder / "README.md").write_text("x")
    (folder / "optimizer.pt").write_text("x")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    s3.publish("models/team/a", folder)
    s3.publish("models/team/a/checkpoint-1", folder)
    s3.publish("models/team/ab", folder)
    store = store_of(source, tmp_path)
    manifest = store.admit(parse_ref("s3://models/team/a/"), None)
    assert manifest.chat_template == "{{ messages }}"
    got = {name for method, name in s3.asked if method == "GET"}
    assert got == {"LIST", CONFIG, WEIGHTS, "chat_template.jinja"}
    pinned = source.resolve(REF, None)
    assert pinned.revision is not None
    assert len(pinned.revision) == 40
    fetched = s3.asked["GET", WEIGHTS]
    assert store.admit(pinned, None) == store.admit(REF, None) == manifest
    assert s3.asked["GET", WEIGHTS] == fetched == 1
    assert all("a-callers-token" not in str(headers) for headers in s3.headers)


def test_new_content_is_a_new_revision_and_what_is_not_needed_is_none(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    first = source.resolve(REF, None)
    s3.files["models/team/a/README.md"] = b"x"
    assert source.resolve(REF, None) == first
    store = store_of(source, tmp_path)
    old = store.admit(REF, None)
    write_adapter(folder, BASE, seed=1)
    s3.publish("models/team/a", folder)
    assert source.resolve(REF, None) != first
    assert store.admit(REF, None).digest != old.digest
    assert refused(store, first).code == "unavailable"


def test_other_buckets_are_refused_before_anything_is_asked(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("private/a", folder)
    store = store_of(source, tmp_path)
    ref = AdapterRef("s3", "private/a")
    assert refused(store, ref).code == "forbidden"
    # What a revision says about another bucket opens nothing either.
    known = S3Source(["private"], s3.endpoint).resolve(ref, None)
    store_of(S3Source(["private"], s3.endpoint), tmp_path).admit(ref, None)
    before = sum(s3.asked.values())
    assert refused(store, known).code == "forbidden"
    assert sum(s3.asked.values()) == before
    assert refusal(lambda: source.list_files(known, None)) is not None
    assert refusal(lambda: source.fetch_file(known, None, CONFIG, tmp_path)) is not None


class Answer(NamedTuple):
    """What S3 answers, and what is made of it."""

    status: int
    error: str
    code: str
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()
    tries: int = 1


ANSWERS = [
    Answer(401, "Unauthorized", "forbidden"),
    Answer(403, "AccessDenied", "forbidden"),
    Answer(403, "InvalidAccessKeyId", "forbidden"),
    Answer(403, "RequestTimeTooSkewed", "unavailable", 1.0, tries=3),
    Answer(400, "InvalidRequest", "not_found"),
    Answer(400, "RequestTimeout", "unavailable", 1.0, tries=3),
    Answer(400, "AuthorizationHeaderMalformed", "unavailable", 60.0),
    Answer(429, "TooManyRequests", "unavailable", 1.0, tries=3),
    Answer(429, "TooManyRequests", "unavailable", 70.0, (("Retry-After", "70"),)),
    Answer(500, "InternalError", "unavailable", 1.0, tries=3),
    Answer(503, "SlowDown", "unavailable", 3.0, (("Retry-After", "3"),), tries=3),
    Answer(503, "SlowDown", "unavailable", 1.0, (("Retry-After", "soon"),), tries=3),
]


@pytest.mark.parametrize("where", ["LIST", WEIGHTS])
@pytest.mark.parametrize("answer", ANSWERS)
def test_statuses(
    where: str, answer: Answer, s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    s3.faults[where] = Fault("status", answer.status, answer.error, answer.headers)
    error = refused(store_of(source, tmp_path))
    assert (error.code, error.retry_after_s) == (answer.code, answer.retry_after_s)
    assert s3.asked["GET", where] <= answer.tries + ("Authorization" in answer.error)
    assert kept(tmp_path) == []


def test_missing(s3: FileServer, source: S3Source, folder: Path, tmp_path: Path) -> None:
    store = store_of(source, tmp_path)
    assert refused(store).code == "not_found"
    s3.faults["LIST"] = Fault("status", 404, "NoSuchBucket")
    assert refused(store, AdapterRef("s3", "models/b")).code == "not_found"


def test_a_passing_fault_passes(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    for where in ("LIST", CONFIG, WEIGHTS):
        s3.faults[where] = Fault("status", 503, "SlowDown", times=2)
    assert store_of(source, tmp_path).admit(REF, None).ranks == (32,)


@pytest.mark.parametrize("kind", ["cut", "stall"])
def test_a_broken_download_goes_on_where_it_broke(
    kind: str, s3: FileServer, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    size = (folder / WEIGHTS).stat().st_size
    assert size > 200_000
    # More breaks than attempts without progress: each got further.
    s3.faults[WEIGHTS] = Fault(kind, after=70_000, times=2 if kind == "stall" else 4)
    source = S3Source(["models"], s3.endpoint, timeout_s=2.0)
    manifest = store_of(source, tmp_path).admit(REF, None)
    content = tmp_path / "store" / BASE.digest[:32] / "content" / manifest.digest / WEIGHTS
    assert content.read_bytes() == (folder / WEIGHTS).read_bytes()
    starts = [int(text.removeprefix("bytes=").removesuffix("-")) for text in s3.ranges]
    assert starts == sorted(set(starts))
    assert starts[0] > 0
    # What came twice is less than the chunk that each break may lose.
    assert s3.body_bytes[WEIGHTS] < size + (64 << 10) * len(starts)
    assert all("If-Match" in h for h in s3.headers if "Range" in h)


def test_a_server_without_ranges_sends_it_again(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    s3.ignore_ranges = True
    s3.faults[WEIGHTS] = Fault("cut", after=70_000, times=1)
    assert store_of(source, tmp_path).admit(REF, None).ranks == (32,)


@pytest.mark.parametrize("fault", [Fault("cut"), Fault("stall")])
def test_what_never_comes_whole_leaves_nothing(
    fault: Fault, s3: FileServer, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    s3.faults[WEIGHTS] = fault
    store = store_of(S3Source(["models"], s3.endpoint, timeout_s=0.3), tmp_path)
    assert refused(store).code == "unavailable"
    assert s3.asked["GET", WEIGHTS] == 3
    assert kept(tmp_path) == []
    s3.faults.clear()
    fresh = S3Source(["models"], s3.endpoint, timeout_s=5.0)
    assert store_of(fresh, tmp_path).admit(REF, None).ranks == (32,)


def test_a_stalled_listing_is_given_up(s3: FileServer, folder: Path, tmp_path: Path) -> None:
    s3.faults["LIST"] = Fault("stall")
    s3.before_get = lambda name: s3.released.wait(60)
    error = refused(store_of(S3Source(["models"], s3.endpoint, timeout_s=0.2), tmp_path))
    assert error.code == "unavailable"


def test_content_that_changes_under_the_fetch_is_read_again_and_never_mixed(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    newer = write_adapter(tmp_path / "newer", BASE, seed=1, rank=4)
    turns = iter([True])

    def replace(name: str) -> None:
        if name == WEIGHTS and next(turns, False):
            s3.publish("models/team/a", newer)

    s3.before_get = replace
    manifest = store_of(source, tmp_path).admit(REF, None)
    assert manifest.ranks == (4,)
    assert s3.asked["GET", "LIST"] == 2


@pytest.mark.parametrize("gone", [False, True])
def test_content_that_keeps_changing_is_unavailable(
    gone: bool, s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    numbers = iter(range(100))

    def replace(name: str) -> None:
        if name == WEIGHTS and gone:
            del s3.files[f"models/team/a/{WEIGHTS}"]
        elif name == WEIGHTS:
            s3.files[f"models/team/a/{WEIGHTS}"] += bytes([next(numbers)])

    s3.before_get = replace
    error = refused(store_of(source, tmp_path))
    assert error.code == ("invalid" if gone else "unavailable")
    assert kept(tmp_path) == []


def test_a_change_during_a_resume_is_seen(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    s3.faults[WEIGHTS] = Fault("cut", after=70_000, times=1)
    newer = write_adapter(tmp_path / "newer", BASE, seed=1, rank=32, targets=ALL_PROJECTIONS)
    s3.before_get = lambda name: (
        s3.publish("models/team/a", newer) if s3.asked["GET", WEIGHTS] == 2 else None
    )
    manifest = store_of(source, tmp_path).admit(REF, None)
    content = tmp_path / "store" / BASE.digest[:32] / "content" / manifest.digest / WEIGHTS
    assert content.read_bytes() == (newer / WEIGHTS).read_bytes()


def test_what_is_refused_by_config_or_size_costs_no_weights(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    small = store_of(source, tmp_path, AdapterLimits(max_bytes=1000))
    assert refused(small).code == "too_large"
    write_adapter(folder, BASE, config={"use_qalora": True})
    s3.publish("models/team/b", folder)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    s3.publish("models/team/c", folder)
    store = store_of(source, tmp_path)
    codes = [
        violation_codes(lambda name=name: store.admit(AdapterRef("s3", name), None))  # type: ignore[misc]
        for name in ("models/team/b", "models/team/c")
    ]
    assert codes == [{"unsupported_feature"}, {"unsupported_feature", "unsafe_format"}]
    assert s3.asked["GET", WEIGHTS] == s3.asked["GET", "adapter_model.bin"] == 0


def test_a_long_listing_is_read_in_pages_and_bounded(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    for number in range(2500):
        s3.files[f"models/team/a/a{number}"] = b""
    assert set(source.list_files(source.resolve(REF, None), None)) == {CONFIG, WEIGHTS}
    for number in range(12_000):
        s3.files[f"models/team/a/a{number}"] = b""
    assert violation_codes(lambda: source.resolve(REF, None)) == {"too_many_files"}


def test_no_credentials(
    s3: FileServer, source: S3Source, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    for name in names:
        monkeypatch.delenv(name)
    store = store_of(source, tmp_path)
    error = refused(store)
    assert (error.code, error.retry_after_s) == ("unavailable", 60.0)
    assert "no credentials" in error.message
    # They may come later.
    for name, value in zip(names, (KEY_ID, SECRET, SESSION), strict=True):
        monkeypatch.setenv(name, value)
    assert store.admit(REF, None).ranks == (32,)


def test_the_environment_says_where(
    s3: FileServer, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    s3.publish("models/team/a", folder)
    assert store_of(S3Source(["models"]), tmp_path).admit(REF, None).ranks == (32,)


@pytest.mark.parametrize("name", ["AWS_PROFILE", "AWS_ENDPOINT_URL_S3"])
def test_a_setup_that_cannot_hold(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, "no such thing")
    error = refused(store_of(S3Source(["models"]), tmp_path))
    assert (error.code, error.retry_after_s) == ("unavailable", 60.0)


def test_nobody_there(tmp_path: Path) -> None:
    error = refused(store_of(S3Source(["models"], "http://127.0.0.1:9", 1.0), tmp_path))
    assert (error.code, error.retry_after_s) == ("unavailable", 1.0)


def test_an_answer_that_is_no_s3(s3: FileServer, source: S3Source, tmp_path: Path) -> None:
    s3.faults["LIST"] = Fault("status", 200, "x")
    assert refused(store_of(source, tmp_path)).code in ("not_found", "unavailable")


def test_fifty_callers_cause_one_fetch(
    s3: FileServer, source: S3Source, folder: Path, tmp_path: Path
) -> None:
    s3.publish("models/team/a", folder)
    gate = threading.Event()
    s3.before_get = lambda name: gate.wait(60) if name == WEIGHTS else None
    store = store_of(source, tmp_path)
    with ThreadPoolExecutor(50) as pool:
        asking = [pool.submit(store.admit, REF, None) for _ in range(50)]
        gate.set()
        digests = {ask.result(60).digest for ask in asking}
    assert len(digests) == 1
    assert s3.asked["GET", WEIGHTS] == 1


def test_credentials_are_not_written_anywhere(
    s3: FileServer,
    source: S3Source,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    s3.publish("models/team/a", folder)
    store = store_of(source, tmp_path)
    store.admit(REF, None)
    s3.faults["LIST"] = Fault("status", 403, "SignatureDoesNotMatch")
    refused(store)
    captured = capfd.readouterr()
    written = caplog.text + captured.out + captured.err
    for secret in SECRETS:
        assert secret not in written
        for path in (tmp_path / "store").rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes()
