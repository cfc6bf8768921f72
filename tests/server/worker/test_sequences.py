"""Every sequence ends exactly once, at its own router; credits are never exceeded."""

from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loraplex.server.engine.messages import SequenceEvent
from loraplex.server.protocol import (
    Evidence,
    GenerateRequest,
    PictureSpan,
    SamplingParams,
    TokenEvent,
)
from loraplex.server.worker.sequences import (
    DuplicateSequence,
    SequenceTable,
    refusal,
    split_events,
    weigh,
)
from tests.server.invariants import check_table

CAPACITY = 4


def request(name: str, attempt: int = 0, choice: int = 0, accepted: int = 0) -> GenerateRequest:
    return GenerateRequest(name, attempt, choice, None, [1], [7] * accepted, SamplingParams(), 0)


def event(name: str, index: int, *, finish: bool = False, tokens: int = 1) -> TokenEvent:
    return TokenEvent(name, 0, 0, index, (5,) * tokens, finish="stop" if finish else None)


def test_events_go_to_the_connection_that_asked() -> None:
    table = SequenceTable(CAPACITY)
    first, second = table.open(1, request("a")), table.open(2, request("a"))
    assert first is not None
    assert second is not None
    routed = table.route(
        [SequenceEvent(first, event("a", 0)), SequenceEvent(second, event("a", 0, finish=True))]
    )
    assert routed == {1: [event("a", 0)], 2: [event("a", 0, finish=True)]}
    assert len(table) == 1


def test_nothing_follows_the_terminal_event() -> None:
    table = SequenceTable(CAPACITY)
    key = table.open(1, request("a"))
    assert key is not None
    assert table.route([SequenceEvent(key, event("a", 0, finish=True))]) != {}
    assert table.route([SequenceEvent(key, event("a", 1, finish=True))]) == {}


def test_the_ends_of_sequences_with_pictures_are_known() -> None:
    table = SequenceTable(CAPACITY)
    spans = (PictureSpan(0, 1, "a", (1, 2, 2)),)
    pictured = [msgspec.structs.replace(request(name), pictures=spans) for name in ("a", "b", "c")]
    first, second, third = (table.open(1, each) for each in pictured)
    plain = table.open(2, request("plain"))
    assert first is not None
    assert plain is not None
    table.route([SequenceEvent(key, event("a", 0, finish=True)) for key in (first, plain)])
    assert table.take_ended() == [first]
    table.disconnect(1)
    assert table.take_ended() == [], "the engine still has them"
    table.end_all("engine_lost", "it was lost")
    assert table.take_ended() == [second, third]


def test_beyond_the_credits_nothing_is_opened() -> None:
    table = SequenceTable(2)
    assert table.open(1, request("a")) is not None
    assert table.open(2, request("b")) is not None
    assert table.open(1, request("c")) is None
    check_table(table)


def test_a_sequence_cannot_be_opened_twice() -> None:
    table = SequenceTable(CAPACITY)
    table.open(1, request("a"))
    with pytest.raises(DuplicateSequence):
        table.open(1, request("a"))
    assert table.open(1, request("a", choice=1)) is not None
    assert table.open(1, request("a", attempt=1)) is not None


def test_abort_means_one_choice_or_all() -> None:
    table = SequenceTable(CAPACITY)
    keys = [table.open(1, request("a", choice=choice)) for choice in range(3)]
    assert table.keys_of(1, "a", 0, 1) == [keys[1]]
    assert table.keys_of(1, "a", 0, None) == keys
    assert table.keys_of(1, "a", 1, None) == []
    assert table.keys_of(2, "a", 0, None) == []


def test_a_lost_engine_ends_a_resumed_sequence_at_its_next_index() -> None:
    table = SequenceTable(CAPACITY)
    key = table.open(1, request("a", accepted=3))
    assert key is not None
    table.route([SequenceEvent(key, event("a", 3, tokens=2))])
    (lost,) = table.end_all("engine_lost", "gone")[1]
    assert (lost.index, lost.finish, lost.error) == (5, "error", "engine_lost")
    assert table.end_all("engine_lost", "gone") == {}


FRESH = frozenset(range(10, 20))


