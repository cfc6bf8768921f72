"""When to plan the next step: as late as the running step allows. Pure; all times in seconds.

A request that arrives while a step runs is then in the next step, not in the one after that.
"""

# After a shorter step the next one is planned at once: few requests arrive meanwhile, and the host
# must not be late.
SHORT_S = 0.008
# Part of a step's likely time that is surely spent.
_SURE = 0.75
# The device starts a step long before a launch of more than this returns.
_LAUNCH_S = 0.005
_NEWEST = 0.3  # weight of the newest step in a mean
_FADING = 0.9  # of the host's longest, from step to step


class Pace:
    """Learns how long steps take on the device, and the host to prepare one."""

    def __init__(self) -> None:
        self._decode_s = 0.0  # of a step without prompts; 0 = none has been seen
        # Fading sums over steps with prompts: their time beyond a decode step, and their tokens. A
        # step of few tokens says little about the time of a token.
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
        """How long after the start of such a step the planning of the next one can wait."""
        token_s = self._more_s / self._tokens if self._tokens else 0.0
        likely_s = self._decode_s + prompt_tokens * token_s
        if likely_s < SHORT_S:
            return 0.0
        return max(0.0, _SURE * likely_s - self._host_s)
