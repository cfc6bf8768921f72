"""Constraints that the scheduler asks for, and the answers. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from loraplex.server.constraints.constraint import Constraint
from loraplex.server.engine.admission import Refusal
from loraplex.server.protocol import SamplingParams


class ConstraintWish(NamedTuple):
    """Request to open the constraint of one sequence. key: of the sequence. accepted_ids: the known
    tokens of its output. vocab_size, tenant: as in `GenerateRequest`. is_batch: nobody waits for
    its tokens.
    """

    key: int
    sampling: SamplingParams
    accepted_ids: Sequence[int]
    vocab_size: int | None = None
    tenant: str = ""
    is_batch: bool = False


class ConstraintNews(NamedTuple):
    """The answer to one wish."""

    key: int
    outcome: Constraint | Refusal


class MaskWish(NamedTuple):
    """Masks of the next token and of those that follow a draft's tokens. place: of the slice in the
    plan. constraint: None = all tokens may be drawn, since the sequence has ended."""

    place: int
    constraint: Constraint | None
    draft: Sequence[int]

    @property
    def num_masks(self) -> int:
        return 1 + len(self.draft)


class AsideWish(NamedTuple):
    """The mask of the next token, while steps go on without the sequence. tenant, is_batch: as in
    `ConstraintWish`."""

    constraint: Constraint
    tenant: str
    is_batch: bool = False


class ForesightWish(NamedTuple):
    """Request to look ahead in a grammar along a draft. See `Constraint.foresee`."""

    constraint: Constraint
    draft: list[int]
    most: int

    @property
    def constraints(self) -> list[Constraint]:
        return [self.constraint]
