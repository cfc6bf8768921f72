"""The store: one fetch for all who ask, nothing half done, nothing forgotten over a restart."""

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.adapters.common.disk import Hold, hold, release, remove_held
from loraplex.adapters.common.unfinished import unfinished_folder
from loraplex.adapters.content_check import content_digest
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.judge import judge_folder, rejudge
from loraplex.adapters.manifest import LAYOUT_VERSION, AdapterManifest
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import AdapterRef, RefSource
from loraplex.adapters.slab.file import SlabError, SlabFile, SlabGarbled, write_slab_file
from loraplex.adapters.slab.layout import make_layout
from loraplex.adapters.slab.memory import one_after_another
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.store.store import HEADROOM_BYTES, AdapterStore
from tests.adapter_folders import Dtype, small_base, write_adapter
from tests.adapters.refusals import refusal, refused_as, violation_codes
from tests.slab_files import read_layout, read_payload, save_slab, slab_path

BASE = small_base()
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
CALLERS = 50
PINNED = AdapterRef("hub", "org/a", "a" * 40)
Gate = Callable[[str], None]


def _open_gate(name: str) -> None:
    """Lets every fetch pass."""


class FakeHub:
    """Serves a folder under any pinned name; counts fetches; `gate` sees each before it happens."""

    def __init__(self, folder: Path, gate: Gate = _open_gate) -> None:
        self.folder = folder
        self.gate = gate
        self.fetches: list[str] = []
        self.resolved = 0

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        self.resolved += 1
        return AdapterRef(ref.source, ref.name, "a" * 40)

    def list_files(self, ref: AdapterRef, token: str | None) -> dict[str, int]:
        return {p.name: p.stat().st_size for p in self.folder.iterdir() if p.is_file()}

    def adapters_in(self, ref: AdapterRef, token: str | None) -> Sequence[str]:
        return ()

    def fetch_file(self, ref: AdapterRef, token: str | None, name: str, folder: Path) -> None:
        self.fetches.append(name)
        self.gate(name)
        shutil.copyfile(self.folder / name, folder / name)


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    return FakeHub(write_adapter(tmp_path / "published", BASE))


def store_of(source: FakeHub, tmp_path: Path, limits: AdapterLimits | None = None) -> AdapterStore:
    return AdapterStore(tmp_path / "store", BASE, {"hub": source}, limits, clock=lambda: 0.0)


def home(tmp_path: Path) -> Path:
    return tmp_path / "store" / BASE.digest[:32]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_admitted_content_is_whole_and_read_only(hub: FakeHub, tmp_path: Path) -> None:
    stages: list[str] = []
    manifest = store_of(hub, tmp_path).admit(PINNED, None, progress=stages.append)
    assert stages == ["fetching", "checking"]
    content = home(tmp_path) / "content" / manifest.digest
    assert files(content) == ["adapter_config.json", WEIGHTS, "manifest.json"]
    for path in content.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert list((home(tmp_path) / "staging").iterdir()) == []
    assert hub.fetches == ["adapter_config.json", WEIGHTS]


def test_a_restart_fetches_nothing(hub: FakeHub, tmp_path: Path) -> None:
    manifest = store_of(hub, tmp_path).admit(PINNED, None)
    hub.fetches.clear()
    again = store_of(hub, tmp_path)
    assert again.admit(PINNED, None) == again.manifest(manifest.digest) == manifest
    assert save_slab(again, manifest.digest, "float32", 4096).exists()
    assert hub.fetches == []
    assert hub.resolved == 0


def test_an_unpinned_reference_is_resolved_each_time(hub: FakeHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path)
    for _ in range(3):
        store.admit(AdapterRef("hub", "org/a"), None)
    assert hub.resolved == 3
    assert hub.fetches.count(WEIGHTS) == 1


