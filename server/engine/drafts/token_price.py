"""The price of one token more in a step, from the times of earlier steps. Pure."""

_FADING = 0.98  # the weight that a step keeps with each that follows
# Variance of token counts from which a slope says something.
_LEAST_VARIANCE = 0.5


class TokenPrice:
    """A line through the times of steps by their tokens; later steps weigh more."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """A step without a prompt."""
        self._weight = _FADING * self._weight + 1
        self._x = _FADING * self._x + tokens
        self._y = _FADING * self._y + seconds
        self._xx = _FADING * self._xx + tokens * tokens
        self._xy = _FADING * self._xy + tokens * seconds

    def of(self, tokens: int) -> float:
        """The price of a token more in a step of `tokens` tokens.

        It is the number of tokens that other steps would give in the time that the token takes. 0
        while nothing is known, so that the token is tried.
        """
        if not self._weight:
            return 0.0
        mean, seconds = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean * mean
        if variance < _LEAST_VARIANCE:
            return 0.0
        slope = max(0.0, (self._xy / self._weight - mean * seconds) / variance)
        # A step takes no less than its tokens do.
        step = max(seconds + slope * (tokens - mean), slope * tokens)
        return tokens * slope / step if step > 0 else 0.0
