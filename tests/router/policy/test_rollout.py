"""Shares of versions: that they hold, who moves when they change, and what moves may be made."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.router.names.registration import MAX_HISTORY, Registration, seen
from loraplex.router.names.rollout_moves import (
    Shares,
    before,
    copies_needed,
    ended,
    in_force,
    promoted,
    reverted,
    rolled_back,
    to_promote,
    with_shares,
)
from loraplex.router.policy.rollout import Content, Guards, Rollout, Version, sticky_value
from tests.router.fake_worker import make_manifest

WEIGHTS = st.lists(st.integers(0, 100), min_size=2, max_size=4).filter(any)
CALLERS = [f"user\0\0{number}" for number in range(2000)]


def content(name: str) -> Content:
    return Content(AdapterRef("hub", f"org/{name}"), make_manifest(f"org/{name}"))


def version(name: str, weight: int, live: int = 0) -> Version:
    return Version(content(name).ref, content(name), weight, live)


def rollout(weights: list[int], rollout_id: str = "r") -> Rollout:
    """All in force; the first is the old version's."""
    versions = tuple(version(f"v{n}", w, w) for n, w in enumerate(weights[1:]))
    return Rollout(rollout_id, versions, weights[0], weights[0])


def chosen(of: Rollout) -> list[int]:
    """Of each caller: 0 = the old version."""
    versions = [None, *of.versions]
    return [versions.index(of.choose(caller)) for caller in CALLERS]


ONE = seen(Registration("one", content("old").ref, "api", state="ready"), content("old"), 1.0)


def shares(*versions: Version, weight: int) -> Shares:
    return Shares(versions, weight, Guards())


def started(weight: int = 5) -> Registration:
    return with_shares(ONE, shares(version("new", weight), weight=100 - weight), "r", 10.0, "me")


@settings(max_examples=50)
@given(WEIGHTS, st.text("abc", min_size=1, max_size=4))
def test_shares_hold(weights: list[int], rollout_id: str) -> None:
    got = chosen(rollout(weights, rollout_id))
    for which, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = (share * (1 - share) * len(CALLERS)) ** 0.5
        # Few callers have a long tail: once in a million draws it is past five deviations.
        assert abs(got.count(which) - share * len(CALLERS)) <= 5 * deviation + 15


@settings(max_examples=50)
@given(WEIGHTS, st.data())
def test_only_those_move_who_must(weights: list[int], data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(weights) - 1))
    raised = [*weights]
    raised[which] = data.draw(st.integers(weights[which], 100))
    for caller, (was, is_now) in enumerate(
        zip(chosen(rollout(weights)), chosen(rollout(raised)), strict=True)
    ):
        assert was == is_now or is_now == which, (caller, was, is_now)


def test_from_nothing_to_all_each_caller_moves_once() -> None:
    steps = [chosen(rollout([100 - new, new])) for new in (0, 5, 25, 50, 75, 100)]
    assert set(steps[0]) == {0}
    assert set(steps[-1]) == {1}
    for earlier, later in zip(steps, steps[1:], strict=False):
        assert all(b >= a for a, b in zip(earlier, later, strict=True))


def test_each_rollout_begins_with_other_callers() -> None:
    first, second = (chosen(rollout([90, 10], rollout_id)) for rollout_id in ("a", "b"))
    both = sum(a == b == 1 for a, b in zip(first, second, strict=True))
    assert both < 0.3 * sum(first)


def test_without_any_weight_the_old_version_serves() -> None:
    assert set(chosen(rollout([0, 0]))) == {0}


def test_what_a_caller_sticks_to() -> None:
    assert sticky_value("t", "u", "k", "r") == sticky_value("t", "u", "other", "again")
    assert sticky_value("t", "u", "k", "r") != sticky_value("s", "u", "k", "r")
    assert sticky_value("t", None, "k", "r") == sticky_value("t", "", "k", "again")
    assert sticky_value("", None, "", "r") != sticky_value("", None, "", "again")
    assert sticky_value("", "x", "", "r") != sticky_value("", None, "x", "r")


