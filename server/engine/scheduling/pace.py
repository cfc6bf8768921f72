"""When to plan the next step: as late as the running one allows. Pure; all times in seconds.

What comes in while a step runs is then in the next one, not in the one after that.
"""

# Shorter steps are followed at once: little comes in meanwhile, and the host must not be late.
SHORT_S = 0.008
# Of what a step is likely to take; it may take less.
_SURE = 0.75
# The device starts on a launch long before a longer one is over.
_LAUNCH_S = 0.005
_NEWEST = 0.3  # weight of the newest step in a mean
_FADING = 0.9  # of the host's longest, from step to step


class Pace:
    """Learns how long steps take on the device, and the host to prepare one."""

    def __init__(self) -> None:
        self._decode_s = 0.0  # of a step without prompts; 0 = none has been seen
        # Of steps with prompts, fading: what they took more, and their tokens. A step of few says
        # little of what a token adds.
        self._more_s, self._tokens = 0.0, 0.0
        self._host_s = 0.0

    def prepared(self, plan_s: float, launch_s: float) -> None:
        """The host planned and launched a step."""
        self._host_s = max(plan_s + min(launch_s, _LAUNCH_S), _FADING * self._host_s)

    def took(self, prompt_tokens: int, step_s: float) -> None:
        """A step with so many tokens of prompts kept the device busy for step_s."""
        if not prompt_tokens:
            weight = _NEWEST if self._decode_s else 1.0
            self._decode_s += weight * (step_s - self._decode_s)
        else:
            more_s = max(0.0, step_s - self._decode_s)
            self._more_s = (1 - _NEWEST) * self._more_s + more_s
            self._tokens = (1 - _NEWEST) * self._tokens + prompt_tokens

    def spare_s(self, prompt_tokens: int) -> float:
        """How long after the start of such a step the next one need not be planned."""
        token_s = self._more_s / self._tokens if self._tokens else 0.0
        likely_s = self._decode_s + prompt_tokens * token_s
        if likely_s < SHORT_S:
            return 0.0
        return max(0.0, _SURE * likely_s - self._host_s)
