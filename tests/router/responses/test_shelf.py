"""Values of tenants in a folder: kept within bounds, the oldest given up."""

import os
from pathlib import Path

import pytest

from loraplex.router.files.disk_shelf import DiskShelf
from loraplex.router.files.store import FileStore
from loraplex.router.policy.batch_limits import ResponsesLimits

LIMITS = ResponsesLimits(keep_s=60, tenant_bytes=100, tenant_count=3)


@pytest.fixture
def shelf(tmp_path: Path) -> DiskShelf:
    return DiskShelf(FileStore(tmp_path), LIMITS)


async def names(shelf: DiskShelf, tenant: str = "acme") -> str:
    return "".join([name for name in "abcdef" if await shelf.shelved(tenant, name)])


@pytest.mark.parametrize(
    ("sizes", "least", "left"),
    [
        ((10, 10, 10), "", "abc"),
        ((10, 10, 10, 10), "", "bcd"),  # too many
        ((50, 10, 60), "", "bc"),  # too large together
        ((10, 10, 100), "", "c"),
        ((10, 95, 10), "", "c"),  # what is older than one that goes, goes
        ((10, 10, 200), "", "c"),  # the newest stays in any case
        ((10, 10, 10), "b", "bc"),  # too old
        ((10, 10, 10), "c", "c"),
    ],
)
async def test_the_oldest_make_room(
    shelf: DiskShelf, sizes: tuple[int, ...], least: str, left: str
) -> None:
    for i, size in enumerate(sizes):
        is_last = i == len(sizes) - 1
        await shelf.shelve("acme", "abcdef"[i], b"x" * size, least if is_last else "")
    await shelf.shelve("other", "a", b"x" * 90, "")
    assert (await names(shelf), await names(shelf, "other")) == (left, "a")


async def test_values_are_removed(shelf: DiskShelf) -> None:
    for name in "ab":
        await shelf.shelve("acme", name, b"x", "")
    for _ in range(2):
        await shelf.remove("acme", "a")
        assert (await shelf.shelved("acme", "a"), await names(shelf)) == (b"", "b")


async def test_a_folder_is_swept(tmp_path: Path, shelf: DiskShelf) -> None:
    for name in "abc":
        await shelf.shelve("acme", name, b"x", "")
    folder = tmp_path / "tenants/acme/responses"
    for name, age_s in ((".new.tmp", 0), (".old.tmp", 10**6)):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, times=(os.stat(folder).st_mtime - age_s,) * 2)
    shelf.sweep("b")
    assert sorted(os.listdir(folder)) == [".new.tmp", "b", "c"]
