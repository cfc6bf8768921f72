"""Drafts of answers from texts of the same owner: a sequence's prompt, its answer so far, and other
answers. Pure.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from loraplex.server.engine.drafts.draft import (
    LONGEST,
    NO_DRAFT,
    Draft,
    DraftOwner,
    common_length,
    vote,
)
from loraplex.server.engine.drafts.places import GrowingPlaces, Place, PromptPlaces

# Tokens of a context. The first that was seen before decides.
WINDOWS = (6, 1)
VOTERS = 3  # places that are looked at, of the sequence and as many of other answers

_Answers = tuple[GrowingPlaces, ...]  # for each window


class DraftSource:
    """Keep answers, and propose drafts from them. max_bytes: of all answers that it keeps."""

    TOKEN_BYTES = len(WINDOWS) * GrowingPlaces.BYTES

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // self.TOKEN_BYTES
        self._num_tokens = 0
        self._kept: OrderedDict[DraftOwner, _Answers] = OrderedDict()  # the latest used last

    def open(self, owner: DraftOwner, token_ids: Sequence[int]) -> "Drafts":
        """Open one sequence's drafts. token_ids: its prompt, and the answer so far."""
        return Drafts(self, owner, token_ids)

    def drop(self, digest: str) -> None:
        """The adapter's content is gone or another."""
        for owner in [owner for owner in self._kept if owner.adapter == digest]:
            while owner in self._kept:
                self._forget_oldest(owner)

    def answers(self, owner: DraftOwner) -> _Answers | None:
        """Return the answers kept of an owner, an index for each window; None without any."""
        found = self._kept.get(owner)
        if found is not None:
            self._kept.move_to_end(owner)
        return found

    def keep(self, owner: DraftOwner, token_ids: Sequence[int], num_prompt: int) -> None:
        """Keep a prompt with its answer, which may help others of its owner.

        The tokens before an answer say how it begins.
        """
        start = min(LONGEST, num_prompt)
        tokens = list(token_ids[num_prompt - start :])
        if not start < len(tokens) <= self._max_tokens:
            return
        self._num_tokens += len(tokens)
        while self._num_tokens > self._max_tokens:
            self._forget_oldest(next(iter(self._kept)))
        answers = self._kept.setdefault(owner, tuple(map(GrowingPlaces, WINDOWS)))
        self._kept.move_to_end(owner)
        for places in answers:
            places.begin(tokens, start)

    def _forget_oldest(self, owner: DraftOwner) -> None:
        """The oldest answer of this owner."""
        answers = self._kept[owner]
        self._num_tokens -= [places.forget_oldest() for places in answers][0]
        if not len(answers[0]):
            del self._kept[owner]


class Drafts:
    """Drafts of one sequence."""

    def __init__(self, source: DraftSource, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        self._source, self._owner = source, owner
        self._tokens = list(token_ids)
        ids = np.array(self._tokens, np.int64)
        self._prompt = [PromptPlaces(self._tokens, ids, window) for window in WINDOWS]
        self._answer = [GrowingPlaces(window) for window in WINDOWS]
        for places in self._answer:
            places.begin(self._tokens, len(self._tokens))

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add new tokens to the sequence. token_ids: accepted tokens of the answer."""
        self._tokens.extend(token_ids)
        for places in self._answer:
            places.grow()

    def propose(self, most: int) -> Draft:
        """Propose at most `most` tokens that may follow the known ones."""
        for index, answer in enumerate(self._answer):
            if answer.end is not None and (places := self._places(index, answer.end)):
                return self._draft(places, most)
        return NO_DRAFT

    def _places(self, index: int, sought: int) -> list[Place]:
        """Places of the sought context before, the sequence's own first. index: of the window."""
        found = self._answer[index].after(sought, VOTERS)
        if len(found) < VOTERS:
            found += self._prompt[index].after(sought, VOTERS - len(found))
        if (answers := self._source.answers(self._owner)) is not None:
            found += answers[index].after(sought, VOTERS)
        return found

    def _draft(self, places: list[Place], most: int) -> Draft:
        """Vote on a draft among those places that follow the longest match."""
        tail, longest = self._tokens[-LONGEST:], 1
        best = list[list[int]]()
        for place in places:
            length = common_length(tail, place)
            if length >= longest:
                if length > longest:
                    longest, best = length, []
                text, position = place
                best.append(text[position : position + most])
        return vote(best, longest) if best else NO_DRAFT
