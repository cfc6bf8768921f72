"""What the scheduler wants made for constrained sequences, and what becomes of it. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from server.constraints.constraint import Constraint
from server.engine.validation import Refusal
from server.protocol import SamplingParams


class ConstraintWish(NamedTuple):
    """key: of the sequence. accepted_ids: of its output."""

    key: int
    sampling: SamplingParams
    accepted_ids: Sequence[int]


class ConstraintNews(NamedTuple):
    """Answers one wish."""

    key: int
    outcome: Constraint | Refusal
