"""Sequences with pictures: what they wait for, what they share, and what becomes of them."""

import re
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.engine.executor import PictureLimits
from loraplex.server.engine.memory.picture_cache import PictureCache, PictureKey
from loraplex.server.engine.messages import PictureFailed
from loraplex.server.engine.plan import StepPlan
from loraplex.server.engine.scheduling.sequence import State
from loraplex.server.protocol import BACKGROUND_PRIORITY, GenerateRequest, PictureForm, PictureSpan
from tests.server.engine.harness import TOWER_LAYER, Harness, limits, make_request, right

TOKEN = 90
PICTURES = PictureLimits(
    token_id=TOKEN,
    form=PictureForm(side=2),
    columns=6,
    most_tokens=24,
    num_blocks=8,
    block_tokens=4,
    chunk=40,
    tower_layer=TOWER_LAYER,
)
GRIDS = {"a": (1, 4, 4), "b": (1, 4, 6), "c": (1, 2, 2), "d": (1, 8, 4), "e": (1, 2, 10)}


def harness(pictures: PictureLimits = PICTURES, **changes: Any) -> Harness:
    made = Harness(limits(pictures=pictures, num_pages=48, **changes))
    made.grids = dict(GRIDS)
    return made


def miss(made: Harness, failed: PictureFailed) -> None:
    """The worker has no patches of a picture."""
    made.scheduler.fail_pictures(made.scheduler.pictures.missing(failed), failed.error)


def pictured(parts: list[int | str], **changes: Any) -> GenerateRequest:
    """parts: tokens, and pictures between them."""
    ids, spans = list[int](), list[PictureSpan]()
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        length = PICTURES.form.tokens(GRIDS[part])
        spans.append(PictureSpan(len(ids), length, part, GRIDS[part]))
        ids += [TOKEN] * length
    return msgspec.structs.replace(make_request(ids, **changes), pictures=tuple(spans))


def test_a_sequence_waits_for_its_pictures_and_reads_them() -> None:
    made = harness()
    made.auto_pictures = False
    request = pictured([5, "a", 6, "b", 7])
    key = made.submit(request)
    assert made.scheduler._sequences[key].state is State.NEEDS_PICTURES
    assert made.scheduler.stats().waiting == 1
    (asked,) = made.asked
    assert (asked.key, asked.spans) == (key, request.pictures)
    other = made.submit(make_request([1, 2, 3]))
    made.run()
    assert made.last(other).finish == "length"
    made.auto_pictures = True
    made.run()
    assert made.tokens(key) == right(made, request)
    made.assert_at_rest()


def test_prompts_share_results_and_pages_of_the_same_pictures_alone() -> None:
    made = harness(max_step_tokens=64)
    begin: list[int | str] = [4, "d", 8, 9]
    requests = [pictured([*begin, 1]), pictured([*begin, 2, 3]), pictured([4, "e", 5, 6, 7, 8, 9])]
    hits = []
    for request in requests:
        key = made.submit(request)
        made.run()
        assert made.tokens(key) == right(made, request)
        hits.append(made.last(key).cached_tokens or made.events[key][0].cached_tokens)
    assert hits == [0, 8, 0]
    assert made.segments == 2
    made.assert_at_rest()


def test_more_pictures_than_have_room_wait_in_order() -> None:
    made = harness(msgspec.structs.replace(PICTURES, num_blocks=4))
    requests = [pictured([i, *pictures]) for i, pictures in enumerate(["ab", "d", "e", "ae"])]
    keys = [made.submit(request) for request in requests]
    assert [asked.key for asked in made.asked] == keys[:1]
    made.run()
    for key, request in zip(keys, requests, strict=True):
        assert made.tokens(key) == right(made, request)
    made.assert_at_rest()


def test_a_later_sequence_gives_its_lease_up_before_it_runs() -> None:
    made = harness(msgspec.structs.replace(PICTURES, num_blocks=2), max_rows=1)
    first = made.submit(make_request([1, 2], 20))
    batch, live = pictured([1, "d"], priority=BACKGROUND_PRIORITY), pictured([2, "a"])
    last = made.submit(batch)
    for _ in range(12):
        made.cycle()
    assert made.scheduler._sequences[last].state is State.WAITING
    key = made.submit(live)
    assert made.scheduler.pictures._wanting == [made.scheduler._sequences[last]]
    made.run()
    assert made.last(first).finish == "length"
    ends = {each: made.last(each).finish for each in (key, last)}
    assert ends == {key: "length", last: "length"}
    for each, request in ((key, live), (last, batch)):
        assert made.tokens(each) == right(made, request)
    made.assert_at_rest()


