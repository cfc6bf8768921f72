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
_FADING = 0.9  # of the host's longest, from step to step


class Pace:
    """Learns how long the host takes to prepare a step."""

    def __init__(self) -> None:
        self._host_s = 0.0

    def prepared(self, plan_s: float, launch_s: float) -> None:
        """The host planned and launched a step."""
        self._host_s = max(plan_s + min(launch_s, _LAUNCH_S), _FADING * self._host_s)

    def spare_s(self, likely_s: float) -> float:
        """How long after the start of a step the planning of the next one can wait. likely_s: of
        the step."""
        if likely_s < SHORT_S:
            return 0.0
        return max(0.0, _SURE * likely_s - self._host_s)
