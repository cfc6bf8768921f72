"""Which sequences have drafts, and how long these are. Pure.

A draft begins behind the last token that is known, so its sequence waits for each result. Other
sequences have a step in flight while the next is planned.
"""

from server.engine.drafts.draft import DraftOwner
from server.engine.drafts.gain import worth
from server.engine.drafts.source import Drafts, DraftSource
from server.engine.drafts.token_price import TokenPrice
from server.engine.plan import SeqSlice
from server.engine.scheduling.sequence import Sequence

# Tokens that a step with a draft must be likely to give a sequence: where no other step overtakes
# it; where it is to wait for a result, and the device may wait for the host; and where others have
# two steps meanwhile.
_ALONE, _TO_WAIT, _BESIDE_OTHERS = 1.05, 1.3, 2.2


class Drafting:
    """max_draft: tokens, 0 = there are no drafts. max_bytes: of the answers that are kept.

    drafted, accepted: tokens so far.
    """

    def __init__(self, max_draft: int, max_bytes: int) -> None:
        self.source = DraftSource(max_bytes)
        self.price = TokenPrice()
        self.drafted = self.accepted = 0
        self._max_draft = max_draft
        self._ahead, self._all_hold, self._tokens, self._has_room = False, True, 0, False

    def begin_plan(self, running: list[Sequence], *, ahead: bool, room: int) -> None:
        """ahead: whether a step is in flight. room: tokens of drafts in the step."""
        self._ahead = ahead
        self._all_hold = all(sequence.holds for sequence in running)
        self._tokens, self._has_room = len(running), room > 0

    def most(self, sequence: Sequence) -> int:
        """Tokens that its next draft may have."""
        return self._max_draft if sequence.holds else 0

    def draft(self, sequence: Sequence, room: int) -> list[int]:
        """For a slice that is being planned, of at most `room` tokens."""
        if sequence.pending or sequence.drafts is None:
            return []
        least = _BESIDE_OTHERS if self._ahead else _ALONE
        found = self._worth(sequence, room, least) if room else []
        sequence.holds = bool(found)
        return found

    def note(self, sequence: Sequence, piece: SeqSlice, drawn: int) -> None:
        """The sequence has taken so many tokens that a slice has given."""
        if not self._max_draft or sequence.request.drafts is None:
            return
        if sequence.drafts is None:
            sequence.drafts = self._open(sequence)
        drafts = sequence.drafts
        drafts.extend(sequence.tokens[drafts.num_tokens :])
        if piece.draft:
            self.drafted += len(piece.draft)
            self.accepted += drawn - 1
            sequence.acceptance.saw(sequence.expected, drawn - 1)
        elif sequence.pending and self._has_room and sequence.constraint is None:
            least = _TO_WAIT if self._all_hold else _BESIDE_OTHERS
            sequence.holds = bool(self._worth(sequence, self._max_draft, least))

    def end(self, sequence: Sequence) -> None:
        """What there is of its answer may help others."""
        if sequence.drafts is not None:
            sequence.drafts.close(keep=True)
            sequence.drafts = None

    def _open(self, sequence: Sequence) -> Drafts:
        request = sequence.request
        owner = DraftOwner(request.adapter or "", request.drafts or "")
        return self.source.open(owner, request.prompt_ids)

    def _worth(self, sequence: Sequence, most: int, least: float) -> list[int]:
        """As much of a draft as pays; none where the step would give fewer tokens than `least`."""
        assert sequence.drafts is not None
        draft = sequence.drafts.propose(min(most, self._max_draft))
        ratio = sequence.acceptance.ratio
        count, expected = worth(draft.chances, ratio, self.price.of(self._tokens))
        if 1 + expected * ratio < least:
            return []
        sequence.expected = expected
        return draft.token_ids[:count]
