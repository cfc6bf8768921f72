"""How long steps take on the device, by the times of earlier ones. Pure; all times in seconds."""

import math
import sys

_NEWEST = 0.3  # weight of the newest step without prompts
_FADING = 0.9  # the weight that a step with prompts keeps with each that follows
# A step of fewer prompt tokens says little about the price of a token.
_TELLING = 256
# Contexts that differ by less say little about what a token of context costs.
_SPREAD = 1024.0
# A step that takes more times what was likely was held up by something else.
_HELD_UP = 2.0
_GROWTH = 2  # times the tokens of the largest step of late: what is known says no more


class StepCost:
    """A step takes what one without prompts takes, and a price for each token of a prompt. The
    price grows with the context that the token sees.

    decode_s: of a step without prompts; 0 = none has been seen.
    """

    def __init__(self) -> None:
        self.decode_s = 0.0
        self._largest = 0.0
        self._forget_prompts()

    def _forget_prompts(self) -> None:
        # A line through the prices of steps' prompt tokens by their contexts: sums over tokens.
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def took(self, tokens: int, attended: float, step_s: float) -> None:
        """A step kept the device busy for step_s. tokens: of its prompts. attended: tokens of
        context that these see, summed up."""
        if tokens:
            self._prompts_took(tokens, attended, step_s)
        elif self.decode_s:
            self.decode_s += _NEWEST * (min(step_s, _HELD_UP * self.decode_s) - self.decode_s)
        else:
            self.decode_s = step_s

    def _prompts_took(self, tokens: int, attended: float, step_s: float) -> None:
        likely_s = self.prompt_s(tokens, attended)
        if self._weight:
            step_s = min(step_s, _HELD_UP * (self.decode_s + likely_s))
        more_s = max(0.0, step_s - self.decode_s)
        if tokens >= _TELLING and _HELD_UP * step_s < likely_s:
            self._forget_prompts()  # no step is faster than the device
        context, price = attended / tokens, more_s / tokens
        self._largest = max(tokens, _FADING * self._largest)
        self._weight = _FADING * self._weight + tokens
        self._x = _FADING * self._x + tokens * context
        self._y = _FADING * self._y + tokens * price
        self._xx = _FADING * self._xx + tokens * context**2
        self._xy = _FADING * self._xy + tokens * context * price

    def prompt_s(self, tokens: int, attended: float) -> float:
        """Seconds that such prompts add to a step; 0 while nothing is known."""
        price, slope = self._line()
        return price * tokens + slope * attended

    def tokens_within(self, seconds: float, start: int) -> int:
        """How many tokens of a prompt, from its token `start` on, add so much to a step."""
        if not self._weight:
            return sys.maxsize
        most, twice_s = int(_GROWTH * max(_TELLING, self._largest)), 2 * max(0.0, seconds)
        price, slope = self._line()
        first = price + slope * start
        root = first + math.sqrt(first**2 + slope * twice_s)
        return most if most * root <= twice_s else int(twice_s / root)

    def _line(self) -> tuple[float, float]:
        """The price of a token without context, and what a token of context adds."""
        if not self._weight:
            return 0.0, 0.0
        context, price = self._x / self._weight, self._y / self._weight
        variance = max(0.0, self._xx / self._weight - context**2)
        slope = (self._xy / self._weight - context * price) / (variance + _SPREAD**2)
        slope = min(max(0.0, slope), price / context if context else 0.0)
        return price - slope * context, slope
