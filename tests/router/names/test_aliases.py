"""The table of names: one router's and a fleet's, what declarations decide, what outages cost."""

import asyncio
import time

import msgspec
import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.router.call import Secret
from loraplex.router.names.aliases import MAX_DELETED, Aliases
from loraplex.router.names.registration import Registration, seen
from loraplex.router.names.served import OwnedName
from loraplex.router.policy.rollout import Content, Rollout, Version
from loraplex.router.shared import memory_store
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.redis_link import RedisLink
from loraplex.router.shared.redis_store import RedisStore
from loraplex.router.shared.store import Row, Store
from tests.router.fake_worker import make_manifest
from tests.router.serving import poll
from tests.router.shared.redis_server import running_redis

REF = AdapterRef("hub", "org/one")
OTHER = AdapterRef("hub", "org/other")


def ready(name: str, ref: AdapterRef = REF) -> Registration:
    content = Content(ref, make_manifest(ref.name))
    plain = Registration(name, ref, "api", state="ready")
    return seen(plain, content, 5.0, "register", "api 10.0.0.1")


ONE = ready("one")


async def test_what_one_writes_the_others_and_a_restarted_one_have(store: Store) -> None:
    one, two = Aliases(store, True), Aliases(store, True)
    assert not one.is_known
    await two.refresh()
    version = Version(OTHER, Content(OTHER, make_manifest("v2")), 5, 5)
    rollout = Rollout("id", (version,), 95, 95)
    wanted = msgspec.structs.replace(ONE, rollout=rollout, pinned=True)
    await one.write(wanted)
    assert one.get(OwnedName("one")) == wanted
    await two.refresh()
    restarted = Aliases(store, True)
    await restarted.refresh()
    for aliases in (two, restarted):
        assert aliases.is_known
        assert aliases.get(OwnedName("one")) == wanted
        assert aliases.all() == [wanted]
        assert aliases.pinned() == [wanted]
    await two.write(msgspec.structs.replace(wanted, state="unloaded"))
    await one.refresh()
    assert one.names_for("") == ["one"]
    assert not one.in_service


async def test_of_two_writers_the_second_gets_an_error(store: Store) -> None:
    one, two = Aliases(store, True), Aliases(store, True)
    await one.write(ONE)
    with pytest.raises(AdapterError, match="somebody else") as caught:
        await two.write(ready("one", OTHER))
    assert caught.value.code == "conflict"
    assert two.get(OwnedName("one")) == ONE, "and knows now what there is"
    await two.write(ready("one", OTHER))


async def test_a_deleted_name_stays_gone_for_all_until_it_is_registered_again(store: Store) -> None:
    one, two = Aliases(store, True), Aliases(store, True)
    await one.write(ONE)
    gone = msgspec.structs.replace(ONE, state="deleted", content=None)
    await one.write(gone)
    await two.refresh()
    assert two.get(OwnedName("one")) == gone
    assert two.all() == []
    await two.write(ONE)
    assert two.get(OwnedName("one")) == ONE


async def test_no_credential_is_in_the_store(store: Store) -> None:
    alone = Aliases(store, False)
    secret = msgspec.structs.replace(ONE, token=Secret("hf_secret"))
    await alone.write(secret)
    assert alone.get(OwnedName("one")) == secret, "a router by itself keeps it"
    table = await store.read("adapters")
    assert b"hf_secret" not in table.rows["one"].value
    changed = ready("one", OTHER)
    await alone.write(changed)
    assert alone.get(OwnedName("one")) == changed, "and forgets it with what it opened"
    with pytest.raises(AdapterError, match="HF_TOKEN"):
        await Aliases(store, True).write(secret)


