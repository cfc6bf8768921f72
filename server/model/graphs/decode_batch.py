"""A step of decodes alone as the columns that a captured graph reads."""

from dataclasses import dataclass

import numpy as np

from loraplex.server.engine.plan import PageGrant, SeqSlice, StepPlan

_FIRST_PAGE = 5
ROW, POSITION, TOKEN, APPEND, SLOT = range(_FIRST_PAGE)


def num_columns(groups: int) -> int:
    """Number of columns for so many groups of layers."""
    return _FIRST_PAGE + 2 * groups


def page_column(group: int) -> int:
    """A page granted to a group of layers; the next column is the page's place."""
    return _FIRST_PAGE + 2 * group


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Inputs of a decode step, one column a slice. columns: int32 `[num_columns, slices]`, in the
    plan's order: row, position, token (-1 = the row's own), where the sample goes in the row (-1
    = nowhere), adapter slot; of each group of layers a page granted and its place in the row's
    list (-1 = none). grants: those that found no place here. replays: int64 `[slices]`, as of
    `SeqSlice`.
    """

    columns: np.ndarray
    grants: tuple[PageGrant, ...]
    replays: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan, groups: int = 1) -> "DecodeBatch | None":
        """Make the batch of a plan. None for a step with a slice of several tokens. A prompt slice
        of one token is taken as a decode slice is, unless more than a token is wanted of it. No
        slice has a draft.
        """
        slices = plan.slices
        if not slices or not all(s.kind == "decode" or _is_like_decode(s) for s in slices):
            return None
        columns = np.array(
            [
                [s.seq_row for s in slices],
                [s.start for s in slices],
                [s.token_ids[0] if s.token_ids else -1 for s in slices],
                [s.start + 1 if s.sample else -1 for s in slices],
                [s.adapter_slot for s in slices],
                *([[0] * len(slices), [-1] * len(slices)] * groups),
            ],
            dtype=np.int32,
        )
        place = {s.seq_row: i for i, s in enumerate(slices)}
        others = []
        for grant in plan.grants:
            i, page = place.get(grant.seq_row), page_column(grant.group)
            if i is None or len(grant.pages) != 1 or columns[page + 1, i] >= 0:
                others.append(grant)
            else:
                columns[page : page + 2, i] = grant.pages[0], grant.first
        replays = np.array([s.replays for s in slices], dtype=np.int64)
        return cls(columns, tuple(others), replays)

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    @property
    def contexts(self) -> np.ndarray:
        """Tokens that each sequence attends to."""
        contexts: np.ndarray = self.columns[POSITION] + 1
        return contexts


def _is_like_decode(piece: SeqSlice) -> bool:
    """Whether a token is all that a prompt slice can give."""
    return piece.is_single and not piece.prompt_logprobs and piece.vector is None
