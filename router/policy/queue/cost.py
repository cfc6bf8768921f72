"""Prices of sequences in the queue's currency, before and while their tokens are known. Pure.

The currency is the prompt token. Prices are relative work on a GPU, not money.
"""

from typing import NamedTuple

from loraplex.adapters.common.newest import NewestKept
from loraplex.router.policy.queue.fairness import Account, FairOrder
from loraplex.router.policy.queue.shares import TenantShares

# A generated token costs a share of a whole step, a prompt token rides in a chunk (VTC's prices).
PROMPT_PRICE = 1.0
OUTPUT_PRICE = 2.0
# Bytes that reach the device in about the time that a decode step gives one of its sequences.
LOAD_BYTES_A_TOKEN = 512 << 10

MAX_ESTIMATES = 4096
_FIRST_GUESS = 128.0  # output tokens of a flow without observations
_NEWEST = 0.1  # weight of the newest observation in a running mean


class Flow(NamedTuple):
    """A party that has turns: a tenant, for one adapter. adapter: digest, or "" for the base."""

    tenant: str
    adapter: str


def load_price(nbytes: int) -> float:
    """The price in tokens of bringing an adapter of `nbytes` to a device."""
    return nbytes / LOAD_BYTES_A_TOKEN


class OutputEstimate:
    """How long the outputs of a flow tend to be: a running mean, of at most so many flows."""

    def __init__(self) -> None:
        self._means = NewestKept[Flow | str, float](MAX_ESTIMATES)
        self._overall = _FIRST_GUESS

    def expected(self, flow: Flow, max_tokens: int) -> float:
        """Output tokens to reckon with; `max_tokens` is often no more than the model's limit."""
        mean = self._means.get(flow)
        if mean is None:
            mean = self._means.get(flow.tenant, self._overall)
        return min(mean, float(max_tokens))

    def observe(self, flow: Flow, num_tokens: int) -> None:
        self._overall += _NEWEST * (num_tokens - self._overall)
        for key in (flow, flow.tenant):
            old = self._means.get(key, float(num_tokens))
            self._means[key] = old + _NEWEST * (num_tokens - old)


class Bill:
    """The charge for one sequence: prompt and expected output at first, then what really comes.

    parties: the accounts that pay. Call `settle` when the sequence is over, however it ended.
    """

    __slots__ = ("_estimate", "_expected", "_flow", "_generated", "_parties", "_settled", "_shares")

    def __init__(
        self,
        parties: tuple[tuple[FairOrder, Account], ...],
        flow: Flow,
        expected: float,
        estimate: OutputEstimate,
        shares: TenantShares,
    ) -> None:
        shares.begins(flow.tenant)
        self._shares = shares
        self._parties = parties
        self._flow = flow
        self._expected = expected
        self._estimate = estimate
        self._generated = 0
        self._settled = False

    def generated(self, num_tokens: int) -> None:
        """Notes that so many tokens came. What exceeds the expected output is charged at once."""
        before = max(float(self._generated), self._expected)
        self._generated += num_tokens
        if self._generated > before:
            for _, account in self._parties:
                account.charge(OUTPUT_PRICE * (self._generated - before))

    def settle(self) -> None:
        """Ends the charge: tokens that never came cost nothing. Once is enough."""
        if self._settled:
            return
        self._settled = True
        self._shares.ends(self._flow.tenant)
        if self._generated:  # a request that was cancelled says nothing about output lengths
            self._estimate.observe(self._flow, self._generated)
        unused = self._expected - self._generated
        if unused > 0:
            for order, account in self._parties:
                order.refund(account, OUTPUT_PRICE * unused)
