"""Answers with drafts, some of whose tokens are wrong, beside the same answers without."""

from collections.abc import Callable

from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, prompt


def partly_right(answer: list[int], seed: int) -> Callable[[list[int]], list[int]]:
    """Drafts of 0 to 4 tokens. answer: prompt and output, as they will be."""

    def draft(tokens: list[int]) -> list[int]:
        begin = len(tokens)
        said = answer[begin : begin + (begin * 7 + seed) % 5]
        wrong = [(begin + i + seed) % 4 == 0 for i in range(len(said))]
        return [token + 1 if off else token for token, off in zip(said, wrong, strict=True)]

    return draft


def with_drafts(driver: Driver, slots: dict[str | None, int]) -> list[tuple[str | None, Stream]]:
    """Streams of 20 tokens with drafts, beside prompts in chunks; and without, the same answers."""
    found: list[list[Stream]] = []
    for round_ in range(2):
        streams = []
        for row, slot in enumerate(slots.values()):
            ids = prompt(3 + 11 * row, row)
            streams.append(Stream(driver, row, ids, slot=slot, sampling=GREEDY))
            if round_:
                streams[-1].draft = partly_right(found[0][row].tokens, row)
        began = driver.step
        generate(driver, streams, 20, 5)
        assert not round_ or driver.step - began < 18 + 9
        for stream in streams:
            stream.free()
        found.append(streams)
    for plain, drafted in zip(*found, strict=True):
        assert drafted.output[:20] == plain.output[:20]
    return [*zip(slots, found[1], strict=True)]
