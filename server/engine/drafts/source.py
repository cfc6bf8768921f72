"""Drafts of answers from texts of the same owner: a sequence's prompt, its answer so far, and other
answers. Pure.
"""

from collections import OrderedDict
from collections.abc import Sequence

from server.engine.drafts.draft import (
    LONGEST,
    NO_DRAFT,
    Draft,
    DraftOwner,
    common_length,
    vote,
)
from server.engine.drafts.places import CONTEXT, GrowingPlaces, PromptPlaces, context

VOTERS = 4  # places of one text that are looked at


class DraftSource:
    """max_bytes: of the answers that it keeps, over all owners."""

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // GrowingPlaces.BYTES
        self._num_tokens = 0
        self._kept: OrderedDict[DraftOwner, GrowingPlaces] = OrderedDict()  # the latest used last

    @property
    def num_bytes(self) -> int:
        return self._num_tokens * GrowingPlaces.BYTES

    def open(self, owner: DraftOwner, token_ids: Sequence[int]) -> "Drafts":
        """token_ids: the prompt, and what is known of the answer."""
        return Drafts(self, owner, token_ids)

    def drop(self, digest: str) -> None:
        """The adapter's content is gone or another."""
        for owner in [owner for owner in self._kept if owner.adapter == digest]:
            kept = self._kept.pop(owner)
            while len(kept):
                self._num_tokens -= kept.forget_oldest()

    def answers(self, owner: DraftOwner) -> GrowingPlaces | None:
        if owner in self._kept:
            self._kept.move_to_end(owner)
        return self._kept.get(owner)

    def keep(self, owner: DraftOwner, tokens: list[int], start: int) -> None:
        if len(tokens) > self._max_tokens:
            return
        self._kept.setdefault(owner, GrowingPlaces()).begin(tokens, start)
        self._kept.move_to_end(owner)
        self._num_tokens += len(tokens)
        while self._num_tokens > self._max_tokens:
            oldest, kept = next(iter(self._kept.items()))
            self._num_tokens -= kept.forget_oldest()
            if not len(kept):
                del self._kept[oldest]


class Drafts:
    """Of one sequence."""

    def __init__(self, source: DraftSource, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        self._source, self._owner = source, owner
        self._tokens = list(token_ids)
        self._num_prompt = len(self._tokens)
        self._prompt = PromptPlaces(self._tokens)
        self._answer = GrowingPlaces()
        self._answer.begin(self._tokens, self._num_prompt)

    def extend(self, token_ids: Sequence[int]) -> None:
        """token_ids: accepted tokens of the answer."""
        self._tokens.extend(token_ids)
        self._answer.grow()

    def propose(self, most: int) -> Draft:
        """At most `most` tokens that may follow what is known."""
        tokens = self._tokens
        if len(tokens) < CONTEXT:
            return NO_DRAFT
        sought = context(tokens, len(tokens))
        places = self._answer.after(sought, VOTERS)
        if len(places) < VOTERS:
            places += self._prompt.after(sought, VOTERS - len(places))
        if (kept := self._source.answers(self._owner)) is not None:
            places += kept.after(sought, VOTERS)
        if not places:
            return NO_DRAFT
        tail = tokens[-LONGEST:]
        lengths = [common_length(tail, place) for place in places]
        longest = max(lengths)
        best = [
            text[position : position + most]
            for (text, position), length in zip(places, lengths, strict=True)
            if length == longest
        ]
        return vote(best, longest)

    def close(self, keep: bool) -> None:
        """keep: the answer ended well, and may help others of its owner."""
        if keep and len(self._tokens) > self._num_prompt:
            lead = min(LONGEST, self._num_prompt)
            answer = self._tokens[self._num_prompt - lead :]
            self._source.keep(self._owner, answer, lead)
