"""Constraints that the scheduler asks for, and the answers. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from server.constraints.constraint import Constraint
from server.engine.admission import Refusal
from server.protocol import SamplingParams


class ConstraintWish(NamedTuple):
    """key: of the sequence. accepted_ids: the known tokens of its output. vocab_size: as in
    `GenerateRequest`."""

    key: int
    sampling: SamplingParams
    accepted_ids: Sequence[int]
    vocab_size: int | None = None


class ConstraintNews(NamedTuple):
    """The answer to one wish."""

    key: int
    outcome: Constraint | Refusal
