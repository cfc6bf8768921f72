"""The same sequences by one device and by several."""

from collections.abc import Sequence
from typing import Any

from loraplex.server.protocol import SamplingParams
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import prompt
from tests.server.model.slabs import pack

# Of which rounding alone may choose the other.
NEAR = 1e-5


def load_adapters(driver: Driver, oracle: Any, shards: int, names: Sequence[str]) -> dict[str, int]:
    """Into slots from 0 on, by name."""
    first, slots = 0, {}
    for slot, name in enumerate(names):
        layout, slab = pack(oracle, name, shards=shards)
        assert driver.load(slot, layout, slab, first).error is None
        first += sum(layout.runs)
        slots[name] = slot
    return slots


def run(driver: Driver, slots: Sequence[int], sampling: SamplingParams) -> list[Stream]:
    streams = [
        Stream(driver, row, prompt(4 + 5 * row % 29, row), slot=slot, sampling=sampling, seed=row)
        for row, slot in enumerate(slots)
    ]
    generate(driver, streams, 24, 16)
    return streams


def assert_near(found: Sequence[Stream], expected: Sequence[Stream]) -> None:
    """Logprobs within 1e-5 of their size. Tokens differ only where the two best are nearer."""
    differing = tokens = 0
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            tokens += 1
            a, b = (dict(each.top) for each in (ours, theirs))
            assert all(abs(a[token] - b[token]) < NEAR * max(1, -b[token]) for token in a)
            if ours.token_id != theirs.token_id:
                best = sorted(b.values())[-2:]
                assert best[1] - best[0] < NEAR
                differing += 1
                break  # from here on the contexts differ
    print(f"{differing} of {tokens} tokens differ")
    assert differing * 10_000 <= tokens