@pytest.mark.parametrize(
    ("begun", "is_telling", "expected"),
    [
        ({12}, True, {12: "strong"}),
        ({12}, False, {12: "weak"}),
        ({3, 12, 13, 14, 15}, True, dict.fromkeys(range(12, 16), "strong")),
        (set(range(12, 17)), True, dict.fromkeys(range(12, 17), "weak")),
        ({3}, True, {}),
        (set(), True, {}),
        (None, True, dict.fromkeys(FRESH, "weak")),
    ],
)
def test_an_engines_end_says_nothing_of_what_it_had_not_begun(
    begun: set[int] | None, is_telling: bool, expected: dict[int, Evidence]
) -> None:
    found = weigh(begun, FRESH, is_telling)
    assert found == {**dict.fromkeys(FRESH, "none"), **expected}


def test_an_engine_that_dies_before_its_first_step_tells_of_the_few_that_were_there() -> None:
    assert weigh(None, {1, 2}, True) == {1: "strong", 2: "strong"}
    assert weigh(None, set(), True) == {}


def test_evidence_goes_with_the_sequences_that_have_no_token() -> None:
    table = SequenceTable(CAPACITY)
    keys = [table.open(1, request(name, accepted=3)) for name in ("got on", "begun", "waiting")]
    other = table.open(2, request("other"))
    assert keys[0] is not None
    table.route([SequenceEvent(keys[0], event("got on", 3))])
    assert table.fresh() == {*keys[1:], other}
    evidence = weigh({key for key in (*keys[:2], other) if key is not None}, table.fresh(), True)
    assert table.named(1, evidence) == (("begun", 0, 0, "strong"), ("waiting", 0, 0, "none"))
    ended = table.end_all("engine_lost", "gone", evidence)
    found = {e.request_id: e.evidence for events in ended.values() for e in events}
    assert found == {"got on": "weak", "begun": "strong", "waiting": "none", "other": "strong"}


def test_a_refusal_is_terminal_and_starts_where_the_request_does() -> None:
    refused = refusal(request("a", accepted=3), "overloaded", "full")
    assert (refused.index, refused.finish, refused.error) == (3, "error", "overloaded")


def test_splitting_loses_and_reorders_nothing() -> None:
    events = [event("a", index) for index in range(5)]
    halves = split_events(events)
    assert [e for half in halves for e in half] == events
    assert len(halves) == 2


class TableMachine(RuleBasedStateMachine):
    """Routers, engine and losses in any order, against a plain model of who waits for what."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SequenceTable(CAPACITY)
        self.keys: dict[int, tuple[int | None, str]] = {}
        self.fresh: set[int] = set()

    @rule(connection=st.integers(0, 2), name=st.sampled_from("abc"))
    def open(self, connection: int, name: str) -> None:
        waiting = (connection, name) in self.keys.values()
        try:
            key = self.table.open(connection, request(name))
        except DuplicateSequence:
            assert waiting
            return
        assert not waiting
        assert (key is None) == (len(self.keys) >= CAPACITY)
        if key is not None:
            assert key not in self.keys
            self.keys[key] = (connection, name)
            self.fresh.add(key)

    @rule(index=st.integers(0, CAPACITY), finish=st.booleans())
    def engine_event(self, index: int, finish: bool) -> None:
        key = list(self.keys)[index] if index < len(self.keys) else 999
        connection, name = self.keys.get(key, (None, "a"))
        routed = self.table.route([SequenceEvent(key, event(name, 0, finish=finish))])
        self.fresh.discard(key)
        assert set(routed) == ({connection} - {None} if key in self.keys else set())
        if finish:
            self.keys.pop(key, None)

    @rule(connection=st.integers(0, 2))
    def disconnect(self, connection: int) -> None:
        mine = [key for key, (owner, _) in self.keys.items() if owner == connection]
        assert sorted(self.table.disconnect(connection)) == sorted(mine)
        for key in mine:
            self.keys[key] = (None, self.keys[key][1])

    @rule(begun=st.sets(st.integers(0, CAPACITY)))
    def lose_engine(self, begun: set[int]) -> None:
        keys = {key for place, key in enumerate(self.keys) if place in begun}
        routed = self.table.end_all("engine_lost", "gone", weigh(keys, self.table.fresh(), True))
        evidence = Counter(event.evidence for events in routed.values() for event in events)
        read = {key for key, (connection, _) in self.keys.items() if connection is not None}
        assert evidence["strong"] == len(keys & self.fresh & read)
        assert evidence["none"] == len((self.fresh - keys) & read)
        self.fresh.clear()
        sent = sorted((c, e.request_id) for c, events in routed.items() for e in events)
        assert sent == sorted((c, n) for c, n in self.keys.values() if c is not None)
        self.keys.clear()

    @invariant()
    def agrees(self) -> None:
        check_table(self.table)
        assert len(self.table) == len(self.keys)
        assert self.table.fresh() == self.fresh


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=30)
