"""The certifying executor notices what a real one could only get silently wrong."""

from collections.abc import Callable

import msgspec
import pytest

from loraplex.server.engine.executor import AdapterCopy, CopyOver, CopyUsable
from loraplex.server.engine.plan import PageGrant, RowStart, SeqSlice, StepPlan
from loraplex.server.protocol import SamplingParams
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.certifying.executor import CertifyingExecutor, ContractError
from tests.server.engine.harness import LIMITS, layout

PROMPT = [5, 6, 7, 8, 9]


def row_start(seq_row: int = 0, tokens: list[int] = PROMPT) -> RowStart:
    return RowStart(seq_row, tokens, len(tokens), SamplingParams(), 7, 0, 0)


def first_plan() -> StepPlan:
    piece = SeqSlice("prompt", 0, 0, 5, PROMPT, -1, True)
    return StepPlan(1, [piece], [row_start()], [PageGrant(0, 0, [3, 4])], [])


def next_plan() -> StepPlan:
    return StepPlan(2, [SeqSlice("decode", 0, 5, 1, [], -1, True)], [], [], [])


def with_slice(plan: StepPlan, **changes: object) -> StepPlan:
    piece = msgspec.structs.replace(plan.slices[0], **changes)
    return msgspec.structs.replace(plan, slices=[piece])


def started() -> CertifyingExecutor:
    executor = CertifyingExecutor(LIMITS)
    executor.collect(executor.launch(first_plan()))
    return executor


def copy(digest: str = "a", slot: int = 0, extents: tuple[int, ...] = (0, 1)) -> AdapterCopy:
    return AdapterCopy(slot, layout(digest), (0, 1), extents)


def test_tokens_are_those_of_the_certificate() -> None:
    executor = CertifyingExecutor(LIMITS)
    first = executor.collect(executor.launch(first_plan()))[0].token_ids
    second = executor.collect(executor.launch(next_plan()))[0].token_ids
    assert [*first, *second] == certified_output(None, PROMPT, 2, executor.options)
    outputs = {tuple(certified_output(a, PROMPT, 8, executor.options)) for a in (None, "a", "b")}
    assert len(outputs) == 3
    assert all(token not in LIMITS.eos_token_ids for output in outputs for token in output)


def test_end_of_sequence_comes_only_when_configured() -> None:
    options = CertifyOptions(100, (2, 3), eos_percent=30)
    output = certified_output(None, PROMPT, 500, options)
    assert output[-1] == 2
    assert len(output) < 500
    assert len(certified_output(None, PROMPT, 50, options, min_tokens=49)) >= 49


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda p: msgspec.structs.replace(p, step=1), "step 1 after step 1"),
        (lambda p: msgspec.structs.replace(p, slices=[]), "empty plan"),
        (lambda p: msgspec.structs.replace(p, slices=p.slices * 2), "two slices"),
        (lambda p: msgspec.structs.replace(p, new_rows=[row_start(0)]), "in use"),
        (lambda p: msgspec.structs.replace(p, new_rows=[row_start(4)]), "no row 4"),
        (lambda p: msgspec.structs.replace(p, freed_rows=[1]), "freed twice"),
        (lambda p: msgspec.structs.replace(p, freed_rows=[0]), "no row 0"),
        (lambda p: msgspec.structs.replace(p, grants=[PageGrant(0, 1, [5])]), "gap"),
        (lambda p: msgspec.structs.replace(p, grants=[PageGrant(0, 2, [3])]), "twice"),
        (lambda p: msgspec.structs.replace(p, grants=[PageGrant(0, 2, [99])]), "no page 99"),
        (lambda p: msgspec.structs.replace(p, grants=[PageGrant(3, 0, [5])]), "no row 3"),
        (lambda p: with_slice(p, seq_row=2), "no row 2"),
        (lambda p: with_slice(p, start=4), "gap or an overlap"),
        (lambda p: with_slice(p, num_new=2), "not there"),
        (lambda p: with_slice(p, num_new=0), "empty slice"),
        (lambda p: with_slice(p, token_ids=[1]), "not there"),
        (lambda p: with_slice(p, adapter_slot=0), "not loaded"),
        (lambda p: with_slice(p, num_new=13), "budget"),
    ],
)
def test_a_broken_plan_is_noticed(change: Callable[[StepPlan], StepPlan], word: str) -> None:
    with pytest.raises(ContractError, match=word):
        started().launch(change(next_plan()))


def test_a_sample_that_was_never_drawn_is_no_input() -> None:
    executor = CertifyingExecutor(LIMITS)
    executor.launch(with_slice(first_plan(), num_new=4, token_ids=PROMPT[:4], sample=False))
    plan = with_slice(next_plan(), start=4)
    with pytest.raises(ContractError, match="no sample"):
        executor.launch(plan)


