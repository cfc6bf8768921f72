"""Files of pages: what is read is what was written, or is refused."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.model.pages import page_copier
from loraplex.server.model.pages.page_copier import PageFault, PageFiles, PageForm

FORM = PageForm("base", "float32", "auto", 4, ((0, 0), (0, 1)), 8, 0, 1, 24)
NAME, OTHER = bytes(range(32)), bytes(range(33))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[PageFiles]:
    found = PageFiles(tmp_path, FORM)
    yield found
    found.close()


def pieces(content: bytes) -> list[memoryview]:
    return [memoryview(bytearray(content[:16])), memoryview(bytearray(content[16:]))]


def read(files: PageFiles, name: bytes) -> bytes:
    found = pieces(bytes(24))
    files.read(name, found)
    return b"".join(found)


def test_what_is_written_is_read(files: PageFiles) -> None:
    for number, name in enumerate((NAME, OTHER)):
        files.write(name, pieces(bytes([number] * 24)))
    assert read(files, NAME) == bytes(24)
    assert read(files, OTHER) == bytes([1] * 24)
    files.write(NAME, pieces(bytes([7] * 24)))
    assert read(files, NAME) == bytes([7] * 24)
    files.drop(NAME)
    files.drop(NAME)
    with pytest.raises(PageFault, match="No such file"):
        read(files, NAME)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_byte_that_differs_is_noticed(data: st.DataObject, tmp_path_factory: Any) -> None:
    files = PageFiles(tmp_path_factory.mktemp("pages"), FORM)
    files.write(NAME, pieces(bytes(24)))
    path = files._path(NAME)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(PageFault, match="not as it was written|another size"):
        read(files, NAME)
    files.close()


def swap_names(files: PageFiles) -> None:
    files.write(bytes(32), pieces(bytes(24)))
    files._path(bytes(32)).rename(files._path(NAME))


def link(files: PageFiles) -> None:
    files._path(NAME).rename(files._path(OTHER))
    files._path(NAME).symlink_to(files._path(OTHER))


def folder(files: PageFiles) -> None:
    files._path(NAME).unlink()
    files._path(NAME).mkdir()


BAD: dict[str, Callable[[PageFiles], None]] = {
    "cut": lambda files: os.truncate(files._path(NAME), 50),
    "empty": lambda files: os.truncate(files._path(NAME), 0),
    "longer": lambda files: os.truncate(files._path(NAME), 500),
    "another page's": swap_names,
    "a link": link,
    "a folder": folder,
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_files_are_refused(files: PageFiles, bad: str) -> None:
    files.write(NAME, pieces(bytes(24)))
    BAD[bad](files)
    with pytest.raises(PageFault):
        read(files, NAME)


def test_a_full_disk_is_a_fault_and_leaves_nothing(
    files: PageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copier, "free_bytes", lambda folder: 1000)
    with pytest.raises(PageFault, match="full"):
        files.write(NAME, pieces(bytes(24)))
    monkeypatch.setattr(page_copier, "free_bytes", lambda folder: 1 << 40)
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, parts[0]))
    with pytest.raises(PageFault, match="part"):
        files.write(NAME, pieces(bytes(24)))
    assert files.stored(10) == []
    assert [path.name for path in files._folder.iterdir()] == ["lock"]


def test_pages_outlive_the_process(tmp_path: Path) -> None:
    first = PageFiles(tmp_path, FORM)
    names = [bytes([number] * 32) for number in range(5)]
    for at, name in enumerate(names):
        first.write(name, pieces(bytes([at] * 24)))
        os.utime(first._path(name), ns=(at, at))
    (first._folder / f"{NAME.hex()}.part").write_bytes(b"a kill left it")
    first.close()
    second = PageFiles(tmp_path, FORM)
    assert second.stored(3) == names[2:]
    assert read(second, names[4]) == bytes([4] * 24)
    assert len(list(second._folder.iterdir())) == 4, "the lock, and no more pages than may be"
    second.close()


def test_processes_that_live_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = PageFiles(tmp_path, FORM), PageFiles(tmp_path, FORM)
    first.write(NAME, pieces(bytes(24)))
    assert second.stored(10) == []
    first.close()
    third = PageFiles(tmp_path, FORM)
    assert third.stored(10) == [NAME]
    second.close()
    third.close()


def test_shards_lie_beside_each_other(tmp_path: Path) -> None:
    first, second = (
        PageFiles(tmp_path, msgspec.structs.replace(FORM, shards=2, shard=shard))
        for shard in range(2)
    )
    first.write(NAME, pieces(bytes(24)))
    assert second.stored(10) == []
    shutil.copy(first._path(NAME), second._path(NAME))
    with pytest.raises(PageFault, match="not as it was written"):
        read(second, NAME)
    for each in (first, second):
        each.close()
    PageFiles(tmp_path, msgspec.structs.replace(FORM, shards=2, shard=1)).close()
    assert first._path(NAME).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"base_digest": "other"},
        {"dtype": "bfloat16"},
        {"kv_dtype": "fp8"},
        {"page_size": 8},
        {"layers": ((0, 0), (1, 0))},
        {"shards": 2},
    ],
)
def test_another_form_reads_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    """Not even where the file is put into its folder. What nobody uses any more is removed."""
    first = PageFiles(tmp_path, FORM)
    first.write(NAME, pieces(bytes(24)))
    other = PageFiles(tmp_path, msgspec.structs.replace(FORM, **change))
    assert other.stored(10) == []
    shutil.copy(first._path(NAME), other._path(NAME))
    with pytest.raises(PageFault, match="not as it was written"):
        read(other, NAME)
    assert first._folder.exists(), "its process lives"
    first.close()
    other.close()
    PageFiles(tmp_path, msgspec.structs.replace(FORM, **change)).close()
    assert not first._folder.exists()