async def test_a_declaration_says_what_a_name_means(store: Store) -> None:
    declared = Registration("one", REF, "file")
    aliases, other = Aliases(store, True), Aliases(store, True, [declared])
    await aliases.write(ready("one", OTHER))
    await other.refresh()
    assert other.get(OwnedName("one")) == declared, "also where another was registered"
    done = msgspec.structs.replace(ONE, origin="file", state="unloaded")
    await other.write(msgspec.structs.replace(done))
    assert other.get(OwnedName("one")) == done, (
        "what was done to it counts for those who declare it so"
    )
    await aliases.refresh()
    assert aliases.get(OwnedName("one")) is None
    elsewhere = Aliases(store, True, [msgspec.structs.replace(declared, ref=OTHER)])
    await elsewhere.refresh()
    found = elsewhere.get(OwnedName("one"))
    assert found is not None
    assert (found.ref, found.state) == (OTHER, "registered")
    other.declare(msgspec.structs.replace(declared, pinned=True))
    assert [r.name for r in other.pinned()] == ["one"], "the file says what is pinned"
    gone = msgspec.structs.replace(declared, state="deleted")
    await other.drop(gone)
    assert other.get(OwnedName("one")) == gone
    assert (await store.read("adapters")).rows["one"].value == b"", "nothing of it is left"


async def test_what_a_router_notes_lasts_until_somebody_changes_it(store: Store) -> None:
    aliases = Aliases(store, True, [Registration("mine", REF, "option")])
    await aliases.write(ONE)
    for name in ("one", "mine"):
        found = aliases.get(OwnedName(name))
        assert found is not None
        aliases.note(found, msgspec.structs.replace(found, error="odd"))
    await aliases.refresh()
    assert [r.error for r in aliases.all()] == ["odd", "odd"]
    await Aliases(store, True).refresh()
    await aliases.write(msgspec.structs.replace(ONE, pinned=True))
    assert [r.error for r in aliases.all()] == ["odd", None]


async def test_without_redis_what_was_known_is_served_and_nothing_changed() -> None:
    async with running_redis() as server:
        link = RedisLink(server.url, timeout_s=5.0)
        aliases = Aliases(RedisStore(link, "test"), True)
        await aliases.write(ONE)
        await aliases.refresh()
        await server.kill()
        with pytest.raises(AdapterError, match="no Redis") as caught:
            await aliases.write(ready("two"))
        assert (caught.value.code, caught.value.retry_after_s) == ("unavailable", 2.0)
        assert aliases.all() == [ONE]
        assert aliases.is_known
        await server.start()
        running = asyncio.create_task(link.run())

        async def is_back() -> bool:
            return link.is_up

        await poll(is_back)
        await aliases.refresh()
        again = Aliases(RedisStore(link, "test"), True)
        await again.refresh()
        assert again.all() == [ONE], "an emptied Redis is filled again"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await link.close()


async def test_rows_that_mean_nothing_are_left_out() -> None:
    store = MemoryStore(time.time)
    await store.put("adapters", "odd", Row(1, b'{"name": 7}'))
    aliases = Aliases(store, True)
    await aliases.refresh()
    assert aliases.get(OwnedName("odd")) is None


async def test_the_table_is_bounded_and_deleted_names_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_store, "MAX_ROWS", 16)
    store = MemoryStore(time.time)
    for number in range(16):
        row = Row(1, msgspec.json.encode(ready(f"n{number}")))
        await store.put("adapters", f"n{number}", row)
    aliases = Aliases(store, False)
    await aliases.refresh()
    with pytest.raises(AdapterError, match="at most"):
        await aliases.write(ONE)
    gone = msgspec.structs.replace(ready("n7"), state="deleted", content=None)
    await aliases.write(gone)
    await aliases.write(ONE)
    assert aliases.get(OwnedName("n7")) is None
    assert aliases.get(OwnedName("one")) == ONE


async def test_dropped_declarations_are_remembered_for_a_while() -> None:
    aliases = Aliases(MemoryStore(time.time), False)
    for number in range(MAX_DELETED + 1):
        await aliases.drop(Registration(f"n{number}", REF, "file", state="deleted"))
    assert aliases.get(OwnedName("n0")) is None
    assert aliases.get(OwnedName("n1")) is not None
