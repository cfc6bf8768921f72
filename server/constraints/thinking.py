"""Reasoning of an output that ends after so many tokens. Pure."""

import numpy as np

from loraplex.server.protocol import ThinkingBudget


class Thinking:
    """Reads an output token by token. A copy is cheap, and knows no more of what was copied."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._left = budget.tokens
        # What begins the reasoning, and what ends it; () once that is there.
        self._opens, self._closes = budget.opens, budget.closes
        self._last: tuple[int, ...] = ()

    @property
    def _forced(self) -> int | None:
        """The next token, where the reasoning must end."""
        if self._opens or self._left > 0 or not self._closes:
            return None
        sizes = range(len(self._closes) - 1, 0, -1)
        begun = next((n for n in sizes if self._last[-n:] == self._closes[:n]), 0)
        return self._closes[begun]

    def take(self, token_id: int, _matcher: object = None) -> bool:
        """Whether another token had to come."""
        forced = self._forced
        sought = self._opens or self._closes
        self._last = (*self._last, token_id)[-len(sought) :]
        self._left -= not self._opens
        if self._opens and self._last == sought:
            self._opens, self._last = (), ()
        elif self._last == sought:
            self._closes = ()
        return forced not in (None, token_id)

    def forbid(self, mask: np.ndarray) -> None:
        """Leave the token alone that must come in a mask, int32 `[words]`, if it allows it."""
        forced = self._forced
        if forced is not None and mask[forced >> 5] >> (forced & 31) & 1:
            mask[:] = 0
            mask.view(np.uint32)[forced >> 5] = 1 << (forced & 31)
