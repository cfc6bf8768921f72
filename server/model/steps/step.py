"""A StepPlan as arrays: the flat batch, which of its rows give logits, and how results map back."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from loraplex.server.engine.plan import SeqSlice, StateCopy, StepPlan
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.steps.rows import Rows


@dataclass(frozen=True, slots=True)
class Step:
    """The slices reordered: slices of one token first, then the others. Both parts are sorted by
    adapter, so that an adapter's tokens are neighbours.

    order: int64 `[slices]`, a slice's place in the plan. ends: `[slices]`, its last token in the
    batch, with what pads it. token_slots: `[tokens]`, adapter slots. results: as of `Rows.results`;
    None = no token stands for a picture. All of these lie on the host. routed: as of
    `routed_places`.
    """

    slices: list[SeqSlice]
    order: np.ndarray
    seq_rows: np.ndarray
    starts: np.ndarray
    num_new: np.ndarray
    ends: np.ndarray
    token_slots: np.ndarray
    samples: np.ndarray
    layout: StepLayout
    results: tuple[np.ndarray, np.ndarray] | None
    routed: list[int]

    @classmethod
    def build(cls, plan: StepPlan, rows: Rows, tokens: int) -> "Step":
        """Build the arrays of a step from its plan. tokens: of the batch, no fewer than the plan's.
        What pads it are decodes of the scratch row, its first tokens; of the arrays only
        token_slots and layout have them.
        """
        table = np.array(
            [
                (s.seq_row, s.start, s.num_new, s.adapter_slot, s.sample, s.replays)
                for s in plan.slices
            ],
            dtype=np.int64,
        ).reshape(-1, 6)
        singles = table[:, 2] == 1  # as `SeqSlice.is_single`
        order = np.lexsort((table[:, 3], ~singles))
        padding = np.full((tokens - plan.num_tokens, 6), (rows.scratch, 0, 1, -1, 0, 0))
        batch = np.concatenate([padding, table[order]])
        seq_rows, starts, num_new, slots, samples, replays = batch.T.copy()
        ends = np.cumsum(num_new)
        begins = ends - num_new
        positions = np.arange(ends[-1]) + np.repeat(starts - begins, num_new)
        token_rows = np.repeat(seq_rows, num_new)
        packed = to_device(np.stack((token_rows, positions)), rows.device)
        real, decodes = slice(len(padding), None), len(padding) + int(singles.sum())
        slices = [plan.slices[i] for i in order]
        saves = [
            (len(padding) + place, save.position, save.snapshot)
            for place, piece in enumerate(slices)
            for save in piece.saves
            if save.position < piece.start + piece.num_new
        ]
        of_states = np.array(saves, dtype=np.int64).reshape(-1, 3), replays
        turns = rows.turns(seq_rows, starts, num_new, positions)
        of_turns = None if turns is None else to_device(turns, rows.device)
        tables = (rows.page_table, rows.long_rows, *of_states, of_turns)
        reads_pictures = rows.reads_pictures(slices)
        lasts = rows.lasts(seq_rows, starts, num_new, positions) if reads_pictures else None
        return cls(
            slices=slices,
            order=order,
            seq_rows=seq_rows[real],
            starts=starts[real],
            num_new=num_new[real],
            ends=ends[real] - 1,
            token_slots=np.repeat(slots, num_new),
            samples=np.flatnonzero(samples[real]),
            layout=StepLayout(
                decodes, seq_rows, starts, num_new, packed[0], packed[1], *tables, lasts
            ),
            results=rows.results(seq_rows, starts, num_new) if reads_pictures else None,
            routed=routed_places(slices),
        )

    def tokens_of(self, places: Iterable[int]) -> np.ndarray:
        """Where the tokens of these slices lie in the batch, int64 `[n]`."""
        ends, num_new = self.ends, self.num_new
        return np.concatenate([np.arange(ends[p] - num_new[p], ends[p]) + 1 for p in places])

    @property
    def second_texts(self) -> list[tuple[int, int]]:
        """Where second texts of pairs begin and end in the batch. Such prompts are one slice."""
        ends = zip(self.slices, (self.ends + 1).tolist(), strict=True)
        return [
            (end - piece.num_new + piece.vector.second, end)
            for piece, end in ends
            if piece.vector is not None and piece.vector.second is not None
        ]


def routed_places(slices: Iterable[SeqSlice]) -> list[int]:
    """Places of the slices whose experts are asked for."""
    return [place for place, piece in enumerate(slices) if piece.routed]


def saves_at_ends(slices: Iterable[SeqSlice]) -> Iterator[StateCopy]:
    """Saves of states that slices leave. What they save within is `StepLayout.saves`."""
    for piece in slices:
        for save in piece.saves:
            if save.position == piece.start + piece.num_new:
                yield StateCopy(piece.seq_row, save.snapshot)