def test_a_picture_that_fails_ends_those_that_wait_for_it() -> None:
    made = harness()
    made.auto_pictures = False
    keys = [made.submit(pictured([1, *names])) for names in ("ab", "b", "a")]
    miss(made, PictureFailed("b", GRIDS["b"], "it is no picture"))
    made.exchange()
    for key in keys[:2]:
        event = made.last(key)
        assert (event.error, event.message) == ("invalid_image", "b: it is no picture")
    made.send_picture("b")
    made.executor.pictures.bad.add("c")
    fourth = made.submit(pictured(["c", 1]))
    made.auto_pictures = True
    made.run()
    assert made.last(keys[2]).finish == "length"
    # The device's fault, not the picture's.
    assert (made.last(fourth).error, made.last(fourth).message) == ("internal", "it is bad")
    assert {each.error for each in made.taken} == {None, "it is bad"}
    made.assert_at_rest()


def test_patches_that_are_not_those_of_their_size() -> None:
    made = harness()
    made.auto_pictures = False
    key = made.submit(pictured([1, "a"]))
    made.asked.clear()
    made.send_picture("a", rows=15)
    assert made.last(key).error == "invalid_image"
    made.assert_at_rest()


def test_a_picture_in_two_sizes_is_two_pictures() -> None:
    """In one prompt, and in prompts that begin alike; neither waits for the other's patches."""
    made, small = harness(max_step_tokens=64), (1, 2, 8)
    large = pictured([4, "a", "a", 9])
    span = msgspec.structs.replace(large.pictures[1], grid=small)
    both = msgspec.structs.replace(large, pictures=(large.pictures[0], span))
    other = pictured([4, "a", 9])
    other = msgspec.structs.replace(
        other, pictures=(msgspec.structs.replace(other.pictures[0], grid=small),)
    )
    made.auto_pictures = False
    keys = [made.submit(request) for request in (both, other)]
    assert [len(asked.spans) for asked in made.asked] == [2, 1]
    made.asked.clear()
    made.send_picture("a", small)
    made.run()
    assert made.tokens(keys[1]) == right(made, other)
    assert not made.events.get(keys[0])
    miss(made, PictureFailed("a", small, "it is too late for that"))
    made.send_picture("a")
    made.run()
    assert made.tokens(keys[0]) == right(made, both)
    assert made.events[keys[0]][0].cached_tokens == 0
    assert made.tokens(keys[0]) != right(made, large)
    made.assert_at_rest()


def test_aborts_leave_nothing_behind() -> None:
    made = harness()
    made.auto_pictures = False
    first, second = (made.submit(pictured([1, "a", i])) for i in range(2))
    made.abort(first)
    made.send_picture("a")
    made.abort(second)
    made.auto_pictures = True
    made.asked.clear()
    made.run()
    made.assert_at_rest()
    assert made.scheduler.pictures.cache[PictureKey("a", GRIDS["a"])].is_ready


def test_who_waits_behind_a_sequence_that_is_aborted_goes_on() -> None:
    made = harness(msgspec.structs.replace(PICTURES, num_blocks=3))
    made.auto_pictures = False
    first, large, small = (made.submit(pictured([1, name])) for name in ("d", "b", "c"))
    assert [asked.key for asked in made.asked] == [first]
    made.abort(large)
    assert [asked.key for asked in made.asked] == [first, small]
    made.auto_pictures = True
    made.run()
    assert {made.last(key).finish for key in (first, small)} == {"length"}
    made.assert_at_rest()


def test_a_failed_device_fails_pictures_on_their_way() -> None:
    made = harness()
    key = made.submit(pictured([1, "d"]))
    made.cycle()
    assert made.scheduler.pictures.busy
    made.executor.wait_idle()
    made.scheduler.fail_running("internal", "the device failed in this step")
    made.exchange()
    assert made.last(key).error == "internal"
    made.run()
    made.assert_at_rest()


def test_results_are_kept_by_the_adapter_that_changes_the_tower() -> None:
    made = harness(msgspec.structs.replace(PICTURES, num_blocks=12))
    of = [(None, 1.0), ("x", 1.0), ("tower x", 1.0), ("tower x", 0.5), ("tower y", 1.0)]
    requests = [
        pictured([5, "a", 7], adapter=adapter, adapter_scale=scale, request_id=f"{adapter}{scale}")
        for adapter, scale in of
    ]
    keys = [made.submit(request) for request in requests]
    made.run()
    for key, request in zip(keys, requests, strict=True):
        assert made.tokens(key) == right(made, request)
    entries = made.scheduler.pictures.cache._entries
    acting = ["", "tower x", "tower x*0.5", "tower y"]
    assert sorted(entries) == [PictureKey("a", GRIDS["a"], each) for each in acting]
    made.assert_at_rest()


