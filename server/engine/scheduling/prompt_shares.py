"""How many tokens of prompts a step takes, and whose. Pure; all times in seconds.

Beside streams a step lasts no longer than a target. The prompts of one tenant have a share of the
device's time beside streams of others, and so have those of all batches beside anybody: a step with
such prompts is followed by steps without.
"""

import math
import sys
from collections.abc import Iterable
from typing import NamedTuple

from loraplex.adapters.common.newest import NewestKept
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.engine.scheduling.sequence import Sequence

# Of a step's prompts, however long it takes; and of batches', however many others there are.
LEAST_TOKENS = 256
# Executors pad steps to multiples of this, and smaller steps to finer sizes.
_PADDED_TO = 128

Payer = str | None  # a tenant; None = all batches
# Tokens of a tenant's prompts in one turn: shorter prompts are not cut into turns.
TURN_TOKENS = 8192
# Tenants whose turns are known.
_MOST_TENANTS = 1024


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
        root = first + math.hypot(first, math.sqrt(slope) * math.sqrt(twice_s))
        if not root:  # tokens are free, or there is no time for any
            return 0 if slope else most
        return most if most * root <= twice_s else int(twice_s / root)

    def _line(self) -> tuple[float, float]:
        """The price of a token without context, and what a token of context adds."""
        if not self._weight:
            return 0.0, 0.0
        context, price = self._x / self._weight, self._y / self._weight
        variance = max(0.0, self._xx / self._weight - context**2)
        slope = (self._xy / self._weight - context * price) / (variance + _SPREAD**2)
        slope = min(max(0.0, slope), price / context if context else 0.0)
        return max(0.0, price - slope * context), slope  # rounding may go below 0


class StepLoad(NamedTuple):
    """The prompts of a step. attended: as of `StepCost.took`. likely_s: of the whole step."""

    tokens: int
    attended: float
    likely_s: float


class PromptTurn(NamedTuple):
    """Place of a prompt in the order of prompts; the lower one goes first. after: the plan in which
    the last turn of its tenant was over, 0 = none was of late."""

    priority: int
    after: int


class _Served(NamedTuple):
    """The turns that a tenant's prompts had. after: as of PromptTurn. tokens: of the turn since."""

    after: int
    tokens: int


_NOT_SERVED = _Served(0, 0)


class PromptShares:
    """Share steps out between prompts and streams. For each plan `begin`, then `most` and `take`
    for prompts in order of precedence, then `end`.

    A prompt slice of one token costs what a decode costs. It is no prompt here.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.cost = StepCost()
        self._config = config
        self._owed = dict[Payer, float]()  # time of steps before the payer's next prompt
        self._num_plans = 0
        self._served = NewestKept[str, _Served](_MOST_TENANTS)
        self.begin((), has_live=False)

    def begin(self, streams: Iterable[str], *, has_live: bool) -> None:
        """Begin the shares of a new plan. streams: tenants of those that have a token in each step,
        batches' excepted. has_live: whether anything but batches runs or waits.
        """
        self._num_plans += 1
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

    def turn(self, sequence: Sequence) -> PromptTurn:
        """Turn of a prompt: in one priority the tenant goes first whose last turn ended first."""
        served = self._served.get(sequence.request.tenant, _NOT_SERVED)
        return PromptTurn(sequence.precedence.priority, served.after)

    def waiting_turn(self, sequence: Sequence) -> tuple[int, bool, PromptTurn]:
        """Turn of a sequence that waits: one that was preempted goes on before others begin."""
        begins = sequence.cached_tokens is None
        return sequence.precedence.priority, begins, self.turn(sequence)

    def take(self, sequence: Sequence, start: int, num_new: int) -> None:
        """The step computes so many tokens of its prompt."""
        tenant = sequence.request.tenant
        after, tokens = self._served.get(tenant, _NOT_SERVED)
        is_over = tokens + num_new >= TURN_TOKENS
        served = _Served(self._num_plans, 0) if is_over else _Served(after, tokens + num_new)
        self._served[tenant] = served
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
        """Forgive what payers owe: nobody else uses the device. Whether anybody stood back."""
        owed, self._owed = self._owed, {}
        return bool(owed)

    def _is_shared(self, payer: Payer) -> bool:
        return self._has_live if payer is None else bool(self._streams - {payer})


def _payer(sequence: Sequence) -> Payer:
    return None if sequence.is_background else sequence.request.tenant
