"""The index of names answers as one who looks at all of them."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.ref import AdapterRef
from loraplex.router.names.aliases import AliasIndex, SortedKeys
from loraplex.router.names.registration import AliasState, Origin, Registration
from loraplex.router.policy.rollout import Content
from tests.router.fake_worker import make_manifest

NAMES = st.sampled_from(["a", "ab", "b", "c-a", "z"])
TENANTS = st.sampled_from(["", "acme", "ac", "zeta"])
STATES: list[AliasState] = ["registered", "ready", "unloading", "unloaded", "deleted"]
ORIGINS: list[Origin] = ["api", "file", "option", "folder"]
CONTENTS = st.sampled_from(["one", "two", "three"]).map(
    lambda name: Content(AdapterRef("hub", f"org/{name}"), make_manifest(name))
)
REGISTRATIONS = st.builds(
    Registration,
    name=NAMES,
    tenant=TENANTS,
    ref=st.just(AdapterRef("upload", "0" * 64)) | st.just(AdapterRef("hub", "org/x")),
    origin=st.sampled_from(ORIGINS),
    pinned=st.booleans(),
    state=st.sampled_from(STATES),
    content=st.none() | CONTENTS,
    error=st.none() | st.just("broken"),
)


@given(st.lists(REGISTRATIONS, max_size=30), TENANTS | st.none(), NAMES | st.just(""))
def test_answers(changes: list[Registration], tenant: str | None, search: str) -> None:
    index, table = AliasIndex(), dict[str, Registration]()
    for change in changes:
        key = str(change.key)
        index.remove(key, table.get(key))
        table[key] = change
        index.add(key, change)
        list(index.keys(None))  # what is put in place early stays right
    there = {key: one for key, one in table.items() if one.state != "deleted"}
    assert len(index) == len(there)
    assert index.in_service == sum(r.in_service and not r.is_broken for r in there.values())
    assert set(index.marked("pinned")) == {key for key, one in there.items() if one.pinned}
    assert set(index.marked("file")) == {k for k, one in there.items() if one.origin == "file"}
    assert index.uploads() == {digest for one in there.values() for digest in one.uploads}
    for held in {held for one in table.values() for held in one.held}:
        assert set(index.meaning(held)) == {k for k, one in there.items() if held in one.held}
    wanted = [
        key
        for key, one in sorted(there.items(), key=lambda item: (bool(item[1].tenant), item[0]))
        if tenant in (None, one.tenant) and search in one.name
    ]
    assert list(index.keys(tenant, search)) == wanted
    for place, key in enumerate(wanted):  # each page goes on where the last one ended
        assert list(index.keys(tenant, search, key)) == wanted[place + 1 :]


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.booleans())))
def test_keys_in_order(changes: list[tuple[int, bool, bool]]) -> None:
    keys, there = SortedKeys(), set[str]()
    for number, adds, looks in changes:
        key = f"k{number}"
        if adds and key not in there:
            keys.add(key)
            there.add(key)
        elif not adds and key in there:
            keys.remove(key)
            there.discard(key)
        if looks:
            keys.keys()
    assert keys.keys() == sorted(there)


def test_many_changes_are_sorted_together() -> None:
    keys = SortedKeys()
    for number in range(1000, 0, -1):
        keys.add(f"k{number:04}")
    keys.remove("k0007")
    keys.settle()
    assert keys.keys()[5:8] == ["k0006", "k0008", "k0009"]
    assert list(keys.found("99", "k0500"))[:2] == ["k0599", "k0699"]


def test_one_content_of_several_names() -> None:
    index = AliasIndex()
    content = Content(AdapterRef("hub", "org/one"), make_manifest("one"))
    ones = [Registration(n, content.ref, "api", state="ready", content=content) for n in "abc"]
    for one in ones:
        index.add(one.name, one)
    assert index.meaning(content.held) == ("a", "b", "c")
    index.remove("b", ones[1])
    assert index.meaning(content.held) == ("a", "c")
    other = msgspec.structs.replace(content, base="other")
    assert index.meaning(other.held) == ()
