"""Drafts of a fixed length, to time the steps that check them."""

from loraplex.server.engine.scheduling.drafting import Drafting
from loraplex.server.engine.scheduling.sequence import Sequence

_TOKEN = 1


class FixedDrafting(Drafting):
    """Every sequence has a draft of `draft_tokens` in each of its decodes, as far as a step has
    room. Next to no token of it is right."""

    def __init__(self, draft_tokens: int) -> None:
        super().__init__(draft_tokens, max_bytes=0)

    def _worth(self, sequence: Sequence, most: int, least: float) -> list[int]:
        return [_TOKEN] * min(most, self._max_draft)