def test_an_adapter_stays_until_its_pictures_are_computed() -> None:
    made = harness()
    made.auto_pictures = False
    first = made.submit(pictured([5, "a", 7], adapter="tower x"))
    for _ in range(4):
        made.cycle()
    arena = made.scheduler.arena
    assert arena.leases("tower x") == 1
    others = [made.submit(make_request([1, 2], adapter=each)) for each in ("y", "z")]
    for _ in range(30):
        made.cycle()
    assert arena.stage("tower x") == "ready"
    made.auto_pictures = True
    made.run()
    assert {made.last(key).finish for key in (first, *others)} == {"length"}
    made.assert_at_rest()


def test_an_activated_adapter_does_not_change_the_tower() -> None:
    made = harness()
    key = made.submit(pictured([5, "a", 7], adapter="tower x", adapter_from=3))
    made.run()
    assert "acts on all tokens" in str(made.last(key).message)
    made.assert_at_rest()


def test_small_pictures_pass_the_tower_together_and_their_waiters_pay() -> None:
    made = harness()
    made.auto_pictures = False
    two = [made.submit(pictured([i, "c", 7])) for i in (1, 2)]
    one = made.submit(pictured([3, "e", 7], adapter="tower x"))
    text = made.submit(make_request([4, 5], 30))
    for _ in range(3):
        made.cycle()
    made.auto_pictures = True
    made.run()
    assert made.executor.pictures.most_passing == 2
    costs = {key: made.last(key).cost for key in (*two, one, text)}
    seconds = [0.0 if cost is None else cost.device_s for cost in costs.values()]
    # 4 and 20 patches.
    assert seconds == pytest.approx([1.25 / 12, 1.25 / 12, 1.25 * 5 / 6, 0.0], abs=1e-5)
    assert made.scheduler.shares.use.pictures == pytest.approx(1.25)
    made.assert_at_rest()


def test_what_nobody_waits_for_is_nobodys() -> None:
    made = harness()
    key = made.submit(pictured([1, "d"]))
    while made.scheduler.pictures._passing == 0:
        made.cycle()
    made.abort(key)
    made.run()
    use = made.scheduler.shares.use
    assert use.pictures + use.late == pytest.approx(1.25)
    assert use.late > 0
    made.assert_at_rest()


def test_logprobs_of_placeholders_are_null() -> None:
    made = harness()
    key = made.submit(pictured([5, "c", 6, 7], prompt_logprobs=1))
    made.run()
    found = made.events[key][0].prompt_logprobs
    assert found is not None
    assert [each.logprob is None for each in found] == [True, True, False, False]
    assert [each.token_id for each in found] == [5, TOKEN, 6, 7]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": (2, 4, 4)}, "does not take"),
        ({"grid": (1, 3, 4)}, "does not take"),
        ({"grid": (1, -4, -4)}, "does not take"),
        ({"length": 3}, "does not take"),
        ({"start": 0}, "must hold its placeholders"),
        ({"start": 4}, "no place"),
        ({"start": -1}, "no place"),
        ({"grid": (1, 20, 20), "length": 100}, "at most 24"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], words: str) -> None:
    made = harness()
    request = pictured([1, "a", 2])
    span = msgspec.structs.replace(request.pictures[0], **changes)
    key = made.submit(msgspec.structs.replace(request, pictures=(span,)))
    event = made.last(key)
    assert event.error == "invalid_image"
    assert words in str(event.message)


def test_refused_where_there_is_no_room_or_no_tower() -> None:
    few = harness(msgspec.structs.replace(PICTURES, num_blocks=2))
    assert "at most 8 tokens" in str(few.last(few.submit(pictured(["a", "b"]))).message)
    none = Harness()
    assert "reads none" in str(none.last(none.submit(pictured(["a"]))).message)


def test_sequences_know_how_much_they_share() -> None:
    made = harness()
    made.auto_pictures = False
    texts: list[list[int | str]] = [[1, "a", 2, "b", 3], [1, "a", 2, "e", 3], [1, "a", 2, "b", 4]]
    keys = [made.submit(pictured(parts)) for parts in texts]
    first, second, third = (made.scheduler._sequences[key] for key in keys)
    assert first.shared_with(second) == 6
    assert first.shared_with(third) == 12


JOINED = msgspec.structs.replace(PICTURES, is_joined=True)


def slices_of(made: Harness) -> list[tuple[int, int]]:
    """First token and end of every slice that is launched from now on, none of which ends within a
    picture."""
    launch, found, pictures = made.executor.launch, list[tuple[int, int]](), dict[int, Any]()

    def noted(plan: StepPlan) -> Any:
        pictures.update({row.seq_row: row.pictures for row in plan.new_rows})
        for piece in plan.slices:
            end = piece.start + piece.num_new
            for of in pictures[piece.seq_row]:
                assert not of.start < end < of.start + PICTURES.form.tokens(of.grid)
            found.append((piece.start, end))
        return launch(plan)

    made.executor.launch = noted  # type: ignore[method-assign,assignment]
    return found


