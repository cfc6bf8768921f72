"""What may be done with a registered adapter, and what it then means."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.router.names.registration import (
    MAX_HISTORY,
    AliasState,
    Event,
    Registration,
    check_served,
    conflicts,
    move,
    seen,
)
from loraplex.router.policy.rollout import Content
from tests.router.fake_worker import make_manifest

REF = AdapterRef("hub", "org/one")
ALIAS = Registration("one", REF, "api")
STATES: tuple[AliasState, ...] = ("registered", "ready", "unloading", "unloaded", "deleted")
EVENTS: tuple[Event, ...] = ("admit", "refresh", "pin", "unload", "drained", "delete")


def content(name: str) -> Content:
    return Content(REF, make_manifest(name))


def in_state(state: AliasState) -> Registration:
    return msgspec.structs.replace(ALIAS, state=state)


@pytest.mark.parametrize(
    ("event", "table"),
    [
        ("admit", {"registered": "ready", "ready": "ready", "unloaded": "ready"}),
        ("refresh", {"registered": "ready", "ready": "ready"}),
        ("pin", {"registered": "ready", "ready": "ready", "unloaded": "ready"}),
        (
            "unload",
            {
                "registered": "unloading",
                "ready": "unloading",
                "unloading": "unloading",
                "unloaded": "unloaded",
            },
        ),
        ("drained", {"unloading": "unloaded"}),
        ("delete", dict.fromkeys(STATES[:-1], "deleted")),
    ],
)
def test_what_may_follow_what(event: Event, table: dict[AliasState, AliasState]) -> None:
    for state in STATES:
        if state in table:
            assert move(in_state(state), event).state == table[state]
            continue
        with pytest.raises(AdapterError) as caught:
            move(in_state(state), event)
        assert caught.value.code == ("gone" if state == "deleted" else "conflict")
        assert "'one'" in caught.value.message


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("registered", None),
        ("ready", None),
        ("unloading", "conflict"),
        ("unloaded", "conflict"),
        ("deleted", "gone"),
    ],
)
def test_who_is_served(state: AliasState, code: str | None) -> None:
    registration = in_state(state)
    assert registration.in_service == (code is None)
    if code is None:
        check_served(registration)
        return
    with pytest.raises(AdapterError) as caught:
        check_served(registration)
    assert caught.value.code == code


@given(st.lists(st.sampled_from("abc"), max_size=100))
def test_history_is_the_changes_in_order_and_bounded(names: list[str]) -> None:
    registration = ALIAS
    for now, name in enumerate(names):
        registration = seen(registration, content(name), now)
        assert registration.digest == content(name).manifest.digest
        assert registration.history[-1].digest == registration.digest
    digests = [record.digest for record in registration.history]
    assert all(a != b for a, b in zip(digests, digests[1:], strict=False))
    assert len(digests) <= MAX_HISTORY
    since = [record.since for record in registration.history]
    assert since == sorted(since)


@given(st.lists(st.sampled_from(EVENTS), max_size=30), st.booleans())
def test_only_what_is_ready_is_pinned(events: list[Event], pinned: bool) -> None:
    registration = msgspec.structs.replace(seen(ALIAS, content("a"), 0), pinned=pinned)
    for event in events:
        try:
            registration = move(registration, event)
        except AdapterError:
            continue
        kept = [content.digest for content in registration.pinned_contents]
        expected = [registration.digest] if pinned and registration.state == "ready" else []
        assert kept == expected


def test_a_name_means_one_reference_unless_replaced() -> None:
    other = AdapterRef("hub", "org/other")
    conflicts(ALIAS, REF, replace=False)
    conflicts(ALIAS, other, replace=True)
    conflicts(in_state("deleted"), other, replace=False)
    with pytest.raises(AdapterError) as caught:
        conflicts(ALIAS, other, replace=False)
    assert caught.value.code == "conflict"
