"""Slices with drafts as slices of one token each, and their results put together. Pure.

Each token of a draft is computed as a decode, after those before it were written into the row. So
a draw sees the history, the keys and the adapter that it would see without a draft. A draw depends
on nothing but its logits, its request's seed and its place. So a draft changes no answer.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from loraplex.server.engine.plan import SeqSlice, SliceResult, StepPlan


def spread(plan: StepPlan) -> StepPlan:
    """Give each token of a draft a slice of its own, so that no slice of the plan has a draft."""
    slices = [single for piece in plan.slices for single in _singles(piece)]
    return msgspec.structs.replace(plan, slices=slices)


def _singles(piece: SeqSlice) -> Iterator[SeqSlice]:
    if not piece.draft:
        yield piece
        return
    yield msgspec.structs.replace(piece, num_new=1, token_ids=[])
    for place, token_id in enumerate(piece.draft, piece.start + 1):
        yield msgspec.structs.replace(
            piece, kind="prompt", start=place, num_new=1, token_ids=[token_id], replays=0
        )


def spread_places(slices: Sequence[SeqSlice], of: Sequence[int]) -> list[int]:
    """Places in `spread`'s plan of draws. of: the slice of each, ascending; the draws of a slice
    follow one another."""
    begins = [*accumulate((1 + len(piece.draft) for piece in slices), initial=0)]
    found = list[int]()
    for index in of:
        begin = begins[index]
        found.append(found[-1] + 1 if found and found[-1] >= begin else begin)
    return found


def joined(slices: Sequence[SeqSlice], results: Sequence[SliceResult]) -> list[SliceResult]:
    """Results of the slices, of those that `spread` makes of them."""
    found = iter(results)
    return [_accepted(piece.draft, found) if piece.draft else next(found) for piece in slices]


def _accepted(draft: Sequence[int], results: Iterator[SliceResult]) -> SliceResult:
    """Merge a draft's results, as far as each token drawn is the draft's next one."""
    drawn = [next(results) for _ in range(len(draft) + 1)]
    right = 0
    while right < len(draft) and drawn[right].token_ids == (draft[right],):
        right += 1
    if right and drawn[right].failed:
        right -= 1  # what fails, or has a mask of nothing, comes first in the next step
    taken = drawn[: right + 1]
    return SliceResult(
        token_ids=tuple(t for result in taken for t in result.token_ids),
        logprobs=tuple(p for result in taken for p in result.logprobs),
        routed=None if taken[0].routed is None else b"".join(r.routed or b"" for r in taken),
        failed=taken[-1].failed,
    )