def test_pages_are_checked() -> None:
    with pytest.raises(ContractError, match="without pages"):
        CertifyingExecutor(LIMITS).launch(
            msgspec.structs.replace(first_plan(), grants=[PageGrant(0, 0, [3])])
        )
    other = StepPlan(
        2,
        [SeqSlice("prompt", 1, 4, 1, [9], -1, True)],
        [row_start(1, [1, 6, 7, 8, 9])],
        [PageGrant(1, 0, [3, 5])],
        [],
    )
    with pytest.raises(ContractError, match="another prefix"):
        started().launch(other)
    shared = msgspec.structs.replace(
        other, new_rows=[row_start(1)], grants=[PageGrant(1, 0, [3, 4])]
    )
    with pytest.raises(ContractError, match="shared"):
        started().launch(shared)


def test_a_row_is_not_freed_under_a_step_in_flight() -> None:
    executor = CertifyingExecutor(LIMITS)
    executor.launch(first_plan())
    with pytest.raises(ContractError, match="in flight"):
        executor.launch(msgspec.structs.replace(next_plan(), freed_rows=[0]))


def test_steps_are_collected_in_order() -> None:
    executor = CertifyingExecutor(LIMITS)
    executor.launch(first_plan())
    second = executor.launch(next_plan())
    assert second.ready()
    with pytest.raises(ContractError, match="oldest"):
        executor.collect(second)
    executor.close()


def test_adapters_are_checked() -> None:
    executor = CertifyingExecutor(LIMITS, CertifyOptions(100, (2, 3), copy_polls=2))
    executor.start_copy(copy())
    plan = with_slice(first_plan(), adapter_slot=0)
    with pytest.raises(ContractError, match="not loaded"):
        executor.launch(plan)
    with pytest.raises(ContractError, match="one slot"):
        executor.start_copy(copy("b"))
    with pytest.raises(ContractError, match="one extent"):
        executor.start_copy(copy("b", 1, (1, 2)))
    assert executor.poll_copies() == []
    assert executor.poll_copies() == [CopyUsable(0, "a"), CopyOver(0, "a")]

    executor = CertifyingExecutor(LIMITS)
    executor.start_copy(copy())
    executor.poll_copies()
    ticket = executor.launch(plan)
    with pytest.raises(ContractError, match="overwritten"):
        executor.start_copy(copy("b", 1, (1, 2)))
    executor.collect(ticket)
    executor.start_copy(copy("b"))
    executor.poll_copies()
    with pytest.raises(ContractError, match="changed its adapter"):
        executor.launch(with_slice(next_plan(), adapter_slot=0))


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (copy(slot=2), "no slot"),
        (copy(extents=(0,)), "runs"),
        (copy(extents=(1, 1)), "overlap"),
        (copy(extents=(5, 6)), "outside"),
    ],
)
def test_a_broken_copy_is_noticed(bad: AdapterCopy, word: str) -> None:
    with pytest.raises(ContractError, match=word):
        CertifyingExecutor(LIMITS).start_copy(bad)


def test_other_bytes_of_a_slab_are_noticed_before_and_during_a_copy() -> None:
    layout_of_a = copy("a").layout
    extent = layout_of_a.extent_bytes
    memory = bytearray(b"a" * 2 * extent + b"b" * 2 * extent)
    options = CertifyOptions(100, (2, 3), check_bytes=True)
    executor = CertifyingExecutor(LIMITS, options, memoryview(memory))

    def at(digest: str, slot: int, *host: int) -> AdapterCopy:
        return msgspec.structs.replace(
            copy(digest, slot, (2 * slot, 2 * slot + 1)), host_extents=host
        )

    executor.start_copy(at("a", 0, 0, 1))
    executor.start_copy(at("b", 1, 2, 3))
    assert len(executor.poll_copies()) == 4
    with pytest.raises(ContractError, match="bytes"):
        executor.start_copy(at("a", 0, 2, 3))
    executor.start_copy(at("a", 0, 0, 1))
    memory[extent] = ord("x")
    (over,) = executor.poll_copies()
    assert isinstance(over, CopyOver)
    assert "bytes" in str(over.error)


def test_a_copy_is_usable_before_it_is_over_and_its_bytes_stay_until_then() -> None:
    memory = bytearray(b"a" * 2 * LIMITS.extent_bytes)
    options = CertifyOptions(100, (2, 3), ending_polls=2, check_bytes=True)
    executor = CertifyingExecutor(LIMITS, options, memoryview(memory))
    executor.start_copy(copy())
    assert executor.poll_copies() == [CopyUsable(0, "a")]
    executor.collect(executor.launch(with_slice(first_plan(), adapter_slot=0)))
    assert executor.poll_copies() == []
    executor.start_copy(copy("b", 1))
    assert executor.poll_copies() == [CopyUsable(1, "b"), CopyOver(0, "a")]
    memory[0] = ord("x")
    assert executor.poll_copies() == []
    with pytest.raises(ContractError, match="bytes"):
        executor.poll_copies()
