"""What a token more costs a step, from the times of steps that were. Pure."""

_FADING = 0.98  # the weight that a step keeps with each that follows
# Variance of token counts from which a slope says something.
_LEAST_VARIANCE = 0.5


class StepTimes:
    """A line through the times of steps by their tokens; later steps weigh more."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def took(self, tokens: int, seconds: float) -> None:
        """A step without a prompt."""
        terms = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            _FADING * total + term for total, term in zip(sums, terms, strict=True)
        )

    def price(self, tokens: int) -> float:
        """Of a token more in a step of so many: the tokens that other steps would give in the time
        that it takes. 0 while nothing is known, so that it is tried."""
        if not self._weight:
            return 0.0
        mean, second = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean * mean
        if variance < _LEAST_VARIANCE:
            return 0.0
        slope = max(0.0, (self._xy / self._weight - mean * second) / variance)
        step = max(second + slope * (tokens - mean), slope * tokens)
        return tokens * slope / step if step > 0 else 0.0
