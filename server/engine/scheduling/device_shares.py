"""Shares the time of a step on the device among its sequences. Pure.

A step's time is shared by the bytes that it moves. A byte of weights counts for all tokens of the
step, one of keys and values for the sequence that reads it, one of an adapter for the adapter's
tokens. What more than RIDGE_TOKENS tokens read costs arithmetic, which grows with each token.
"""

from collections.abc import Sequence as Items

from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.engine.memory.residency import AdapterArena
from loraplex.server.engine.messages import DeviceUse
from loraplex.server.engine.plan import StepPlan
from loraplex.server.engine.scheduling.sequence import Sequence, State

# For so many tokens a device computes about as long as it reads what it multiplies them with.
RIDGE_TOKENS = 256


class DeviceShares:
    """Adds up time on the device, by sequence and in all, as `DeviceUse` has it."""

    def __init__(self, limits: ExecutorLimits, arena: AdapterArena) -> None:
        self._adapters = self._base = self._late = self._copies = self._pictures = 0.0
        self._weights = max(1, limits.weight_bytes)
        self._token = limits.token_bytes
        self._devices = limits.num_devices
        self._arena = arena
        self._causes: dict[str, Sequence] = {}  # of copies that are not over

    def took(self, plan: StepPlan, sequences: Items[Sequence], step_s: float) -> None:
        """Shares a step among its sequences. Those that have ended pay nothing for what the device
        did behind their end: it is a cost of the step. sequences: parallel to plan.slices.
        """
        step_s *= self._devices
        rates, token, over = self._rates(plan, sequences), self._token, State.FINISHED
        costs: list[float] = []
        of_base = 0.0
        for piece, sequence in zip(plan.slices, sequences, strict=True):
            count, slot, cost = piece.num_new, piece.adapter_slot, 0.0
            if sequence.state is not over:
                reads = count / RIDGE_TOKENS if count > RIDGE_TOKENS else 1.0
                cost = count * rates[slot] + token * (piece.start + count) * reads
            costs.append(cost)
            if slot < 0:
                of_base += cost
        total = sum(costs)
        if not total:
            self._late += step_s
            return
        each = step_s / total
        for sequence, cost in zip(sequences, costs, strict=True):
            sequence.device_s += cost * each
        self._base += of_base * each
        self._adapters += (total - of_base) * each

    def _rates(self, plan: StepPlan, sequences: Items[Sequence]) -> dict[int, float]:
        """Bytes of weights for each token, by adapter slot."""
        tokens: dict[int, int] = {}
        adapters: dict[int, Sequence] = {}
        for piece, sequence in zip(plan.slices, sequences, strict=True):
            slot = piece.adapter_slot
            tokens[slot] = tokens.get(slot, 0) + piece.num_new
            adapters[slot] = sequence
        base = self._weights * max(1 / sum(tokens.values()), 1 / RIDGE_TOKENS)
        rates = {-1: base}
        for slot, count in tokens.items():
            if slot >= 0:
                nbytes = self._arena.nbytes(adapters[slot].adapter or "")
                rates[slot] = base + nbytes * max(1 / count, 1 / RIDGE_TOKENS)
        return rates

    def encoded(self, shares: Items[tuple[Sequence, float]], tower_s: float) -> None:
        """Charges work of the tower to those who wait for its pictures. shares: sequences, and the
        part of each. The parts of those that have ended are nobody's."""
        tower_s *= self._devices
        paid = 0.0
        for sequence, share in shares:
            if sequence.state is not State.FINISHED:
                sequence.device_s += tower_s * share
                paid += tower_s * share
        self._pictures += paid
        self._late += tower_s - paid

    def usable(self, digest: str, waiters: Items[Sequence]) -> None:
        """Notes that an adapter came to the device. The first of its waiters caused its copy."""
        if waiters:
            self._causes[digest] = waiters[0]

    def copied(self, digest: str, copy_s: float) -> None:
        """Counts the copy of an adapter. One that nobody waited for is nobody's."""
        copy_s *= self._devices
        self._copies += copy_s
        cause = self._causes.pop(digest, None)
        if cause is not None:
            cause.copy_s += copy_s

    @property
    def use(self) -> DeviceUse:
        return DeviceUse(self._adapters, self._base, self._late, self._copies, self._pictures)
