"""The Hub source against a stub Hub: what is pinned, fetched, refused, and never said."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from loraplex.adapters.common.retries import RetryPolicy
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.ref import AdapterRef, parse_ref
from loraplex.adapters.sources.hub import HubSource
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import small_base, write_adapter
from tests.adapters.refusals import refusal
from tests.adapters.stub_hub import Repo, StubHub, running_hub

BASE = small_base()
WEIGHTS = "adapter_model.safetensors"
REF = AdapterRef("hub", "org/a")
TOKEN = "hf_thisIsTheCallersOwn"


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def source(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> HubSource:
    # The library retries downloads after pauses; here they only cost time.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    return HubSource(hub.endpoint, timeout_s=5.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "published", BASE)


def store_of(source: HubSource, tmp_path: Path) -> AdapterStore:
    retries = RetryPolicy(sleep=lambda seconds: None)
    return AdapterStore(tmp_path / "store", BASE, {"hub": source}, retries=retries)


def kept(tmp_path: Path) -> list[Path]:
    """What is admitted: what is being fetched lies apart."""
    files = (path for path in (tmp_path / "store").rglob("*") if path.is_file())
    return [path for path in files if "staging" not in path.parts]


def test_a_branch_is_pinned_to_its_commit(hub: StubHub, source: HubSource, folder: Path) -> None:
    first = hub.publish("org/a", folder)
    assert source.resolve(REF, None) == AdapterRef("hub", "org/a", first)
    (folder / "chat_template.jinja").write_text("{{ x }}")
    second = hub.publish("org/a", folder)
    assert source.resolve(AdapterRef("hub", "org/a", "main"), None).revision == second
    assert source.resolve(AdapterRef("hub", "org/a", first), None).revision == first
    assert "chat_template.jinja" not in source.list_files(AdapterRef("hub", "org/a", first), None)


def test_a_branch_that_moves_during_a_fetch_does_not_mix(
    hub: StubHub, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    hub.publish("org/a", folder)
    pinned = source.resolve(REF, None)
    old = (folder / WEIGHTS).read_bytes()
    write_adapter(folder, BASE, seed=1)
    hub.publish("org/a", folder)
    manifest = store_of(source, tmp_path).admit(pinned, None)
    content = tmp_path / "store" / BASE.digest[:32] / "content" / manifest.digest / WEIGHTS
    assert content.read_bytes() == old


def test_only_what_is_needed_is_fetched_and_once(
    hub: StubHub, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    for name in ("README.md", "optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(b"x" * 1000)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    hub.publish("org/a", folder)
    store = store_of(source, tmp_path)
    manifest = store.admit(REF, None)
    assert manifest.chat_template == "{{ messages }}"
    asked = {path.rpartition("/")[2] for (_, path) in hub.requests if "/resolve/" in path}
    assert asked == {"adapter_config.json", WEIGHTS, "chat_template.jinja"}
    pinned = source.resolve(REF, None)
    before = sum(hub.requests.values())
    again = AdapterStore(tmp_path / "store", BASE, {"hub": source})
    assert again.admit(pinned, None) == manifest
    assert sum(hub.requests.values()) == before


def test_folders_of_a_repository_are_adapters_of_their_own(
    hub: StubHub, source: HubSource, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    folders = ("", "checkpoint-1", "checkpoint-2", "runs/a+b/final")
    for seed, path in enumerate(folders):
        write_adapter(run / path, BASE, seed=seed)
    commit = hub.publish("org/a", run, gated=True, granted=frozenset([TOKEN]))
    store = store_of(source, tmp_path)
    digests = set()
    for path in folders:
        ref = parse_ref(f"hub:org/a/{path}".rstrip("/"))
        pinned = source.resolve(ref, TOKEN)
        assert pinned == AdapterRef("hub", ref.name, commit)
        assert set(source.list_files(pinned, TOKEN)) == {"adapter_config.json", WEIGHTS}
        manifest = store.admit(pinned, TOKEN)
        assert manifest == judge_folder(run / path, BASE).manifest
        assert store.recall(pinned) == manifest
        digests.add(manifest.digest)
        denied = refusal(lambda ref=ref: source.resolve(ref, None))  # type: ignore[misc]
        assert denied is not None
        assert denied.code == "forbidden"
    assert len(digests) == len(folders)


@pytest.mark.parametrize("path", ["checkpoint", "checkpoint-1/adapter_config.json", "nothing/here"])
def test_a_folder_that_is_not_there_is_not_found(
    path: str, hub: StubHub, source: HubSource, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "run" / "checkpoint-1", BASE)
    hub.publish("org/a", tmp_path / "run")
    error = refusal(lambda: store_of(source, tmp_path).admit(parse_ref(f"hub:org/a/{path}"), None))
    assert error is not None
    assert error.code == "not_found"
    assert "no such folder" in error.message


def test_a_folder_of_a_run_names_the_adapters_in_it(
    hub: StubHub, source: HubSource, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "all" / "run" / "checkpoint-1", BASE)
    write_adapter(tmp_path / "all" / "other" / "checkpoint-2", BASE)
    hub.publish("org/a", tmp_path / "all")
    store = store_of(source, tmp_path)
    error = refusal(lambda: store.admit(parse_ref("hub:org/a/run"), None))
    assert error is not None
    message = error.violations[0].message
    assert message.endswith("did you mean hub:org/a/run/checkpoint-1?")
    store.admit(parse_ref("hub:org/a/run/checkpoint-1"), None)


def test_owners_count_for_folders_too(hub: StubHub, tmp_path: Path) -> None:
    source = HubSource(hub.endpoint, owners=["acme"])
    for name in ("org/a/acme", "org/acme/x"):
        error = refusal(lambda name=name: source.resolve(AdapterRef("hub", name), None))  # type: ignore[misc]
        assert error is not None
        assert error.code == "forbidden"


def test_private(hub: StubHub, source: HubSource, folder: Path, tmp_path: Path) -> None:
    hub.publish("org/a", folder, token=TOKEN)
    codes = [_code(source, token) for token in (None, "hf_other", "invalid")]
    assert codes == ["not_found", "unauthorized", "unauthorized"]
    assert source.resolve(REF, TOKEN).revision
    manifest = store_of(source, tmp_path).admit(REF, TOKEN)
    assert manifest.ranks == (8,)
    for path in kept(tmp_path):
        assert TOKEN.encode() not in path.read_bytes()


def test_stored_credentials_are_not_used(
    hub: StubHub, source: HubSource, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.publish("org/a", folder)
    store_of(source, tmp_path).admit(REF, None)
    assert hub.tokens == {""}


def _code(source: HubSource, token: str | None, ref: AdapterRef = REF) -> str:
    error = refusal(lambda: source.resolve(ref, token))
    assert error is not None
    _says_nothing_secret(error, token)
    return error.code


def _says_nothing_secret(error: AdapterError, token: str | None) -> None:
    for secret in ("127.0.0.1", "http", "/tmp", token or "127.0.0.1"):
        assert secret not in error.message


@pytest.mark.parametrize("token", ["", " ", "hf_x\n", "a\r\nX: y", "é", "€", "x" * 5000])
def test_what_cannot_be_a_token(token: str, hub: StubHub, source: HubSource, folder: Path) -> None:
    hub.publish("org/a", folder)
    error = refusal(lambda: source.resolve(REF, token))
    assert error is not None
    assert error.code == "unauthorized"
    assert not hub.requests


def test_gated(hub: StubHub, source: HubSource, folder: Path, tmp_path: Path) -> None:
    hub.publish("org/a", folder, gated=True)
    error = refusal(lambda: store_of(source, tmp_path).admit(REF, TOKEN))
    assert error is not None
    assert error.code == "forbidden"
    assert "gated" in error.message
    assert kept(tmp_path) == []


def test_gated_content_that_is_here_already_is_no_more_open(
    hub: StubHub, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    hub.publish("org/a", folder, gated=True, granted=frozenset({TOKEN}))
    store_of(source, tmp_path).admit(source.resolve(REF, TOKEN), TOKEN)
    for other in (None, "hf_anothers"):
        assert _code(source, other) == "forbidden"


def test_missing(hub: StubHub, source: HubSource, folder: Path) -> None:
    hub.publish("org/a", folder)
    assert _code(source, None, AdapterRef("hub", "org/none")) == "not_found"
    assert _code(source, None, AdapterRef("hub", "org/a", "none")) == "not_found"
    assert _code(source, None, AdapterRef("hub", "org/a", "0" * 40)) == "not_found"


class Answer(NamedTuple):
    """What the Hub answers, and what is made of it."""

    status: int
    code: str
    retry_after_s: float | None = None
    headers: dict[str, str] = {}


ANSWERS = [
    Answer(401, "unauthorized"),
    Answer(403, "forbidden"),
    Answer(404, "not_found"),
    Answer(410, "not_found"),
    Answer(418, "not_found"),
    Answer(429, "unavailable", 7.0, {"Retry-After": "7"}),
    Answer(429, "unavailable", 5.0),
    Answer(429, "unavailable", 300.0, {"Retry-After": "99999999"}),
    Answer(500, "unavailable", 5.0),
    Answer(502, "unavailable", 5.0, {"Retry-After": "soon"}),
    Answer(503, "unavailable", 3.0, {"Retry-After": "3"}),
]


@pytest.mark.parametrize("where", ["api", WEIGHTS])
@pytest.mark.parametrize("answer", ANSWERS)
def test_statuses(
    where: str, answer: Answer, hub: StubHub, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    hub.publish("org/a", folder)
    hub.repos["org/a"].faults[where] = (answer.status, answer.headers)
    error = refusal(lambda: store_of(source, tmp_path).admit(REF, TOKEN))
    assert error is not None
    _says_nothing_secret(error, TOKEN)
    assert (error.code, error.retry_after_s) == (answer.code, answer.retry_after_s)
    assert kept(tmp_path) == []


def test_a_truncated_body_admits_nothing_and_heals(
    hub: StubHub, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    hub.publish("org/a", folder)
    hub.repos["org/a"].truncate = WEIGHTS
    error = refusal(lambda: store_of(source, tmp_path).admit(REF, None))
    assert error is not None
    assert error.code == "unavailable"
    assert kept(tmp_path) == []
    hub.repos["org/a"].truncate = None
    assert store_of(source, tmp_path).admit(REF, None).ranks == (8,)
    half = (folder / WEIGHTS).stat().st_size // 2
    assert set(hub.ranges) == {f"bytes={half}-"}, "another store went on where the first had left"


def test_a_broken_download_goes_on_where_it_broke(
    hub: StubHub, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    hub.publish("org/a", folder)
    hub.repos["org/a"].truncate = WEIGHTS
    hub.repos["org/a"].truncations = 1
    manifest = store_of(source, tmp_path).admit(REF, None)
    content = tmp_path / "store" / BASE.digest[:32] / "content" / manifest.digest / WEIGHTS
    assert content.read_bytes() == (folder / WEIGHTS).read_bytes()
    assert hub.ranges
    assert all(text != "bytes=0-" for text in hub.ranges)


def test_a_passing_fault_passes(
    hub: StubHub, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    hub.publish("org/a", folder)
    faults = hub.repos["org/a"].faults
    faults["api"] = faults[WEIGHTS] = (503, {})
    # Each wait sees one fault go.
    retries = RetryPolicy(sleep=lambda seconds: (faults.popitem(), None)[1])
    store = AdapterStore(tmp_path / "store", BASE, {"hub": source}, retries=retries)
    assert store.admit(REF, None).ranks == (8,)
    assert not faults


def test_what_is_refused_by_config_or_size_costs_no_weights(
    hub: StubHub, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    write_adapter(folder, BASE, config={"use_qalora": True, "base_model_name_or_path": "x/y"})
    hub.publish("org/a", folder)
    error = refusal(lambda: store_of(source, tmp_path).admit(REF, None))
    assert error is not None
    assert {v.code for v in error.violations} == {"unsupported_feature", "wrong_base"}
    assert hub.downloads(WEIGHTS) == 0


def test_a_pickle_is_refused_unseen(
    hub: StubHub, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    hub.publish("org/a", folder)
    error = refusal(lambda: store_of(source, tmp_path).admit(REF, None))
    assert error is not None
    assert [violation.code for violation in error.violations] == ["unsafe_format"]
    assert not any(path.endswith(".bin") for _, path in hub.requests)


def test_owners(hub: StubHub, folder: Path) -> None:
    hub.publish("org/a", folder)
    source = HubSource(hub.endpoint, owners=["friends"])
    error = refusal(lambda: source.resolve(REF, None))
    assert error is not None
    assert error.code == "forbidden"
    assert not hub.requests


def test_offline(hub: StubHub, source: HubSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refusal(lambda: source.resolve(REF, None))
    assert error is not None
    assert error.code == "unavailable"
    assert not hub.requests


def test_nobody_there(source: HubSource) -> None:
    gone = HubSource("http://127.0.0.1:9", timeout_s=1.0)
    error = refusal(lambda: gone.resolve(REF, None))
    assert error is not None
    assert (error.code, error.retry_after_s) == ("unavailable", 5.0)


def test_an_answer_that_is_no_hubs(hub: StubHub, source: HubSource) -> None:
    hub.repos["org/a"] = Repo({}, {}, faults={"api": (200, {})})
    error = refusal(lambda: source.resolve(REF, None))
    assert error is not None
    assert error.code == "unavailable"


def test_tokens_are_not_logged(
    hub: StubHub,
    source: HubSource,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.publish("org/a", folder, token=TOKEN)
    store_of(source, tmp_path).admit(REF, TOKEN)
    refusal(lambda: source.resolve(AdapterRef("hub", "org/none"), TOKEN))
    assert TOKEN not in caplog.text
    captured = capfd.readouterr()
    assert TOKEN not in captured.out + captured.err
    assert "%|" not in captured.err, "a progress bar"
