"""How many tokens of prompts a step takes, and whose. Pure; all times in seconds.

Beside streams a step lasts no longer than a target. The prompts of one tenant have a share of the
device's time beside streams of others, and so have those of all batches beside anybody: a step with
such prompts is followed by steps without.
"""

import sys
from collections.abc import Iterable
from typing import NamedTuple

from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.engine.scheduling.sequence import Sequence
from loraplex.server.engine.scheduling.step_cost import StepCost

# Of a step's prompts, however long it takes; and of batches', however many others there are.
LEAST_TOKENS = 256
# Executors pad steps to multiples of this, and smaller steps to finer sizes.
_PADDED_TO = 128

Payer = str | None  # a tenant; None = all batches


class StepLoad(NamedTuple):
    """The prompts of a step. attended: as of `StepCost.took`. likely_s: of the whole step."""

    tokens: int
    attended: float
    likely_s: float


class PromptShares:
    """For each plan `begin`, then `most` and `take` for prompts in order of precedence, then `end`.

    A prompt slice of one token costs what a decode costs. It is no prompt here.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.cost = StepCost()
        self._config = config
        self._owed = dict[Payer, float]()  # time of steps before the payer's next prompt
        self.begin((), has_live=False)

    def begin(self, streams: Iterable[str], *, has_live: bool) -> None:
        """streams: tenants of those that have a token in each step, batches' excepted. has_live:
        whether anything but batches runs or waits."""
        self._streams, self._has_live = set(streams), has_live
        self._tokens = [0, 0]  # of others than batches, and of batches
        self._attended = 0.0
        self._seconds = dict[Payer, float]()

    def most(self, sequence: Sequence, tokens: int) -> int:
        """Tokens of its prompt that the step may take; 0 or less = none. tokens: of the step so
        far."""
        payer = _payer(sequence)
        if payer in self._owed and self._is_shared(payer):
            return 0
        if not (self._has_live if payer is None else self._streams):
            return sys.maxsize
        seconds = self._config.step_target_s - self.cost.decode_s - sum(self._seconds.values())
        within = self.cost.tokens_within(seconds, sequence.num_computed)
        within = (tokens + within) // _PADDED_TO * _PADDED_TO - tokens
        is_batch = payer is None
        least = LEAST_TOKENS - self._tokens[is_batch]
        return least if is_batch and self._tokens[False] else max(within, least)

    def take(self, sequence: Sequence, start: int, num_new: int) -> None:
        """The step computes so many tokens of its prompt."""
        payer, attended = _payer(sequence), num_new * (start + num_new / 2)
        self._tokens[payer is None] += num_new
        self._attended += attended
        seconds = self.cost.prompt_s(num_new, attended)
        self._seconds[payer] = self._seconds.get(payer, 0.0) + seconds

    def end(self) -> StepLoad:
        """The step is planned."""
        likely_s = self.cost.decode_s + sum(self._seconds.values())
        others = self._owed.keys() - self._seconds.keys()
        owed = {payer: self._owed[payer] - likely_s for payer in others}
        for payer, seconds in self._seconds.items():
            if self._is_shared(payer):
                share = self._config.batch_share if payer is None else self._config.prompt_share
                owed[payer] = seconds / share - likely_s
        self._owed = {payer: seconds for payer, seconds in owed.items() if seconds > 0}
        return StepLoad(sum(self._tokens), self._attended, likely_s)

    def forgive(self) -> bool:
        """Nobody else uses the device. Whether anybody stood back."""
        owed, self._owed = self._owed, {}
        return bool(owed)

    def _is_shared(self, payer: Payer) -> bool:
        return self._has_live if payer is None else bool(self._streams - {payer})


def _payer(sequence: Sequence) -> Payer:
    return None if sequence.is_background else sequence.request.tenant