def test_more_waits_until_it_is_warm_and_less_does_not() -> None:
    waiting = started()
    assert waiting.rollout is not None
    [new] = waiting.rollout.versions
    assert (new.state, new.live, waiting.rollout.live) == ("warming", 0, 100)
    assert set(chosen(waiting.rollout)) == {0}
    warm = msgspec.structs.replace(waiting, rollout=in_force(waiting.rollout))
    assert warm.rollout is not None
    assert (warm.rollout.versions[0].state, warm.rollout.live) == ("serving", 95)
    more = with_shares(warm, shares(version("new", 50), weight=50), "x", 20.0, "me").rollout
    assert more is not None
    assert (more.id, more.versions[0].live, more.live) == ("r", 5, 95)
    assert more.versions[0].since == 0, "all that was counted under this id is its own"
    less = with_shares(warm, shares(version("new", 1), weight=99), "x", 20.0, "me").rollout
    assert less is not None
    assert (less.versions[0].live, less.live, less.is_warming) == (1, 99, False)


@pytest.mark.parametrize(
    ("weight", "old_copies", "workers", "needed"),
    [(5, 1, 4, 1), (5, 8, 8, 1), (50, 4, 8, 2), (50, 3, 8, 2), (100, 4, 3, 3), (100, 0, 4, 1)],
)
def test_copies_before_a_share(weight: int, old_copies: int, workers: int, needed: int) -> None:
    of = rollout([100 - weight, weight])
    assert copies_needed(of, of.versions[0].digest, old_copies, workers) == needed


def test_taken_back_it_has_nothing_and_says_why() -> None:
    waiting = started(100)
    assert waiting.rollout is not None
    warm = msgspec.structs.replace(waiting, rollout=in_force(waiting.rollout))
    back = rolled_back(warm, content("new").digest, "too slow", 30.0, "guard")
    assert back.rollout is not None
    [new] = back.rollout.versions
    assert (new.state, new.why, new.weight, new.live) == ("rolled_back", "too slow", 0, 0)
    assert (back.rollout.weight, back.rollout.live) == (100, 100)
    assert set(chosen(back.rollout)) == {0}
    last = back.history[-1]
    assert (last.action, last.by, last.note, last.since) == ("rollback", "guard", "too slow", 30)
    with pytest.raises(AdapterError, match="no such share"):
        rolled_back(back, None, "again", 31.0, "me")
    again = with_shares(back, shares(version("new", 5), weight=95), "x", 40.0, "me").rollout
    assert again is not None
    assert (again.versions[0].state, again.versions[0].since) == ("warming", 40)


def test_promoted_ended_and_gone_back() -> None:
    running = started()
    done = promoted(running, to_promote(running, None), 20.0, "me")
    assert (done.digest, done.ref, done.rollout) == (
        *(content("new").digest, content("new").ref, None),
    )
    earlier = before(done, None)
    assert earlier.digest == ONE.digest
    home = reverted(done, content("old"), 30.0, "me")
    assert (home.digest, home.history[-1].before) == (ONE.digest, done.digest)
    assert before(home, None).digest == done.digest
    assert before(home, done.digest[:12] if done.digest else "").digest == done.digest
    over = ended(running, 20.0, "me")
    assert (over.rollout, over.digest) == (None, ONE.digest)
    for refused, words in (
        (lambda: to_promote(ONE, None), "no rollout"),
        (lambda: to_promote(running, "0" * 64), "no version to promote"),
        (lambda: ended(ONE, 1.0, "me"), "no rollout"),
        (lambda: before(ONE, None), "has not an earlier version"),
        (lambda: with_shares(ONE, shares(version("old", 5), weight=95), "r", 1.0, ""), "same"),
    ):
        with pytest.raises(AdapterError, match=words):
            refused()


@given(st.lists(st.integers(1, 100), min_size=40, max_size=60))
def test_the_history_is_bounded_and_has_every_step(weights: list[int]) -> None:
    now = ONE
    for number, weight in enumerate(weights):
        wanted = shares(version("new", weight), weight=100 - weight)
        now = with_shares(now, wanted, "r", 10.0 + number, "me")
    assert len(now.history) == MAX_HISTORY
    assert now.history[-1].note.endswith(f" {weights[-1]}")


def test_digests_and_pins_of_a_rollout() -> None:
    running = msgspec.structs.replace(started(), pinned=True)
    both = {content("old").held, content("new").held}
    assert running.held == both
    assert {kept.held for kept in running.pinned_contents} == both
    back = rolled_back(running, None, "", 1.0, "me")
    assert back.held == {content("old").held}
