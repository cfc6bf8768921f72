"""What the user allows of a conversion to LoRA. Pure."""

from pathlib import Path

import msgspec

from loraplex.adapters.peft.validate import MAX_LORA_RANK

# Far above what float64 rounds, far below what float32 shows in an answer.
EXACT = 1e-5


class MethodOptions(msgspec.Struct, frozen=True):
    """rank: of each module that has as much to say; None = the lowest that `max_error` allows.
    max_error: of each module's change, relative, Frobenius. base: the base's folder. initial: the
    folder of the adapter before its training."""

    rank: int | None = None
    max_error: float = EXACT
    base: Path | None = None
    initial: Path | None = None

    @property
    def is_asked_for(self) -> bool:
        return (self.rank, self.max_error, self.initial) != (None, EXACT, None)

    @property
    def max_rank(self) -> int:
        return MAX_LORA_RANK if self.rank is None else self.rank

    @property
    def wanted_error(self) -> float:
        """From which on no further rank is taken."""
        return self.max_error if self.rank is None else min(self.max_error, EXACT)
