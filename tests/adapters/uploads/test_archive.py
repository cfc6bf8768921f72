"""Tars of adapters: what is read, and what is refused by name."""

import io
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.uploads.archive import adapter_files, archive_pieces
from tests.adapters.uploads.bodies import CONFIG, FILES, LIMIT, WEIGHTS, archive, entry, unpacked

BIG = (1 << 33) - 1


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("top", ["", "./", "run-7/"])
def test_archives_of_pythons_tarfile(tmp_path: Path, form: int, top: str) -> None:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w", format=form) as tar:
        folder = tarfile.TarInfo(top or ".")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in {**FILES, "README.md": b"text", "optimizer.pt": b"x"}.items():
            info = tarfile.TarInfo(top + name)
            info.size, info.mtime = len(content), 1.25  # pax notes a time with a fraction
            tar.addfile(info, io.BytesIO(content))
    assert unpacked(body.getvalue(), tmp_path) == unpacked(archive(), make(tmp_path / "other"))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.*")} == FILES


def make(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    digest = unpacked(archive(), make(tmp_path / "in"))
    again = b"".join(archive_pieces(adapter_files(tmp_path / "in")))
    assert unpacked(again, make(tmp_path / "out")) == digest
    with tarfile.open(fileobj=io.BytesIO(again)) as tar:
        assert sorted(tar.getnames()) == sorted(FILES)


def test_the_digest_does_not_depend_on_the_order(tmp_path: Path) -> None:
    backwards = archive(list(FILES.items())[::-1])
    assert unpacked(archive(), make(tmp_path / "a")) == unpacked(backwards, make(tmp_path / "b"))
    other = archive(
        [("adapter_config.json", CONFIG + b" "), ("adapter_model.safetensors", WEIGHTS)]
    )
    assert unpacked(archive(), make(tmp_path / "c")) != unpacked(other, make(tmp_path / "d"))


CONFIG_ENTRY = ("adapter_config.json", CONFIG)
HOSTILE = {
    "no weights": (archive([CONFIG_ENTRY]), "missing_file"),
    "no config": (archive([("adapter_model.safetensors", WEIGHTS)]), "missing_file"),
    "nothing": (b"", "bad_archive"),
    "text": (b"hello " * 200, "bad_archive"),
    "cut in a header": (archive()[:300], "bad_archive"),
    "cut in a file": (archive()[:1500], "bad_archive"),
    "no end": (archive(end=False), "bad_archive"),
    "doubled": (archive([*FILES.items(), CONFIG_ENTRY]), "duplicate_file"),
    "upwards": (archive([("../adapter_config.json", CONFIG)]), "escaping_path"),
    "absolute": (archive([("/etc/adapter_config.json", CONFIG)]), "escaping_path"),
    "deep": (archive([("a/b/adapter_config.json", CONFIG)]), "escaping_path"),
    "two folders": (
        archive([("a/adapter_config.json", CONFIG), ("b/adapter_model.safetensors", WEIGHTS)]),
        "several_folders",
    ),
    "link": (entry("adapter_config.json", kind=tarfile.SYMTYPE) + archive(), "not_a_file"),
    "hard link": (entry("adapter_config.json", kind=tarfile.LNKTYPE) + archive(), "not_a_file"),
    "device": (entry("adapter_config.json", kind=tarfile.CHRTYPE) + archive(), "not_a_file"),
    "sparse": (
        entry("adapter_model.safetensors", kind=tarfile.GNUTYPE_SPARSE) + archive(),
        "not_a_file",
    ),
    "pickle": (archive([CONFIG_ENTRY, ("adapter_model.bin", b"x")]), "unsafe_format"),
    "renamed by pax": (
        entry("x", b"26 path=adapter_config.json\n", tarfile.XHDTYPE) + archive(),
        "bad_archive",
    ),
    "long name": (entry("././@LongLink", b"x" * 300, tarfile.GNUTYPE_LONGNAME), "bad_archive"),
    "huge note": (entry("x", kind=tarfile.XHDTYPE, size=1 << 30), "bad_archive"),
    "config of 2 MB": (archive([("adapter_config.json", b" " * (2 << 20))]), "file_too_large"),
    "config no JSON": (archive([("adapter_config.json", b"{"), *FILES.items()]), "bad_config"),
    "no safetensors": (
        archive([CONFIG_ENTRY, ("adapter_model.safetensors", b"\xff" * 600)]),
        "header_too_large",
    ),
    "short weights": (archive([("adapter_model.safetensors", WEIGHTS[:-8])]), "truncated"),
    "many files": (archive((f"f{i}.txt", b"") for i in range(70)), "too_many_files"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives(tmp_path: Path, case: str) -> None:
    body, code = HOSTILE[case]
    with pytest.raises(AdapterError) as refused:
        unpacked(body, tmp_path, 8 << 20)
    assert [violation.code for violation in refused.value.violations] == [code]


def test_what_is_announced_as_too_large_is_not_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("adapter_model.safetensors")
    info.size = BIG
    with pytest.raises(AdapterError) as refused:
        unpacked(info.tobuf(), tmp_path)
    assert refused.value.code == "too_large"
    zeros = archive([("notes.txt", bytes(LIMIT)), ("more.txt", bytes(LIMIT))])
    with pytest.raises(AdapterError) as refused:
        unpacked(zeros, tmp_path)
    assert refused.value.code == "too_large", "what is dropped counts, too"


@given(st.binary(max_size=2048), st.integers(0, 6000))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    body = archive()
    spoilt = body[:at] + noise + body[at + len(noise) :]
    with suppress(AdapterError):
        unpacked(spoilt, tmp_path_factory.mktemp("spoilt"))