@pytest.mark.parametrize("good", [True, False])
def test_one_fetch_for_all_who_ask_at_once(good: bool, hub: FakeHub, tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    def gate(name: str) -> None:
        started.set()
        assert go.wait(60)

    hub.gate = gate
    if not good:
        (hub.folder / WEIGHTS).write_bytes(b"x" * 100)
    store = store_of(hub, tmp_path)

    def ask(_: int) -> AdapterManifest | str:
        try:
            return store.admit(PINNED, None)
        except AdapterError as error:
            return error.code

    with ThreadPoolExecutor(CALLERS) as pool:
        answers = [pool.submit(ask, n) for n in range(CALLERS)]
        assert started.wait(60)
        go.set()
        found = [answer.result(60) for answer in answers]
    assert hub.fetches.count(WEIGHTS) == 1
    assert all(answer == found[0] for answer in found)
    assert (found[0] == "invalid") is not good
    if not good:
        assert files(tmp_path / "store") == []


def test_slabs_of_other_shapes_are_other_files(hub: FakeHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    made = {
        save_slab(store, digest, "float32", 4096),
        save_slab(store, digest, "bfloat16", 4096),
        save_slab(store, digest, "bfloat16", 8192),
    }
    assert len(made) == 3
    before = {path: path.stat().st_ino for path in made}
    save_slab(store, digest, "bfloat16", 8192)
    assert {path: path.stat().st_ino for path in made} == before


def test_a_finished_slab_is_kept_beside_the_other_for_its_base(
    hub: FakeHub, tmp_path: Path
) -> None:
    """And it is read in its place, but not where the base's weights are loaded otherwise."""
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    before = save_slab(store, digest, "float32", 4096)
    layout = msgspec.structs.replace(read_layout(before), is_finished=True)
    made = b"\x07" * layout.nbytes
    assert store.save_slab(layout, memoryview(made), one_after_another(layout))
    finished = slab_path(store, digest, "float32", 4096)
    assert read_layout(finished) == layout
    assert read_payload(finished) == made
    quantised = msgspec.structs.replace(BASE, quantize="nf4")
    other = AdapterStore(tmp_path / "store", quantised, {})
    assert slab_path(other, digest, "float32", 4096) == before


def test_a_slab_of_another_layout_version_is_packed_anew(hub: FakeHub, tmp_path: Path) -> None:
    """Even where its name says this version."""
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    kept = save_slab(store, digest, "float32", 4096)
    layout, payload = read_layout(kept), read_payload(kept)
    old = msgspec.structs.replace(layout, version=LAYOUT_VERSION - 1)
    garbage = memoryview(b"\x07" * layout.nbytes)
    kept.unlink()
    assert write_slab_file(kept, old, garbage, one_after_another(old))
    with pytest.raises(SlabError, match="layout version"):
        SlabFile(kept)
    assert save_slab(store, digest, "float32", 4096) == kept
    assert read_layout(kept) == layout
    assert read_payload(kept) == payload


def test_identity_is_content(hub: FakeHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path)
    first = store.admit(PINNED, None)
    same = store.admit(AdapterRef("hub", "org/copy", "b" * 40), None)
    assert same == first
    digests = {first.digest}
    write_adapter(hub.folder, BASE, seed=1)
    digests.add(store.admit(AdapterRef("hub", "org/a", "c" * 40), None).digest)
    write_adapter(hub.folder, BASE, seed=1, config={"lora_alpha": 17})
    digests.add(store.admit(AdapterRef("hub", "org/a", "d" * 40), None).digest)
    write_adapter(hub.folder, BASE, seed=1, config={"lora_alpha": 17, "lora_dropout": 0.5})
    harmless = store.admit(AdapterRef("hub", "org/a", "e" * 40), None)
    assert harmless.digest in digests
    (hub.folder / "chat_template.jinja").write_text("{{ messages }}")
    templated = store.admit(AdapterRef("hub", "org/a", "f" * 40), None)
    assert templated.chat_template == "{{ messages }}"
    digests.add(templated.digest)
    (hub.folder / "tokenizer_config.json").write_text('{"bos_token": "<a>", "eos_token": null}')
    with_tokens = store.admit(AdapterRef("hub", "org/a", "1" * 40), None)
    assert with_tokens.special_tokens == {"bos_token": "<a>", "eos_token": None}
    digests.add(with_tokens.digest)
    (hub.folder / "tokenizer_config.json").write_text('{"eos_token": null, "bos_token": "<a>"}')
    assert store.admit(AdapterRef("hub", "org/a", "2" * 40), None).digest in digests
    (hub.folder / "tokenizer_config.json").write_text('{"bos_token": "<b>", "eos_token": null}')
    digests.add(store.admit(AdapterRef("hub", "org/a", "3" * 40), None).digest)
    assert len(digests) == 6
    (hub.folder / "chat_template.jinja").unlink()
    listed = [{"name": name, "template": "{{ messages }}"} for name in ("default", "rag")]
    for number, chosen in (("4", listed), ("5", listed[:1]), ("6", listed[1:])):
        settings = json.dumps({"chat_template": chosen, "bos_token": "<c>"})
        (hub.folder / "tokenizer_config.json").write_text(settings)
        named = store.admit(AdapterRef("hub", "org/a", number * 40), None)
        assert named.template is not None
        assert list(named.template.sources) == [entry["name"] for entry in chosen]
        digests.add(named.digest)
    assert len(digests) == 9


def test_a_template_without_its_special_tokens_is_judged_again(
    hub: FakeHub, tmp_path: Path
) -> None:
    """Manifests had none once."""
    (hub.folder / "chat_template.jinja").write_text("{{ bos_token }}")
    first = store_of(hub, tmp_path).admit(PINNED, None)
    (path,) = (tmp_path / "store").rglob("manifest*.json")
    kept = msgspec.json.decode(path.read_bytes())
    assert kept.pop("special_tokens") == {}
    path.write_bytes(msgspec.json.encode(kept))
    (hub.folder / "tokenizer_config.json").write_text('{"bos_token": "<a>"}')
    again = store_of(hub, tmp_path).admit(PINNED, None)
    assert again.special_tokens == {"bos_token": "<a>"}
    assert again.digest != first.digest
    assert store_of(hub, tmp_path).admit(PINNED, None) == again


def forget_ends(tmp_path: Path) -> None:
    """Makes the stored manifest one of a time when ends were not kept."""
    (path,) = (tmp_path / "store").rglob("manifest*.json")
    kept = msgspec.json.decode(path.read_bytes())
    assert kept.pop("end_token_ids") == []
    path.write_bytes(msgspec.json.encode(kept))


@pytest.mark.parametrize("own", [(), (7,)])
def test_a_manifest_of_before_ends_were_kept_is_judged_again(
    hub: FakeHub, tmp_path: Path, own: tuple[int, ...]
) -> None:
    first = store_of(hub, tmp_path).admit(PINNED, None)
    forget_ends(tmp_path)
    if own:
        (hub.folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    store = store_of(hub, tmp_path)
    assert store.recall(PINNED) is None
    again = store.admit(PINNED, None)
    assert again.end_token_ids == own
    assert (again.digest == first.digest) == (not own)
    hub.fetches.clear()
    assert store_of(hub, tmp_path).admit(PINNED, None) == store.recall(PINNED) == again
    assert hub.fetches == []


def test_it_still_serves_while_its_source_is_away(hub: FakeHub, tmp_path: Path) -> None:
    first = store_of(hub, tmp_path).admit(PINNED, None)
    forget_ends(tmp_path)

    def away(name: str) -> None:
        raise AdapterError("not_found", "the repository is gone")

    hub.gate = away
    store = store_of(hub, tmp_path)
    manifest = store.admit(PINNED, None, expected_digest=first.digest)
    assert (manifest.digest, manifest.end_token_ids) == (first.digest, None)
    assert save_slab(store, manifest.digest, "float32", 4096).exists()


def test_expected_digest(hub: FakeHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    assert store.admit(PINNED, None, expected_digest=digest).digest == digest
    codes = violation_codes(lambda: store.admit(PINNED, None, expected_digest="0" * 64))
    assert codes == {"digest_mismatch"}


@pytest.mark.parametrize("digest", ["", "0" * 64, "../../x", "A" * 64, "0" * 63 + "\n"])
def test_unknown_digests(digest: str, hub: FakeHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path)
    for call in (store.manifest, lambda d: save_slab(store, d, "float32", 4096)):
        error = refusal(lambda call=call: call(digest))  # type: ignore[misc]
        assert error is not None
        assert error.code == "not_found"


@pytest.mark.parametrize(
    ("source", "option"), [("s3", "--s3-bucket"), ("https", "--https-host"), ("local", "")]
)
def test_sources_that_are_not_here(
    source: RefSource, option: str, hub: FakeHub, tmp_path: Path
) -> None:
    ref = AdapterRef(source, "bucket/key", "a" * 40)
    error = refusal(lambda: store_of(hub, tmp_path).admit(ref, None))
    assert error is not None
    assert error.code == "forbidden"
    assert option in error.message


def test_a_file_shorter_than_announced_is_not_kept(hub: FakeHub, tmp_path: Path) -> None:
    whole = (hub.folder / WEIGHTS).read_bytes()

    def truncate(name: str) -> None:
        if name == WEIGHTS:
            (hub.folder / WEIGHTS).write_bytes(whole[:-10])

    hub.gate = truncate
    error = refusal(lambda: store_of(hub, tmp_path).admit(PINNED, None))
    assert error is not None
    assert error.code == "unavailable"
    kept = files(tmp_path / "store")
    assert [name.rpartition("/")[2] for name in kept] == ["adapter_config.json"]
    assert all("/staging/" in name for name in kept)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_fails(code: int, hub: FakeHub, tmp_path: Path) -> None:
    def fail(name: str) -> None:
        if name == WEIGHTS:
            raise OSError(code, os.strerror(code))

    hub.gate = fail
    error = refusal(lambda: store_of(hub, tmp_path).admit(PINNED, None))
    assert error is not None
    assert (error.code, error.retry_after_s) == ("unavailable", 30.0)
    assert str(tmp_path) not in error.message
    assert files(tmp_path / "store") == []


def test_a_disk_that_fails_is_reported_to_operators_once(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes = [errno.ENOSPC, errno.ENOSPC, errno.EROFS]

    def fail(name: str) -> None:
        code = codes.pop(0)
        raise OSError(code, os.strerror(code), f"/some/{len(codes)}")

    hub.gate = fail
    monkeypatch.setattr("loraplex.adapters.common.disk._logged_at", {})
    for _ in range(3):
        assert refusal(lambda: store_of(hub, tmp_path).admit(PINNED, None)) is not None
    assert not codes
    where = f"the adapter store in {home(tmp_path)} cannot use its disk"
    assert caplog.messages == [
        f"{where}: [Errno 28] No space left on device: '/some/2'",
        f"{where}: [Errno 30] Read-only file system: '/some/0'",
    ]


def test_a_deleted_cache_folder_is_made_again(hub: FakeHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path)
    manifest = store.admit(PINNED, None)
    with closing(store.open_slab(manifest.digest, "float32", 4096)) as slab:
        arena, runs = memoryview(bytearray(slab.layout.nbytes)), one_after_another(slab.layout)
        slab.copy_runs(arena, runs)
    shutil.rmtree(tmp_path / "store")
    assert store.save_slab(slab.layout, arena, runs)
    shutil.rmtree(tmp_path / "store")
    assert store.admit(PINNED, None) == manifest
    assert save_slab(store, manifest.digest, "float32", 4096).exists()


def test_too_little_room_is_known_before_the_fetch(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.adapters.store.store.free_bytes", lambda folder: 1 << 20)
    error = refusal(lambda: store_of(hub, tmp_path).admit(PINNED, None))
    assert error is not None
    assert error.code == "unavailable"
    assert hub.fetches == []


def test_stale_staging_goes_and_live_staging_stays(hub: FakeHub, tmp_path: Path) -> None:
    store_of(hub, tmp_path)
    staging = home(tmp_path) / "staging"
    stale = staging / "left-over"
    stale.mkdir()
    (stale / WEIGHTS).write_bytes(b"half")
    with unfinished_folder(staging) as live:
        store_of(hub, tmp_path)
        assert not stale.exists()
        assert live.exists()
    assert not live.exists()


@pytest.mark.parametrize("damage", ["manifest", "manifest byte", "weights", "gone", "reference"])
def test_damaged_content_is_fetched_again(damage: str, hub: FakeHub, tmp_path: Path) -> None:
    manifest = store_of(hub, tmp_path).admit(PINNED, None)
    content = home(tmp_path) / "content" / manifest.digest
    if damage == "gone":
        shutil.rmtree(content)
    elif damage == "reference":
        (reference,) = (home(tmp_path) / "refs").iterdir()
        reference.chmod(0o644)
        reference.write_bytes(b"{")
    elif damage == "manifest byte":
        path = content / "manifest.json"
        path.chmod(0o644)
        path.write_bytes(path.read_bytes().replace(b"q_proj", b"\xff_proj"))
    else:
        path = content / ("manifest.json" if damage == "manifest" else WEIGHTS)
        path.chmod(0o644)
        path.write_bytes(b"{}")
    store = store_of(hub, tmp_path)
    assert store.admit(PINNED, None) == manifest
    assert save_slab(store, manifest.digest, "float32", 4096).exists()
    assert hub.fetches.count(WEIGHTS) == 2


@pytest.mark.parametrize(
    ("name", "old", "new"), [(WEIGHTS, b"F32", b"F3r"), (CONFIG, b'"r"', b'"2"')]
)
def test_a_flipped_bit_in_a_header_is_not_the_adapters_fault(
    name: str, old: bytes, new: bytes, hub: FakeHub, tmp_path: Path
) -> None:
    manifest = store_of(hub, tmp_path).admit(PINNED, None)
    path = home(tmp_path) / "content" / manifest.digest / name
    path.chmod(0o644)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    assert store_of(hub, tmp_path).recall(PINNED) is None
    store = store_of(hub, tmp_path)
    assert store.admit(PINNED, None) == store.recall(PINNED) == manifest
    assert save_slab(store, manifest.digest, "float32", 4096).exists()
    assert hub.fetches.count(WEIGHTS) == 2


def test_a_flipped_bit_is_never_packed(hub: FakeHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path)
    manifest = store.admit(PINNED, None)
    weights = home(tmp_path) / "content" / manifest.digest / WEIGHTS
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    error = refusal(lambda: save_slab(store, manifest.digest, "float32", 4096))
    assert error is not None
    assert error.code == "unavailable"
    later = store_of(hub, tmp_path)
    assert later.admit(PINNED, None) == manifest
    assert save_slab(later, manifest.digest, "float32", 4096).exists()


def test_content_is_hashed_once_by_the_process_that_judges_it(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again by one that did not see it, and when its file is not the same any more."""
    hashed: list[str] = []

    def watched(*arguments: Any) -> str:
        hashed.append(content_digest(*arguments))
        return hashed[-1]

    monkeypatch.setattr("loraplex.adapters.judge.content_digest", watched)
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    path = save_slab(store, digest, "bfloat16", 4096)
    assert hashed == [digest]
    for turn, other in enumerate((store_of(hub, tmp_path), store)):
        path.unlink()
        if other is store:
            os.utime(home(tmp_path) / "content" / digest / WEIGHTS, (0, 0))
        save_slab(other, digest, "bfloat16", 4096)
        assert hashed == [digest] * (2 + turn)


def test_a_disk_that_garbles_what_was_judged_is_noticed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file looks the same, its bytes are not."""
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    weights = home(tmp_path) / "content" / digest / WEIGHTS
    times = weights.stat()
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    error = refusal(lambda: save_slab(store, digest, "float32", 4096))
    assert error is not None
    assert error.code == "unavailable"
    assert not store.has(digest)
    assert store.admit(PINNED, None).digest == digest
    assert save_slab(store, digest, "float32", 4096).exists()


def test_a_slab_that_cannot_be_read_is_packed_and_written_anew(
    hub: FakeHub, tmp_path: Path
) -> None:
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    path = save_slab(store, digest, "float32", 4096)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], b"X" + whole[1:]):
        path.chmod(0o644)
        path.write_bytes(damaged)
        with closing(store.open_slab(digest, "float32", 4096)) as slab:
            assert not slab.on_disk
        assert save_slab(store, digest, "float32", 4096).read_bytes() == whole
    path.chmod(0o644)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(SlabGarbled):
        save_slab(store, digest, "float32", 4096)
    assert save_slab(store, digest, "float32", 4096).read_bytes() == whole


def test_a_slab_that_is_given_up_leaves_nothing(hub: FakeHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    with closing(store.open_slab(digest, "float32", 4096)) as slab:
        memory = memoryview(bytearray(slab.layout.nbytes))
        places = one_after_another(slab.layout)
        slab.copy_runs(memory, places)
    answers = iter([False, True])
    assert not store.save_slab(slab.layout, memory, places, lambda: next(answers))
    assert files(home(tmp_path) / "slabs") == files(home(tmp_path) / "staging") == []
    assert store.save_slab(slab.layout, memory, places)


class Later(Executor):
    """Jobs are done when they are asked for."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        self.jobs.append(lambda: fn(*args, **kwargs))
        return Future()

    def do_all(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


def patient(hub: FakeHub, tmp_path: Path, later: Later) -> AdapterStore:
    return AdapterStore(tmp_path / "store", BASE, {"hub": hub}, syncing=later)


def test_nobody_waits_for_the_disk_and_a_crash_is_survived(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had not reached the disk when the machine went down is fetched again, whatever lies
    there; what had is used."""
    boot = tmp_path / "boot"
    boot.write_text("first")
    monkeypatch.setattr("loraplex.adapters.common.disk._BOOT_ID", boot)
    synced: list[int] = []
    monkeypatch.setattr("loraplex.adapters.common.disk.os.fsync", synced.append)
    later = Later()
    store = patient(hub, tmp_path, later)
    manifest = store.admit(PINNED, None)
    assert synced == []
    content = home(tmp_path) / "content" / manifest.digest
    assert store.has(manifest.digest)
    assert store.admit(PINNED, None) == store.manifest(manifest.digest) == manifest
    assert hub.fetches.count(WEIGHTS) == 1

    boot.write_text("second")
    (content / WEIGHTS).chmod(0o644)
    (content / WEIGHTS).write_bytes(bytes((content / WEIGHTS).stat().st_size))
    later = Later()
    store = patient(hub, tmp_path, later)
    assert not store.has(manifest.digest)
    assert store.admit(PINNED, None) == manifest
    assert hub.fetches.count(WEIGHTS) == 2
    later.do_all()
    assert synced
    assert files(content) == ["adapter_config.json", WEIGHTS, "manifest.json"]

    boot.write_text("third")
    assert patient(hub, tmp_path, Later()).admit(PINNED, None) == manifest
    assert hub.fetches.count(WEIGHTS) == 2


def test_what_a_process_left_unsynced_the_next_one_syncs(hub: FakeHub, tmp_path: Path) -> None:
    digest = patient(hub, tmp_path, Later()).admit(PINNED, None).digest
    content = home(tmp_path) / "content" / digest
    assert "manifest.json" not in files(content)
    later = Later()
    patient(hub, tmp_path, later)
    later.do_all()
    assert "manifest.json" in files(content)
    assert len(files(content)) == 3


@pytest.mark.parametrize("gone", [True, False])
def test_a_sync_that_fails_costs_nobody_the_adapter(
    gone: bool, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later()
    store = patient(hub, tmp_path, later)
    digest = store.admit(PINNED, None).digest
    if gone:
        release(1 << 40, (home(tmp_path) / "content",))
    else:
        monkeypatch.setattr("loraplex.adapters.common.disk.os.fsync", _broken)
    later.do_all()
    assert store.has(digest) is not gone
    assert store.admit(PINNED, None).digest == digest
    with closing(store.open_slab(digest, "float32", 4096)) as slab:
        slab.copy_runs(memoryview(bytearray(slab.layout.nbytes)), one_after_another(slab.layout))


def _broken(fd: int) -> None:
    raise OSError(errno.EIO, "broken")


def test_limits_of_today_hold_for_content_of_yesterday(hub: FakeHub, tmp_path: Path) -> None:
    write_adapter(hub.folder, BASE, config={"base_model_name_or_path": "x/y"})
    lenient = AdapterLimits(allow_other_base=True)
    store_of(hub, tmp_path, lenient).admit(PINNED, None)
    assert violation_codes(lambda: store_of(hub, tmp_path).admit(PINNED, None)) == {"wrong_base"}
    tight = AdapterLimits(allow_other_base=True, max_lora_rank=4)
    codes = violation_codes(lambda: store_of(hub, tmp_path, tight).admit(PINNED, None))
    assert codes == {"rank_too_large"}


@pytest.mark.parametrize("beside", [0, 5000])
def test_what_has_become_too_large_is_not_served_from_disk(
    hub: FakeHub, tmp_path: Path, beside: int
) -> None:
    """beside: bytes of a tokenizer file, which counts and is not kept."""
    if beside:
        (hub.folder / "tokenizer_config.json").write_bytes(b"{}".ljust(beside))
    total = sum(hub.list_files(PINNED, None).values())
    tight, just = AdapterLimits(max_bytes=total - 1), AdapterLimits(max_bytes=total)
    assert refused_as(lambda: store_of(hub, tmp_path, tight).admit(PINNED, None)) == {"too_large"}
    admitted = store_of(hub, tmp_path).admit(PINNED, None)
    fetches = len(hub.fetches)
    store = store_of(hub, tmp_path, tight)
    assert store.recall(PINNED) is None
    assert refused_as(lambda: store.admit(PINNED, None)) == {"too_large"}
    assert store_of(hub, tmp_path, just).admit(PINNED, None) == admitted
    assert len(hub.fetches) == fetches


def test_the_size_of_content_counts_where_that_of_its_files_was_not_kept(
    hub: FakeHub, tmp_path: Path
) -> None:
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    (file,) = (home(tmp_path) / "refs").iterdir()
    file.chmod(0o644)
    file.write_bytes(msgspec.json.encode({"ref": PINNED, "digest": digest}))
    total = sum(hub.list_files(PINNED, None).values())
    assert store_of(hub, tmp_path, AdapterLimits(max_bytes=total)).recall(PINNED) is not None
    tight = store_of(hub, tmp_path, AdapterLimits(max_bytes=total - 1))
    assert refused_as(lambda: tight.admit(PINNED, None)) == {"too_large"}


def test_another_base_has_its_own_content(hub: FakeHub, tmp_path: Path) -> None:
    store_of(hub, tmp_path).admit(PINNED, None)
    other = msgspec.structs.replace(small_base(num_layers=1), digest="1" * 64)
    store = AdapterStore(tmp_path / "store", other, {"hub": hub})
    assert violation_codes(lambda: store.admit(PINNED, None)) == {"layer_out_of_range"}


def test_disk_use_is_bounded_by_least_recent_use(hub: FakeHub, tmp_path: Path) -> None:
    one = sum(path.stat().st_size for path in hub.folder.iterdir())
    store = store_of(hub, tmp_path, AdapterLimits(max_store_bytes=int(one * 3.9)))
    digests = []
    for number in range(6):
        write_adapter(hub.folder, BASE, seed=number)
        ref = AdapterRef("hub", "org/a", f"{number}" * 40)
        digests.append(store.admit(ref, None).digest)
        content = home(tmp_path) / "content"
        for age, digest in enumerate(digests):
            if (content / digest).exists():
                os.utime(content / digest, (1000 + age, 1000 + age))
    kept = {path.name for path in content.iterdir()}
    assert kept == set(digests[-3:])
    error = refusal(lambda: store.manifest(digests[0]))
    assert error is not None
    assert error.code == "not_found"


def test_what_is_in_use_is_not_taken(hub: FakeHub, tmp_path: Path) -> None:
    one = sum(path.stat().st_size for path in hub.folder.iterdir())
    store = store_of(hub, tmp_path, AdapterLimits(max_store_bytes=int(one * 1.9)))
    first = store.admit(PINNED, None).digest
    write_adapter(hub.folder, BASE, seed=1)
    # As another process may hold it while it packs.
    with closing(hold(home(tmp_path) / "content" / first)):
        second = store.admit(AdapterRef("hub", "org/a", "b" * 40), None).digest
        assert store.manifest(first).digest == first
    assert store.manifest(second).digest == second
    write_adapter(hub.folder, BASE, seed=2)
    third = store.admit(AdapterRef("hub", "org/a", "c" * 40), None).digest
    assert [path.name for path in (home(tmp_path) / "content").iterdir()] == [third]


def test_a_slab_is_not_taken_from_who_was_given_it(hub: FakeHub, tmp_path: Path) -> None:
    """Whatever is packed between its opening and its reading."""
    store = store_of(hub, tmp_path, AdapterLimits(max_store_bytes=1 << 16))
    digest = store.admit(PINNED, None).digest
    slabs = home(tmp_path) / "slabs"
    path = save_slab(store, digest, "float32", 4096)
    with closing(store.open_slab(digest, "float32", 4096)) as slab:
        assert slab.on_disk
        release(1 << 40, (slabs,))
        assert read_payload(path)
    release(1 << 40, (slabs,))
    assert list(slabs.iterdir()) == []


def test_content_is_not_taken_from_who_looks_at_it(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is read first; until all is read it must stay."""
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    content = home(tmp_path) / "content"
    for name, real in (("rejudge", rejudge), ("make_layout", make_layout)):

        def look(*arguments: Any, real: Any = real) -> Any:
            release(1 << 40, (content,))
            return real(*arguments)

        monkeypatch.setattr(f"loraplex.adapters.store.store.{name}", look)
    assert store.admit(PINNED, None).digest == digest
    assert store.recall(PINNED) is not None
    save_slab(store, digest, "float32", 4096)
    assert hub.fetches.count(WEIGHTS) == 1
    assert (content / digest).exists()


def test_content_that_leaves_while_it_is_wanted_may_come_again_at_once(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it was not there is not remembered."""
    store = store_of(hub, tmp_path)
    digest = store.admit(PINNED, None).digest
    content = home(tmp_path) / "content"

    def late(path: Path) -> Hold:
        release(1 << 40, (content,))
        return hold(path)

    with monkeypatch.context() as patched:
        patched.setattr("loraplex.adapters.store.content.hold", late)
        error = refusal(lambda: save_slab(store, digest, "float32", 4096))
    assert error is not None
    assert error.code == "not_found"
    assert store.admit(PINNED, None).digest == digest
    save_slab(store, digest, "float32", 4096)


def test_room_is_made_before_the_weights_come(hub: FakeHub, tmp_path: Path) -> None:
    """Several fetches under way count together."""
    one = sum(path.stat().st_size for path in hub.folder.iterdir())
    store = store_of(hub, tmp_path, AdapterLimits(max_store_bytes=int(one * 3.9)))
    old = []
    for seed in range(3):
        write_adapter(hub.folder, BASE, seed=seed)
        old.append(store.admit(AdapterRef("hub", "org/a", f"{seed}" * 40), None).digest)
    barrier = threading.Barrier(3)

    def gate(name: str) -> None:
        if name == WEIGHTS:
            barrier.wait(60)
            barrier.wait(60)

    write_adapter(hub.folder, BASE, seed=8)
    hub.gate = gate
    with ThreadPoolExecutor(2) as pool:
        asking = [
            pool.submit(store.admit, AdapterRef("hub", "org/b", f"{name}" * 40), None)
            for name in "ab"
        ]
        barrier.wait(60)
        left = {path.name for path in (home(tmp_path) / "content").iterdir()}
        barrier.wait(60)
        assert len({ask.result(60).digest for ask in asking}) == 1
    assert left == {old[-1]}


def test_a_full_disk_is_the_oldest_adapters_loss(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota that is larger than the disk does not keep what nobody uses for ever."""
    store = store_of(hub, tmp_path)
    content = home(tmp_path) / "content"
    old = store.admit(PINNED, None).digest
    newer = write_adapter(hub.folder, BASE, seed=1)
    size = (newer / WEIGHTS).stat().st_size
    monkeypatch.setattr(
        "loraplex.adapters.store.store.free_bytes",
        lambda folder: HEADROOM_BYTES + size - sum(1 for _ in content.iterdir()) * size // 2,
    )
    fresh = store.admit(AdapterRef("hub", "org/a", "b" * 40), None).digest
    assert [path.name for path in content.iterdir()] == [fresh] != [old]


def test_an_adapter_larger_than_the_whole_store_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path, AdapterLimits(max_store_bytes=1000))
    error = refusal(lambda: store.admit(PINNED, None))
    assert error is not None
    assert error.code == "too_large"
    assert hub.fetches == []


def test_several_stores_share_a_root(hub: FakeHub, tmp_path: Path) -> None:
    """As several processes would: whoever is first wins, and all get the same."""
    barrier = threading.Barrier(4)

    def gate(name: str) -> None:
        if name == WEIGHTS:
            barrier.wait(60)

    hub.gate = gate
    stores = [store_of(hub, tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda store: store.admit(PINNED, None), stores))
        digest = found[0].digest
        paths = list(pool.map(lambda store: save_slab(store, digest, "float32", 4096), stores))
    assert len(set(found)) == len(set(paths)) == 1
    assert hub.fetches.count(WEIGHTS) == 4
    assert list((home(tmp_path) / "staging").iterdir()) == []


def test_content_that_another_publishes_meanwhile_stays(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the second looks there is nothing; before it publishes, the first has."""
    first, second = (store_of(hub, tmp_path) for _ in range(2))
    published: list[Hold] = []

    def late(path: Path) -> Hold:
        try:
            return hold(path)
        except FileNotFoundError:
            if not published:
                published.append(Hold(-1))  # the first store looks, too
                first.admit(PINNED, None)
                published[:] = [hold(path)]
            raise

    monkeypatch.setattr("loraplex.adapters.store.content.hold", late)
    content = home(tmp_path) / "content" / second.admit(PINNED, None).digest
    with closing(published[0]) as there:
        assert os.path.samestat(os.fstat(there.fd), content.stat())
    assert hub.fetches.count(WEIGHTS) == 2


def test_only_what_is_held_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "content"
    path.mkdir()
    with closing(hold(path)) as damaged:
        path.rmdir()
        remove_held(damaged, path)
        path.mkdir()
        remove_held(damaged, path)
        assert path.exists()
    with closing(hold(path)) as damaged:
        remove_held(damaged, path)
    assert not path.exists()


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_copied_folder_has_the_digest_that_it_has_where_it_lies(
    dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is hashed as it is written, by leaves; the second adapter's shape is known."""
    monkeypatch.setattr("loraplex.adapters.content_check.LEAF_BYTES", 1000)
    folders = [write_adapter(tmp_path / f"a{i}", BASE, seed=i, dtype=dtype) for i in range(3)]
    with ThreadPoolExecutor(3) as threads:
        source = LocalSource([tmp_path], threads.map)
        store = AdapterStore(tmp_path / "s", BASE, {"local": source}, run=threads.map)
        for folder in folders:
            digest = store.admit(AdapterRef("local", folder.name), None).digest
            assert digest == judge_folder(folder, BASE).manifest.digest
            fresh = AdapterStore(tmp_path / folder.name[1:], BASE, {"local": source})
            assert fresh.admit(AdapterRef("local", folder.name), None).digest == digest
            slabs = [save_slab(each, digest, "bfloat16", 4096) for each in (store, fresh)]
            assert slabs[0].read_bytes() == slabs[1].read_bytes()


def test_local_folders_are_followed_as_they_change(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "root" / "a", BASE)
    store = AdapterStore(tmp_path / "store", BASE, {"local": LocalSource([tmp_path / "root"])})
    first = store.admit(AdapterRef("local", "a"), None)
    assert store.admit(AdapterRef("local", "a"), None) == first
    write_adapter(folder, BASE, seed=1, rank=4)
    second = store.admit(AdapterRef("local", "a"), None)
    assert second.digest != first.digest
    assert store.manifest(first.digest) == first


def test_a_root_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    error = refusal(lambda: AdapterStore(tmp_path / "store", BASE, {}))
    assert error is not None
    assert error.code == "unavailable"
