"""Which sequences have drafts, and of whose answers."""

from typing import Any

import pytest

from loraplex.server.engine.drafts.draft import NO_DRAFT, Draft, DraftOwner
from loraplex.server.engine.drafts.source import Drafts
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from tests.server.engine.harness import Harness, limits, make_request


def drafting(depth: int, right_percent: int | None = 100, **changes: Any) -> Harness:
    config = SchedulerConfig(max_draft=4)
    engine = limits(**{"max_decodes": 16, **changes})
    return Harness(engine, depth, config, right_percent=right_percent)


def steps_of(harness: Harness, row: int) -> list[tuple[int, int]]:
    """Number of each step with the row, and tokens of it there."""
    return [
        (plan.step, piece.num_new)
        for plan in harness.plans
        for piece in plan.slices
        if piece.seq_row == row and piece.kind == "decode"
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_right_drafts_give_several_tokens_a_step(depth: int) -> None:
    harness = drafting(depth)
    key = harness.submit(make_request([5, 6, 7], 40))
    harness.run()
    assert len(harness.tokens(key)) == 40
    assert len(steps_of(harness, 0)) < 20
    stats = harness.scheduler.stats()
    assert 0 < stats.accepted_draft_tokens <= stats.draft_tokens


def test_a_sequence_without_an_owner_has_no_draft() -> None:
    harness = drafting(2)
    harness.submit(make_request([5, 6, 7], 20, drafts=None))
    harness.run()
    assert harness.scheduler.stats().draft_tokens == 0


def test_wrong_drafts_soon_end() -> None:
    harness = drafting(1, right_percent=0, max_context=64)
    harness.submit(make_request([5, 6], 60))
    harness.run()
    lengths = [num_new for _, num_new in steps_of(harness, 0)]
    assert max(lengths[:4]) > 1
    assert max(lengths[-20:]) == 1


@pytest.mark.parametrize(("count", "least", "most"), [(4, 30, 50), (32, 5, 12)])
def test_many_sequences_look_seldom_in_vain(
    count: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """least, most: looks of one sequence of 50 tokens."""
    sizes = {"max_rows": 64, "max_decodes": 128, "max_step_tokens": 128}
    harness = drafting(1, right_percent=None, max_context=64, num_pages=64 * 32, **sizes)
    looked = 0

    def propose(self: Drafts, most: int) -> Draft:
        nonlocal looked
        looked += 1
        return NO_DRAFT

    monkeypatch.setattr(Drafts, "propose", propose)
    keys = [harness.submit(make_request([5 + i], 50)) for i in range(count)]
    harness.run()
    assert all(len(harness.tokens(key)) == 50 for key in keys)
    assert least * count <= looked <= most * count


def test_an_owners_next_answer_knows_how_drafts_went() -> None:
    harness = drafting(1, right_percent=0, max_context=64)
    first: dict[int, float] = {}  # after each answer's first draft
    for i in range(3):
        key = harness.submit(make_request([5, 6 + i], 40))
        while harness.cycle():
            for sequence in harness.scheduler._running:
                if sequence.drafts is not None:
                    first.setdefault(key, sequence.acceptance.ratio)
    ratios = [*first.values()]
    assert ratios[1] < 0.8 * ratios[0]
    assert ratios[2] < 0.8 * ratios[0]


def test_others_go_on_while_a_sequence_waits_for_its_result() -> None:
    harness = drafting(2)
    harness.submit(make_request([5, 6, 7], 30))
    harness.submit(make_request([8, 9], 30, drafts=None))
    harness.run()
    of_other = [step for step, _ in steps_of(harness, 1)]
    assert of_other == list(range(of_other[0], of_other[0] + len(of_other)))
    assert len(steps_of(harness, 0)) < len(of_other)


def test_sequences_wait_for_no_result_where_a_step_has_no_room_for_drafts() -> None:
    harness = drafting(2, max_rows=4, max_decodes=4)
    for i in range(4):
        harness.submit(make_request([5 + i], 12))
    while harness.cycle():
        assert not any(sequence.holds for sequence in harness.scheduler._running)
    assert len(harness.plans) == 12
    assert harness.scheduler.stats().draft_tokens == 0


def test_drafts_have_the_adapter_and_tenant_of_their_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = drafting(1)
    opened: list[DraftOwner] = []
    source = harness.scheduler.drafting.source

    def note(owner: DraftOwner, token_ids: Any) -> Drafts:
        opened.append(owner)
        return type(source).open(source, owner, token_ids)

    monkeypatch.setattr(source, "open", note)
    for adapter, tenant in (("a", "x"), ("a", "y"), (None, "x")):
        harness.submit(make_request([5], 4, adapter, drafts=tenant))
    harness.submit(make_request([5], 4, "a", drafts="x", adapter_scale=0.5))
    harness.run()
    assert sorted(opened) == [("", "x", 1), ("a", "x", 0.5), ("a", "x", 1), ("a", "y", 1)]


@pytest.mark.parametrize(("second", "helped"), [("x", True), ("y", False)])
def test_an_answer_helps_its_tenant_alone(second: str, helped: bool) -> None:
    """The same answer twice; its tokens never repeat before."""
    harness = drafting(1, right_percent=None)
    prompt = [5, 6, 7, 8, 9, 10]
    answers = []
    for tenant in ("x", second):
        key = harness.submit(make_request(prompt, 20, drafts=tenant))
        harness.run()
        answers.append(harness.tokens(key))
    assert answers[0] == answers[1]
    assert (harness.scheduler.stats().accepted_draft_tokens > 8) is helped