def test_tokens_of_a_joined_picture_are_computed_together() -> None:
    made = harness(JOINED, max_step_tokens=12, max_rows=4, max_decodes=0)
    found = slices_of(made)
    made.submit(pictured([1, "d", 9, "d", 5], max_tokens=1))
    made.submit(pictured([2, 2, 2, 2, 2, "d", "d", 5], max_tokens=1))
    made.run()
    assert found == [(0, 10), (0, 2), (10, 19), (2, 5), (5, 13), (13, 22)]
    made.assert_at_rest()


def test_a_sequence_goes_on_within_a_joined_picture() -> None:
    made = harness(JOINED, max_step_tokens=12, max_rows=4, max_decodes=0)
    found = slices_of(made)
    for last in (5, 6):
        made.submit(pictured([4, 4, "d", last], max_tokens=1))
        made.run()
    assert found == [(0, 11), (8, 11)]


@pytest.mark.parametrize(
    ("changes", "adapter_from", "words"),
    [
        ({"max_step_tokens": 11}, 0, r"of 8 tokens, .* room for 7 \(--max-step-tokens\)"),
        ({"max_step_tokens": 15, "max_decodes": 9}, 0, "room for 6"),
        ({"max_step_tokens": 12}, 3, "adapter_from must not lie within a picture"),
    ],
)
def test_joined_pictures_that_no_slice_can_have(
    changes: dict[str, int], adapter_from: int, words: str
) -> None:
    made = harness(JOINED, **{"max_rows": 4, "max_decodes": 0, **changes})
    request = pictured([1, "d", 2], adapter="x")
    key = made.submit(msgspec.structs.replace(request, adapter_from=adapter_from))
    assert made.last(key).error == "invalid_image"
    assert re.search(words, str(made.last(key).message))


def any_parts(random: Random) -> list[int | str]:
    parts: list[int | str] = []
    for _ in range(random.randint(1, 4)):
        parts += [random.randint(4, 9)] * random.randint(0, 5)
        if random.random() < 0.6:
            parts.append(random.choice("abcde"))
    return parts


def of_text(request: GenerateRequest, random: Random) -> int:
    """Where a token of text stands."""
    return random.choice([i for i, each in enumerate(request.prompt_ids) if each != TOKEN])


@given(st.integers(0, 1 << 32), st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_mixture_ends_right(seed: int, is_joined: bool) -> None:
    """Few pages, so that sequences are preempted; few blocks, so that results go."""
    random = Random(seed)
    windows = random.choice([(None,), (None, 6), (5,)])
    sizes: dict[str, Any] = {"pictures": PICTURES, "max_step_tokens": 9}
    if is_joined:
        sizes = {"pictures": JOINED, "max_step_tokens": 12, "max_rows": 4, "max_decodes": 0}
    pages = random.randint(12, 30) * len(windows)
    made = Harness(
        limits(page_windows=windows, num_pages=pages, **sizes),
        depth=random.randint(1, 2),
        right_percent=random.choice([None, 60]),
    )
    made.grids = dict(GRIDS)
    if is_joined:
        slices_of(made)
    requests = {}
    for number in range(8):
        request = pictured(
            [*any_parts(random), 5],
            max_tokens=random.randint(1, 9),
            adapter=random.choice([None, "x", "tower x", "tower y"]),
            adapter_scale=random.choice([1.0, 1.0, 2.0]),
            request_id=str(number),
            priority=random.choice([0, 0, 1, BACKGROUND_PRIORITY]),
        )
        if len(request.prompt_ids) > 40:
            continue
        if request.adapter == "x" and random.random() < 0.3:
            request = msgspec.structs.replace(request, adapter_from=of_text(request, random))
        requests[made.submit(request)] = request
        if random.random() < 0.3:
            made.abort(random.choice([*requests]))
        for _ in range(random.randint(0, 3)):
            made.cycle()
    made.run()
    for key, request in requests.items():
        if made.last(key).finish == "length":
            assert made.tokens(key) == right(made, request)
        else:
            assert made.last(key).finish == "abort" or made.last(key).error == "context_length"
    made.assert_at_rest()


def test_a_cache_keeps_what_is_read() -> None:
    cache = PictureCache(3)
    one, two, three = (PictureKey(name, (1, 2, 2)) for name in "abc")
    assert cache.take({one: 2, two: 1})
    assert not cache.take({three: 1})
    cache[one].has_patches = True
    cache.finish(one)
    cache.release([one, two])
    assert cache.get(two) is None
    assert cache.take({one: 2, three: 1})
    assert cache[one].is_ready
    assert not cache.take({two: 1})
    cache.release([one])
    assert cache.take({two: 1})
    assert cache.get(one) is None
