"""The choice of sequences that have drafts, and of the drafts' lengths. Pure.

A draft begins behind the last token that is known, so its sequence waits for each result. Other
sequences have a step in flight while the next is planned.
"""

from collections import abc

from loraplex.adapters.common.newest import NewestKept
from loraplex.server.constraints.constraint import Foresight
from loraplex.server.constraints.wishes import ForesightWish
from loraplex.server.engine.drafts.draft import NO_DRAFT, Draft, DraftOwner, under_grammar
from loraplex.server.engine.drafts.gain import Acceptance, TokenPrice, worth
from loraplex.server.engine.drafts.source import Drafts, DraftSource
from loraplex.server.engine.plan import SeqSlice
from loraplex.server.engine.scheduling.sequence import Sequence

# Tokens that a step with a draft must be likely to give a sequence: where no other step overtakes
# it; where it is to wait for a result, and the device may wait for the host; and where others have
# two steps meanwhile.
_ALONE, TO_WAIT, _BESIDE_OTHERS = 1.05, 1.3, 2.2
MANY = 16  # sequences; looks of fewer take little of the host's time
_MOST_OWNERS = 4096  # whose acceptance is known; those that were seen last


class Drafting:
    """Decide which sequences have drafts, and how long. max_draft: tokens, 0 = there are no drafts.
    max_bytes: of the answers that are kept.

    drafted, accepted: tokens so far.
    """

    def __init__(self, max_draft: int, max_bytes: int) -> None:
        self.source = DraftSource(max_bytes)
        self.price = TokenPrice()
        self.drafted = self.accepted = 0
        self._max_draft = max_draft
        self._ahead, self._all_hold, self._tokens, self._has_room = False, True, 0, False
        self._owners = NewestKept[DraftOwner, Acceptance](_MOST_OWNERS)
        # Constrained sequences with new tokens; those of the last wishes, and their drafts.
        self._changed = list[Sequence]()
        self._asked = list[tuple[Sequence, Draft]]()

    def take_wishes(self) -> list[ForesightWish]:
        """The drafts that grammars are to look at before a plan; `foreseen` takes the answers."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, []
        self._asked = [
            (sequence, self._proposed(sequence, self._max_draft))
            for sequence in changed
            if sequence.can_run and _may_be_asked(sequence)
        ]
        return [
            ForesightWish(sequence.constraint, draft.token_ids, self._max_draft)
            for sequence, draft in self._asked
            if sequence.constraint is not None
        ]

    def foreseen(self, answers: abc.Sequence[Foresight]) -> None:
        """Take the answers to the last wishes."""
        for (sequence, draft), (forced, allowed) in zip(self._asked, answers, strict=True):
            sequence.proposed = under_grammar(draft, allowed, forced)

    def begin_plan(self, running: list[Sequence], *, ahead: bool, room: int) -> None:
        """Begin a step's drafts. ahead: a step is in flight. room: tokens for drafts."""
        self._ahead = ahead
        self._all_hold = all(sequence.holds for sequence in running)
        self._tokens, self._has_room = len(running), room > 0
        asked, self._asked = self._asked, []
        for sequence, _ in asked:
            if sequence.pending and self._has_room:
                self._hold(sequence)

    def most(self, sequence: Sequence) -> int:
        """Tokens that its next draft may have."""
        return self._max_draft if sequence.holds else 0

    def draft(self, sequence: Sequence, room: int) -> list[int]:
        """Return a draft of at most `room` tokens for a slice that is being planned."""
        if sequence.pending or sequence.request.drafts is None:
            return []
        least = _BESIDE_OTHERS if self._ahead else _ALONE
        found = self._look(sequence, room, least) if room else []
        sequence.holds = bool(found)
        return found

    def note(self, sequence: Sequence, piece: SeqSlice, drawn: int) -> None:
        """The sequence has taken so many tokens that a slice has given."""
        if piece.draft:
            self._account(sequence, len(piece.draft), drawn - 1)
        sequence.proposed = None
        if not self._has_room or sequence.request.drafts is None:
            return
        if sequence.constraint is not None:
            self._changed.append(sequence)
        elif not piece.draft and sequence.pending:
            self._hold(sequence)

    def _account(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        _acceptance(sequence).saw(sequence.expected, accepted)
        known = self._owners.get(_owner(sequence))
        if known is not None and not _is_forced(sequence):
            known.saw(sequence.expected, accepted)

    def end(self, sequence: Sequence) -> None:
        """Keep the sequence's answer, as far as it came, since it may help others."""
        sequence.drafts = None
        if self._max_draft and sequence.request.drafts is not None:
            self.source.keep(_owner(sequence), sequence.tokens, sequence.prompt_len)

    def _proposed(self, sequence: Sequence, most: int) -> Draft:
        if sequence.drafts is None:
            sequence.drafts = self._open(sequence)
        sequence.drafts.extend(sequence.tokens[sequence.drafts.num_tokens :])
        return sequence.drafts.propose(most)

    def _open(self, sequence: Sequence) -> Drafts:
        """Open the sequence's drafts, for its first look."""
        owner = _owner(sequence)
        known = self._owners.get(owner) or Acceptance()
        self._owners[owner] = known
        sequence.acceptance = Acceptance(known.ratio)
        return self.source.open(owner, sequence.request.prompt_ids)

    def _hold(self, sequence: Sequence) -> None:
        """Decide whether it waits for the result of the step that contains it."""
        least = TO_WAIT if self._all_hold else _BESIDE_OTHERS
        sequence.holds = bool(self._look(sequence, self._max_draft, least))

    def _look(self, sequence: Sequence, most: int, least: float) -> list[int]:
        """Return a draft as `_worth` does, or none where a look is likely to be in vain. What a
        grammar forces comes without a look.
        """
        known = sequence.num_tokens
        if sequence.constraint is not None:
            return self._worth(sequence, most, least)
        if self._tokens >= MANY and not sequence.patience.is_over(known):
            return []
        found = self._worth(sequence, most, least)
        sequence.patience.looked(known, found=bool(found))
        return found

    def _worth(self, sequence: Sequence, most: int, least: float) -> list[int]:
        """As much of a draft as pays; none where the step would give less than `least`."""
        if sequence.constraint is None:
            draft = self._proposed(sequence, min(most, self._max_draft))
        else:
            draft = sequence.proposed or NO_DRAFT
        ratio, price = _acceptance(sequence).ratio, self.price.of(self._tokens)
        count, expected = worth(draft.chances[:most], ratio, price, least)
        if count:
            sequence.expected = expected
        return draft.token_ids[:count]


def _owner(sequence: Sequence) -> DraftOwner:
    request = sequence.request
    return DraftOwner(request.adapter or "", request.drafts or "", request.adapter_scale)


def _is_forced(sequence: Sequence) -> bool:
    """Whether a grammar forced the sequence's latest draft."""
    return sequence.proposed is not None and sequence.proposed.is_forced


def _acceptance(sequence: Sequence) -> Acceptance:
    """The acceptance of drafts like the sequence's latest."""
    return sequence.forced if _is_forced(sequence) else sequence.acceptance


def _may_be_asked(sequence: Sequence) -> bool:
    constraint = sequence.constraint
    if constraint is None or constraint.is_busy or constraint.has_costly_masks:
        return False
    return not (constraint.costly or constraint.broken)
