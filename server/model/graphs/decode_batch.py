"""A step of decodes alone as the columns that a captured graph reads."""

from dataclasses import dataclass

import numpy as np

from server.engine.plan import PageGrant, StepPlan

NUM_COLUMNS = 7
ROW, POSITION, TOKEN, PAGE, PAGE_PLACE, APPEND, SLOT = range(NUM_COLUMNS)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """columns: int32 `[7, slices]`, in the plan's order: row, position, token (-1 = the row's own),
    a page granted and its place in the row's list (-1 = none), where the sample goes in the row
    (-1 = nowhere), adapter slot. grants: those that found no place here.
    """

    columns: np.ndarray
    grants: tuple[PageGrant, ...]

    @classmethod
    def of(cls, plan: StepPlan) -> "DecodeBatch | None":
        """None for a step with a slice of several tokens. A prompt slice of one token is taken as
        a decode slice is, unless its prompt is scored. Decode slices have no guesses."""
        slices = plan.slices
        if not slices or not all(
            s.kind == "decode" or (s.is_single and not s.prompt_logprobs) for s in slices
        ):
            return None
        columns = np.array(
            [
                [s.seq_row for s in slices],
                [s.start for s in slices],
                [s.token_ids[0] if s.token_ids else -1 for s in slices],
                [0] * len(slices),
                [-1] * len(slices),
                [s.start + 1 if s.sample else -1 for s in slices],
                [s.adapter_slot for s in slices],
            ],
            dtype=np.int32,
        )
        place = {s.seq_row: i for i, s in enumerate(slices)}
        others = []
        for grant in plan.grants:
            i = place.get(grant.seq_row)
            if i is None or len(grant.pages) != 1 or columns[PAGE_PLACE, i] >= 0:
                others.append(grant)
            else:
                columns[PAGE, i] = grant.pages[0]
                columns[PAGE_PLACE, i] = grant.first
        return cls(columns, tuple(others))

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    @property
    def contexts(self) -> np.ndarray:
        """Tokens that each sequence attends to."""
        contexts: np.ndarray = self.columns[POSITION] + 1
        return contexts
