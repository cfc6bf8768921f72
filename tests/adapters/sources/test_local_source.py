"""Local adapters: under the roots only, whatever links say; pinned by fingerprint."""

import errno
import hashlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loraplex.adapters.content_check import Run, copy_leaves
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import AdapterRef, local_name
from loraplex.adapters.sources.local import LocalSource
from tests.adapter_folders import small_base, write_adapter
from tests.adapters.refusals import refusal

BASE = small_base()
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "root" / "team" / "a", BASE)
    write_adapter(tmp_path / "outside" / "secret", BASE)
    return tmp_path / "root"


def ref(name: str, revision: str | None = None) -> AdapterRef:
    return AdapterRef("local", name, revision)


def code(source: LocalSource, name: str) -> str:
    error = refusal(lambda: source.resolve(ref(name), None))
    return "" if error is None else error.code


def test_relative_absolute_and_second_root(root: Path, tmp_path: Path) -> None:
    source = LocalSource([tmp_path / "empty", root])
    pinned = source.resolve(ref("team/a"), None)
    assert source.resolve(ref(str(root / "team" / "a")), None).revision == pinned.revision
    listing = source.list_files(pinned, None)
    assert set(listing) == {"adapter_config.json", WEIGHTS}
    target = tmp_path / "target"
    target.mkdir()
    source.fetch_file(pinned, None, WEIGHTS, target)
    assert (target / WEIGHTS).read_bytes() == (root / "team/a" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("shares", [True, False])
def test_a_copy_is_whole_whatever_the_file_system_can_do(
    shares: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (root / "team/a" / WEIGHTS).read_bytes()

    def share(source: int, target: int) -> bool:
        return shares and os.write(target, whole) > 0

    monkeypatch.setattr("loraplex.adapters.sources.local.share_bytes", share)
    monkeypatch.setattr("loraplex.adapters.content_check.LEAF_BYTES", 640)
    monkeypatch.setattr("loraplex.adapters.content_check._WRITE_BYTES", 100)
    with ThreadPoolExecutor(3) as threads:
        source = LocalSource([root], threads.map)
        pinned = source.resolve(ref("team/a"), None)
        digests = source.fetch_file(pinned, None, WEIGHTS, tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == whole
    leaves = [hashlib.sha256(whole[at : at + 640]).digest() for at in range(0, len(whole), 640)]
    assert digests == (None if shares else leaves)


@pytest.mark.parametrize("to", ["shorter", "longer", "another"])
def test_a_file_that_changes_under_a_copy_is_not_taken(
    to: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "team/a" / WEIGHTS

    def copy(source: int, target: int, nbytes: int, run: Run) -> tuple[int, list[bytes]]:
        with path.open("r+b") as file:
            file.truncate(nbytes + {"shorter": -8, "longer": 8, "another": 0}[to])
            file.write(b"\x01")
        return copy_leaves(source, target, nbytes, run)

    monkeypatch.setattr("loraplex.adapters.sources.local.copy_leaves", copy)
    source = LocalSource([root])
    pinned = source.resolve(ref("team/a"), None)
    error = refusal(lambda: source.fetch_file(pinned, None, WEIGHTS, tmp_path))
    assert error is not None
    assert error.code == "unavailable"
    assert not (tmp_path / WEIGHTS).exists()


def test_a_disk_that_fills_up_under_a_copy_is_reported_as_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, position: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("loraplex.adapters.content_check.write_at", full)
    source = LocalSource([root])
    pinned = source.resolve(ref("team/a"), None)
    with pytest.raises(OSError, match="full"):
        source.fetch_file(pinned, None, WEIGHTS, tmp_path)


def test_a_root_may_be_one_adapter(root: Path) -> None:
    alone = LocalSource([root / "team/a"])
    assert alone.resolve(AdapterRef("local", str(root / "team/a")), None).revision
    assert code(alone, str(root / "team")) == "forbidden"
    assert code(alone, str(root / "team/b")) == "forbidden"


def test_outside_the_roots(root: Path, tmp_path: Path) -> None:
    source = LocalSource([root])
    assert code(source, str(tmp_path / "outside" / "secret")) == "forbidden"
    assert code(source, "/etc") == "forbidden"
    assert code(source, str(tmp_path / "none")) == "forbidden"
    assert code(source, "none") == "not_found"
    assert code(LocalSource([]), "team/a") == "forbidden"
    (root / "file").write_text("x")
    assert code(source, "file") == "not_found"


def test_errors_do_not_show_where_a_folder_lies(root: Path, tmp_path: Path) -> None:
    """The reference may be the operator's own, behind a registered name."""
    source = LocalSource([root])
    (root / "team/a" / WEIGHTS).unlink()
    (root / "team/a" / WEIGHTS).mkdir()
    for path in (root / "team" / "a", root / "team" / "gone", tmp_path / "outside" / "secret"):
        error = refusal(lambda name=str(path): source.resolve(ref(name), None))  # type: ignore[misc]
        assert error is not None
        told = f"{error.message} {error.violations}"
        assert path.name in told
        assert str(tmp_path) not in told


def test_a_root_with_a_longer_twin(root: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "root-private" / "a", BASE)
    assert code(LocalSource([root]), str(tmp_path / "root-private" / "a")) == "forbidden"


def test_links_may_not_leave_the_roots(root: Path, tmp_path: Path) -> None:
    source = LocalSource([root])
    (root / "escape").symlink_to(tmp_path / "outside" / "secret")
    assert code(source, "escape") == "forbidden"
    (root / "team" / "up").symlink_to("../../outside")
    assert code(source, "team/up/secret") == "forbidden"
    (root / "mixed").mkdir()
    (root / "mixed" / "adapter_config.json").symlink_to("/etc/passwd")
    error = refusal(lambda: source.resolve(ref("mixed"), None))
    assert error is not None
    assert [violation.code for violation in error.violations] == ["escaping_link"]


def test_a_hub_cache_under_a_root(root: Path, tmp_path: Path) -> None:
    """Snapshots there are links to blobs beside them."""
    blobs = root / "models--o--n" / "blobs"
    snapshot = root / "models--o--n" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("adapter_config.json", WEIGHTS):
        (blobs / f"blob-{name}").write_bytes((root / "team/a" / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
    source = LocalSource([root])
    pinned = source.resolve(ref("models--o--n/snapshots/abc"), None)
    target = tmp_path / "target"
    target.mkdir()
    source.fetch_file(pinned, None, WEIGHTS, target)
    assert not (target / WEIGHTS).is_symlink()


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder"])
def test_what_is_not_a_file(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "team" / "a")
    os.unlink(WEIGHTS)
    if kind == "fifo":
        os.mkfifo(WEIGHTS)
    elif kind == "folder":
        os.mkdir(WEIGHTS)
    else:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(WEIGHTS)
    error = refusal(lambda: LocalSource([root]).resolve(ref("team/a"), None))
    assert error is not None
    assert [violation.code for violation in error.violations] == ["not_a_file"]


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_config.json", "tokenizer.json"])
def test_a_folder_in_place_of_a_file_leaves_nothing_open(name: str, root: Path) -> None:
    path = root / "team/a" / name
    path.unlink(missing_ok=True)
    path.mkdir()
    source, before = LocalSource([root]), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert code(source, "team/a") == "invalid"
    assert len(os.listdir("/proc/self/fd")) == before


def test_pickles_beside_weights_are_not_looked_at(root: Path) -> None:
    folder = root / "team" / "a"
    (folder / "optimizer.pt").symlink_to("/nowhere/optimizer.pt")
    (folder / "training_args.bin").symlink_to("/etc/passwd")
    (folder / "global_step5.pt").mkdir()
    (folder / "scheduler.pkl").write_bytes(b"")
    assert code(LocalSource([root]), "team/a") == ""
    assert judge_folder(folder, BASE, AdapterLimits()).manifest.digest


@pytest.mark.parametrize("name", ["my adapter", "ädäpter", "a:b", "a#b", "a@b", "100%"])
def test_folders_of_any_name(name: str, root: Path) -> None:
    (root / "team" / "a").rename(root / name)
    assert code(LocalSource([root]), local_name(name)) == ""


def test_a_link_away_is_reported_as_one_whatever_the_other_roots_hold(
    root: Path, tmp_path: Path
) -> None:
    (root / "escape").symlink_to(tmp_path / "outside" / "secret")
    source = LocalSource([root, root / "team" / "a"])
    assert code(source, "escape") == "forbidden"
    assert code(source, "none") == "not_found"


def test_a_changed_folder_is_another_revision(root: Path) -> None:
    source = LocalSource([root])
    pinned = source.resolve(ref("team/a"), None)
    assert source.resolve(pinned, None) == pinned
    config = root / "team/a/adapter_config.json"
    config.write_text(config.read_text() + " ")
    for call in (source.resolve, source.list_files):
        error = refusal(lambda call=call: call(pinned, None))  # type: ignore[misc]
        assert error is not None
        assert (error.code, error.retry_after_s) == ("unavailable", 1.0)
    assert source.resolve(ref("team/a"), None) != pinned


def test_other_content_of_the_same_size_and_date_is_another_revision(root: Path) -> None:
    """As after `rsync --times`, or from an archive whose files all have one date."""
    source = LocalSource([root])
    weights = root / "team/a" / WEIGHTS
    os.utime(weights, (1, 1))
    pinned = source.resolve(ref("team/a"), None)
    write_adapter(root / "team" / "b", BASE, seed=1)
    other = root / "team/b" / WEIGHTS
    assert other.stat().st_size == weights.stat().st_size
    os.utime(other, (1, 1))
    other.replace(weights)
    assert source.resolve(ref("team/a"), None) != pinned


def test_files_of_two_revisions_are_not_mixed(root: Path, tmp_path: Path) -> None:
    source = LocalSource([root])
    pinned = source.resolve(ref("team/a"), None)
    target = tmp_path / "target"
    target.mkdir()
    source.fetch_file(pinned, None, "adapter_config.json", target)
    config = root / "team/a/adapter_config.json"
    config.write_text(config.read_text() + " ")
    error = refusal(lambda: source.fetch_file(pinned, None, WEIGHTS, target))
    assert error is not None
    assert error.code == "unavailable"
    assert not (target / WEIGHTS).exists()


def test_an_unrelated_file_changes_nothing(root: Path) -> None:
    source = LocalSource([root])
    pinned = source.resolve(ref("team/a"), None)
    (root / "team/a/README.md").write_text("hello")
    assert source.resolve(ref("team/a"), None) == pinned


def test_too_many_entries(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.adapters.sources.local.MAX_ENTRIES", 1)
    error = refusal(lambda: LocalSource([root]).resolve(ref("team/a"), None))
    assert error is not None
    assert [violation.code for violation in error.violations] == ["too_many_files"]


def test_why_a_folder_is_unreadable_is_reported(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", too_many)
    error = refusal(lambda: LocalSource([root]).resolve(ref("team/a"), None))
    assert error is not None
    assert (error.code, error.message) == (
        "unavailable",
        "local adapter 'a' cannot be read now: Too many open files",
    )
