"""The contract of every shelf: a folder, Redis, and Redis as a cluster keeps keys."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.router.files.store import DiskShelf, FileStore
from loraplex.router.policy.batch_limits import ResponsesLimits
from loraplex.router.shared.store import Shelf
from tests.router.shared.stores import redis_store

LIMITS = ResponsesLimits(keep_s=60, tenant_bytes=100, tenant_count=3)


@pytest.fixture(params=["disk", "redis", "cluster"])
async def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shelf]:
    if request.param == "disk":
        yield DiskShelf(FileStore(tmp_path))
        return
    options = ("--cluster-enabled", "yes") if request.param == "cluster" else ()
    async with redis_store(*options) as store:
        yield store


async def put(shelf: Shelf, name: str, size: int, least: str = "", tenant: str = "acme") -> None:
    assert await shelf.shelve(tenant, name, b"", b"x" * size, LIMITS, least)


async def names(shelf: Shelf, tenant: str = "acme") -> str:
    found = [name for name in "abcdef" if await shelf.shelved(tenant, name)]
    return "".join(found)


async def test_values_take_the_place_of_others(shelf: Shelf) -> None:
    for old, new, done in (
        (b"1", b"2", False),
        (b"", b"", True),
        (b"", b"1", True),
        (b"", b"2", False),
        (b"1", b"2", True),
        (b"1", b"", False),
        (b"2", b"", True),
        (b"2", b"3", False),
        (b"", b"3", True),
    ):
        there = await shelf.shelved("acme", "a")
        assert await shelf.shelve("acme", "a", old, new, LIMITS, "") is done
        assert await shelf.shelved("acme", "a") == (new if done else there)
    assert await shelf.shelved("other", "a") == b""


async def test_one_of_many_puts_a_value(shelf: Shelf) -> None:
    puts = [shelf.shelve("acme", "a", b"", b"%d" % i, LIMITS, "") for i in range(8)]
    assert (await asyncio.gather(*puts)).count(True) == 1


async def test_one_of_many_routers_puts_a_value(tmp_path: Path) -> None:
    routers = [DiskShelf(FileStore(tmp_path)) for _ in range(2)]
    for name in "abcdef":
        puts = [
            shelf.shelve("acme", name, b"", b"%d" % i, LIMITS, "")
            for i in range(4)
            for shelf in routers
        ]
        assert (await asyncio.gather(*puts)).count(True) == 1


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
    shelf: Shelf, sizes: tuple[int, ...], least: str, left: str
) -> None:
    for i, size in enumerate(sizes):
        await put(shelf, "abcdef"[i], size, least if i == len(sizes) - 1 else "")
    await put(shelf, "a", 90, tenant="other")
    assert await names(shelf) == left
    assert await names(shelf, "other") == "a"


async def test_room_is_counted_anew_when_values_change(shelf: Shelf) -> None:
    for name, size in (("a", 40), ("b", 40)):
        await put(shelf, name, size)
    assert await shelf.shelve("acme", "b", b"x" * 40, b"x" * 10, LIMITS, "")
    await put(shelf, "c", 50)
    assert await names(shelf) == "abc"
    assert await shelf.shelve("acme", "a", b"x" * 40, b"", LIMITS, "")
    assert await shelf.shelve("acme", "b", b"x" * 10, b"x" * 50, LIMITS, "")
    assert await names(shelf) == "bc"


async def test_a_folder_is_swept(tmp_path: Path) -> None:
    shelf = DiskShelf(FileStore(tmp_path))
    for name in "abc":
        await put(shelf, name, 10)
    folder = tmp_path / "tenants/acme/responses"
    for name, age_s in ((".new.tmp", 0), (".old.tmp", 10**6)):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, times=(os.stat(folder).st_mtime - age_s,) * 2)
    shelf.sweep(LIMITS, "b")
    assert sorted(os.listdir(folder)) == [".new.tmp", "b", "c"]
